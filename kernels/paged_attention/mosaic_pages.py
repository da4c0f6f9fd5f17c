"""What one program of a Mosaic attention kernel does with a run of pages: load them, and attend to them.

A loading warpgroup copies pages by block-table entry into two rings in shared memory, of keys and of values; each other
warpgroup multiplies a tile of queries with them and keeps an online softmax (Milakov and Gimelshein 2018,
arXiv:1805.02867, algorithm 3). Scores, softmax and sums are float32.
"""

from dataclasses import dataclass
from math import e, log2
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from gdn_jax.kernels.mosaic import add_product, product, swizzled
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.tiles import TILE_QUERIES, AdvanceTiles

LOWEST = -1e37  # logarithm of the sum of no weights, and highest score of no keys: finite, so that no inf - inf arises
MASKED = -3e38  # score of a key that a query must not see: exp2(masked - highest) is 0 even before any key


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a call before it runs."""

    group: int  # query heads that read one KV head
    first_key: int
    tiles: AdvanceTiles
    interpret: bool


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one program reads: a run of pages of one row for one KV head."""

    row: Array
    head: Array
    index: Array  # which part of the row it is
    first: Array  # first page of the run
    count: Array  # pages of the run; not positive for a part that is not in use
    start: Array  # position of the row's first new token
    num_keys: Array  # keys of the row; those from there on are unowned


class Ring(NamedTuple):
    """Pages in shared memory: `tiles` [stages, CHUNK, width], and two barriers for each stage."""

    tiles: Any
    here: Any  # completes when a page has arrived
    free: Any  # completes when all tiles of queries have been multiplied with it


def ring_of(stages: int, width: int, dtype: jnp.dtype, *, num_readers: int) -> Ring:
    """Return what a ring takes of shared memory and barriers, for so many warpgroups that multiply."""
    return Ring(
        plgpu.SMEM((stages, CHUNK, width), dtype, transforms=swizzled(dtype)),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=num_readers, num_barriers=stages),
    )


@dataclass(frozen=True, kw_only=True)
class Queries:
    """What one warpgroup multiplies with the pages: a tile of queries in shared memory."""

    tile: Any
    first: Array  # index of its first query; query i is that of token i // group
    clears: Array  # whether this warpgroup clears what is unowned, for all of them
    cleared: Any  # barrier that completes when that is done


def load_pages(part: Part, tables, sources, tiles: AdvanceTiles) -> None:
    """Copy the part's pages into the rings, each as soon as there is room."""

    def load(index, nothing):
        stage = lax.rem(index, jnp.int32(tiles.stages))
        page = tables[part.row, part.first + index]
        for pages, ring in sources:

            @pl.when(index >= tiles.stages)
            def _wait(free=ring.free):
                plgpu.barrier_wait(free.at[stage])

            plgpu.copy_gmem_to_smem(pages.at[page, :, part.head], ring.tiles.at[stage], ring.here.at[stage])
        return nothing

    def see_out(index, nothing):
        for _, ring in sources:
            plgpu.barrier_wait(ring.free.at[lax.rem(index, jnp.int32(tiles.stages))])
        return nothing

    lax.fori_loop(0, part.count, load, None)
    # Every completion of a barrier is to be waited for, those after the last copy, too.
    lax.fori_loop(jnp.maximum(part.count - tiles.stages, 0), part.count, see_out, None)


def attend_pages(part: Part, queries: Queries, k: Ring, v: Ring, plan: Plan) -> tuple[Array, Array]:
    """Return the part's result for a tile of queries, and the base-2 logarithm of its sum of weights."""
    width = queries.tile.shape[1]
    by_query = plgpu.Layout.WGMMA.reduce(1)
    state = (
        plgpu.layout_cast(jnp.full((TILE_QUERIES,), LOWEST, jnp.float32), by_query),
        plgpu.layout_cast(jnp.zeros((TILE_QUERIES,), jnp.float32), by_query),
        plgpu.layout_cast(jnp.zeros((TILE_QUERIES, width), jnp.float32), plgpu.Layout.WGMMA),
    )

    def visit(index, state):
        highest, total, result = state
        stage = lax.rem(index, jnp.int32(plan.tiles.stages))
        position = (part.first + index) * CHUNK
        plgpu.barrier_wait(k.here.at[stage])
        score = product(queries.tile, k.tiles.at[stage].transpose((1, 0))) * (width**-0.5 * log2(e))
        plgpu.barrier_arrive(k.free.at[stage])
        score = _mask(part, position, score, queries, plan)
        after = jnp.maximum(highest, score.max(axis=1))
        shrink = jnp.exp2(highest - after)
        weight = jnp.exp2(score - lax.broadcast_in_dim(after, score.shape, [0]))
        total = total * shrink + weight.sum(axis=1)
        result = result * lax.broadcast_in_dim(shrink, result.shape, [0])
        plgpu.barrier_wait(v.here.at[stage])
        _clear_unowned(part, position, v.tiles.at[stage], queries, plan)
        result = add_product(result, weight.astype(v.tiles.dtype), v.tiles.at[stage], interpret=plan.interpret)
        plgpu.barrier_arrive(v.free.at[stage])
        return after, total, result

    highest, total, result = lax.fori_loop(0, part.count, visit, state)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    result = result * lax.broadcast_in_dim(1.0 / total, result.shape, [0])
    return result, jnp.where(empty, LOWEST, highest + jnp.log2(total))


def _mask(part: Part, position, score, queries: Queries, plan: Plan):
    """Return the scores of a page's keys, of which the first stands at `position`; masked where a query sees no key."""

    def mask(score):
        query = plgpu.broadcasted_iota(jnp.int32, score.shape, 0, layout=plgpu.Layout.WGMMA) + queries.first
        # Query i is that of token i // group: it sees a key at or before start + i // group.
        seen = (keys_of(position, score.shape, 1) - part.start) * plan.group <= query
        return jnp.where(seen & is_owned(part, keys_of(position, score.shape, 1), plan.first_key), score, MASKED)

    end = position + CHUNK
    whole = (end <= part.start + 1) & (end <= part.num_keys) & (position >= plan.first_key)
    return lax.cond(whole, lambda score: score, mask, score)


def _clear_unowned(part: Part, position, tile, queries: Queries, plan: Plan) -> None:
    """Zero the values that no query may see: unowned memory may hold anything, and a weight of 0 times NaN is NaN."""

    @pl.when((position + CHUNK > part.num_keys) | (position < plan.first_key))
    def _clear():
        @pl.when(queries.clears)
        def _write():
            for column in range(0, tile.shape[1], plan.tiles.columns):
                columns = tile.at[:, pl.ds(column, plan.tiles.columns)]
                values = plgpu.load(columns, layout=plgpu.Layout.WGMMA)
                owned = is_owned(part, keys_of(position, values.shape, 0), plan.first_key)
                columns[...] = jnp.where(owned, values, jnp.zeros_like(values))
            plgpu.commit_smem()

        if plan.tiles.query_tiles > 1:
            plgpu.barrier_arrive(queries.cleared)
            plgpu.barrier_wait(queries.cleared)


def keys_of(position, shape, axis: int):
    """Return the positions of a page's keys, along one axis of a matrix."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + position


def is_owned(part: Part, key, first_key: int):
    """Return which keys, by position, the row owns and may see."""
    return (key < part.num_keys) & (key >= first_key)
