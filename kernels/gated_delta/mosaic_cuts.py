"""Copies of the chunks that tensor cores cannot take as they lie on the packed axis, with zeros where no token stands.

A tile in shared memory is swizzled eight rows at a time, and a copy into it begins at a multiple of eight tokens. A
chunk is *cut* when it begins elsewhere, or when the row has no token at some of its places. Cut chunks are laid out
here, at their numbers; those that are whole and begin well are read where they are, and nothing is stored for them. So
a row of many chunks pays for its last one, unless rows before it leave it askew: a caller that packs rows at multiples
of eight tokens pays for no more.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.gated_delta.chunk_slots import END, FIRST, TOKEN
from gdn_jax.kernels.mosaic import RowsOverLanes, row_by_row
from gdn_jax.kernels.numerics import CHUNK

ROWS = 8  # that are swizzled together
_COLUMNS = 64  # that are cleared together
_PLAIN = RowsOverLanes(CHUNK, 16, jnp.float16).matrix  # a token's columns side by side, whichever the 16-bit dtype


def is_cut(token: Array, first: Array, end: Array) -> Array:
    """Return whether a chunk is cut, from its first place's token and the places that hold tokens."""
    return (end - first < CHUNK) | (token & (ROWS - 1) != 0)


def lay_out_cuts(
    q: Float[Array, "T Nk dk"], k: Float[Array, "T Nk dk"], v: Float[Array, "T Nv dv"], slots: Int[Array, "chunks 3"]
) -> dict[str, Float[Array, "chunks places heads width"]]:
    """Return q, k and v of cut chunks; anything for the others."""
    num_chunks, num_key = slots.shape[0], k.shape[1]
    group = v.shape[1] // num_key

    def gdn_prefill_cuts_body(
        q: Any, k: Any, v: Any, slots: Any, q_cut: Any, k_cut: Any, v_cut: Any, tiles: Any, loaded: Any
    ) -> None:
        chunk, key_head = lax.axis_index("chunk"), lax.axis_index("key_head")
        token, first, end = (slots[chunk, which] for which in (TOKEN, FIRST, END))

        def lay_out(source: Any, tile: Any, to: Any) -> None:
            # A chunk may begin before the packed axis does; its tokens then come to stand lower in the tile.
            there = tile.at[pl.ds(jnp.maximum(-token, 0), CHUNK)]
            plgpu.copy_gmem_to_smem(source.at[pl.ds(jnp.maximum(token, 0), CHUNK)], there, loaded)
            plgpu.barrier_wait(loaded)
            kept = tile.at[pl.ds(0, CHUNK)]
            pl.when(end - first < CHUNK)(lambda: _clear_unowned(kept, first, end))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(kept, to)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile is to be used again

        @pl.when((end > first) & is_cut(token, first, end))
        def _() -> None:
            for source, to in ((q, q_cut), (k, k_cut)):
                lay_out(source.at[:, key_head], tiles["keys"], to.at[chunk, :, key_head])
            for member in range(group):
                head = key_head * group + member
                lay_out(v.at[:, head], tiles["values"], v_cut.at[chunk, :, head])

    def cut(x: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_chunks, CHUNK, *x.shape[1:]), x.dtype)

    def tile(x: Array) -> Any:
        return plgpu.SMEM((2 * CHUNK, x.shape[2]), x.dtype, transforms=row_by_row(_COLUMNS))

    q_cut, k_cut, v_cut = plgpu.kernel(
        gdn_prefill_cuts_body,
        kernel_name="gdn_prefill_cuts",
        out_type=(cut(q), cut(k), cut(v)),
        scratch_types={"tiles": {"keys": tile(k), "values": tile(v)}, "loaded": plgpu.Barrier()},
        grid=(num_chunks, num_key),
        grid_names=("chunk", "key_head"),
    )(q, k, v, slots)
    return {"q": q_cut, "k": k_cut, "v": v_cut}


def _clear_unowned(tile: Any, first: Array, end: Array) -> None:
    """Zero the places that hold no token of the row: memory may hold anything there, NaN too."""
    for begin in range(0, tile.shape[1], _COLUMNS):
        columns = tile.at[:, pl.ds(begin, _COLUMNS)]
        values = plgpu.load(columns, layout=_PLAIN, optimized=False)
        place = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=_PLAIN)
        columns[...] = jnp.where((place >= first) & (place < end), values, jnp.zeros_like(values))
