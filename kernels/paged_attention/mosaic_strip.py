"""What one warpgroup of the Mosaic prefill attention does with a strip: attend to a run of pages, and store.

A warpgroup multiplies one tile of 64 queries: some tokens for each of some heads, head after head. Two of them share
the pages that a third copies (`mosaic_pages.py`). They take turns at the tensor cores, so that one forms its softmax
while the other multiplies, as in FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3.1): a turn is the
product with the values of one page and then that with the keys of the next one.
"""

from dataclasses import dataclass
from math import e, log2
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.mosaic import RowsOverLanes, add_product, over_columns
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.mosaic_pages import LOWEST, MASKED, Part, Ring, is_owned, keys_of
from gdn_jax.kernels.paged_attention.prefill_tiles import WARPGROUPS, PrefillTiles
from gdn_jax.kernels.paged_attention.tiles import TILE_QUERIES

_CLEARED_KEYS, _LANES = 32, 16  # at once; that share a key: a thread that loads has few registers
_State = tuple[Array, Array, Array, Array]  # highest score so far, sum of weights, result, scores of the next page
_COLUMN = plgpu.Layout.WGMMA.reduce(1)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is known of a call before it runs."""

    first_key: int
    tiles: PrefillTiles
    interpret: bool


@dataclass(frozen=True, kw_only=True)
class QueryTile:
    """The queries of one warpgroup."""

    all_here: Any  # [WARPGROUPS, TILE_QUERIES, width] in shared memory; the result takes their place
    warpgroup: Array  # which of those that multiply
    token: Array  # packed index of the first token
    begin: Array  # packed tokens that are the row's, from here
    end: Array  # to before here
    head: Array  # the first query head

    @property
    def here(self) -> Any:
        """Where this warpgroup's lie in shared memory."""
        return self.all_here.at[self.warpgroup]

    def whole(self, tiles: PrefillTiles) -> Array:
        """Return whether all tokens are the row's."""
        return (self.begin <= self.token) & (self.token + tiles.tokens <= self.end)


class Turns(NamedTuple):
    """The turns of the two warpgroups that multiply; each completion of the barrier ends one and begins another."""

    change: Any  # barrier at which both arrive: one has issued its products, the other has formed its softmax

    def begin(self) -> None:
        """Wait for the turn, once this warpgroup has ended the other's."""
        plgpu.barrier_wait(self.change)

    def end_other(self) -> None:
        """Say that this warpgroup is ready for its turn."""
        plgpu.barrier_arrive(self.change)

    def pass_on(self) -> None:
        """End the turn; returns once the other warpgroup's has begun."""
        plgpu.barrier_arrive(self.change)
        plgpu.barrier_wait(self.change)


def load_queries(tile: QueryTile, q: Any, loaded: Any, tiles: PrefillTiles) -> None:
    """Copy the tile's queries, head after head, and wait for them; those of other rows come along."""
    for member in range(tiles.heads):
        there = q.at[pl.ds(pl.multiple_of(tile.token, 8), tiles.tokens), tile.head + member]
        plgpu.copy_gmem_to_smem(there, tile.here.at[pl.ds(member * tiles.tokens, tiles.tokens)], loaded)
    plgpu.barrier_wait(loaded)


def load_pages(part: Part, tables: Any, pages: tuple[Any, Any], k: Ring, v: Ring, raw: Any, call: Call) -> None:
    """Copy the part's pages into the rings, each as soon as there is room.

    Unowned memory may hold anything, and a weight of 0 times NaN is NaN: values that no query may see are cleared here,
    where no products wait.

    Args:
        part: the pages.
        tables: block tables.
        pages: all pages of keys, and of values.
        k: ring of keys.
        v: ring of values.
        raw: barrier of values that are not cleared yet.
        call: the call.
    """
    k_pages, v_pages = pages
    stages = call.tiles.stages

    def load(index: Array, nothing: None) -> None:
        stage = lax.rem(index, jnp.int32(stages))
        page = tables[part.row, part.first + index]
        position = (part.first + index) * CHUNK
        pl.when(index >= stages)(lambda: plgpu.barrier_wait(k.free.at[stage]))
        plgpu.copy_gmem_to_smem(k_pages.at[page, :, part.head], k.tiles.at[stage], k.here.at[stage])
        pl.when(index >= stages)(lambda: plgpu.barrier_wait(v.free.at[stage]))
        values = v_pages.at[page, :, part.head]
        has_unowned = position + CHUNK > part.num_keys
        if call.first_key:
            has_unowned |= position < call.first_key

        @pl.when(~has_unowned)
        def _() -> None:
            plgpu.copy_gmem_to_smem(values, v.tiles.at[stage], v.here.at[stage])

        @pl.when(has_unowned)
        def _() -> None:
            plgpu.copy_gmem_to_smem(values, v.tiles.at[stage], raw)
            plgpu.barrier_wait(raw)
            _clear_unowned(part, position, v.tiles.at[stage], call)
            plgpu.barrier_arrive(v.here.at[stage])

        return nothing

    def see_out(index: Array, nothing: None) -> None:
        stage = lax.rem(index, jnp.int32(stages))
        plgpu.barrier_wait(k.free.at[stage])
        plgpu.barrier_wait(v.free.at[stage])
        return nothing

    lax.fori_loop(0, part.count, load, None)
    # Every completion of a barrier is to be waited for, those after the last copy, too.
    lax.fori_loop(jnp.maximum(part.count - stages, 0), part.count, see_out, None)


def attend_strip(
    part: Part, tile: QueryTile, k: Ring, v: Ring, turns: Turns, call: Call
) -> tuple[Float[Array, "queries D"], Float[Array, "queries"]]:
    """Return the part's result for a tile of queries, and the base-2 logarithm of its sum of weights.

    `part.start` is the position of the tile's first token.
    """
    stages, width = jnp.int32(call.tiles.stages), tile.here.shape[1]
    scale = width**-0.5 * log2(e)

    def weigh(index: Array, state: _State) -> tuple[_State, Array]:
        """Take a page's scores into account; returns the weights of its keys."""
        highest, total, result, score = state
        score = _mask(part, (part.first + index) * CHUNK, score, call)
        # Scaled where it is subtracted from: one instruction does both.
        after = jnp.maximum(highest, score.max(axis=1) * scale)
        shrink = jnp.exp2(highest - after)
        weight = jnp.exp2(score * scale - over_columns(after, score.shape))
        total = total * shrink + weight.sum(axis=1)
        result = result * over_columns(shrink, result.shape)
        turns.end_other()
        plgpu.barrier_wait(v.here.at[lax.rem(index, stages)])
        return (after, total, result, score), weight.astype(v.tiles.dtype)

    def visit(index: Array, state: _State) -> _State:
        stage, following = lax.rem(index, stages), lax.rem(index + 1, stages)
        (highest, total, result, _), weight = weigh(index, state)
        plgpu.barrier_wait(k.here.at[following])
        turns.begin()
        keys = k.tiles.at[following].transpose((1, 0))
        # Where its queries lie is computed anew in each round: kept, that would take 32 registers.
        queries = tile.all_here.at[lax.optimization_barrier(tile.warpgroup)]
        result, score = _multiply(result, weight, v.tiles.at[stage], queries, keys, turns, interpret=call.interpret)
        plgpu.barrier_arrive(v.free.at[stage])
        plgpu.barrier_arrive(k.free.at[following])
        return highest, total, result, score

    plgpu.barrier_wait(k.here.at[0])
    pl.when(tile.warpgroup == WARPGROUPS - 1)(turns.pass_on)  # the first warpgroup begins
    score = _score(tile.here, k.tiles.at[0].transpose((1, 0)), turns)
    plgpu.barrier_arrive(k.free.at[0])
    state = (
        plgpu.layout_cast(jnp.full((TILE_QUERIES,), LOWEST, jnp.float32), _COLUMN),
        plgpu.layout_cast(jnp.zeros((TILE_QUERIES,), jnp.float32), _COLUMN),
        plgpu.layout_cast(jnp.zeros((TILE_QUERIES, width), jnp.float32), plgpu.Layout.WGMMA),
        score,
    )
    last = part.count - 1
    state = lax.fori_loop(0, last, visit, state)
    (highest, total, result, _), weight = weigh(last, state)
    turns.begin()
    stage = lax.rem(last, stages)
    result = add_product(result, weight, v.tiles.at[stage], interpret=call.interpret)
    plgpu.barrier_arrive(v.free.at[stage])
    pl.when(tile.warpgroup == 0)(turns.pass_on)  # the other one ends
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    result = result * over_columns(1.0 / total, result.shape)
    return result, jnp.where(empty, LOWEST, highest + jnp.log2(total))


def store_strip(result: Float[Array, "queries D"], tile: QueryTile, plain: Any, out: Any, tiles: PrefillTiles) -> None:
    """Store the row's tokens of a result: one copy for each head, or token by token where others' lie among them."""
    tile.here[...] = result.astype(tile.here.dtype)

    @pl.when(tile.whole(tiles))
    def _() -> None:
        plgpu.commit_smem()
        for member in range(tiles.heads):
            there = out.at[pl.ds(pl.multiple_of(tile.token, 8), tiles.tokens), tile.head + member]
            plgpu.copy_smem_to_gmem(tile.here.at[pl.ds(member * tiles.tokens, tiles.tokens)], there)

    @pl.when(~tile.whole(tiles))
    def _() -> None:
        # Only a tile that is not swizzled can be copied from any row on.
        size = tiles.plain_rows
        layout = RowsOverLanes(size, 16, jnp.float16).matrix
        for first in range(0, TILE_QUERIES, size):
            for column in range(0, tile.here.shape[1], tiles.columns):
                columns = pl.ds(column, tiles.columns)
                values = plgpu.load(tile.here.at[pl.ds(first, size), columns], layout=layout)
                plain.at[:, columns][...] = values
            plgpu.commit_smem()

            def store_row(index: Array, nothing: None, first: int = first) -> None:
                head, place = lax.div(first + index, tiles.tokens), lax.rem(first + index, tiles.tokens)
                token = tile.token + place

                @pl.when((token >= tile.begin) & (token < tile.end))
                def _() -> None:
                    there = out.at[pl.ds(token, 1), tile.head + head]
                    plgpu.copy_smem_to_gmem(plain.at[pl.ds(index, 1)], there)

                return nothing

            lax.fori_loop(0, size, store_row, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next rows take the same place

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile, before the program ends


def store_part(
    result: Float[Array, "queries D"], weight: Float[Array, "queries"], room: tuple[Any, Any], to: tuple[Any, Any]
) -> None:
    """Store a part's result, some columns at a time, and the logarithm of its sum of weights."""
    (tile, weight_tile), (out, weights) = room, to
    weight_tile[...] = weight
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(weight_tile, weights)
    columns = tile.shape[1]
    for column in range(0, result.shape[1], columns):
        tile[...] = result[:, column : column + columns]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out.at[:, pl.ds(column, columns)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next columns take the same place


def _mask(part: Part, position: Array, score: Float[Array, "queries keys"], call: Call) -> Float[Array, "queries keys"]:
    """Return the scores of a page's keys, of which the first stands at `position`; masked where a query sees no key."""

    def mask(score: Array) -> Array:
        query = plgpu.broadcasted_iota(jnp.int32, score.shape, 0, layout=plgpu.Layout.WGMMA)
        query = (query & (call.tiles.tokens - 1)) + part.start
        key = keys_of(position, score.shape, 1)
        return jnp.where((key <= query) & is_owned(part, key, call.first_key), score, MASKED)

    whole = position + CHUNK <= jnp.minimum(part.start + 1, part.num_keys)
    if call.first_key:
        whole &= position >= call.first_key
    return lax.cond(whole, lambda score: score, mask, score)


def _clear_unowned(part: Part, position: Array, values: Any, call: Call) -> None:
    """Zero the unowned values of a page whose first key stands at `position`."""
    columns = call.tiles.columns
    layout = RowsOverLanes(_CLEARED_KEYS, _LANES, values.dtype).matrix
    for first in range(0, CHUNK, _CLEARED_KEYS):
        key = plgpu.broadcasted_iota(jnp.int32, (_CLEARED_KEYS, columns), 0, layout=layout) + (position + first)
        for column in range(0, values.shape[1], columns):
            there = values.at[pl.ds(first, _CLEARED_KEYS), pl.ds(column, columns)]
            old = plgpu.load(there, layout=layout)
            there[...] = jnp.where(is_owned(part, key, call.first_key), old, jnp.zeros_like(old))
    plgpu.commit_smem()


def _score(queries: Any, keys: Any, turns: Turns) -> Float[Array, "queries keys"]:
    """Return `queries @ keys`; the other warpgroup's turn begins once the product is under way."""

    def multiply(scores: Any) -> Array:
        plgpu.wgmma(scores, queries, keys)
        turns.pass_on()
        return scores[...]

    score = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE_QUERIES, CHUNK), jnp.float32))
    return lax.optimization_barrier(score)  # else arithmetic on it may move to before the product is done


def _multiply(
    result: Array, weight: Array, values: Any, queries: Any, keys: Any, turns: Turns, *, interpret: bool
) -> tuple[Float[Array, "queries D"], Float[Array, "queries keys"]]:
    """Return `result + weight @ values` and `queries @ keys`, the products of one turn."""
    if interpret:
        return add_product(result, weight, values, interpret=True), _score(queries, keys, turns)

    def multiply(sums: Any, scores: Any) -> tuple[Array, Array]:
        sums[...] = result
        plgpu.wgmma(sums, weight, values)
        plgpu.wgmma(scores, queries, keys)
        turns.pass_on()
        return sums[...], scores[...]

    shapes = (TILE_QUERIES, result.shape[1]), (TILE_QUERIES, CHUNK)
    accumulators = (plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes)
    return lax.optimization_barrier(pl.run_scoped(multiply, *accumulators))
