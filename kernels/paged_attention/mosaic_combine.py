"""The results of a row's parts become one: the second step of flash decoding, on Hopper GPUs (Pallas, Mosaic GPU).

With w the base-2 logarithms of the parts' sums of weights and o their results, each already divided by its own sum:

    out = (sum over parts of 2^w o) / (sum over parts of 2^w)

in float32, part after part, the highest w so far kept aside as in an online softmax. One program does this for a tile
of queries of one row and KV head and for some columns; it reads only the parts that are in use.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.mosaic import swizzled
from gdn_jax.kernels.paged_attention.mosaic_pages import LOWEST
from gdn_jax.kernels.paged_attention.tiles import TILE_QUERIES


@dataclass(frozen=True, kw_only=True)
class CombineSizes:
    """How the parts were made, and how the work is cut."""

    parts_of: Callable[[Array], Array]  # the parts of a row that are in use, from its length; traced inside the kernel
    group: int  # queries of one token that read the same KV head
    tile_queries: int  # of one program, a multiple of 8
    columns: int  # of one program
    stages: int  # results of parts that shared memory holds


def combine_parts(
    parts: Float[Array, "rows Hkv parts queries D"],
    weight: Float[Array, "rows Hkv parts queries"],
    length: Int[Array, "rows"],
    num_new: Int[Array, "rows"],
    dtype: jnp.dtype,
    sizes: CombineSizes,
) -> Float[Array, "rows Hkv queries D"]:
    """Weigh the parts of each row.

    Args:
        parts: the parts' results; those not in use may hold anything.
        weight: base-2 logarithms of their sums of weights, `LOWEST` for no keys.
        length: of each row, from which its number of parts follows.
        num_new: tokens of each row that are real; the queries of others get zeros.
        dtype: what the result is rounded to.
        sizes: how the work is cut; `queries` is a multiple of its `tile_queries`, D of its `columns`.
    """
    num_rows, kv_heads, num_parts, queries, width = parts.shape
    shape, stages = (TILE_QUERIES, sizes.columns), min(num_parts, sizes.stages)

    def paged_attention_combine(
        parts, weight, length, num_new, out, part_ring, weight_ring, out_tile, part_here, weight_here
    ):
        row, head, tile, column = (lax.axis_index(name) for name in ("row", "head", "tile", "column"))
        used = sizes.parts_of(length[row])
        kept = pl.ds(0, sizes.tile_queries)
        there = pl.ds(tile * sizes.tile_queries, sizes.tile_queries)
        columns = pl.ds(column * sizes.columns, sizes.columns)

        def load(index, nothing):
            stage, place = lax.rem(index, jnp.int32(stages)), (row, head, index, there)
            plgpu.copy_gmem_to_smem(weight.at[place], weight_ring.at[stage, kept], weight_here.at[stage])
            plgpu.copy_gmem_to_smem(parts.at[(*place, columns)], part_ring.at[stage, kept], part_here.at[stage])
            return nothing

        def add(index, state):
            highest, total, sums = state
            stage = lax.rem(index, jnp.int32(stages))
            plgpu.barrier_wait(weight_here.at[stage])
            plgpu.barrier_wait(part_here.at[stage])
            one = plgpu.load(weight_ring.at[stage], layout=plgpu.Layout.WGMMA.reduce(1))
            values = plgpu.load(part_ring.at[stage], layout=plgpu.Layout.WGMMA)

            @pl.when(index + stages < used)
            def _load_next():
                plgpu.commit_smem()  # the copy comes after what was read from its place
                load(index + stages, None)

            after = jnp.maximum(highest, one)
            shrink, share = jnp.exp2(highest - after), jnp.exp2(one - after)
            sums = sums * lax.broadcast_in_dim(shrink, shape, [0]) + values * lax.broadcast_in_dim(share, shape, [0])
            return after, total * shrink + share, sums

        lax.fori_loop(0, jnp.minimum(used, stages), load, None)
        by_query = plgpu.Layout.WGMMA.reduce(1)
        start = (
            plgpu.layout_cast(jnp.full(shape[:1], LOWEST, jnp.float32), by_query),
            plgpu.layout_cast(jnp.zeros(shape[:1], jnp.float32), by_query),
            plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA),
        )
        _, total, sums = lax.fori_loop(0, used, add, start)
        sums = sums * lax.broadcast_in_dim(1.0 / jnp.where(total > 0, total, 1.0), shape, [0])
        query = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + tile * sizes.tile_queries
        out_tile[...] = jnp.where(query < num_new[row] * sizes.group, sums, 0.0).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile.at[kept], out.at[row, head, there, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        paged_attention_combine,
        out_type=jax.ShapeDtypeStruct((num_rows, kv_heads, queries, width), dtype),
        scratch_types=(
            plgpu.SMEM((stages, *shape), jnp.float32, transforms=swizzled(jnp.float32)),
            plgpu.SMEM((stages, TILE_QUERIES), jnp.float32),
            plgpu.SMEM(shape, dtype, transforms=swizzled(dtype)),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ),
        grid=(num_rows, kv_heads, queries // sizes.tile_queries, width // sizes.columns),
        grid_names=("row", "head", "tile", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(parts, weight, length, num_new)
