"""Scheduler and tell-tale runner together, with the answers known beforehand: what the core's tests drive."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from oracles.tell_tale import TellTaleRunner, next_token

from gdn_jax.serving.core.placement import CacheMode, Placement
from gdn_jax.serving.core.plan import RowCut, StepPlan
from gdn_jax.serving.core.request import FinishReason, Request, RequestId, Status
from gdn_jax.serving.core.scheduler import Limits, Scheduler

STOP_TOKEN = 1


@dataclass
class CoreRig:
    """A small engine core.

    Attributes:
        mode: cache mode.
        block_size: tokens per block.
        interval: of `all`.
        limits: pool sizes.
        vocabulary: tokens are 0..vocabulary - 1.
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
    stops: dict[RequestId, bool] = field(default_factory=dict)  # ends at STOP_TOKEN
    outputs: dict[RequestId, list[int]] = field(default_factory=dict)
    ended: dict[RequestId, Request] = field(default_factory=dict)

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
        self.runner = TellTaleRunner(
            block_size=self.block_size,
            vocabulary=self.vocabulary,
            num_drafts=self.num_drafts,
            salts=self.salts,
        )

    def add(self, name: str, prompt: Sequence[int], *, max_tokens: int = 4, stops: bool = False, **options) -> Request:
        """Queue a request."""
        request = self.scheduler.add(RequestId(name), prompt, max_tokens=max_tokens, **options)
        self.stops[request.request_id], self.outputs[request.request_id] = stops, []
        return request

    def step(self, *, abort: str | None = None, reset: bool = False) -> StepPlan | None:
        """Plan, run, cut, commit; check every book and audit the cache. May abort or reset while the step runs."""
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is None:
            return None
        result = self.runner.run(plan)
        if abort is not None:
            self.scheduler.abort(RequestId(abort))
        if reset:
            self.scheduler.reset_prefix_cache()
        cuts = [self._cut(row.request_id, result.rows[index].tokens) for index, row in enumerate(plan.rows)]
        for row, row_result, cut in zip(plan.rows, result.rows, cuts, strict=True):
            self.outputs[row.request_id] += row_result.tokens[: cut.num_kept]
        for request in self.scheduler.commit(plan, result, cuts):
            self.ended[request.request_id] = request
        self.scheduler.check()
        self.runner.audit(self.scheduler)
        return plan

    def _cut(self, request_id: RequestId, tokens: Sequence[int]) -> RowCut:
        request = self.scheduler.get(request_id)
        if request.status is Status.CLOSING:
            return RowCut(num_kept=0)
        for count, token in enumerate(tokens, 1):
            if self.stops[request_id] and token == STOP_TOKEN:
                return RowCut(num_kept=count, finish=FinishReason.STOP)
            if request.num_output + count == request.max_tokens:
                return RowCut(num_kept=count, finish=FinishReason.LENGTH)
        return RowCut(num_kept=len(tokens))

    def run(self, most_steps: int = 2000) -> int:
        """Step until nothing is left to do; returns how many steps that took."""
        for count in range(most_steps):
            if not self.scheduler.has_work:
                return count
            plan = self.step()
            assert plan is not None, "work is left, and no row can run: starvation"
        raise AssertionError(f"work is left after {most_steps} steps")

    def expected(self, prompt: Sequence[int], max_tokens: int, *, stops: bool) -> list[int]:
        """What a request must answer, alone and without a cache."""
        known = list(prompt)
        while len(known) < len(prompt) + max_tokens:
            known.append(next_token(tuple(known), self.vocabulary))
            if stops and known[-1] == STOP_TOKEN:
                break
        return known[len(prompt) :]
