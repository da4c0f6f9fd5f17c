"""Time on a device: of calls inside one jitted loop, of a copy, of a product, and of a kernel that does nothing.

A call is timed as part of a loop that one jit compiles, so that launching from the host costs it little: each loop is
handed over while the one before runs. The loop's body holds several calls, on different data, so that a cache does not
serve what memory should. The bandwidth that shares are of is that of a copy in the same run, counting bytes read and
bytes written.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.results_file import ResultRow, write_results
from gdn_jax.kernels.dispatch import UnsupportedKernelError, choose_kernels

_LOG = logging.getLogger(__name__)
_LEAST_SECONDS = 0.05  # of one timed run
_ROUNDS = 16  # of one loop
_COPIED_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one call: median, 10th and 90th percentile over the timed runs."""

    median: float
    p10: float
    p90: float


class TimedCalls[Carry, Held]:
    """Calls one after the other and over again, in a loop that is compiled once for checks and times."""

    def __init__(self, call: Callable[[Carry, Held], Carry]) -> None:
        """Take the call: of what is carried from call to call, and of what one call has of its own."""
        one = jax.jit(call)  # so that it is lowered once, however often the body calls it

        def rounds_of(carry: Carry, held: Sequence[Held]) -> Carry:
            def body(_: Any, carry: Carry) -> Carry:
                for own in held:
                    carry = one(carry, own)
                return carry

            # A static number: with one that the device decides on, the host asks for it in every round.
            return lax.fori_loop(0, _ROUNDS, body, carry)

        self._loop = jax.jit(rounds_of, donate_argnums=0)

    def run(self, carry: Carry, held: Sequence[Held]) -> Carry:
        """Run the loop once, and return what its last call does.

        Args:
            carry: what the first call takes; donated.
            held: of each call in the loop's body. Arguments, so that the compiler does not take them for constants.
        """
        return self._loop(carry, held)

    def time(self, carry: Carry, held: Sequence[Held], *, repeats: int = 7) -> Times:
        """Time the calls, each as the mean over those of the body; `repeats` timed runs."""

        def run(num_loops: int, carry: Carry) -> tuple[float, Carry]:
            """Run some loops, each handed over while the one before runs; returns their seconds."""
            start = time.perf_counter()
            for _ in range(num_loops):
                carry = self.run(carry, held)
            carry = jax.block_until_ready(carry)
            return time.perf_counter() - start, carry

        carry = run(1, carry)[1]  # compiles
        seconds, carry = run(1, carry)
        num_loops = max(1, round(_LEAST_SECONDS / seconds))
        carry = run(num_loops, carry)[1]
        timed = []
        for _ in range(repeats):
            seconds, carry = run(num_loops, carry)
            timed.append(seconds / num_loops / _ROUNDS / len(held))
        deciles = statistics.quantiles(timed, n=10, method="inclusive")
        return Times(median=statistics.median(timed), p10=deciles[0], p90=deciles[-1])


def time_calls[Carry, Held](
    call: Callable[[Carry, Held], Carry], carry: Carry, held: Sequence[Held], *, repeats: int = 7
) -> Times:
    """Time calls as `TimedCalls` does."""
    return TimedCalls(call).time(carry, held, repeats=repeats)


def all_kept[Result, State, Held](
    call: Callable[[State, Held], tuple[Result, State]],
) -> Callable[[tuple[tuple[Result, ...], State], Held], tuple[tuple[Result, ...], State]]:
    """Return a call for `TimedCalls` that carries results beside a state, one of each call of the loop's body.

    What only the next call overwrites a compiler does not compute, not even behind a barrier: a kernel that makes
    nothing but a result that nobody reads would run in the last call alone. So each result is carried to the same call
    of the next round, and passes a barrier, with what that call has of its own, on its way past the others.
    """

    def kept(carry: tuple[tuple[Result, ...], State], own: Held) -> tuple[tuple[Result, ...], State]:
        (_, *results), state = carry
        own, results = lax.optimization_barrier((own, results))  # else what no round changes is computed once
        result, state = lax.optimization_barrier(call(state, own))
        return (*results, result), state

    return kept


def time_all_kept[Result, State, Held](
    call: Callable[[State, Held], tuple[Result, State]], state: State, held: Sequence[Held], *, repeats: int = 7
) -> Times:
    """Time calls, two or more, that take a state from one another and whose results nobody reads, or no state."""
    results = tuple(empty(jax.eval_shape(call, state, held[0])[0]) for _ in held)
    return time_calls(all_kept(call), (results, state), held, repeats=repeats)


def empty(shapes: Any) -> Any:
    """Return zeros of the shapes and dtypes of a pytree."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def copy_bandwidth(num_bytes: int = _COPIED_BYTES) -> float:
    """Return bytes per second, read and written, of passing over an array that no cache holds."""
    array = jnp.zeros((num_bytes // 4,), jnp.float32)
    # The barrier keeps two passes from becoming one.
    times = time_calls(lambda x, one: lax.optimization_barrier(x + one), array, [jnp.float32(1.0)])
    return 2 * num_bytes / times.median


def matmul_rate(size: int = 8192) -> float:
    """Return floating-point operations per second of a square product in bfloat16, which XLA computes."""
    matrix = jnp.ones((size, size), jnp.bfloat16) / size
    times = time_calls(lambda x, other: x @ other, matrix, [matrix.T])
    return 2 * size**3 / times.median


def copy_row(bandwidth: float) -> ResultRow:
    """Return the bandwidth of a copy as a result row."""
    return _measure_row("copy", "GB/s", bandwidth / 1e9)


def matmul_row(rate: float) -> ResultRow:
    """Return the rate of a product as a result row."""
    return _measure_row("matmul", "TFLOP/s", rate / 1e12)


def _measure_row(case: str, unit: str, value: float) -> ResultRow:
    return ResultRow(case=case, metric=unit, value=value, unit=unit, implementation="xla", error=None)


def random_keys(seed: int | jax.Array, count: int) -> Iterator[jax.Array]:
    """Return keys to draw arguments with, of a generator whose code compiles in a third of the default one's time."""
    return iter(jax.random.split(jax.random.key(seed, impl="rbg"), count))


def relative_error(got: jax.Array | np.ndarray, want: jax.Array | np.ndarray) -> float:
    """Return the largest error relative to the largest expected magnitude."""
    wide, right = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(wide - right).max() / np.abs(right).max())


def time_rows(case: str, implementation: str, error: float | None, times: Times) -> list[ResultRow]:
    """Return the microseconds of a case as result rows."""
    values = {"us": times.median, "us p10": times.p10, "us p90": times.p90}
    return [
        ResultRow(case=case, metric=name, value=1e6 * value, unit="us", implementation=implementation, error=error)
        for name, value in values.items()
    ]


def check_request(suite: str, names: Sequence[str], known: Iterable[str], implementation: str) -> None:
    """Refuse, before anything is measured, what cannot be run.

    Args:
        suite: the suite's name.
        names: of the cases that are asked for.
        known: names of every case.
        implementation: which kernels.

    Raises:
        SystemExit: a name is not known, there is none, or the device cannot run the kernels.
    """
    known = list(known)
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"--cases must name cases of {suite}; got {unknown}; there are {', '.join(known)}")
    if not names:
        raise SystemExit(f"--cases must name at least one case of {suite}; there are {', '.join(known)}")
    check_kernels(implementation, "--implementation")


def check_kernels(implementation: str, flag: str) -> None:
    """Raise SystemExit if the device cannot run kernels that a flag asks for."""
    try:
        choose_kernels(implementation)
    except UnsupportedKernelError as error:
        raise SystemExit(f"{flag}: {error}, or {flag} jax here") from None


def run_cases[Case](
    suite: str,
    output: Path,
    names: Sequence[str],
    known: Mapping[str, Case],
    benchmark: Callable[[Case], Iterable[ResultRow]],
    rows: Sequence[ResultRow] = (),
) -> None:
    """Run the cases of a suite by name, say each number, and write all of them after every case.

    Args:
        suite: the suite's name in its file.
        output: the file.
        names: of the cases to run, all of them known (`check_request`).
        known: every case by name.
        benchmark: checks and times a case.
        rows: what was measured before.
    """
    measured = list(rows)
    for name in names:
        for row in benchmark(known[name]):
            number = f"{row.metric}: {row.value:.4g} {row.unit}"
            _LOG.info("%s  %s  %s (error %s)", row.case, row.implementation, number, row.error)
            measured.append(row)
        write_results(output, suite, measured)  # a run may be cut short
