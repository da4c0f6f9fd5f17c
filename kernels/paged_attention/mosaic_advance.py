"""Attention of decode and verify windows over pages, on Hopper tensor cores (Pallas, Mosaic GPU).

One program reads one part of a row's pages for one KV head and attends with all queries that read that head, as
`mosaic_pages.py` says. Each part leaves its result and the logarithm of its sum of weights, both float32, and
`mosaic_combine.py` weighs the parts of a row (flash decoding). Where tables are too narrow for a row to be split, its
one part leaves the row's result itself, which is what weighing it alone would give.

Scores, softmax and sums are float32; both products take operands in the pages' dtype, so softmax weights are rounded to
it, as in `plain.py`. Where a row is cut depends on its own length and on static sizes alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.kernels.mosaic import swizzled
from gdn_jax.kernels.paged_attention.mosaic_combine import CombineSizes, combine_parts
from gdn_jax.kernels.paged_attention.mosaic_pages import Part, Plan, Queries, attend_pages, load_pages, ring_of
from gdn_jax.kernels.paged_attention.pages import owned_keys
from gdn_jax.kernels.paged_attention.tiles import (
    TILE_QUERIES,
    AdvanceTiles,
    check_advance,
    check_dtypes,
    choose_advance_tiles,
    num_pages,
    run_of,
    split,
)


@partial(jax.jit, static_argnames=("first_key", "tiles", "interpret"))
def paged_attention_advance(
    q: Float[Array, "rows T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    rows: AdvanceRows,
    first_key: int,
    *,
    tiles: AdvanceTiles | None = None,
    interpret: bool = False,
) -> Float[Array, "rows T Hq D"]:
    """Attend with the windows of all rows at once.

    Args:
        q: as in the public function, like the others.
        k_pages: keys, in q's dtype.
        v_pages: values, in q's dtype.
        block_tables: block ids.
        rows: the rows.
        first_key: keys before this position are masked.
        tiles: sizes; chosen for the shapes if not given.
        interpret: whether this is traced for the interpreter, which also takes float32.

    Raises:
        UnsupportedKernelError: for what `check_dtypes` and `check_advance` refuse.
    """
    num_rows, window, query_heads, width = q.shape
    kv_heads = k_pages.shape[2]
    group = query_heads // kv_heads
    queries = window * group
    check_dtypes(q.dtype, k_pages.dtype, v_pages.dtype, interpret=interpret)
    check_advance(width=width, block_size=k_pages.shape[1], queries=queries)
    tiles = tiles or choose_advance_tiles(
        rows=num_rows,
        blocks=block_tables.shape[1],
        kv_heads=kv_heads,
        queries=queries,
        width=width,
        item_bytes=min(q.dtype.itemsize, 2),  # the interpreter, which alone takes float32, does not run out of memory
    )
    start, num_keys = _spans(block_tables, rows)
    packed = q.reshape(num_rows, window, kv_heads, group, width).swapaxes(1, 2)
    packed = packed.reshape(num_rows, kv_heads, queries, width)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, tiles.query_tiles * tiles.tile_queries - queries), (0, 0)))
    plan = Plan(group=group, first_key=first_key, tiles=tiles, interpret=interpret)
    out, weight = _attend_parts(packed, k_pages, v_pages, block_tables, start, num_keys, rows.num_new, plan)
    if weight is not None:
        sizes = CombineSizes(
            parts_of=lambda keys: split(num_pages(keys), tiles)[0],
            group=group,
            tile_queries=tiles.tile_queries,
            columns=tiles.columns,
            stages=tiles.combine_stages,
        )
        out = combine_parts(out, weight, num_keys, rows.num_new, q.dtype, sizes)
    out = out[:, :, :queries].reshape(num_rows, kv_heads, window, group, width)
    return out.swapaxes(1, 2).reshape(q.shape)


def _spans(block_tables: Int[Array, "rows blocks"], rows: AdvanceRows) -> tuple[Int[Array, "rows"], Int[Array, "rows"]]:
    """Return the position of each row's first new token, and how many keys its pages hold for it (0: nothing to do)."""
    start = rows.start()
    return start, jnp.where(rows.num_new > 0, jnp.minimum(start + rows.num_new, owned_keys(block_tables)), 0)


def _attend_parts(
    q: Float[Array, "rows Hkv queries D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    start: Int[Array, "rows"],
    num_keys: Int[Array, "rows"],
    num_new: Int[Array, "rows"],
    plan: Plan,
) -> tuple[Array, Array | None]:
    """Return each part's result `[rows, Hkv, parts, queries, D]`, and the base-2 logarithm of its sum of weights.

    Both are unset for parts not in use. Where there is one part, they are the rows' own results `[rows, Hkv, queries,
    D]`, rounded, zeros for queries that are not real, and None.
    """
    tiles, (num_rows, kv_heads, queries, width) = plan.tiles, q.shape
    is_whole = tiles.parts == 1
    dtype = q.dtype if is_whole else jnp.dtype(jnp.float32)
    lead, operand = (tiles.query_tiles, TILE_QUERIES), swizzled(q.dtype)
    ring = ring_of(tiles.stages, width, q.dtype, num_readers=tiles.query_tiles)

    def paged_attention_advance(q, k_pages, v_pages, tables, start, num_keys, num_new, *others):
        *results, q_tiles, k, v, out_tiles, weight_tiles, q_here, cleared = others
        out = results[0]
        row, index, head, warpgroup = (lax.axis_index(name) for name in ("row", "part", "head", "warpgroup"))
        first, count = run_of(index, num_pages(num_keys[row]), tiles)
        part = Part(row=row, head=head, index=index, first=first, count=count, start=start[row], num_keys=num_keys[row])

        def store(result):
            """Store a tile's result, some columns at a time in the same place of shared memory."""
            first = warpgroup * tiles.tile_queries
            there = pl.ds(first, tiles.tile_queries)
            place = (row, head, there) if is_whole else (row, head, index, there)
            if is_whole:
                query = plgpu.broadcasted_iota(jnp.int32, result.shape, 0, layout=plgpu.Layout.WGMMA) + first
                result = jnp.where(query < num_new[row] * plan.group, result, 0.0)
            for column in range(0, width, tiles.columns):
                out_tiles[warpgroup] = result[:, column : column + tiles.columns].astype(dtype)
                plgpu.commit_smem()
                kept = out_tiles.at[warpgroup, pl.ds(0, tiles.tile_queries)]
                plgpu.copy_smem_to_gmem(kept, out.at[(*place, pl.ds(column, tiles.columns))])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next columns take the same place

        @pl.when((count <= 0) & is_whole & (warpgroup < tiles.query_tiles))
        def _store_nothing():
            shape = (TILE_QUERIES, width)
            store(plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA))

        @pl.when(count > 0)  # all warpgroups of a program leave together
        def _run():
            @pl.when(warpgroup == tiles.query_tiles)
            def _load():
                if tiles.query_tiles > 1:  # else each thread may have 255 registers
                    plgpu.set_max_registers(tiles.load_registers, action="decrease")
                load_pages(part, tables, ((k_pages, k), (v_pages, v)), tiles)

            @pl.when(warpgroup < tiles.query_tiles)
            def _attend():
                if tiles.query_tiles > 1:
                    plgpu.set_max_registers(tiles.attend_registers, action="increase")
                kept = pl.ds(0, tiles.tile_queries)
                queries = Queries(
                    tile=q_tiles.at[warpgroup],
                    first=warpgroup * tiles.tile_queries,
                    clears=warpgroup == 0,
                    cleared=cleared,
                )
                there = pl.ds(queries.first, tiles.tile_queries)
                plgpu.copy_gmem_to_smem(q.at[row, head, there], queries.tile.at[kept], q_here.at[warpgroup])
                plgpu.barrier_wait(q_here.at[warpgroup])
                result, sums = attend_pages(part, queries, k, v, plan)
                if not is_whole:
                    weight_tiles[warpgroup] = sums
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(weight_tiles.at[warpgroup, kept], results[1].at[row, head, index, there])
                store(result)

    lanes = (num_rows, kv_heads) if is_whole else (num_rows, kv_heads, tiles.parts)
    out = jax.ShapeDtypeStruct((*lanes, queries, width), dtype)
    weight = jax.ShapeDtypeStruct((*lanes, queries), jnp.float32)
    made = plgpu.kernel(
        paged_attention_advance,
        out_type=(out,) if is_whole else (out, weight),
        scratch_types=(
            plgpu.SMEM((*lead, width), q.dtype, transforms=operand),
            ring,
            ring,
            plgpu.SMEM((*lead, tiles.columns), dtype, transforms=swizzled(dtype)),
            plgpu.SMEM(lead, jnp.float32),
            plgpu.Barrier(num_barriers=tiles.query_tiles),
            plgpu.Barrier(num_arrivals=tiles.query_tiles),
        ),
        grid=(num_rows, tiles.parts, kv_heads),  # programs of all heads run side by side, and share lines of memory
        grid_names=("row", "part", "head"),
        num_threads=tiles.query_tiles + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(q, k_pages, v_pages, block_tables, start, num_keys, num_new)
    return made[0], None if is_whole else made[1]
