"""The Mosaic attention kernel against the reference; what no sequence owns is NaN throughout.

The interpreter multiplies float32 in float32, so that a wrong key, page or weight shows at once; it also looks for
races between warpgroups and asynchronous copies. A GPU's tensor cores multiply 16 bits.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_runs import ON_GPU, run_mosaic
from oracles.paged_sequences import Sequences, advance_rows, queries, sequences

from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.kernels.dispatch import UnsupportedKernelError
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention import mosaic_advance, reference
from gdn_jax.kernels.paged_attention.tiles import AdvanceTiles, choose_advance_tiles, run_of, split

# Queries, softmax weights and the output keep 8 bits (bfloat16) or 11 (float16).
ROUNDED = {jnp.bfloat16: {"rtol": 1e-2, "atol": 1e-2}, jnp.float16: {"rtol": 2e-3, "atol": 2e-3}}
# Sums of up to 700 float32 terms of size 1 in another order, as for the plain version.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
USUAL, CLOSE = (jnp.float16, ROUNDED[jnp.float16]) if ON_GPU else (jnp.float32, FLOAT32)


def tiles_for(held: Sequences, window: int, group: int, **changes: int) -> AdvanceTiles:
    """Return small tiles: rows of few pages are split, and more pages and parts come than there are stages."""
    (rows, blocks), (kv_heads, width) = held.tables.shape, held.k_pages.shape[2:]
    sizes = {"rows": rows, "blocks": blocks, "kv_heads": kv_heads, "queries": window * group, "width": width}
    chosen = choose_advance_tiles(**sizes, item_bytes=2)
    return replace(chosen, **{"parts": 3, "least_pages": 2, "stages": 2, "combine_stages": 2, **changes})


def attend(q, held, rows: AdvanceRows, tiles, *, tables=None, first_key=0, dtype=USUAL) -> np.ndarray:
    tables = held.tables if tables is None else tables
    pages = [jnp.asarray(side.astype(dtype)) for side in (held.k_pages, held.v_pages)]
    call = (jnp.asarray(q.astype(dtype)), *pages, jnp.asarray(tables), rows, first_key)
    run = partial(mosaic_advance.paged_attention_advance, *call, tiles=tiles, interpret=not ON_GPU)
    got = np.asarray(run_mosaic(run))
    assert got.dtype == dtype
    return got.astype(np.float32)


def expected(q, held, rows: AdvanceRows, *, first_key=0, dtype=USUAL) -> np.ndarray:
    arrays = [jnp.asarray(np.asarray(array).astype(dtype)) for array in (q, held.k_pages, held.v_pages)]
    answer = reference.paged_attention_advance(*arrays, jnp.asarray(held.tables), rows, first_key)
    return np.asarray(answer, np.float32)


def hold(starts, num_new, *, heads=1, width=64) -> tuple[Sequences, AdvanceRows]:
    """Return pages in random order that hold each row's tokens and nothing else, and the rows."""
    lengths = [start + count for start, count in zip(starts, num_new, strict=True)]
    return sequences(lengths, heads=heads, width=width), advance_rows(starts, num_new)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("window", [1, 4, 9])
def test_every_group_and_window_equals_the_reference(group: int, window: int) -> None:
    held, rows = hold((70, 300, 0), (window, max(1, window - 1), min(window, 2)), heads=2)
    q = queries(3, window, 2 * group, 64)
    got = attend(q, held, rows, tiles_for(held, window, group), first_key=1)
    np.testing.assert_allclose(got, expected(q, held, rows, first_key=1), **CLOSE)
    if group * window == 72:
        assert tiles_for(held, window, group).query_tiles == 2


@pytest.mark.parametrize(
    "lengths", [(1, 63), (64, 65), (127, 128), (129, 700)], ids=lambda lengths: "-".join(map(str, lengths))
)
def test_every_length_equals_the_reference(lengths: tuple[int, int]) -> None:
    held, rows = hold([length - 1 for length in lengths], [1] * len(lengths))
    q = queries(len(lengths), 1, 4, 64)
    np.testing.assert_allclose(attend(q, held, rows, tiles_for(held, 1, 4)), expected(q, held, rows), **CLOSE)


@pytest.mark.parametrize(("parts", "least_pages"), [(1, 1), (4, 1), (5, 2), (12, 1), (3, 64)])
def test_parts_that_are_empty_or_unequal_change_nothing(parts: int, least_pages: int) -> None:
    held, rows = hold((5 * CHUNK - 1, 0), (2, 2))  # six pages, of which the last holds one token; one page
    q = queries(2, 2, 4, 64)
    got = attend(q, held, rows, tiles_for(held, 2, 4, parts=parts, least_pages=least_pages))
    np.testing.assert_allclose(got, expected(q, held, rows), **CLOSE)


def test_rows_that_are_never_split_have_the_bits_of_one_part_that_is_weighed_alone() -> None:
    held, rows = hold((300, 0, 70), (4, 2, 0))
    q = queries(3, 4, 4, 64)
    whole, weighed = (attend(q, held, rows, tiles_for(held, 4, 4, parts=parts, least_pages=9)) for parts in (1, 2))
    np.testing.assert_array_equal(whole, weighed)


@pytest.mark.parametrize("first_key", [1, 70, 128])
def test_keys_before_the_first_are_not_seen_even_if_they_are_not_numbers(first_key: int) -> None:
    held, rows = hold((200, 0), (3, 3))
    held.k_pages[held.tables[:, 0], 0] = held.v_pages[held.tables[:, 0], 0] = np.nan  # position 0 of both rows
    q = queries(2, 3, 4, 64)
    got = attend(q, held, rows, tiles_for(held, 3, 4), first_key=first_key)
    np.testing.assert_allclose(got, expected(q, held, rows, first_key=first_key), **CLOSE)
    assert not np.any(got[1, 0])  # position 0 sees no key


@pytest.mark.parametrize("parts", [1, 3])
def test_closing_rows_padding_rows_and_tokens_past_a_window_give_zeros(parts: int) -> None:
    held, rows = hold((100, 90, 0), (2, 0, 0))  # a verify row, a closing row, a padding row
    q = queries(3, 4, 4, 64)
    q[1:] = q[0, 2:] = np.nan  # what stands in their place may be anything
    got = attend(q, held, rows, tiles_for(held, 4, 4, parts=parts))
    assert not np.any(got[1:])
    assert not np.any(got[0, 2:])
    q[0, 2:] = 0.0
    np.testing.assert_allclose(got[0, :2], expected(q, held, rows)[0, :2], **CLOSE)


def test_a_query_past_the_pages_its_row_owns_reads_only_owned_keys() -> None:
    held = sequences([CHUNK, 12 * CHUNK], heads=1, width=64)
    rows = advance_rows((CHUNK, 12 * CHUNK), (2, 2))  # past the table's entries; past its width
    q = queries(2, 2, 4, 64)
    np.testing.assert_allclose(attend(q, held, rows, tiles_for(held, 2, 4)), expected(q, held, rows), **CLOSE)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_every_dtype_and_width_equals_the_reference(dtype: type, width: int) -> None:
    held, rows = hold((130, 1), (4, 3), width=width)
    q = queries(2, 4, 4, width)
    got = attend(q, held, rows, tiles_for(held, 4, 4), dtype=dtype)
    np.testing.assert_allclose(got, expected(q, held, rows, dtype=dtype), **ROUNDED[dtype])


def test_a_row_has_the_same_bits_whatever_stands_beside_and_after_it() -> None:
    held, rows = hold((0, 62, 300, 0), (2, 4, 3, 0))
    q, tiles = queries(4, 4, 4, 64), tiles_for(held, 4, 4)
    together = attend(q, held, rows, tiles)
    np.testing.assert_array_equal(attend(q, held, rows, tiles), together)
    # First instead of third, one new token less, other rows empty or elsewhere, the table wider.
    other = queries(4, 4, 4, 64, seed=5)
    other[0, :2] = q[2, :2]
    tables = np.pad(held.tables[[2, 0, 1, 1]], ((0, 0), (0, 3)))
    got = attend(other, held, advance_rows((300, 0, 9, 20), (2, 0, 1, 4)), tiles, tables=tables)
    np.testing.assert_array_equal(got[0, :2], together[2, :2])


def test_a_wider_table_changes_neither_the_parts_of_a_row_nor_their_pages() -> None:
    sizes = {"rows": 4, "kv_heads": 4, "queries": 16, "width": 256, "item_bytes": 2}
    narrow, wide = (choose_advance_tiles(blocks=blocks, **sizes) for blocks in (100, 5000))
    pages = jnp.arange(101, dtype=jnp.int32)
    for one, other in zip(split(pages, narrow), split(pages, wide), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 2048), (3, 40), (64, 160), (200, 4)])
def test_the_parts_of_a_row_hold_each_of_its_pages_once(rows: int, blocks: int) -> None:
    tiles = choose_advance_tiles(rows=rows, blocks=blocks, kv_heads=4, queries=36, width=256, item_bytes=2)
    for pages in {0, 1, 2, 3, 4, 5, 63, 64, 65, 127, 128, blocks - 1, blocks}:
        if pages <= blocks:
            used = int(split(jnp.int32(pages), tiles)[0])
            assert used <= tiles.parts
            runs = [
                [int(value) for value in run_of(jnp.int32(part), jnp.int32(pages), tiles)]
                for part in range(tiles.parts)
            ]
            assert all(count > 0 for _, count in runs[:used])
            assert all(count <= 0 for _, count in runs[used:])
            held = [page for first, count in runs[:used] for page in range(first, first + count)]
            assert held == list(range(pages))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"width": 96}, "heads must be 64, 128, 256 wide.*got 96"),
        ({"block": 128}, "pages must hold 64 tokens.*got 128"),
        ({"group": 40}, "must be at most 128.*got 160"),
        ({"pages_dtype": jnp.float16}, "must be of one dtype.*got bfloat16, float16 and float16"),
        ({"dtype": jnp.float32, "pages_dtype": jnp.float32}, "must be bfloat16 or float16.*got float32"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(changes: dict, rule: str) -> None:
    sizes = {"width": 64, "block": CHUNK, "group": 4, "dtype": jnp.bfloat16, "pages_dtype": jnp.bfloat16, **changes}
    q = jnp.zeros((1, 4, sizes["group"], sizes["width"]), sizes["dtype"])
    pages = jnp.zeros((3, sizes["block"], 1, sizes["width"]), sizes["pages_dtype"])
    with pytest.raises(UnsupportedKernelError, match=f"{rule}.*jax"):
        mosaic_advance.paged_attention_advance(
            q, pages, pages, jnp.ones((1, 2), jnp.int32), advance_rows((0,), (1,)), 0
        )
