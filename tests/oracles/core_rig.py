"""Scheduler and tell-tale runner together, with the answers known beforehand: what the core's tests drive.

Every step is checked from outside: the plan's rows against the requests, the pages a row writes against everybody
else's claims, and after the commit every book, every state and every published name. What nobody owns is wiped, so that
a read of it fails. Nothing here uses what it checks to work out what is right.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oracles.tell_tale import TellTaleError, TellTaleRunner, next_token

from gdn_jax.serving.core.limits import Limits
from gdn_jax.serving.core.placement import CacheMode, Placement
from gdn_jax.serving.core.plan import NEWEST, Phase, RowCut, RowPlan, RowResult, StepPlan, StepResult
from gdn_jax.serving.core.request import FinishReason, Request, RequestId, Status
from gdn_jax.serving.core.scheduler import Scheduler

STOP_TOKEN = 1


@dataclass
class CoreRig:
    """A small engine core.

    Attributes:
        mode: cache mode.
        block_size: tokens per block.
        interval: of `all`.
        num_blocks: KV blocks, the null block included.
        num_slots: state slots, the null slot included.
        num_lanes: most requests that run at once.
        budget: most prefill tokens in one step.
        max_model_len: most tokens of one sequence.
        num_drafts: most drafts per step, k.
        vocabulary: tokens are 0..vocabulary - 1.
        salts: cache salts in use, for the audit.
        draft: makes drafts from a prefix; by default a third of the guesses are wrong.
        plans_ahead: whether a step is planned and run before the one before it is committed, where that can be told.
    """

    mode: CacheMode = CacheMode.ALL
    block_size: int = 4
    interval: int = 8
    num_blocks: int = 24
    num_slots: int = 6
    num_lanes: int = 3
    budget: int = 8
    max_model_len: int = 64
    num_drafts: int = 0
    vocabulary: int = 2
    salts: tuple[bytes, ...] = (b"",)
    draft: Callable[[tuple[int, ...], int], list[int]] | None = None
    plans_ahead: bool = False
    stops: dict[RequestId, bool] = field(default_factory=dict)  # ends at STOP_TOKEN
    outputs: dict[RequestId, list[int]] = field(default_factory=dict)
    ended: dict[RequestId, Request] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = Limits(
            num_blocks=self.num_blocks,
            num_slots=self.num_slots,
            num_lanes=self.num_lanes,
            budget=self.budget,
            max_model_len=self.max_model_len,
            num_drafts=self.num_drafts,
        )
        placement = Placement(mode=self.mode, block_size=self.block_size, state_interval=self.interval)
        self.scheduler = Scheduler(limits, placement)
        self.make_runner()

    def make_runner(self) -> None:
        """Start a device that holds nothing."""
        self.launched: tuple[StepPlan, StepResult] | None = None  # a step that ran before the last one was committed
        self.runner = TellTaleRunner(
            block_size=self.block_size,
            vocabulary=self.vocabulary,
            num_drafts=self.num_drafts,
            draft=self.draft,
            salts=self.salts,
        )

    # Requests.

    def add(self, name: str, prompt: Sequence[int], *, max_tokens: int = 4, stops: bool = False, **options) -> Request:
        """Queue a request."""
        request = self.scheduler.add(RequestId(name), prompt, max_tokens=max_tokens, **options)
        self.stops[request.request_id], self.outputs[request.request_id] = stops, []
        return request

    def serve(self, name: str, prompt: Sequence[int], **options) -> Request:
        """Run one request, and whatever else is queued, to the end; its answer must be the model's."""
        request = self.add(name, prompt, **options)
        self.run()
        self.check_answer(request)
        return request

    def text(self, name: str) -> list[int]:
        """Return the prompt and answer of a request that has ended."""
        request = self.ended[RequestId(name)]
        return list(request.tokens)

    def check_answer(self, request: Request) -> None:
        """Compare a finished request's answer with what it must be, alone and without a cache."""
        prompt = request.tokens[: request.num_prompt]
        stops = self.stops[request.request_id]
        expected = self.expected(prompt, request.max_tokens, stops=stops)
        got = self.outputs[request.request_id]
        assert got == expected, f"{request.request_id} answers {got} to {prompt}, not {expected}"
        assert request.tokens == [*prompt, *expected]

    def expected(self, prompt: Sequence[int], max_tokens: int, *, stops: bool = False) -> list[int]:
        """What a request must answer, alone and without a cache."""
        known = list(prompt)
        while len(known) < len(prompt) + max_tokens:
            known.append(next_token(tuple(known), self.vocabulary))
            if stops and known[-1] == STOP_TOKEN:
                break
        return known[len(prompt) :]

    def idle(self) -> None:
        """Nothing is held or owned by anybody."""
        holdings = self.scheduler.holdings
        assert not self.scheduler.has_work
        assert holdings.blocks.num_held() == 0
        assert holdings.checkpoints.num_owned == 0
        self.scheduler.check()

    def finish(self) -> None:
        """Run to the end; every request that was not dropped must answer as the model does, and nothing be held."""
        self.run()
        for request in self.ended.values():
            if request.finish in (FinishReason.STOP, FinishReason.LENGTH):
                self.check_answer(request)
        self.idle()

    # Steps.

    def step(self, *, abort: str | None = None, reset: bool = False, broken: str | None = None) -> StepPlan | None:
        """Plan, run, cut, commit; check everything.

        Args:
            abort: drop this request while the step runs.
            reset: reset the cache while the step runs.
            broken: the numbers of this request's row go wrong on the device.
        """
        launched, self.launched = self.launched or self._launch(self.scheduler.plan(), broken), None
        if launched is None:
            return None
        if self.plans_ahead:
            self.launched = self._launch(self.scheduler.plan_ahead(), broken)
        plan, result = launched
        if abort is not None:
            self.scheduler.abort(RequestId(abort))
        if reset:
            self.scheduler.reset_prefix_cache()
        cuts = [self._cut(row.request_id, made) for row, made in zip(plan.rows, result.rows, strict=True)]
        for row, row_result, cut in zip(plan.rows, result.rows, cuts, strict=True):
            self.outputs[row.request_id] += row_result.tokens[: cut.num_kept]
        for request in self.scheduler.commit(plan, result, cuts):
            assert request.request_id not in self.ended, f"{request.request_id} ends twice"
            self.ended[request.request_id] = request
        self.scheduler.check()
        self._wipe()
        self._check_states()
        self.runner.audit(self.scheduler)
        return plan

    def _launch(self, plan: StepPlan | None, broken: str | None) -> tuple[StepPlan, StepResult] | None:
        """Check a plan and run it at once: the device knows nothing of what is not committed yet."""
        self.scheduler.check()
        self._wipe()
        if plan is None:
            return None
        self.plans.append(plan)
        self._check_rows(plan)
        return plan, self.runner.run(plan, broken=broken)

    def fail_step(self, *, ends_rows: bool = True) -> list[Request] | None:
        """Plan a step that raises on the device; return the requests that end with it, or None without a plan."""
        plan = self.launched[0] if self.launched is not None else self.scheduler.plan()
        if plan is None:
            return None
        if self.plans_ahead:
            self.scheduler.plan_ahead()
        ended = self.scheduler.fail(plan, ends_rows=ends_rows)
        self.make_runner()
        self.scheduler.check()
        self.ended.update({request.request_id: request for request in ended})
        return ended

    def run(self, most_steps: int = 2000) -> int:
        """Step until nothing is left to do; returns how many steps that took."""
        for count in range(most_steps):
            if not self.scheduler.has_work:
                return count
            plan = self.step()
            assert plan is not None, "work is left, and no row can run: starvation"
        raise AssertionError(f"work is left after {most_steps} steps")

    def run_until(self, done: Callable[[], bool], most_steps: int = 200) -> None:
        """Step until a condition holds."""
        for _ in range(most_steps):
            if done():
                return
            self.step()
        raise AssertionError("the condition never held")

    def _cut(self, request_id: RequestId, result: RowResult) -> RowCut:
        request, tokens = self.scheduler.get(request_id), result.tokens
        if request.status is Status.CLOSING:
            return RowCut(num_kept=0)
        if not result.finite:
            return RowCut(num_kept=0, finish=FinishReason.ERROR)
        for count, token in enumerate(tokens, 1):
            if self.stops[request_id] and token == STOP_TOKEN:
                return RowCut(num_kept=count, finish=FinishReason.STOP)
            if request.num_output + count == request.max_tokens:
                return RowCut(num_kept=count, finish=FinishReason.LENGTH)
        return RowCut(num_kept=len(tokens))

    # What every step must satisfy.

    def _check_rows(self, plan: StepPlan) -> None:
        """Each row agrees with its request; no row writes a page that anybody else has a claim on."""
        requests = [self.scheduler.get(row.request_id) for row in plan.rows]
        assert [r.order for r in requests] == sorted(r.order for r in requests), f"rows out of order: {plan}"
        spans = sum(len(row.tokens) for row in plan.rows if row.phase is Phase.PREFILL)
        assert spans <= self.budget, f"{spans} tokens of prefill for a budget of {self.budget}: {plan}"
        claims = Counter(block for request in self.scheduler.running() for block in request.blocks)
        named = set(self.scheduler.holdings.blocks.names().values())
        for row, request in zip(plan.rows, requests, strict=True):
            self._check_row(row, request)
            for index in {at // self.block_size for at in range(row.start, row.end)}:
                block = request.blocks[index]
                if claims[block] != 1 or block in named:
                    raise TellTaleError(f"{row.request_id} writes to block {block}, which is shared: {plan}")

    def _check_row(self, row: RowPlan, request: Request) -> None:
        is_ahead = row.tokens == (NEWEST,)  # then the row before it is not committed, and has emitted one token more
        known, size = request.num_known + is_ahead, self.block_size
        is_told = row.table_start == 0 and request.needs_history
        assert row.history == (tuple(request.tokens) if is_told else ()), f"not the tokens so far: {row}"
        assert row.start - row.num_replay == (known - 2 if is_ahead else request.folded)
        if row.phase is Phase.PREFILL:
            assert row.tokens, f"an empty span: {row}"
            assert row.tokens == tuple(request.tokens[row.start : row.end]), f"other tokens than the request's: {row}"
            assert row.start % size == 0, f"a span starts off the grid: {row}"
            assert row.end % size == 0 or row.end == known, f"a span ends off the grid: {row}"
            assert row.emits == (row.end == known), f"only a span that ends the known tokens emits: {row}"
        elif row.tokens:
            assert row.emits
            assert row.start == known - 1, f"the pending token is the {known - 1}th: {row}"
            assert is_ahead or row.tokens == (request.tokens[-1],)
            assert request.num_output + is_ahead + row.num_drafts < request.max_tokens, f"drafts past max_tokens: {row}"
            assert (row.phase is Phase.VERIFY) == (row.num_drafts > 0)
        else:
            assert request.status is Status.CLOSING
            assert not row.emits
            assert not row.exports

    def _check_states(self) -> None:
        """The state at each running request's read anchor holds exactly its first `folded` tokens.

        Where a row that is not committed has run, it holds those that this row folded, if its numbers did not go wrong.
        """
        folds, broken = dict[RequestId, int](), set[RequestId]()
        if self.launched is not None:
            for row, result in zip(self.launched[0].rows, self.launched[1].rows, strict=True):
                folds[row.request_id] = row.start
                broken |= set() if result.finite else {row.request_id}
        for request in self.scheduler.running():
            if request.read_anchor and request.request_id not in broken:
                folded = folds.get(request.request_id, request.folded)
                state = self.runner.slots.get(request.read_anchor, ())
                if list(state) != request.tokens[:folded] or len(state) != folded:
                    raise TellTaleError(f"{request.request_id} has {state} in its state, not {folded} tokens")

    def _wipe(self) -> None:
        """Forget the content of every slot and page that nobody owns."""
        holdings, running = self.scheduler.holdings, self.scheduler.running()
        slots = {*holdings.checkpoints.names().values(), *(r.slot for r in running), *(r.pinned for r in running)}
        slots |= {export.slot for plan in self.scheduler._plans for row in plan.rows for export in row.exports}
        pages = {*holdings.blocks.names().values(), *(block for request in running for block in request.blocks)}
        for gone in self.runner.slots.keys() - slots:
            del self.runner.slots[gone]
        for gone in self.runner.pages.keys() - pages:
            del self.runner.pages[gone]

    def books(self) -> dict[str, object]:
        """Return a copy of everything the core remembers but its counts, to see that something changed nothing."""
        holdings, queues = self.scheduler.holdings, self.scheduler._queues
        requests = {
            request.request_id: {
                key: copy.copy(getattr(request, key)) for key in type(request).__slots__ if key != "chain"
            }
            for request in self.scheduler._queues.live()
        }
        blocks = {key: copy.copy(value) for key, value in vars(holdings.blocks).items() if key != "_on_evict"}
        blocks["idle order"] = list(holdings.blocks._idle)
        checkpoints = {key: copy.copy(value) for key, value in vars(holdings.checkpoints).items()}
        checkpoints["orders"] = [list(holdings.checkpoints._interval), list(holdings.checkpoints._placed)]
        return {
            "requests": requests,
            "blocks": blocks,
            "checkpoints": checkpoints,
            "lanes": list(holdings._lanes),
            "queues": [[r.request_id for r in queue] for queue in (queues._waiting, queues._running)],
        }
