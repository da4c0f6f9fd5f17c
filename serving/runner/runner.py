"""Runner: the only holder of parameters and device state. Turns a StepPlan into calls and brings the results back.

It knows rows, slots, blocks and lanes as numbers in plans; what they mean is the scheduler's. The state is donated to
every call, so a call that raises has lost it: `reset` starts again with empty pools.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn_jax.model import LanguageModel
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.serving.core.plan import Phase, RowPlan, RowResult, StepPlan, StepResult, TokenLogprobs
from gdn_jax.serving.core.request import RequestId
from gdn_jax.serving.runner.audit import TOLERANCE, Auditor, Recomputation
from gdn_jax.serving.runner.buckets import Buckets
from gdn_jax.serving.runner.inputs import BlockTables, build_advance, build_prefill, prefill_groups
from gdn_jax.serving.runner.lanes import LaneSampling
from gdn_jax.serving.runner.sampling import RowSampling
from gdn_jax.serving.runner.steps import StepOutputs, StepStatic, advance_step, prefill_step
from gdn_jax.state import ModelState, make_state

_LOG = logging.getLogger(__name__)
MAX_LOGPROBS = 20  # alternatives that steps compute when some row wants log probabilities


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """Device pools: what `make_state` allocates, null block and null slot included."""

    num_blocks: int
    num_slots: int
    num_lanes: int
    window: int
    block_size: int
    max_blocks: int  # of one sequence
    state_dtype: str


@dataclass(frozen=True, kw_only=True)
class RequestSampling:
    """What the runner has to know of a request: how its tokens are drawn and what is reported of them."""

    row: RowSampling
    num_logprobs: int | None


class Runner:
    """Owns the device side of an engine."""

    def __init__(self, model: LanguageModel, sizes: PoolSizes, buckets: Buckets, *, num_valid_tokens: int) -> None:
        """Allocate the pools.

        Args:
            model: with its parameters.
            sizes: of the pools.
            buckets: padded sizes of calls.
            num_valid_tokens: token ids from here on are never chosen.
        """
        graph, self._params = nnx.split(model)
        num_top = min(MAX_LOGPROBS, num_valid_tokens)
        self._static = StepStatic(graph=graph, num_valid_tokens=num_valid_tokens, num_top=num_top)
        self._config, self._dtype = model.config, model.dtype
        self._sizes, self._buckets = sizes, buckets
        self._requests: dict[RequestId, RequestSampling] = {}
        self.reset()

    def reset(self) -> None:
        """Start with empty pools and lanes; requests stay known, since they may be run again from their tokens."""
        sizes = self._sizes
        self._state = self._make_state(sizes)
        self._tables = BlockTables(sizes.num_lanes, sizes.max_blocks)
        self._lanes = LaneSampling(sizes.num_lanes)

    def _make_state(self, sizes: PoolSizes) -> ModelState:
        return make_state(
            self._config,
            num_slots=sizes.num_slots,
            num_pages=sizes.num_blocks,
            num_lanes=sizes.num_lanes,
            window=sizes.window,
            dtype=self._dtype,
            state_dtype=jnp.dtype(sizes.state_dtype),
            block_size=sizes.block_size,
        )

    @property
    def state(self) -> ModelState:
        """The device state between steps, for audits; the next step donates it."""
        return self._state

    def make_auditor(self) -> Auditor:
        """Return an auditor of these pools; it has a state of its own, with room for one sequence."""
        sizes = self._sizes
        own = replace(sizes, num_blocks=sizes.max_blocks + 1, num_slots=2, num_lanes=1)
        recomputation = Recomputation(
            self._static,
            self._params,
            self._make_state(own),
            block_size=sizes.block_size,
            max_blocks=sizes.max_blocks,
        )
        tolerance = TOLERANCE[str(self._dtype)]
        return Auditor(lambda: self._state, recomputation, block_size=sizes.block_size, tolerance=tolerance)

    def add(self, request_id: RequestId, sampling: RequestSampling) -> None:
        """Make a request known before its first row."""
        self._requests[request_id] = sampling

    def forget(self, request_id: RequestId) -> None:
        """Drop what is known of a request, if anything."""
        self._requests.pop(request_id, None)

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan's rows, phase by phase, and wait for the results.

        Rows of one plan never read what others write, so the phases' order does not matter.
        """
        for row in plan.rows:
            if row.table_start == 0 and row.new_blocks:
                self._assign_lane(row)
            self._tables.extend(row)
        calls: list[tuple[Sequence[RowPlan], StepOutputs]] = []
        prefill = [row for row in plan.rows if row.phase is Phase.PREFILL]
        for group in prefill_groups(prefill, self._buckets):
            calls.append((group, self._prefill(group)))
        advance = [row for row in plan.rows if row.phase is not Phase.PREFILL]
        if advance:
            calls.append((advance, self._advance(advance)))
        on_host = jax.device_get([outputs for _, outputs in calls])
        results: dict[RequestId, RowResult] = {}
        for (rows, _), outputs in zip(calls, on_host, strict=True):
            for index, row in enumerate(rows):
                results[row.request_id] = self._result(row, outputs, index)
        return StepResult(rows=tuple(results[row.request_id] for row in plan.rows))

    def _assign_lane(self, row: RowPlan) -> None:
        request = self._requests.get(row.request_id)
        if request is None:
            raise InvariantError(f"request {row.request_id} has a row and was never made known")
        self._lanes.assign(row.lane, request.row, request.num_logprobs)

    def _prefill(self, rows: Sequence[RowPlan]) -> StepOutputs:
        batch = build_prefill(rows, self._tables, self._buckets, self._sizes.block_size)
        sampling, wants = self._lanes.gather(rows, batch.rows.length.shape[0])
        outputs, self._state = prefill_step(self._static, self._params, self._state, batch, sampling, wants)
        return outputs

    def _advance(self, rows: Sequence[RowPlan]) -> StepOutputs:
        batch = build_advance(
            rows, self._tables, self._buckets, window=self._sizes.window, num_lanes=self._sizes.num_lanes
        )
        sampling, wants = self._lanes.gather(rows, batch.lane.shape[0])
        outputs, self._state = advance_step(self._static, self._params, self._state, batch, sampling, wants)
        return outputs

    def _result(self, row: RowPlan, outputs: StepOutputs, index: int) -> RowResult:
        prefill = row.phase is Phase.PREFILL
        stored = outputs.stored[index]
        first = row.start // self._sizes.block_size + 1
        saved = tuple(
            export.boundary
            for export in row.exports
            if stored[export.boundary // self._sizes.block_size - first if prefill else 0]
        )
        finite = bool(outputs.finite[index]) or not row.tokens  # a closing row runs no token, so it has no logits
        if not row.emits:
            return RowResult(tokens=(), saved=saved, finite=finite)
        num_top = self._lanes.num_top(row.lane)
        return RowResult(
            tokens=(int(outputs.tokens[index]),),
            saved=saved,
            finite=finite,
            logprobs=() if num_top is None else (_logprobs(outputs, index, num_top),),
        )

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every step this engine can be asked for, by running each on padding alone, which changes nothing.

        Args:
            progress: called with (steps compiled, steps in all).
        """
        began, calls = time.monotonic(), list(self._every_bucket())
        for done, call in enumerate(calls, 1):
            call()
            if progress is not None:
                progress(done, len(calls))
        jax.block_until_ready(self._state)
        _LOG.info("compiled %d steps in %.1f s", len(calls), time.monotonic() - began)

    def _every_bucket(self) -> Iterator[Callable[[], None]]:
        buckets, block_size = self._buckets, self._sizes.block_size
        for width in buckets.table_blocks:
            for num_rows in buckets.prefill_rows:
                for tokens in buckets.prefill_tokens:
                    yield lambda size=(tokens, num_rows, width): self._dummy_prefill(*size, block_size)
            for num_rows in buckets.advance_rows:
                yield lambda size=(num_rows, width): self._dummy_advance(*size)

    def _dummy_prefill(self, num_tokens: int, num_rows: int, width: int, block_size: int) -> None:
        sizes = Buckets(
            prefill_tokens=(num_tokens,), prefill_rows=(num_rows,), advance_rows=(1,), table_blocks=(width,)
        )
        batch = build_prefill([], self._tables, sizes, block_size)
        sampling, wants = self._lanes.gather([], num_rows)
        _, self._state = prefill_step(self._static, self._params, self._state, batch, sampling, wants)

    def _dummy_advance(self, num_rows: int, width: int) -> None:
        sizes = Buckets(prefill_tokens=(1,), prefill_rows=(1,), advance_rows=(num_rows,), table_blocks=(width,))
        batch = build_advance([], self._tables, sizes, window=self._sizes.window, num_lanes=self._sizes.num_lanes)
        sampling, wants = self._lanes.gather([], num_rows)
        _, self._state = advance_step(self._static, self._params, self._state, batch, sampling, wants)


def _logprobs(outputs: StepOutputs, index: int, num_top: int) -> TokenLogprobs:
    found = outputs.logprobs
    return TokenLogprobs(
        chosen=float(found.logprob[index]),
        rank=int(found.rank[index]),
        top_ids=tuple(np.asarray(found.top_ids[index, :num_top]).tolist()),
        top=tuple(np.asarray(found.top_logprobs[index, :num_top]).tolist()),
    )
