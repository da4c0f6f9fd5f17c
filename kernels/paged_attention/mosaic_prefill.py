"""Attention of packed spans over pages, on Hopper tensor cores (Pallas, Mosaic GPU).

One program attends with the queries of one strip (`strips.py`) that read one KV head, to all pages they see or, where
there are too few strips to fill a GPU, to one part of them: parts are weighed by `mosaic_combine.py` then. Programs are
as many as there is room for, whatever the rows hold; those that have nothing to do end at once. Longest strips start
first, head after head, so that what runs at one time reads the pages of few heads.

Scores, softmax and sums are float32; both products take operands in the pages' dtype, so softmax weights are rounded to
it, as in `plain.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.mosaic import swizzled
from gdn_jax.kernels.paged_attention.mosaic_blanks import fill_gaps
from gdn_jax.kernels.paged_attention.mosaic_combine import CombineSizes, combine_parts
from gdn_jax.kernels.paged_attention.mosaic_pages import Part, ring_of
from gdn_jax.kernels.paged_attention.mosaic_strip import Turns, attend_strip
from gdn_jax.kernels.paged_attention.mosaic_strip_copies import (
    Call,
    QueryTile,
    load_pages,
    load_queries,
    store_part,
    store_strip,
)
from gdn_jax.kernels.paged_attention.prefill_tiles import WARPGROUPS, PrefillTiles, choose_prefill_tiles, parts_shape
from gdn_jax.kernels.paged_attention.strips import (
    BEGIN,
    END,
    KEYS,
    PAGES,
    POSITION,
    ROW,
    TOKEN,
    longest_first,
    strips_of,
)
from gdn_jax.kernels.paged_attention.tiles import TILE_QUERIES, check_dtypes, check_pages, choose_combine_stages


@partial(jax.jit, static_argnames=("first_key", "tiles", "interpret"))
def paged_attention_prefill(
    q: Float[Array, "T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    rows: PrefillRows,
    first_key: int,
    *,
    tiles: PrefillTiles | None = None,
    interpret: bool = False,
) -> Float[Array, "T Hq D"]:
    """Attend with all packed spans at once.

    Args:
        q: as in the public function, like the others.
        k_pages: keys, in q's dtype.
        v_pages: values, in q's dtype.
        block_tables: block ids.
        rows: the packing.
        first_key: keys before this position are masked.
        tiles: sizes; chosen for the shapes if not given.
        interpret: whether this is traced for the interpreter, which also takes float32.

    Raises:
        UnsupportedKernelError: for what `check_dtypes` and `check_pages` refuse.
    """
    num_tokens, query_heads, width = q.shape
    kv_heads = k_pages.shape[2]
    check_dtypes(q.dtype, k_pages.dtype, v_pages.dtype, interpret=interpret)
    check_pages(width=width, block_size=k_pages.shape[1])
    tiles = tiles or choose_prefill_tiles(
        num_tokens=num_tokens,
        rows=block_tables.shape[0],
        blocks=block_tables.shape[1],
        kv_heads=kv_heads,
        group=query_heads // kv_heads,
        width=width,
        item_bytes=min(q.dtype.itemsize, 2),  # the interpreter, which alone takes float32, does not run out of memory
    )
    call = Call(first_key=first_key, tiles=tiles, interpret=interpret)
    strips = strips_of(rows, block_tables, num_tokens=num_tokens, strip_tokens=tiles.strip_tokens)
    padded = jnp.pad(q, ((0, -num_tokens % tiles.strip_tokens), (0, 0), (0, 0)))  # copies only a call of odd size
    arrays = padded, k_pages, v_pages, block_tables
    if not tiles.part_pages:
        return _attend_strips(*arrays, longest_first(strips), rows, call)[:num_tokens]
    parts, weight = _attend_parts(*arrays, strips, call)
    queries = parts.shape[3]
    programs = strips.shape[0] * parts.shape[1] * WARPGROUPS * (width // tiles.columns)
    sizes = CombineSizes(
        parts_of=lambda pages: lax.div(pages + (tiles.part_pages - 1), jnp.int32(tiles.part_pages)),
        group=queries,
        tile_queries=TILE_QUERIES,
        columns=tiles.columns,
        stages=choose_combine_stages(programs, tiles.columns),
    )
    pages = strips[:, PAGES]
    every = jnp.ones_like(pages)  # which queries are tokens of a row is seen to after
    combined = combine_parts(parts, weight, pages, every, q.dtype, sizes)
    return _tokens_of(combined, rows, num_tokens, tiles)


def _attend_strips(
    q: Float[Array, "T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    strips: Int[Array, "strips 7"],
    rows: PrefillRows,
    call: Call,
) -> Float[Array, "T Hq D"]:
    """Return the outputs of all tokens, each strip attending to all its pages."""
    tiles, head_tiles = call.tiles, call.tiles.head_tiles * k_pages.shape[2]

    def paged_attention_prefill(
        q: Any, k_pages: Any, v_pages: Any, tables: Any, strips: Any, rows: dict[str, Any], out: Any, **room: Any
    ) -> None:
        head_tile, program, warpgroup = (lax.axis_index(name) for name in ("head_tile", "program", "warpgroup"))
        plain = room["plain"].at[warpgroup]

        @pl.when((program == 0) & (warpgroup < WARPGROUPS))
        def _() -> None:
            _fill_heads(rows, out, plain, head_tile, warpgroup, tiles)

        @pl.when(program > 0)
        def _() -> None:
            strip = strips.at[program - 1]

            def store(result: Array, weight: Array, tile: QueryTile) -> None:
                store_strip(result, tile, plain, out, tiles)

            part = _part_of(strip, head_tile, jnp.int32(0), tiles)
            _run_part(part, strip, head_tile, (q, k_pages, v_pages, tables), room, store, call)

    return plgpu.kernel(
        paged_attention_prefill,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types={**_room(q, tiles), "plain": plgpu.SMEM((WARPGROUPS, tiles.plain_rows, q.shape[2]), q.dtype)},
        # One program more zeroes what no row owns. It is the first, as that may take long.
        grid=(head_tiles, 1 + strips.shape[0]),
        grid_names=("head_tile", "program"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(q, k_pages, v_pages, block_tables, strips, {"offset": rows.offset, "length": rows.length})


def _attend_parts(
    q: Float[Array, "T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    strips: Int[Array, "strips 7"],
    call: Call,
) -> tuple[Float[Array, "strips head_tiles parts queries D"], Float[Array, "strips head_tiles parts queries"]]:
    """Return each part's result, and the base-2 logarithm of its sum of weights; unset for parts not in use."""
    tiles, width = call.tiles, q.shape[2]
    shape = parts_shape(tiles, q.shape[0], block_tables.shape[0], k_pages.shape[2])

    def paged_attention_prefill_parts(
        q: Any, k_pages: Any, v_pages: Any, tables: Any, strips: Any, out: Any, weights: Any, **room: Any
    ) -> None:
        names = "head_tile", "part", "strip", "warpgroup"
        head_tile, index, number, warpgroup = (lax.axis_index(name) for name in names)
        strip = strips.at[number]

        def store(result: Array, weight: Array, tile: QueryTile) -> None:
            there = (number, head_tile, index, pl.ds(warpgroup * TILE_QUERIES, TILE_QUERIES))
            here = room["out_tiles"].at[warpgroup], room["weight_tiles"].at[warpgroup]
            store_part(result, weight, here, (out.at[there], weights.at[there]))

        part = _part_of(strip, head_tile, index, tiles)
        _run_part(part, strip, head_tile, (q, k_pages, v_pages, tables), room, store, call)

    lead = (WARPGROUPS, TILE_QUERIES)
    return plgpu.kernel(
        paged_attention_prefill_parts,
        out_type=(jax.ShapeDtypeStruct((*shape, width), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        scratch_types={
            **_room(q, tiles),
            "out_tiles": plgpu.SMEM((*lead, tiles.columns), jnp.float32, transforms=swizzled(jnp.float32)),
            "weight_tiles": plgpu.SMEM(lead, jnp.float32),
        },
        grid=(shape[1], tiles.parts, strips.shape[0]),
        grid_names=("head_tile", "part", "strip"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(q, k_pages, v_pages, block_tables, strips)


def _tokens_of(
    combined: Float[Array, "strips head_tiles queries D"], rows: PrefillRows, num_tokens: int, tiles: PrefillTiles
) -> Float[Array, "T Hq D"]:
    """Return the outputs of packed tokens, which few are here, from those of strips; zeros for tokens of no row."""
    num_strips, head_tiles, _, width = combined.shape
    apart = combined.reshape(num_strips, head_tiles, WARPGROUPS, tiles.heads, tiles.tokens, width)
    of_strips = apart.transpose(0, 2, 4, 1, 3, 5).reshape(num_strips * tiles.strip_tokens, -1, width)
    row, owned = rows.row_of(num_tokens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    number = token // tiles.strip_tokens + row
    place = jnp.where(owned, number * tiles.strip_tokens + token % tiles.strip_tokens, 0)
    return jnp.where(owned[:, None, None], of_strips[place], 0)


def _room(q: Float[Array, "T Hq D"], tiles: PrefillTiles) -> dict[str, Any]:
    """Return what a program needs of shared memory and barriers to attend."""
    width = q.shape[2]
    ring = ring_of(tiles.stages, width, q.dtype, num_readers=WARPGROUPS)
    return {
        "q_tiles": plgpu.SMEM((WARPGROUPS, TILE_QUERIES, width), q.dtype, transforms=swizzled(q.dtype)),
        "k": ring,
        "v": ring,
        "loaded": plgpu.Barrier(num_arrivals=tiles.heads, num_barriers=WARPGROUPS),
        "change": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "raw": plgpu.Barrier(),
    }


def _part_of(strip: Any, head_tile: Array, index: Array, tiles: PrefillTiles) -> Part:
    """Return which pages a program reads; for inside a kernel, like what follows."""
    first, pages = index * tiles.part_pages, strip[PAGES]
    return Part(
        row=strip[ROW],
        head=lax.div(head_tile, jnp.int32(tiles.head_tiles)),
        index=index,
        first=first,
        count=jnp.minimum(pages - first, tiles.part_pages) if tiles.part_pages else pages,
        start=strip[POSITION],
        num_keys=strip[KEYS],
    )


def _run_part(
    part: Part,
    strip: Any,
    head_tile: Array,
    arrays: tuple[Any, ...],
    room: dict[str, Any],
    store: Callable[[Array, Array, QueryTile], None],
    call: Call,
) -> None:
    """Run one program: one warpgroup loads its pages, the others multiply and store."""
    (q, k_pages, v_pages, tables), tiles = arrays, call.tiles
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(part.count > 0)  # all warpgroups of a program leave together
    def _() -> None:
        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(tiles.load_registers, action="decrease")
            load_pages(part, tables, (k_pages, v_pages), room["k"], room["v"], room["raw"], call)

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(tiles.attend_registers, action="increase")
            shift = warpgroup * tiles.tokens
            tile = QueryTile(
                all_here=room["q_tiles"],
                warpgroup=warpgroup,
                token=strip[TOKEN] + shift,
                begin=strip[BEGIN],
                end=strip[END],
                head=head_tile * tiles.heads,
            )
            load_queries(tile, q, room["loaded"].at[warpgroup], tiles)
            mine = replace(part, start=part.start + shift)
            store(*attend_strip(mine, tile, room["k"], room["v"], Turns(room["change"]), call), tile)


def _fill_heads(
    rows: dict[str, Any], out: Any, zeros: Any, head_tile: Array, warpgroup: Array, tiles: PrefillTiles
) -> None:
    """Zero what no row owns of the heads of a tile, every other one of them."""

    def fill(member: Array, nothing: None) -> None:
        fill_gaps(rows, out.at[:, head_tile * tiles.heads + member * WARPGROUPS + warpgroup], zeros)
        return nothing

    lax.fori_loop(0, lax.div(tiles.heads - warpgroup + (WARPGROUPS - 1), jnp.int32(WARPGROUPS)), fill, None)
