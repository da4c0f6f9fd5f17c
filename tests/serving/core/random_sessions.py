"""Seeded random sessions on the tell-tale runner: quick, and the same every time.

The Hypothesis machine finds and shrinks; these are what the deliberate faults are run against, so they must be bounded
and must visit everything: hits, gaps, drafts, preemptions, take-overs, closing rows, aborts, resets,
failed steps and numbers that go wrong.
"""

import random
from collections import Counter

from oracles.core_rig import CoreRig

from gdn_jax.serving.core.errors import PromptTooLongError
from gdn_jax.serving.core.placement import CacheMode
from gdn_jax.serving.core.request import FinishReason, Status

SALTS = (b"", b"other")


class Session:
    """One random session: small pools, two tokens, follow-up requests that resubmit finished text."""

    def __init__(self, seed: int, *, mode: CacheMode | None = None) -> None:
        self.dice = random.Random(seed)
        dice = self.dice
        self.rig = CoreRig(
            mode=mode or dice.choice([CacheMode.ALIGN, CacheMode.ALL, CacheMode.ALL, CacheMode.NONE]),
            interval=dice.choice([4, 8, 12]),
            num_blocks=dice.randint(9, 26),
            num_slots=dice.randint(2, 9),
            num_lanes=dice.randint(1, 4),
            budget=dice.randint(4, 20),
            max_model_len=40,
            num_drafts=dice.randint(0, 3),
            salts=SALTS,
            plans_ahead=seed % 2 == 1,
        )
        self.count = 0
        self.names: list[str] = []
        self.texts: list[list[int]] = [[0, 1, 0, 0, 1]]
        self.seen = Counter[str]()

    def play(self, num_actions: int = 40) -> Counter[str]:
        """Act, then finish everything; return how often what happened."""
        for _ in range(num_actions):
            action = self.dice.choices(
                [
                    self._submit,
                    self._follow_up,
                    self._twins,
                    self._steps,
                    self._abort,
                    self._reset,
                    self._fail,
                    self._break,
                ],
                [4, 6, 2, 10, 2, 0.3, 0.3, 0.7],
            )[0]
            action()
            self.rig.scheduler.check()
            self._collect()
        self.rig.run()
        self._collect()
        assert not self.names, f"requests were lost: {self.names}"
        self.rig.idle()
        counts = self.rig.scheduler.counts
        for name in ("hit_tokens", "gap_tokens", "preemptions", "saves", "saves_skipped"):
            self.seen[name] += getattr(counts, name)
        self.seen["evictions"] += self.rig.scheduler.holdings.checkpoints.num_evicted
        self.seen["accepted"] += self.rig.runner.num_accepted
        return self.seen

    def _add(self, prompt: list[int], **options) -> str:
        name = f"r{self.count}"
        self.count += 1
        try:
            self.rig.add(name, prompt, max_tokens=self.dice.randint(1, 12), **options)
        except PromptTooLongError:
            return name
        self.names.append(name)
        return name

    def _tokens(self, least: int, most: int) -> list[int]:
        return [self.dice.randint(0, 1) for _ in range(self.dice.randint(least, most))]

    def _submit(self) -> None:
        borders = tuple(self.dice.randint(0, 40) for _ in range(self.dice.randint(0, 2)))
        self._add(
            self._tokens(1, 30),
            stops=self.dice.random() < 0.4,
            priority=self.dice.choice([0, 0, 0, 1]),
            cache_salt=self.dice.choice([b"", b"", b"", b"other"]),
            use_cache=self.dice.random() < 0.9,
            turn_borders=borders,
        )

    def _follow_up(self) -> None:
        text = self.dice.choice(self.texts[-6:])
        cut = self.dice.randint(1, len(text))
        self._add([*text[:cut], *self._tokens(0, 5)], stops=self.dice.random() < 0.3)

    def _twins(self) -> None:
        prompt = self._tokens(5, 26)
        leader = self._add(prompt)
        self._add(prompt)
        self._add(prompt, leader=leader)

    def _steps(self) -> None:
        for _ in range(self.dice.randint(1, 5)):
            self._step()

    def _step(self, **options) -> None:
        plan = self.rig.step(**options)
        closing = [r for r in self.rig.scheduler.running() if r.status is Status.CLOSING]
        self.seen["closing"] += len(closing)
        ahead = self.rig.launched[0].rows if self.rig.launched is not None else ()
        self.seen["ahead"] += len(ahead)
        self.seen["in vain"] += len({row.request_id for row in ahead} & {request.request_id for request in closing})
        for row in plan.rows if plan is not None else ():
            self.seen["take-over"] += row.read_anchor == row.write_anchor and row.table_start == 0 and row.start > 0

    def _abort(self) -> None:
        if not self.names:
            return
        name = self.dice.choice(self.names)
        if self.dice.random() < 0.6:
            self._step(abort=name)
        else:
            self.rig.scheduler.abort(name)
        if name not in self.rig.ended:  # it had no row in flight, so it went at once
            self.names.remove(name)
        self.seen["aborts"] += 1

    def _break(self) -> None:
        plan = self.rig.step(broken=self.dice.choice(self.names)) if self.names else None
        self.seen["broken"] += plan is not None and any(self._is_broken(name) for name in self.names)

    def _is_broken(self, name: str) -> bool:
        return name in self.rig.ended and self.rig.ended[name].finish is FinishReason.ERROR

    def _reset(self) -> None:
        if self.dice.random() < 0.5:
            self._step(reset=True)
        else:
            self.rig.scheduler.reset_prefix_cache()
        self.seen["resets"] += 1

    def _fail(self) -> None:
        if self.rig.fail_step(ends_rows=self.dice.random() < 0.7) is not None:
            self.seen["failures"] += 1

    def _collect(self) -> None:
        for name in [name for name in self.names if name in self.rig.ended]:
            self.names.remove(name)
            request = self.rig.ended[name]
            if request.finish in (FinishReason.STOP, FinishReason.LENGTH):
                self.rig.check_answer(request)
                self.texts.append(list(request.tokens))


def play(seeds: range) -> Counter[str]:
    """Play several sessions; return how often what happened in all."""
    seen = Counter[str]()
    for seed in seeds:
        seen += Session(seed).play()
    return seen
