"""Host work of one engine step: what `plan`, `build`, `cut` and `commit` cost together, and what a lookup costs.

    JAX_PLATFORMS=cpu python -m benchmarks.core_host

No model runs: results of steps are made up, in time that is not counted. `build` is what the runner does before it
calls a step: block tables, padded arrays, lanes; `cut` ends rows without a tokenizer. Each case checks what it did
before a number is written: rows, positions, tokens and arrays of every step, the length of every hit. The goals: at 64
decode rows of 4,096 tokens plan, build, cut and commit take at most 600 us together, and at most 8 us for each further
row; the lookup of an 8,192-token prompt takes at most 1 ms with its hashing. Compare 10th percentiles on a machine that
others use too.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

from benchmarks.results_file import ResultRow, write_results
from gdn_jax.serving.core.limits import Limits
from gdn_jax.serving.core.placement import CacheMode, Placement
from gdn_jax.serving.core.plan import Phase, RowCut, RowResult, StepPlan, StepResult
from gdn_jax.serving.core.request import RequestId
from gdn_jax.serving.core.scheduler import Scheduler
from gdn_jax.serving.cut import Cutter
from gdn_jax.serving.runner.buckets import make_buckets
from gdn_jax.serving.runner.inputs import BlockTables, build_advance
from gdn_jax.serving.runner.lanes import LaneSampling
from gdn_jax.serving.runner.sampling import RowSampling, SampledRows
from gdn_jax.serving.sampling_params import SamplingParams
from gdn_jax.state import AdvanceBatch

BLOCK_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to run.

    Attributes:
        output: JSON file for the results.
        rows: decode rows of the step.
        context: tokens of each sequence, about.
        prompt: tokens of the prompt that is looked up.
        steps: steps that are timed, per case.
    """

    output: Path = Path("benchmarks/results/core-host.json")
    rows: int = 64
    context: int = 4096
    prompt: int = 8192
    steps: int = 400


class Times(NamedTuple):
    """Microseconds of the parts of one step."""

    plan: float
    build: float
    cut: float
    commit: float


class Host:
    """The host side of an engine whose requests all decode, from contexts that do not fill blocks together."""

    def __init__(self, num_rows: int, context: int, num_drafts: int) -> None:
        """Admit the requests, and run the step that prefills them."""
        self._num_drafts = num_drafts
        limits = Limits(
            num_blocks=num_rows * (context // BLOCK_SIZE + 200) + 1,
            num_slots=4 * num_rows + 1,
            num_lanes=num_rows,
            budget=num_rows * context,
            max_model_len=context + 10_000,
            num_drafts=num_drafts,
        )
        self.scheduler = Scheduler(limits, Placement(mode=CacheMode.ALL, block_size=BLOCK_SIZE, state_interval=512))
        self._buckets = make_buckets(
            budget=2048,
            max_num_seqs=num_rows,
            max_model_len=limits.max_model_len,
            block_size=BLOCK_SIZE,
            deterministic=False,
        )
        self._tables = BlockTables(num_rows, self._buckets.table_blocks[-1])
        self._lanes = LaneSampling(num_rows)
        self._cutters: dict[RequestId, Cutter] = {}
        for number in range(num_rows):
            length = context - number * 7 % BLOCK_SIZE
            prompt = [(number * 31 + at * 7) % 50_000 for at in range(length)]
            request = self.scheduler.add(RequestId(f"r{number}"), prompt, max_tokens=9_000)
            self._cutters[request.request_id] = Cutter(
                SamplingParams(stop_token_ids=[7]), prompt, 9_000, tokenizer=None, end_token_ids=(1, 2)
            )
            self._lanes.assign(number, RowSampling(temperature=0.7, seed=number), None)
        self.step()

    def step(self) -> tuple[StepPlan, Times]:
        """Run one step; return its plan and how long each part took.

        Raises:
            RuntimeError: no row can run, or the arrays that were built are not the plan's.
        """
        marks = [time.perf_counter_ns()]
        plan = self.scheduler.plan()
        marks.append(time.perf_counter_ns())
        if plan is None:
            raise RuntimeError("no row can run, so there is nothing to measure")
        built = self._build(plan)
        marks.append(time.perf_counter_ns())
        if built is not None:
            self._check(plan, *built)
        result = made_up(plan, self._num_drafts)
        before_cut = time.perf_counter_ns()
        cuts = [
            self._cutters[row.request_id].cut(found.tokens)[0] if row.emits else RowCut(num_kept=0)
            for row, found in zip(plan.rows, result.rows, strict=True)
        ]
        after_cut = time.perf_counter_ns()
        self.scheduler.commit(plan, result, cuts)
        done = time.perf_counter_ns()
        spans = (marks[1] - marks[0], marks[2] - marks[1], after_cut - before_cut, done - after_cut)
        return plan, Times(*(span / 1000 for span in spans))

    def _build(self, plan: StepPlan) -> tuple[AdvanceBatch, SampledRows] | None:
        """Do what the runner does before it calls a step; nothing but tables for the one that prefills."""
        for row in plan.rows:
            self._tables.extend(row)
        rows = [row for row in plan.rows if row.phase is not Phase.PREFILL]
        if not rows:
            return None
        batch = build_advance(rows, self._tables, self._buckets, window=1 + self._num_drafts)
        emits = np.zeros(batch.lane.shape, np.bool_)
        emits[: len(rows)] = [row.emits for row in rows]
        return batch, self._lanes.gather(np.asarray(batch.lane), emits)

    def _check(self, plan: StepPlan, batch: AdvanceBatch, sampled: SampledRows) -> None:
        lanes = [row.lane for row in plan.rows]
        tokens = [row.tokens[0] for row in plan.rows]
        owned = [self.scheduler.get(row.request_id).blocks for row in plan.rows]
        found = [table[: len(blocks)].tolist() for table, blocks in zip(batch.block_tables, owned, strict=False)]
        right = batch.lane[: len(lanes)].tolist() == sampled.lane[: len(lanes)].tolist() == lanes
        if not right or batch.token_ids[: len(tokens), 0].tolist() != tokens or found != owned:
            raise RuntimeError(f"the arrays that were built are not those of {plan}")


def made_up(plan: StepPlan, num_drafts: int) -> StepResult:
    """Return what a device might say: half of the drafts of a row accepted, every save stored."""
    rows = tuple(
        RowResult(
            tokens=(5,) * (1 + (row.num_drafts + 1) // 2) if row.emits else (),
            saved=tuple(export.boundary for export in row.exports),
            num_drafts=num_drafts,
        )
        for row in plan.rows
    )
    return StepResult(rows=rows)


def time_steps(num_rows: int, arguments: Arguments, num_drafts: int) -> list[Times]:
    """Return the times of each of many steps of decode rows.

    Raises:
        RuntimeError: a step did not do what it was to do.
    """
    host = Host(num_rows, arguments.context, num_drafts)
    times: list[Times] = []
    for _ in range(arguments.steps):
        known = {request.request_id: request.num_known for request in host.scheduler.running()}
        plan, spans = host.step()
        times.append(spans)
        phase = Phase.VERIFY if num_drafts else Phase.DECODE
        emitted = 1 + (num_drafts + 1) // 2
        right = [row.phase is phase and row.start == known[row.request_id] - 1 for row in plan.rows]
        grown = [request.num_known == known[request.request_id] + emitted for request in host.scheduler.running()]
        if len(right) != num_rows or not all(right + grown):
            raise RuntimeError(f"a step of {num_rows} rows went wrong: {plan}")
    host.scheduler.check()
    return times


def _row(case: str, metric: str, value: float) -> ResultRow:
    return ResultRow(case=case, metric=metric, value=round(value, 2), unit="us", implementation="ours", error=0.0)


def figures(case: str, values: Sequence[float]) -> list[ResultRow]:
    """Return median, 10th and 90th percentile, and mean: the mean holds the steps that fill blocks."""
    tenths = statistics.quantiles(values, n=10)
    named = {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1], "mean": statistics.mean(values)}
    return [_row(case, metric, value) for metric, value in named.items()]


def step_rows(arguments: Arguments, num_drafts: int) -> list[ResultRow]:
    """Measure steps of `arguments.rows` rows and of twice as many; the difference is the cost of a further row."""
    rows: list[ResultRow] = []
    totals: list[dict[str, float]] = []
    for num_rows in (arguments.rows, 2 * arguments.rows):
        times = time_steps(num_rows, arguments, num_drafts)
        case = f"host/step/B{num_rows}/T{1 + num_drafts}/ctx{arguments.context}"
        for part in Times._fields:
            rows += figures(f"{case}/{part}", [getattr(spans, part) for spans in times])
        whole = figures(case, [sum(spans) for spans in times])
        totals.append({row.metric: row.value for row in whole})
        rows += whole
    case = f"host/step/further-row/T{1 + num_drafts}/ctx{arguments.context}"
    further = {metric: (totals[1][metric] - totals[0][metric]) / arguments.rows for metric in ("median", "p10")}
    return [*rows, *(_row(case, metric, value) for metric, value in further.items())]


def lookup_rows(arguments: Arguments) -> list[ResultRow]:
    """Measure the lookup of a prompt that is all known, with its hashing and when its hashes are at hand."""
    scheduler = Host(1, arguments.prompt, 0).scheduler
    prompt = list(scheduler.running()[0].tokens[: arguments.prompt])
    expected = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    times: dict[str, list[float]] = {"hashing": [], "hashed": []}
    for number in range(arguments.steps // 4):
        request = scheduler.add(RequestId(f"look{number}"), prompt, max_tokens=1)
        for kind in times:
            start = time.perf_counter_ns()
            hit = scheduler.holdings.lookup(request)
            times[kind].append((time.perf_counter_ns() - start) / 1000)
            if hit.length != expected:
                raise RuntimeError(f"a hit of {hit.length} tokens, not {expected}")
        scheduler.abort(request.request_id)
    return [row for kind, values in times.items() for row in figures(f"host/lookup/{arguments.prompt}/{kind}", values)]


def main(arguments: Arguments) -> None:
    """Run every case and write the file."""
    rows = [*step_rows(arguments, 0), *step_rows(arguments, 3), *lookup_rows(arguments)]
    write_results(arguments.output, "core-host", rows)
    for row in rows:
        sys.stdout.write(f"{row.case:40} {row.metric:8} {row.value:.4g} {row.unit}\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
