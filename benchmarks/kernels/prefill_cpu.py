"""Time the chunked `gdn_prefill` against the token-by-token reference on the CPU, both jitted, in one run.

    JAX_PLATFORMS=cpu python -m benchmarks.kernels.prefill_cpu

Runs of the two alternate, so that load on the machine meets both alike; the ratio is that of the medians. Nothing is
reported when the two disagree.
"""

import logging
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tyro

from benchmarks.results_file import ResultRow, write_results
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import gdn_prefill
from gdn_jax.kernels.gated_delta.cases import CASES, CPU_BENCHMARKS, PrefillArguments, PrefillCase, make_prefill

_LOG = logging.getLogger(__name__)
_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}  # by dtype of the operands, relative to the largest value


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: where the results go.
        cases: names of prefill cases.
        repeats: timed runs of each implementation.
    """

    output: Path = Path("benchmarks/results/kernels-cpu.json")
    cases: tuple[str, ...] = tuple(case.name for case in CPU_BENCHMARKS)
    repeats: int = 15


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """Return the largest error relative to the largest expected magnitude; both must hold NaN in the same places."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("inf")
    return float(np.nanmax(np.abs(got - want)) / np.nanmax(np.abs(want)))


def check(args: PrefillArguments, tolerance: float) -> float:
    """Return the error of the chunked version against the reference, outputs and pool.

    Raises:
        SystemExit: the error is above the tolerance, so that no time would mean anything.
    """
    got, want = (run(args, implementation) for implementation in (Implementation.JAX, Implementation.REFERENCE))
    error = max(relative_error(a, b) for a, b in zip(got, want, strict=True))
    if not error <= tolerance:
        raise SystemExit(f"the chunked prefill must equal the reference within {tolerance}; error {error}: no times")
    return error


def run(args: PrefillArguments, implementation: Implementation) -> tuple[jax.Array, jax.Array]:
    """Run one prefill to its end."""
    out = gdn_prefill(args.q, args.inputs, args.rows, args.pool, implementation=implementation)
    return jax.block_until_ready(out)


def measure(args: PrefillArguments, repeats: int) -> dict[Implementation, list[float]]:
    """Return milliseconds of each run, the two implementations taking turns."""
    times: dict[Implementation, list[float]] = {Implementation.JAX: [], Implementation.REFERENCE: []}
    for _ in range(repeats):
        for implementation, milliseconds in times.items():
            start = time.perf_counter()
            run(args, implementation)
            milliseconds.append(1e3 * (time.perf_counter() - start))
    return times


def benchmark(case: PrefillCase, repeats: int) -> list[ResultRow]:
    """Check, then time, one case; returns medians, 10th and 90th percentiles, and the ratio of the medians."""
    args = make_prefill(case)
    error = check(args, _TOLERANCES[case.dtype])
    times = measure(args, repeats)
    rows = []
    for implementation, milliseconds in times.items():
        deciles = statistics.quantiles(milliseconds, n=10, method="inclusive")
        values = {"median": statistics.median(milliseconds), "p10": deciles[0], "p90": deciles[-1]}
        rows += [
            ResultRow(case=case.name, metric=name, value=value, unit="ms", implementation=implementation, error=error)
            for name, value in values.items()
        ]
    ratio = statistics.median(times[Implementation.REFERENCE]) / statistics.median(times[Implementation.JAX])
    return [
        *rows,
        ResultRow(
            case=case.name,
            metric="reference / jax",
            value=ratio,
            unit="ratio",
            implementation=Implementation.JAX,
            error=error,
        ),
    ]


def find_case(name: str) -> PrefillCase:
    """Return a prefill case by name.

    Raises:
        SystemExit: there is no such case; the message lists those there are.
    """
    known = {case.name: case for case in CASES.values() if isinstance(case, PrefillCase)}
    if name not in known:
        raise SystemExit(f"--cases must name prefill cases; got {name!r}; there are {', '.join(known)}")
    return known[name]


def main() -> None:
    """Run the benchmark and write its results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    cases = [find_case(name) for name in options.cases]
    rows = [row for case in cases for row in benchmark(case, options.repeats)]
    for r in rows:
        _LOG.info("%s  %s  %s: %.3f %s (error %.1e)", r.case, r.implementation, r.metric, r.value, r.unit, r.error)
    write_results(options.output, "kernels-cpu", rows)


if __name__ == "__main__":
    main()
