"""The Mosaic prefill attention against the reference; what no sequence owns is NaN throughout.

As for the advance, the interpreter multiplies float32 in float32 and looks for races.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_runs import ON_GPU, run_mosaic, tell_kernels
from oracles.paged_sequences import Sequences, prefill_rows, queries, sequences, span_of
from test_paged_attention_mosaic import CLOSE, ROUNDED, USUAL

from gdn_jax.kernels import paged_attention
from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.dispatch import Implementation, UnsupportedKernelError
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention import mosaic_prefill, reference
from gdn_jax.kernels.paged_attention.prefill_tiles import PrefillTiles, choose_prefill_tiles

NUM_TOKENS = 64
SPANS = ((0, 65), (600, 1), (64, 63), (100, 64), (0, 0), (1, 33))  # (start, length) of each row
FEW = ((70, 20), (0, 0), (300, 9))


def tiles_for(held: Sequences, num_tokens: int, group: int, *, part_pages: int = 0) -> PrefillTiles:
    """Return tiles with fewer stages than a row has pages, in parts of so many pages."""
    (rows, blocks), (kv_heads, width) = held.tables.shape, held.k_pages.shape[2:]
    sizes = {"rows": rows, "blocks": blocks, "kv_heads": kv_heads, "group": group, "width": width}
    chosen = choose_prefill_tiles(num_tokens=num_tokens, **sizes, item_bytes=2)
    parts = -(-blocks // part_pages) if part_pages else 1
    return replace(chosen, part_pages=part_pages, parts=parts, stages=2)


def attend(q, held, rows: PrefillRows, *, part_pages=0, tables=None, first_key=0, dtype=USUAL) -> np.ndarray:
    tables = held.tables if tables is None else tables
    tiles = tiles_for(held, q.shape[0], q.shape[1] // held.k_pages.shape[2], part_pages=part_pages)
    pages = [jnp.asarray(side.astype(dtype)) for side in (held.k_pages, held.v_pages)]
    call = (jnp.asarray(q.astype(dtype)), *pages, jnp.asarray(tables), rows, first_key)
    run = partial(mosaic_prefill.paged_attention_prefill, *call, tiles=tiles, interpret=not ON_GPU)
    got = np.asarray(run_mosaic(run))
    assert got.dtype == dtype
    return got.astype(np.float32)


def expected(q, held, rows: PrefillRows, *, first_key=0, dtype=USUAL) -> np.ndarray:
    arrays = [jnp.asarray(np.asarray(array).astype(dtype)) for array in (q, held.k_pages, held.v_pages)]
    answer = reference.paged_attention_prefill(*arrays, jnp.asarray(held.tables), rows, first_key)
    return np.asarray(answer, np.float32)


def hold(spans, *, gap=3, heads=1, width=64) -> tuple[Sequences, PrefillRows]:
    """Return pages in random order that hold each row's tokens and nothing else, and the rows."""
    lengths = [start + length for start, length in spans]
    held = sequences(lengths, heads=heads, width=width, table=-(-max(lengths) // CHUNK))
    return held, prefill_rows(spans, gap=gap)


def test_prefill_is_that_of_the_reference_over_prefix_and_span() -> None:
    held, rows = hold(SPANS)
    q = queries(256, 4, 64)
    unowned = np.ones(256, bool)
    for row in range(len(SPANS)):
        unowned[span_of(rows, row)] = False
    want = expected(q, held, rows, first_key=1)
    q[unowned] = np.nan  # what stands in their place may be anything
    got = attend(q, held, rows, first_key=1)
    np.testing.assert_allclose(got, want, **CLOSE)
    assert not np.any(got[unowned])
    assert not np.any(got[span_of(rows, 0)][0])  # position 0 sees no key from position 1 on


def test_rows_in_parts_equal_the_reference() -> None:
    held, rows = hold(FEW)
    q = queries(NUM_TOKENS, 4, 64)
    got = attend(q, held, rows, part_pages=2, first_key=1)
    np.testing.assert_allclose(got, expected(q, held, rows, first_key=1), **CLOSE)
    assert not np.any(got[:3])  # of no row


@pytest.mark.parametrize(("group", "heads"), [(1, 2), (3, 1), (4, 2), (6, 1), (8, 1), (16, 1)])
def test_every_group_equals_the_reference(group: int, heads: int) -> None:
    held, rows = hold(((60, 9), (0, 3)), gap=5, heads=heads)
    q = queries(24, group * heads, 64)  # less than a strip, or one and a half
    np.testing.assert_allclose(attend(q, held, rows), expected(q, held, rows), **CLOSE)
    if group == 6:  # three tiles of heads
        np.testing.assert_allclose(attend(q, held, rows, part_pages=1), expected(q, held, rows), **CLOSE)


def test_keys_before_the_first_are_not_seen_even_if_they_are_not_numbers() -> None:
    held, rows = hold(((100, 20), (60, 8)))
    blocks, places = held.tables[:, :2].ravel(), np.arange(CHUNK)
    for page, place in [*((blocks[0], p) for p in places), *((blocks[1], p) for p in places[:6])]:
        held.k_pages[page, place] = held.v_pages[page, place] = np.nan  # positions 0 to 69 of the first row
    held.k_pages[blocks[2]] = held.v_pages[blocks[2]] = np.nan
    q = queries(NUM_TOKENS, 4, 64)
    got = attend(q, held, rows, first_key=70)
    np.testing.assert_allclose(got, expected(q, held, rows, first_key=70), **CLOSE)
    assert not np.any(got[span_of(rows, 1)])


def test_a_query_past_the_pages_its_row_owns_reads_only_owned_keys() -> None:
    held = sequences([CHUNK, 6 * CHUNK, 0], heads=1, width=64, table=6)
    rows = prefill_rows(((CHUNK - 2, 5), (6 * CHUNK - 1, 3), (9, 4)))  # past the table's entries; its width; no entry
    q = queries(NUM_TOKENS, 4, 64)
    got = attend(q, held, rows)
    np.testing.assert_allclose(got, expected(q, held, rows), **CLOSE)
    assert not np.any(got[span_of(rows, 2)])


@pytest.mark.parametrize(("dtype", "width"), [(jnp.bfloat16, 256), (jnp.float16, 128)])
def test_every_dtype_and_width_equals_the_reference(dtype: type, width: int) -> None:
    held, rows = hold(((130, 17), (1, 15)), gap=0, width=width)
    q = queries(32, 4, width)
    got = attend(q, held, rows, dtype=dtype)
    np.testing.assert_allclose(got, expected(q, held, rows, dtype=dtype), **ROUNDED[dtype])


@pytest.mark.parametrize("part_pages", [0, 2])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(part_pages: int) -> None:
    held, rows = hold(FEW)
    q = queries(NUM_TOKENS, 4, 64)
    together = attend(q, held, rows, part_pages=part_pages)
    # First instead of last, other rows elsewhere, the table wider.
    alone, other = prefill_rows((FEW[2], (9, 30), (0, 0)), gap=1), queries(NUM_TOKENS, 4, 64, seed=5)
    other[span_of(alone, 0)] = q[span_of(rows, 2)]
    tables = np.pad(held.tables[[2, 0, 1]], ((0, 0), (0, 3)))
    moved = attend(other, held, alone, part_pages=part_pages, tables=tables)
    np.testing.assert_array_equal(moved[span_of(alone, 0)], together[span_of(rows, 2)])


@pytest.mark.parametrize("part_pages", [0, 2])
def test_a_span_cut_anywhere_has_the_bits_of_the_whole(part_pages: int) -> None:
    start, length = 180, 40
    held, _ = hold(((start, length),))
    q = queries(length, 4, 64)

    def run(spans) -> np.ndarray:
        rows = prefill_rows(spans)
        packed = np.zeros((NUM_TOKENS, 4, 64), np.float32)
        for row, (first, count) in enumerate(spans):
            packed[span_of(rows, row)] = q[first - start :][:count]
        tables = np.repeat(held.tables, len(spans), axis=0)
        out = attend(packed, replace(held, tables=tables), rows, part_pages=part_pages)
        return np.concatenate([out[span_of(rows, row)] for row in range(len(spans))])

    pieces = [(start + a, b - a) for a, b in pairwise([0, 1, 12, length])]
    np.testing.assert_array_equal(run(pieces), run([(start, length), (0, 0), (0, 0)]))


def test_few_tokens_are_split_into_parts_that_begin_where_those_of_other_spans_do() -> None:
    sizes = {"blocks": 4096, "kv_heads": 4, "group": 4, "width": 256, "item_bytes": 2}
    few, other = (choose_prefill_tiles(num_tokens=tokens, rows=1, **sizes) for tokens in (64, 128))
    assert few.parts > 1
    assert few.part_pages == other.part_pages
    assert choose_prefill_tiles(num_tokens=8192, rows=1, **sizes).part_pages == 0


def test_the_dispatch_takes_16_bits_to_tensor_cores_and_float32_to_plain_jax(monkeypatch) -> None:
    tell_kernels(monkeypatch)
    held, rows = hold(((60, 9), (0, 3)))

    def call(dtype: type, implementation: Implementation) -> np.ndarray:
        arrays = [jnp.asarray(array.astype(dtype)) for array in (queries(24, 4, 64), held.k_pages, held.v_pages)]
        attend = partial(paged_attention.paged_attention_prefill, *arrays, jnp.asarray(held.tables), rows)
        return np.asarray(attend(first_key=1, implementation=implementation), np.float32)

    plain, mosaic = Implementation.JAX, Implementation.MOSAIC
    half = run_mosaic(lambda: jnp.asarray(call(jnp.float16, mosaic)))
    np.testing.assert_allclose(np.asarray(half), call(jnp.float16, plain), **ROUNDED[jnp.float16])
    np.testing.assert_array_equal(call(jnp.float32, mosaic), call(jnp.float32, plain))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"width": 96}, "heads must be 64, 128, 256 wide.*got 96"),
        ({"block": 128}, "pages must hold 64 tokens.*got 128"),
        ({"pages_dtype": jnp.float16}, "must be of one dtype.*got bfloat16, float16 and float16"),
        ({"dtype": jnp.float32, "pages_dtype": jnp.float32}, "must be bfloat16 or float16.*got float32"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(changes: dict, rule: str) -> None:
    sizes = {"width": 64, "block": CHUNK, "dtype": jnp.bfloat16, "pages_dtype": jnp.bfloat16, **changes}
    q = jnp.zeros((8, 4, sizes["width"]), sizes["dtype"])
    pages = jnp.zeros((3, sizes["block"], 1, sizes["width"]), sizes["pages_dtype"])
    tables, rows = jnp.ones((1, 2), jnp.int32), prefill_rows(((0, 5),))
    with pytest.raises(UnsupportedKernelError, match=f"{rule}.*jax"):
        mosaic_prefill.paged_attention_prefill(q, pages, pages, tables, rows, 0)
