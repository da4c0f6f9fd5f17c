"""Attention of packed spans over pages, on Hopper tensor cores (Pallas, Mosaic GPU).

One program attends with the queries of one strip (`strips.py`) that read one KV head, to all pages they see or, where
there are too few strips to fill a GPU, to one part of them: parts are weighed by `mosaic_combine.py` then. Programs are
as many as there is room for, whatever the rows hold; those that have nothing to do end at once. Longest strips start
first, head after head, so that what runs at one time reads the pages of few heads.

Scores, softmax and sums are float32; both products take operands in the pages' dtype, so softmax weights are rounded to
it, as in `plain.py`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.dispatch import UnsupportedKernelError
from gdn_jax.kernels.gated_delta.mosaic_blanks import fill_gaps
from gdn_jax.kernels.mosaic import swizzled
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.mosaic_combine import combine_parts
from gdn_jax.kernels.paged_attention.mosaic_pages import Part, Ring
from gdn_jax.kernels.paged_attention.mosaic_strip import (
    Call,
    QueryTile,
    Turns,
    attend_strip,
    load_pages,
    load_queries,
    store_strip,
)
from gdn_jax.kernels.paged_attention.prefill_tiles import (
    WARPGROUPS,
    PrefillTiles,
    check_prefill,
    choose_prefill_tiles,
)
from gdn_jax.kernels.paged_attention.strips import BEGIN, END, KEYS, PAGES, POSITION, ROW, TOKEN, longest_first, strips_of
from gdn_jax.kernels.paged_attention.tiles import TILE_QUERIES, check_dtype


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
        UnsupportedKernelError: for what `check_dtype` and `check_prefill` refuse.
    """
    num_tokens, query_heads, width = q.shape
    kv_heads = k_pages.shape[2]
    group = query_heads // kv_heads
    if len({q.dtype, k_pages.dtype, v_pages.dtype}) > 1:
        raise UnsupportedKernelError(
            f"queries and pages must be of one dtype for the Mosaic attention; got {q.dtype}, {k_pages.dtype} and "
            f"{v_pages.dtype}; ask for kernels='jax'"
        )
    if not interpret:  # which runs float32 too
        check_dtype(q.dtype)
    check_prefill(width=width, block_size=k_pages.shape[1], group=group)
    tiles = tiles or choose_prefill_tiles(
        num_tokens=num_tokens,
        rows=block_tables.shape[0],
        blocks=block_tables.shape[1],
        kv_heads=kv_heads,
        group=group,
        width=width,
        item_bytes=min(q.dtype.itemsize, 2),  # the interpreter, which alone takes float32, does not run out of memory
    )
    call = Call(first_key=first_key, tiles=tiles, interpret=interpret)
    strips = strips_of(rows, block_tables, num_tokens=num_tokens, strip_tokens=tiles.strip_tokens)
    padded = jnp.pad(q, ((0, -num_tokens % tiles.strip_tokens), (0, 0), (0, 0)))  # copies only a call of odd size
    arrays = padded, k_pages, v_pages, block_tables
    if not tiles.part_pages:
        return _attend_strips(*arrays, longest_first(strips), rows, call)[:num_tokens]
    raise NotImplementedError


def _attend_strips(
    q: Float[Array, "T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    strips: Int[Array, "strips 7"],
    rows: PrefillRows,
    call: Call,
) -> Float[Array, "T Hq D"]:
    """Return the outputs of all tokens."""
    tiles, kv_heads, dtype = call.tiles, k_pages.shape[2], q.dtype

    def paged_attention_prefill(
        q: Any, k_pages: Any, v_pages: Any, tables: Any, strips: Any, gaps: dict[str, Any], out: Any, **room: Any
    ) -> None:
        head, strip, warpgroup = (lax.axis_index(name) for name in ("head", "strip", "warpgroup"))
        plain = room["plain"]

        @pl.when((strip == 0) & (warpgroup < WARPGROUPS))
        def _() -> None:
            heads = tiles.heads * tiles.head_tiles

            def fill(member: Array, nothing: None) -> None:
                of_head = head * heads + member * WARPGROUPS + warpgroup

                @pl.when(member * WARPGROUPS + warpgroup < heads)
                def _() -> None:
                    fill_gaps(gaps, out.at[:, of_head], plain.at[warpgroup])

                return nothing

            lax.fori_loop(0, -(-heads // WARPGROUPS), fill, None)

        @pl.when(strip > 0)
        def _() -> None:
            pages = strips[strip - 1, PAGES]
            part = _part_of(strips, strip - 1, head, jnp.int32(0), pages)

            def store(result: Array, weight: Array, tile: QueryTile) -> None:
                store_strip(result, tile, plain.at[warpgroup], out, tiles)

            _run_part(part, strips, strip - 1, (q, k_pages, v_pages, tables), room, store, call)

    return plgpu.kernel(
        paged_attention_prefill,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types={
            **_room(q, tiles),
            "plain": plgpu.SMEM((WARPGROUPS, tiles.plain_rows, q.shape[2]), dtype),
        },
        # One program more zeroes what no row owns; it starts first, as it may be long.
        grid=(kv_heads, 1 + strips.shape[0]),
        grid_names=("head", "strip"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(q, k_pages, v_pages, block_tables, strips, {"offset": rows.offset, "length": rows.length})


def _room(q: Float[Array, "T Hq D"], tiles: PrefillTiles) -> dict[str, Any]:
    """Return what a program needs of shared memory and barriers to attend."""
    width, operand = q.shape[2], swizzled(q.dtype)
    ring = Ring(
        plgpu.SMEM((tiles.stages, CHUNK, width), q.dtype, transforms=operand),
        plgpu.Barrier(num_barriers=tiles.stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tiles.stages),
    )
    return {
        "q_tiles": plgpu.SMEM((WARPGROUPS, TILE_QUERIES, width), q.dtype, transforms=operand),
        "k": ring,
        "v": ring,
        "loaded": plgpu.Barrier(num_arrivals=tiles.heads, num_barriers=WARPGROUPS),
        "change": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "raw": plgpu.Barrier(),
    }


def _part_of(strips: Any, strip: Array, head: Array, index: Array, pages: Array) -> Part:
    return Part(
        row=strips[strip, ROW],
        head=head,
        index=index,
        first=jnp.int32(0),
        count=pages,
        start=strips[strip, POSITION],
        num_keys=strips[strip, KEYS],
    )


def _run_part(
    part: Part, strips: Any, strip: Array, arrays: tuple[Any, ...], room: dict[str, Any], store: Any, call: Call
) -> None:
    """Run one program's pages: one warpgroup loads them, the others multiply."""
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
            # With one tile for all heads of a group warpgroups have other tokens, else other heads.
            shift = jnp.where(tiles.head_tiles == 1, warpgroup * tiles.tokens, 0)
            first_head = jnp.where(tiles.head_tiles == 1, 0, warpgroup * tiles.heads)
            tile = QueryTile(
                here=room["q_tiles"].at[warpgroup],
                warpgroup=warpgroup,
                token=strips[strip, TOKEN] + shift,
                begin=strips[strip, BEGIN],
                end=strips[strip, END],
                head=part.head * (tiles.heads * tiles.head_tiles) + first_head,
            )
            load_queries(tile, q, room["loaded"].at[warpgroup], tiles)
            turns = Turns(room["change"])
            mine = Part(**{**vars(part), "start": part.start + shift})
            result, weight = attend_strip(mine, tile, room["q_tiles"], room["k"], room["v"], turns, call)
            store(result, weight, tile)
