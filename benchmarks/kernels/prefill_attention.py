"""Time the attention of prefill over pages on a device, with and without a cached prefix.

    python -m benchmarks.kernels.prefill_attention

Times are set against the rate of a large product in bfloat16 in the same run, counting what the causal mask leaves. A
case is checked first, on a few of its queries, against float32; one whose check fails has no time. cuDNN is timed on
the same spans where it is installed and there is no prefix: its keys and values are not in pages.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.kernels.device_time import (
    Times,
    check_request,
    matmul_rate,
    matmul_row,
    random_keys,
    relative_error,
    run_cases,
    time_calls,
    time_rows,
)
from benchmarks.results_file import ResultRow
from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.numerics import CHUNK, einsum
from gdn_jax.kernels.paged_attention import paged_attention_prefill

_SUITE = "kernels-prefill-attention"
_LOG = logging.getLogger(__name__)
_DTYPE = jnp.dtype("bfloat16")
_TOLERANCE = 2.0**-6  # weights and outputs are rounded to 8 bits, and the two versions sum in another order
_CHECKED_ROWS, _CHECKED_QUERIES = 2, 48
_CALLS = 4  # in the loop's body


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of one length.

    Attributes:
        num_rows: rows.
        length: new tokens of each row.
        start: tokens of each row that are cached.
        query_heads: heads of the queries.
        kv_heads: heads of keys and values.
        width: of a head.
    """

    num_rows: int = 1
    length: int
    start: int
    query_heads: int = 16
    kv_heads: int = 4
    width: int = 256

    @property
    def name(self) -> str:
        """The case's name in results."""
        rows = f"{self.num_rows}x" if self.num_rows > 1 else ""
        return f"attention/prefill/{self.query_heads}x{self.kv_heads}/{rows}{self.length}on{self.start}"

    @property
    def context(self) -> int:
        """Keys of each row."""
        return self.start + self.length

    @property
    def num_operations(self) -> int:
        """Floating-point operations of both products, for the keys that each query sees."""
        seen = self.length * self.start + self.length * (self.length + 1) // 2
        return 4 * self.num_rows * seen * self.query_heads * self.width


_SHAPES = ((1, 8192, 8192), (1, 8192, 0), (1, 2048, 8192), (1, 1024, 0), (8, 1024, 0), (1, 64, 8192), (1, 32, 8192))
CASES = {
    case.name: case
    for case in (
        *(Case(num_rows=rows, length=length, start=start) for rows, length, start in _SHAPES),
        *(Case(length=8192, start=8192, query_heads=heads, kv_heads=kv) for heads, kv in ((24, 4), (16, 2))),
    )
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: where the results go.
        cases: names of cases.
        implementation: which kernels: mosaic, or jax for the plain ones.
        repeats: timed runs.
    """

    output: Path = Path("benchmarks/results/kernels-prefill-attention.json")
    cases: tuple[str, ...] = tuple(CASES)
    implementation: Literal["mosaic", "jax"] = "mosaic"
    repeats: int = 7


class Drawn(NamedTuple):
    """Arguments of a call."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    tables: jax.Array
    rows: PrefillRows


@partial(jax.jit, static_argnums=0)
def draw(case: Case) -> Drawn:
    """Draw queries and pages on the device; pages of a row lie in random order."""
    keys = random_keys(0, 3)
    blocks = -(-case.context // CHUNK)
    order = np.random.RandomState(0).permutation(case.num_rows * blocks).reshape(case.num_rows, blocks)
    row = jnp.arange(case.num_rows, dtype=jnp.int32)
    rows = PrefillRows(
        offset=row * case.length,
        length=jnp.full_like(row, case.length),
        start=jnp.full_like(row, case.start),
        read_slot=jnp.zeros_like(row),
        write_slot=jnp.zeros_like(row),
        export_slot=jnp.zeros((case.num_rows, 1), jnp.int32),
    )
    q = jax.random.normal(next(keys), (case.num_rows * case.length, case.query_heads, case.width), _DTYPE)
    shape = (1 + case.num_rows * blocks, CHUNK, case.kv_heads, case.width)
    k_pages, v_pages = (jax.random.normal(key, shape, _DTYPE) for key in keys)
    return Drawn(q, k_pages, v_pages, jnp.asarray(1 + order, jnp.int32), rows)


def attend(drawn: Drawn, implementation: Implementation) -> jax.Array:
    """Return the outputs."""
    return paged_attention_prefill(*drawn, implementation=implementation)


def check(case: Case, implementation: Implementation) -> float:
    """Return the error of some queries of the first and the last row against float32.

    Raises:
        SystemExit: it is above the tolerance, so that no time would mean anything.
    """
    drawn = draw(case)
    got = jax.jit(attend, static_argnums=1)(drawn, implementation)
    places = np.unique(np.linspace(0, case.length - 1, _CHECKED_QUERIES).astype(np.int32))
    errors = []
    for row in np.unique(np.linspace(0, case.num_rows - 1, _CHECKED_ROWS).astype(int)):
        want = _attend_in_float32(case, drawn, int(row), jnp.asarray(places))
        errors.append(_error(got[row * case.length + places], want))
    error = max(errors)
    if not error <= _TOLERANCE:
        raise SystemExit(f"{case.name}: attention must be right within {_TOLERANCE}; error {error}: no times")
    return error


def _error(got: jax.Array, want: jax.Array) -> float:
    """Return the largest error of a query; those that see many keys have small outputs, so each has its own scale."""
    return max(relative_error(*pair) for pair in zip(np.asarray(got, np.float32), np.asarray(want), strict=True))


@partial(jax.jit, static_argnums=(0, 2))
def _attend_in_float32(case: Case, drawn: Drawn, row: int, places: jax.Array) -> jax.Array:
    """Return the outputs of some of a row's queries, by their index in its span."""
    q = drawn.q[row * case.length + places].astype(jnp.float32)
    grouped = q.reshape(len(places), case.kv_heads, -1, case.width)
    k, v = (
        pages[drawn.tables[row]].reshape(-1, case.kv_heads, case.width).astype(jnp.float32)
        for pages in (drawn.k_pages, drawn.v_pages)
    )
    score = einsum("thgd,shd->hgts", grouped, k) * case.width**-0.5
    seen = jnp.arange(k.shape[0], dtype=jnp.int32)[None] <= case.start + places[:, None]
    weight = jax.nn.softmax(jnp.where(seen[None, None], score, -jnp.inf), axis=-1)
    return einsum("hgts,shd->thgd", weight, v).reshape(q.shape)


def benchmark(case: Case, *, options: Options, rate: float) -> Iterator[ResultRow]:
    """Check, then time, one case; cuDNN too, where it can run the case."""
    implementation, repeats = Implementation(options.implementation), options.repeats
    error = check(case, implementation)
    drawn = draw(case)

    def call(carry: tuple[jax.Array, ...], held: tuple[jax.Array, PrefillRows]) -> tuple[jax.Array, ...]:
        return (attend(Drawn(*carry, *held), implementation), *carry[1:])

    times = time_calls(call, tuple(drawn[:3]), [tuple(drawn[3:])] * _CALLS, repeats=repeats)
    yield from _rows(case, options.implementation, error, times, rate)
    if not case.start and _has_cudnn():
        error, times = _time_cudnn(case, repeats)
        if error <= _TOLERANCE:
            yield from _rows(case, "cudnn", error, times, rate)
        else:
            _LOG.warning("%s: the error of cudnn is %g: no time", case.name, error)


def _rows(case: Case, implementation: str, error: float, times: Times, rate: float) -> Iterator[ResultRow]:
    yield from time_rows(case.name, implementation, error, times)
    share = case.num_operations / times.median / rate
    metric = "share of matmul"
    yield ResultRow(
        case=case.name, metric=metric, value=share, unit="ratio", implementation=implementation, error=error
    )


def _has_cudnn() -> bool:
    return jax.default_backend() == "gpu" and find_spec("nvidia") is not None and find_spec("nvidia.cudnn") is not None


def _time_cudnn(case: Case, repeats: int) -> tuple[float, Times]:
    """Return the error and the times of cuDNN on rows whose keys and values lie in one piece."""
    drawn = draw(case)
    attend_causally = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")

    def by_row(x: jax.Array) -> jax.Array:
        return x.reshape(case.num_rows, case.length, -1, case.width)

    q = by_row(drawn.q)
    k, v = (by_row(pages[drawn.tables]) for pages in (drawn.k_pages, drawn.v_pages))
    places = np.arange(0, case.length, max(1, case.length // _CHECKED_QUERIES), dtype=np.int32)
    want = _attend_in_float32(case, drawn, 0, jnp.asarray(places))
    error = _error(jax.jit(attend_causally)(q, k, v)[0, places], want)
    times = time_calls(lambda q, held: attend_causally(q, *held), q, [(k, v)] * _CALLS, repeats=repeats)
    return error, times


def main() -> None:
    """Run the benchmark and write its results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    check_request(_SUITE, options.cases, CASES, options.implementation)
    rate = matmul_rate()
    rows = [matmul_row(rate)]
    timed = partial(benchmark, options=options, rate=rate)
    run_cases(_SUITE, options.output, options.cases, CASES, timed, rows)


if __name__ == "__main__":
    main()
