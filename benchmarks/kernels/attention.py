"""Time the attention of decode and verify over pages on a device, beside a copy in the same run.

    python -m benchmarks.kernels.attention

Every case is checked first, some of its rows against the reference; a case whose check fails has no time. Pages of a
row lie in random order. Where a cache could hold what one call reads, each call of the loop's body has pages of its
own, so many that no cache holds those of all, as in a model, whose other layers come between. The outputs of a call are
the queries of the next one.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.kernels.device_time import (
    check_request,
    copy_bandwidth,
    copy_row,
    random_keys,
    relative_error,
    run_cases,
    time_calls,
    time_rows,
)
from benchmarks.results_file import ResultRow
from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention import paged_attention_advance

_SUITE = "kernels-attention"
_DTYPE = jnp.dtype("bfloat16")
_TOLERANCE = 2.0**-6  # weights and outputs are rounded to 8 bits, and the two versions sum in another order
_CHECKED_KEYS = 1 << 14  # of all checked rows together
_LEAST_BYTES = 256 << 20  # of all calls' pages: several times the second-level cache of a Hopper GPU
_LEAST_CALLS, _MOST_CALLS = 4, 64  # in the loop's body


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of one length.

    Attributes:
        num_rows: rows.
        context: keys of each row, those of its new tokens among them.
        window: new tokens of each row.
        query_heads: heads of the queries.
        kv_heads: heads of keys and values.
        width: of a head.
    """

    num_rows: int
    context: int
    window: int
    query_heads: int = 16
    kv_heads: int = 4
    width: int = 256

    @property
    def name(self) -> str:
        """The case's name in results."""
        return f"attention/{self.query_heads}x{self.kv_heads}/B{self.num_rows}/ctx{self.context}/T{self.window}"

    @property
    def moved_bytes(self) -> int:
        """The least bytes that a call moves: keys and values once, queries and outputs once."""
        return self.kv_bytes + 2 * self.num_rows * self.window * self.query_heads * self.width * _DTYPE.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that a call reads."""
        return 2 * self.num_rows * self.context * self.kv_heads * self.width * _DTYPE.itemsize

    @property
    def num_sets(self) -> int:
        """Sets of pages: one for each call of the loop's body, or one for all if no cache holds it."""
        return min(_MOST_CALLS, -(-_LEAST_BYTES // self.kv_bytes))


_SHAPES = ((1, 1024), (64, 1024), (64, 8192), (1, 8192), (1, 131072))  # rows, keys of each
CASES = {
    case.name: case
    for case in (Case(num_rows=rows, context=context, window=window) for rows, context in _SHAPES for window in (1, 4))
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: where the results go.
        cases: names of attention cases.
        implementation: which kernels: mosaic, or jax for the plain ones.
        repeats: timed runs.
    """

    output: Path = Path("benchmarks/results/kernels-attention.json")
    cases: tuple[str, ...] = tuple(CASES)
    implementation: Literal["mosaic", "jax"] = "mosaic"
    repeats: int = 7


_Carry = tuple[jax.Array, jax.Array, jax.Array]  # queries, pages of keys, pages of values
_Held = tuple[jax.Array, AdvanceRows]  # block tables and rows of one call


@partial(jax.jit, static_argnums=0)
def draw(case: Case) -> tuple[_Carry, list[_Held]]:
    """Draw queries and all pages of keys and of values on the device, and what each set of pages is read with."""
    keys = random_keys(0, 3)
    blocks = -(-case.context // CHUNK)
    num_pages = case.num_sets * case.num_rows * blocks
    order = np.random.RandomState(0).permutation(num_pages).reshape(case.num_sets, case.num_rows, blocks)
    counts = jnp.full((case.num_rows,), case.window, jnp.int32)
    nothing = jnp.zeros_like(counts)
    rows = AdvanceRows(
        read_slot=nothing,
        write_slot=nothing,
        save_slot=nothing,
        save_at=nothing,
        folded=jnp.full_like(counts, case.context - case.window),
        num_replay=nothing,
        num_new=counts,
    )
    queries = jax.random.normal(next(keys), (case.num_rows, case.window, case.query_heads, case.width), _DTYPE)
    shape = (1 + num_pages, CHUNK, case.kv_heads, case.width)
    k_pages, v_pages = (jax.random.normal(key, shape, _DTYPE) for key in keys)
    return (queries, k_pages, v_pages), [(jnp.asarray(1 + tables, jnp.int32), rows) for tables in order]


def check(case: Case, implementation: Implementation) -> float:
    """Return the error of some rows, of all that are timed, against the reference.

    Raises:
        SystemExit: it is above the tolerance, so that no time would mean anything.
    """
    (queries, k_pages, v_pages), (*_, (tables, rows)) = draw(case)
    attend = jax.jit(paged_attention_advance, static_argnames="implementation")
    # All rows run: how kernels split a row follows from how many there are, too.
    got = attend(queries, k_pages, v_pages, tables, rows, implementation=implementation)
    count = max(1, min(case.num_rows, _CHECKED_KEYS // case.context))
    checked = np.linspace(0, case.num_rows - 1, count).astype(int)
    queries, tables, rows = jax.tree.map(lambda x: x[checked], (queries, tables, rows))
    want = attend(queries, k_pages, v_pages, tables, rows, implementation=Implementation.REFERENCE)
    error = relative_error(got[checked], want)
    if not error <= _TOLERANCE:
        raise SystemExit(f"{case.name}: attention must be right within {_TOLERANCE}; error {error}: no times")
    return error


def benchmark(case: Case, *, options: Options, bandwidth: float) -> Iterator[ResultRow]:
    """Check, then time, one case of decode or verify."""
    implementation = Implementation(options.implementation)
    error = check(case, implementation)
    carry, sets = draw(case)

    def call(carry: _Carry, held: _Held) -> _Carry:
        return (paged_attention_advance(*carry, *held, implementation=implementation), *carry[1:])

    held = [sets[index % len(sets)] for index in range(max(_LEAST_CALLS, len(sets)))]
    times = time_calls(call, carry, held, repeats=options.repeats)
    row = partial(ResultRow, case=case.name, implementation=options.implementation, error=error)
    yield from time_rows(case.name, options.implementation, error, times)
    yield row(metric="share of copy", value=case.moved_bytes / times.median / bandwidth, unit="ratio")


def main() -> None:
    """Run the benchmark and write its results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    check_request(_SUITE, options.cases, CASES, options.implementation)
    bandwidth = copy_bandwidth()
    rows = [copy_row(bandwidth)]
    timed = partial(benchmark, options=options, bandwidth=bandwidth)
    run_cases(_SUITE, options.output, options.cases, CASES, timed, rows)


if __name__ == "__main__":
    main()
