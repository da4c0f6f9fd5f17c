"""Random schedules on the tell-tale runner, found and shrunk by Hypothesis; books are checked after every action."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles.core_rig import CoreRig

from gdn_jax.serving.core.errors import PromptTooLongError
from gdn_jax.serving.core.placement import CacheMode
from gdn_jax.serving.core.request import FinishReason

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=30)


class CoreMachine(RuleBasedStateMachine):
    """Drives a core with tiny pools; each request's answer is known beforehand."""

    @initialize(
        mode=st.sampled_from(list(CacheMode)),
        num_blocks=st.integers(10, 30),
        num_slots=st.integers(2, 8),
        num_lanes=st.integers(1, 4),
        budget=st.integers(4, 20),
        num_drafts=st.integers(0, 3),
        interval=st.sampled_from([4, 8, 12]),
        plans_ahead=st.booleans(),
    )
    def start(self, **sizes) -> None:
        self.rig = CoreRig(salts=(b"", b"other"), max_model_len=40, **sizes)
        self.live: set[str] = set()
        self.texts: list[list[int]] = [[0]]
        self.count = 0

    def _submit(self, prompt, max_tokens, **options) -> None:
        name = f"r{self.count}"
        self.count += 1
        try:
            self.rig.add(name, prompt, max_tokens=max_tokens, **options)
        except PromptTooLongError:
            return
        self.live.add(name)

    @rule(
        prompt=TOKENS,
        max_tokens=st.integers(1, 12),
        stops=st.booleans(),
        salt=st.sampled_from([b"", b"", b"other"]),
        priority=st.sampled_from([0, 0, 1]),
        use_cache=st.sampled_from([True, True, False]),
        borders=st.lists(st.integers(0, 40), max_size=2).map(tuple),
    )
    def submit_fresh(self, prompt, max_tokens, salt, borders, **options) -> None:
        self._submit(prompt, max_tokens, cache_salt=salt, turn_borders=borders, **options)

    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), max_size=5), max_tokens=st.integers(1, 12))
    def submit_follow_up(self, data, tail, max_tokens) -> None:
        text = data.draw(st.sampled_from(self.texts))
        cut = data.draw(st.integers(1, len(text)))
        self._submit([*text[:cut], *tail], max_tokens)

    @rule(prompt=TOKENS, max_tokens=st.integers(1, 6))
    def submit_twins(self, prompt, max_tokens) -> None:
        first = f"r{self.count}"
        self._submit(prompt, max_tokens)
        self._submit(prompt, max_tokens)
        self._submit(prompt, max_tokens, leader=first)

    @rule(times=st.integers(1, 6))
    def step(self, times) -> None:
        for _ in range(times):
            self.rig.step()
        self._collect()

    @rule(data=st.data(), during=st.booleans())
    @precondition(lambda self: self.live)
    def abort(self, data, during) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        if during:
            self.rig.step(abort=name)
        else:
            self.rig.scheduler.abort(name)
        self._collect()
        self.live.discard(name)

    @rule(during=st.booleans())
    def reset(self, during) -> None:
        if during:
            self.rig.step(reset=True)
        else:
            self.rig.scheduler.reset_prefix_cache()
            assert self.rig.scheduler.holdings.checkpoints.num_published == 0
        self._collect()

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def break_numbers(self, data) -> None:
        self.rig.step(broken=data.draw(st.sampled_from(sorted(self.live))))
        self._collect()

    @rule(ends_rows=st.booleans())
    @precondition(lambda self: self.count > 2)
    def fail_a_step(self, ends_rows) -> None:
        for request in self.rig.fail_step(ends_rows=ends_rows) or ():
            assert request.finish is FinishReason.ERROR
        self._collect()

    def _collect(self) -> None:
        for name in sorted(self.live & self.rig.ended.keys()):
            self.live.remove(name)
            request = self.rig.ended[name]
            if request.finish in (FinishReason.STOP, FinishReason.LENGTH):
                self.rig.check_answer(request)
                self.texts.append(list(request.tokens))

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        self._collect()
        assert not self.live, "a request was lost"
        self.rig.idle()


CoreMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestCoreMachine = CoreMachine.TestCase
