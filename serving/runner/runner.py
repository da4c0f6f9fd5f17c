"""Runner: the only holder of parameters and device state. Turns a StepPlan into calls and brings the results back.

It knows rows, slots, blocks and lanes as numbers in plans; what they mean is the scheduler's. The state is donated to
every call, so a call that raises has lost it: `reset` starts again with empty pools.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gdn_jax.model import LanguageModel
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.serving.core.plan import Phase, RowPlan, RowResult, StepPlan, StepResult
from gdn_jax.serving.core.request import RequestId
from gdn_jax.serving.runner.adjust import NO_ADJUSTMENTS, RowAdjustments, pack_history
from gdn_jax.serving.runner.audit import TOLERANCE, Auditor, Recomputation
from gdn_jax.serving.runner.buckets import Buckets
from gdn_jax.serving.runner.inputs import BlockTables, build_advance, build_prefill, padded_lanes, prefill_groups
from gdn_jax.serving.runner.lanes import LaneSampling
from gdn_jax.serving.runner.outputs import StepOutputs, describe_token, unpack
from gdn_jax.serving.runner.packed import StepInputs, pack_inputs
from gdn_jax.serving.runner.pools import DeviceState, PoolSizes, make_device_state
from gdn_jax.serving.runner.prompt_scores import ScoredPrompt, next_prompt_ids, prompt_logprobs, score_prompts
from gdn_jax.serving.runner.sampling import Demand, RowSampling, SampledRows
from gdn_jax.serving.runner.steps import advance_step, place_history, prefill_step, split_model
from gdn_jax.serving.runner.warm_up import Progress, WarmUpCall, default_threads, run_all
from gdn_jax.state import ModelState

_LOG = logging.getLogger(__name__)
MAX_LOGPROBS = 20  # alternatives that steps compute when some row wants log probabilities


@dataclass(frozen=True, kw_only=True)
class RequestSampling:
    """What the runner has to know of a request: how its tokens are drawn and what is reported of them.

    Attributes:
        row: how they are drawn.
        num_logprobs: alternatives to list; None for no log probabilities.
        scored_prompt: the prompt, if its own log probabilities are wanted.
        adjustments: how its own tokens change its logits.
        num_prompt: how many tokens are the prompt.
    """

    row: RowSampling
    num_logprobs: int | None
    scored_prompt: ScoredPrompt | None = None
    adjustments: RowAdjustments = NO_ADJUSTMENTS
    num_prompt: int = 0


_Call = tuple[Sequence[RowPlan], Array]  # rows, and the words that the device says of them


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step that the device has been told of.

    Attributes:
        plan: its rows.
        calls: of step functions, by phase.
        scored: calls that score the prompts of some of the rows.
    """

    plan: StepPlan
    calls: tuple[_Call, ...]
    scored: tuple[_Call, ...]


class Runner:
    """Owns the device side of an engine."""

    def __init__(
        self,
        model: LanguageModel,
        sizes: PoolSizes,
        buckets: Buckets,
        *,
        num_valid_tokens: int,
        steps_by_demand: bool = False,
        on_compile: Callable[[], None] | None = None,
    ) -> None:
        """Allocate the pools.

        Args:
            model: with its parameters.
            sizes: of the pools.
            buckets: padded sizes of calls.
            num_valid_tokens: token ids from here on are never chosen.
            steps_by_demand: whether decode steps are compiled for what their rows ask for (`sampling.Demand`); then a
                row's step depends on its neighbours.
            on_compile: called before a step is compiled that warm-up has not.
        """
        self._static, self._params = split_model(
            model, num_valid_tokens=num_valid_tokens, num_top=min(MAX_LOGPROBS, num_valid_tokens)
        )
        self._config, self._dtype = model.config, model.dtype
        self._sizes, self._buckets = sizes, buckets
        self._requests: dict[RequestId, RequestSampling] = {}
        self._scored: dict[RequestId, ScoredPrompt] = {}
        self._shapes: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()
        self._is_warming_up, self._on_compile = False, on_compile
        self._demands = tuple(Demand) if steps_by_demand else (Demand.ANYTHING,)
        self._device: DeviceState | None = None
        self.reset()

    def reset(self) -> None:
        """Start with empty pools and lanes; requests stay known, since they may be run again from their tokens."""
        sizes = self._sizes
        self._device = None  # the old pools go first: there is no room for both
        self._device = make_device_state(self._config, sizes, dtype=self._dtype)
        self._owners: dict[int, RequestId] = {}  # of lanes, as far as rows told
        self._tables = BlockTables(sizes.num_lanes, sizes.max_blocks)
        self._lanes = LaneSampling(sizes.num_lanes)

    @property
    def device(self) -> DeviceState:
        """All device state between steps; the next step donates it.

        Raises:
            InvariantError: pools could not be allocated again after a failed step.
        """
        if self._device is None:
            raise InvariantError("the device pools are lost, and nothing can run until reset() has allocated them")
        return self._device

    @property
    def state(self) -> ModelState:
        """The model's part of the device state, for audits; raises as `device`."""
        return self.device.model

    def make_auditor(self) -> Auditor:
        """Return an auditor of these pools; it has a state of its own, with room for one sequence."""
        sizes = self._sizes
        own = replace(sizes, num_blocks=sizes.max_blocks + 1, num_slots=2, num_lanes=1)
        recomputation = Recomputation(
            self._static,
            self._params,
            make_device_state(self._config, own, dtype=self._dtype),
            block_size=sizes.block_size,
            max_blocks=sizes.max_blocks,
        )
        tolerance = TOLERANCE[str(self._dtype)]
        return Auditor(lambda: self.state, recomputation, block_size=sizes.block_size, tolerance=tolerance)

    def add(self, request_id: RequestId, sampling: RequestSampling) -> None:
        """Make a request known before its first row."""
        self._requests[request_id] = sampling
        if sampling.scored_prompt is not None:
            self._scored[request_id] = sampling.scored_prompt

    def forget(self, request_id: RequestId) -> None:
        """Drop what is known of a request, if anything, and clear the lane that it still has."""
        self._requests.pop(request_id, None)
        self._scored.pop(request_id, None)
        for lane in [lane for lane, owner in self._owners.items() if owner == request_id]:
            del self._owners[lane]
            self._lanes.release(lane)

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan's rows and wait for the results."""
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Hand a plan's rows to the device, phase by phase, and wait for nothing.

        Rows of one plan never read what others write, so the phases' order does not matter. The next plan may be
        launched before this one is collected; the device runs them in order.
        """
        for row in plan.rows:
            if row.table_start == 0 and row.new_blocks:
                self._assign_lane(row)
            self._tables.extend(row)
        calls: list[_Call] = []
        scored: list[_Call] = []
        prefill = [row for row in plan.rows if row.phase is Phase.PREFILL]
        for group in prefill_groups(prefill, self._buckets):
            words, hidden = self._prefill(self._prefill_inputs(group, self._buckets))
            calls.append((group, words))
            if (ids := next_prompt_ids(group, self._scored, hidden.shape[0])) is not None:
                scored.append((group, self._score(hidden, ids)))
        advance = [row for row in plan.rows if row.phase is not Phase.PREFILL]
        if advance:
            calls.append((advance, self._advance(self._advance_inputs(advance, self._buckets))))
        return LaunchedStep(plan=plan, calls=tuple(calls), scored=tuple(scored))

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait for a step's results."""
        on_host = jax.device_get([words for _, words in [*step.calls, *step.scored]])
        results: dict[RequestId, RowResult] = {}
        for (rows, _), words in zip(step.calls, on_host, strict=False):
            window = 1 if rows[0].phase is Phase.PREFILL else self._sizes.window
            outputs = unpack(words, window=window, num_top=self._static.num_top)
            results |= zip((row.request_id for row in rows), self._results(rows, outputs), strict=True)
        for (rows, _), words in zip(step.scored, on_host[len(step.calls) :], strict=True):
            for request_id, found in prompt_logprobs(rows, self._scored, words, self._static.num_top):
                results[request_id] = results[request_id]._replace(prompt_logprobs=found)
        return StepResult(rows=tuple(results[row.request_id] for row in step.plan.rows))

    def _assign_lane(self, row: RowPlan) -> None:
        request = self._requests.get(row.request_id)
        if request is None:
            raise InvariantError(f"request {row.request_id} has a row and was never made known")
        self._owners[row.lane] = row.request_id
        self._lanes.assign(row.lane, request.row, request.num_logprobs, request.adjustments)
        if request.adjustments.adjusts:
            self._place_history(row.lane, row.history[: request.num_prompt], row.history[request.num_prompt :])

    def _place_history(self, lane: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        row = pack_history(prompt, output, self._config.vocab_size)
        history = place_history(self.device.history, np.int32(lane), row)
        self._device = replace(self.device, history=history)

    def _prefill(self, inputs: StepInputs) -> tuple[Array, Array]:
        words, hidden, self._device = prefill_step(self._static, self._params, self.device, inputs)
        return words, hidden

    def _prefill_inputs(self, rows: Sequence[RowPlan], buckets: Buckets) -> StepInputs:
        batch = build_prefill(rows, self._tables, buckets, self._sizes.block_size)
        sampling = self._gather(rows, padded_lanes(rows, batch.rows.length.shape[0], self._sizes.num_lanes))
        sampling = replace(sampling, demand=Demand.ANYTHING)  # a wait in a prefill is not worth a compilation
        self._note("prefill", batch.token_ids.shape, batch.block_tables.shape)
        return pack_inputs(batch, sampling)

    def _score(self, hidden: Array, next_ids: np.ndarray) -> Array:
        self._note("scores of prompts", next_ids.shape)
        return score_prompts(self._static, self._params, hidden, next_ids)

    def _advance(self, inputs: StepInputs) -> Array:
        words, self._device = advance_step(self._static, self._params, self.device, inputs)
        return words

    def _advance_inputs(self, rows: Sequence[RowPlan], buckets: Buckets, least: Demand = Demand.GREEDY) -> StepInputs:
        batch = build_advance(rows, self._tables, buckets, window=self._sizes.window)
        sampling = self._gather(rows, np.asarray(batch.lane))
        sampling = replace(sampling, demand=max(sampling.demand, least, self._demands[0]))
        self._note(f"decode ({sampling.demand.name.lower()})", batch.token_ids.shape, batch.block_tables.shape)
        return pack_inputs(batch, sampling)

    def _note(self, step: str, *shapes: tuple[int, ...]) -> None:
        """Keep the shape of a call; say so if it is the first one, since compiling may take a minute."""
        shape = (step, shapes)
        if shape in self._shapes:
            return
        self._shapes.add(shape)
        if self._is_warming_up:
            return
        _LOG.info("compiling a step for its first use: %s, %s (warm_up=True does it before)", step, shapes[0])
        if self._on_compile is not None:
            self._on_compile()

    def _gather(self, rows: Sequence[RowPlan], lane: np.ndarray) -> SampledRows:
        emits = np.zeros(lane.shape, np.bool_)
        emits[: len(rows)] = [row.emits for row in rows]
        return self._lanes.gather(lane, emits)

    @property
    def num_compiled(self) -> int:
        """Steps compiled for this engine: shapes that a step was called with."""
        return len(self._shapes)

    def _results(self, rows: Sequence[RowPlan], outputs: StepOutputs) -> Iterator[RowResult]:
        block_size, finite = self._sizes.block_size, outputs.finite.tolist()
        tokens, num_tokens = outputs.tokens.tolist(), outputs.num_tokens.tolist()
        for index, row in enumerate(rows):
            first = row.start // block_size + 1 if row.phase is Phase.PREFILL else None
            saved = tuple(
                export.boundary
                for export in row.exports
                if outputs.stored[index, 0 if first is None else export.boundary // block_size - first]
            )
            if not row.emits:
                yield RowResult(tokens=(), saved=saved, finite=finite[index])
                continue
            emitted, num_top = tuple(tokens[index][: num_tokens[index]]), self._lanes.num_top(row.lane)
            yield RowResult(
                tokens=emitted,
                saved=saved,
                num_drafts=self._sizes.num_drafts if emitted else 0,
                finite=finite[index],
                logprobs=()
                if num_top is None
                else tuple(describe_token(outputs, index, place, num_top) for place in range(len(emitted))),
            )

    def warm_up(self, progress: Progress | None = None, *, num_threads: int | None = None) -> None:
        """Compile every step this engine can be asked for, by running each on padding alone, which changes nothing.

        Args:
            progress: called with (steps compiled, steps in all).
            num_threads: that compile; by default as `default_threads` says.
        """
        began = time.monotonic()
        threads = default_threads() if num_threads is None else num_threads
        self._is_warming_up = True
        try:
            calls = list(self._every_call())
            self._place_history(self._sizes.num_lanes, (), ())  # on the padding lane, which nobody reads
            run_all(calls, progress, num_threads=threads)
        finally:
            self._is_warming_up = False
        jax.block_until_ready(self._device)
        _LOG.info("compiled %d steps in %.1f s", len(calls), time.monotonic() - began)

    def _every_call(self) -> Iterator[WarmUpCall]:
        for shape in self._buckets.prefill_shapes():
            yield self._warm_up_call(prefill_step, self._prefill, self._prefill_inputs([], shape))
        for num_tokens in sorted({num_tokens for num_tokens, _ in self._buckets.prefill}):
            arguments = (
                jnp.zeros((num_tokens, self._config.hidden_size), self._dtype),
                np.full((num_tokens,), -1, np.int32),
            )
            yield WarmUpCall(
                lower=partial(score_prompts.lower, self._static, self._params, *arguments),
                run=partial(self._score, *arguments),
            )
        for shape in self._buckets.advance_shapes():
            for demand in self._demands:
                yield self._warm_up_call(advance_step, self._advance, self._advance_inputs([], shape, demand))

    def _warm_up_call(self, step: Any, run: Callable[[StepInputs], object], inputs: StepInputs) -> WarmUpCall:
        return WarmUpCall(
            lower=lambda: step.lower(self._static, self._params, self.device, inputs), run=partial(run, inputs)
        )
