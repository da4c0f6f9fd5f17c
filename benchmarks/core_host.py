"""Host work of one engine step: what `plan` and `commit` cost, and what a lookup costs.

    python benchmarks/core_host.py [--rows 64] [--context 4096] [--steps 400]

Needs neither a device nor JAX: results of steps are made up, in time that is not counted. Each case checks what it did
before a number is written: rows, positions and tokens of every step, the length of every hit. Goals (design of the
engine): at 64 decode rows of 4,096 tokens plan, build, cut and commit take at most 600 us together and at most 8 us for
each further row; the lookup of an 8,192-token prompt takes at most 1 ms with hashing.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import tyro

from gdn_jax.serving.core.placement import CacheMode, Placement
from gdn_jax.serving.core.plan import Phase, RowCut, RowResult, StepPlan, StepResult
from gdn_jax.serving.core.request import RequestId
from gdn_jax.serving.core.scheduler import Limits, Scheduler

RESULTS = Path(__file__).resolve().parent / "results"
BLOCK_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sizes of the benchmark.

    Attributes:
        rows: decode rows of the step.
        context: tokens of each sequence, about.
        prompt: tokens of the prompt that is looked up.
        steps: steps that are timed, per case.
        results: file to write; "-" prints the rows only.
    """

    rows: int = 64
    context: int = 4096
    prompt: int = 8192
    steps: int = 400
    results: str = str(RESULTS / "core_host.json")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number.

    Attributes:
        case: what was done.
        metric: which figure of it.
        value: in `unit`.
        unit: "us".
        implementation: "ours".
        error: of the check that ran before; exact bookkeeping has none.
    """

    case: str
    metric: str
    value: float
    unit: str = "us"
    implementation: str = "ours"
    error: float = 0.0


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


def time_steps(num_rows: int, options: Options, num_drafts: int) -> list[tuple[float, float]]:
    """Return the microseconds of `plan` and `commit` for each of many steps of decode rows.

    Raises:
        RuntimeError: a step did not do what it was to do.
    """
    scheduler = make_scheduler(num_rows, options.context, num_drafts)
    times: list[tuple[float, float]] = []
    for _ in range(options.steps):
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


def figures(case: str, values: Sequence[float]) -> list[Row]:
    """Return median, 10th and 90th percentile, and mean: the mean holds the steps that fill blocks."""
    tenths = statistics.quantiles(values, n=10)
    named = {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1], "mean": statistics.mean(values)}
    return [Row(case=case, metric=metric, value=round(value, 2)) for metric, value in named.items()]


def step_rows(options: Options, num_drafts: int) -> list[Row]:
    """Measure steps of `options.rows` rows and of twice as many; the difference is the cost of a further row."""
    rows: list[Row] = []
    medians: list[float] = []
    for num_rows in (options.rows, 2 * options.rows):
        times = time_steps(num_rows, options, num_drafts)
        case = f"host/step/B{num_rows}/T{1 + num_drafts}/ctx{options.context}"
        rows += figures(f"{case}/plan", [planning for planning, _ in times])
        rows += figures(f"{case}/commit", [committing for _, committing in times])
        rows += figures(case, [planning + committing for planning, committing in times])
        medians.append(statistics.median(map(sum, times)))
    further = (medians[1] - medians[0]) / options.rows
    case = f"host/step/row/T{1 + num_drafts}/ctx{options.context}"
    return [*rows, Row(case=case, metric="median", value=round(further, 2))]


def lookup_rows(options: Options) -> list[Row]:
    """Measure the lookup of a prompt that is all known, with its hashing and when its hashes are at hand."""
    scheduler = make_scheduler(1, options.prompt, 0)
    prompt = list(scheduler.running()[0].tokens[: options.prompt - BLOCK_SIZE])
    expected = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    prompt.append(1)
    cold: list[float] = []
    warm: list[float] = []
    for number in range(options.steps // 4):
        request = scheduler.add(RequestId(f"look{number}"), prompt, max_tokens=1)
        for times in (cold, warm):
            start = time.perf_counter_ns()
            hit = scheduler.holdings.lookup(request)
            times.append((time.perf_counter_ns() - start) / 1000)
            if hit.junction < expected or not hit.length:
                raise RuntimeError(f"found {hit.length} and {hit.junction} of {expected} tokens")
        scheduler.abort(request.request_id)
    case = f"host/lookup/{options.prompt}"
    return [*figures(f"{case}/hashing", cold), *figures(f"{case}/hashed", warm)]


def device_name() -> str:
    """Return the name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0].strip()
    return platform.processor() or platform.machine()


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows with what is needed to repeat them."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=RESULTS.parent
    )
    report = {
        "suite": "core_host",
        "device": device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "versions": {"python": platform.python_version(), "gdn-jax": version("gdn-jax")},
        "command": " ".join(["python benchmarks/core_host.py", *sys.argv[1:]]),
        "rows": [vars(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def main(options: Options) -> None:
    """Measure everything, print it, and write the results file."""
    cases: list[Callable[[], list[Row]]] = [
        lambda: step_rows(options, 0),
        lambda: step_rows(options, 3),
        lambda: lookup_rows(options),
    ]
    rows = [row for case in cases for row in case()]
    for row in rows:
        sys.stdout.write(f"{row.case:45} {row.metric:7} {row.value:10.2f} {row.unit}\n")
    if options.results != "-":
        write(Path(options.results), rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
