"""Host work of one engine step: what `plan` and `commit` cost, and what a lookup costs.

    JAX_PLATFORMS=cpu python -m benchmarks.core_host

No model runs: results of steps are made up, in time that is not counted. Each case checks what it did before a number
is written: rows, positions and tokens of every step, the length of every hit. The goals: at 64 decode rows of 4,096
tokens plan, build, cut and commit take at most 600 us together, and at most 8 us for each further row; the lookup of an
8,192-token prompt takes at most 1 ms with its hashing. Compare 10th percentiles on a machine that others use too.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.results_file import ResultRow, write_results
from gdn_jax.serving.core.limits import Limits
from gdn_jax.serving.core.placement import CacheMode, Placement
from gdn_jax.serving.core.plan import Phase, RowCut, RowResult, StepPlan, StepResult
from gdn_jax.serving.core.request import RequestId
from gdn_jax.serving.core.scheduler import Scheduler

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


def make_scheduler(num_rows: int, context: int, num_drafts: int) -> Scheduler:
    """Return a scheduler whose requests all decode; their contexts differ, so that they do not fill blocks together."""
    blocks = num_rows * (context // BLOCK_SIZE + 200) + 1
    limits = Limits(
        num_blocks=blocks,
        num_slots=4 * num_rows + 1,
        num_lanes=num_rows,
        budget=num_rows * context,
        max_model_len=context + 10_000,
        num_drafts=num_drafts,
    )
    scheduler = Scheduler(limits, Placement(mode=CacheMode.ALL, block_size=BLOCK_SIZE, state_interval=512))
    for number in range(num_rows):
        length = context - number * 7 % BLOCK_SIZE
        prompt = [(number * 31 + at * 7) % 50_000 for at in range(length)]
        scheduler.add(RequestId(f"r{number}"), prompt, max_tokens=9_000)
    run_step(scheduler, num_drafts)
    return scheduler


def made_up(plan: StepPlan, num_drafts: int) -> tuple[StepResult, list[RowCut]]:
    """Return what a device might say: half of the drafts of a row accepted, every save stored."""
    rows = tuple(
        RowResult(
            tokens=(5,) * (1 + (row.num_drafts + 1) // 2) if row.emits else (),
            saved=tuple(export.boundary for export in row.exports),
            num_drafts=num_drafts,
        )
        for row in plan.rows
    )
    return StepResult(rows=rows), [RowCut(num_kept=len(row.tokens)) for row in rows]


def run_step(scheduler: Scheduler, num_drafts: int) -> tuple[StepPlan, float, float]:
    """Run one step; return its plan and the microseconds of `plan` and `commit`."""
    start = time.perf_counter_ns()
    plan = scheduler.plan()
    planned = time.perf_counter_ns()
    if plan is None:
        raise RuntimeError("no row can run, so there is nothing to measure")
    result, cuts = made_up(plan, num_drafts)
    before = time.perf_counter_ns()
    scheduler.commit(plan, result, cuts)
    return plan, (planned - start) / 1000, (time.perf_counter_ns() - before) / 1000


def time_steps(num_rows: int, arguments: Arguments, num_drafts: int) -> list[tuple[float, float]]:
    """Return the microseconds of `plan` and `commit` for each of many steps of decode rows.

    Raises:
        RuntimeError: a step did not do what it was to do.
    """
    scheduler = make_scheduler(num_rows, arguments.context, num_drafts)
    times: list[tuple[float, float]] = []
    for _ in range(arguments.steps):
        known = {request.request_id: request.num_known for request in scheduler.running()}
        plan, planning, committing = run_step(scheduler, num_drafts)
        times.append((planning, committing))
        phase = Phase.VERIFY if num_drafts else Phase.DECODE
        emitted = 1 + (num_drafts + 1) // 2
        right = [row.phase is phase and row.start == known[row.request_id] - 1 for row in plan.rows]
        grown = [request.num_known == known[request.request_id] + emitted for request in scheduler.running()]
        if len(right) != num_rows or not all(right + grown):
            raise RuntimeError(f"a step of {num_rows} rows went wrong: {plan}")
    scheduler.check()
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
        rows += figures(f"{case}/plan", [planning for planning, _ in times])
        rows += figures(f"{case}/commit", [committing for _, committing in times])
        both = figures(case, [planning + committing for planning, committing in times])
        totals.append({row.metric: row.value for row in both})
        rows += both
    case = f"host/step/further-row/T{1 + num_drafts}/ctx{arguments.context}"
    further = {metric: (totals[1][metric] - totals[0][metric]) / arguments.rows for metric in ("median", "p10")}
    return [*rows, *(_row(case, metric, value) for metric, value in further.items())]


def lookup_rows(arguments: Arguments) -> list[ResultRow]:
    """Measure the lookup of a prompt that is all known, with its hashing and when its hashes are at hand."""
    scheduler = make_scheduler(1, arguments.prompt, 0)
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
