"""What one warpgroup of the Mosaic prefill attention does with a strip: attend to a run of pages, and store.

A warpgroup multiplies one tile of 64 queries: some tokens for each of some heads, head after head. Two of them share
the pages that a third copies (`mosaic_pages.py`). They take turns at the tensor cores, so that one forms its softmax
while the other multiplies, as in FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3.1): a turn is the
product with the values of one page and then that with the keys of the next one.
"""

from dataclasses import dataclass
from math import e, log2
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.mosaic import RowsOverLanes, add_product, over_columns
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.mosaic_pages import LOWEST, MASKED, Part, Ring, clear_values, is_owned, keys_of
from gdn_jax.kernels.paged_attention.prefill_tiles import WARPGROUPS, PrefillTiles
from gdn_jax.kernels.paged_attention.tiles import TILE_QUERIES

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

    here: Any  # [TILE_QUERIES, width] in shared memory; the result takes their place
    warpgroup: Array
    token: Array  # packed index of the first token
    begin: Array  # packed tokens that are the row's, from here
    end: Array  # to before here
    head: Array  # the first query head

    def whole(self, tiles: PrefillTiles) -> Array:
        """Return whether all tokens are the row's."""
        return (self.begin <= self.token) & (self.token + tiles.tokens <= self.end)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Barriers between the warpgroups that multiply."""

    change: Any  # completes when both have arrived: one has issued its products, the other formed its softmax
    cleared: Any  # completes when the first warpgroup has cleared the unowned values of a page

    def pass_on(self) -> None:
        """Let the other warpgroup multiply; returns once it has its operands."""
        plgpu.barrier_arrive(self.change)
        plgpu.barrier_wait(self.change)


def load_queries(tile: QueryTile, q: Any, loaded: Any, tiles: PrefillTiles) -> None:
    """Copy the tile's queries, head after head, and wait for them; those of other rows come along."""
    for member in range(tiles.heads):
        there = q.at[pl.ds(pl.multiple_of(tile.token, 8), tiles.tokens), tile.head + member]
        plgpu.copy_gmem_to_smem(there, tile.here.at[pl.ds(member * tiles.tokens, tiles.tokens)], loaded)
    plgpu.barrier_wait(loaded)


def attend_strip(
    part: Part, tile: QueryTile, k: Ring, v: Ring, turns: Turns, call: Call
) -> tuple[Float[Array, "queries D"], Float[Array, "queries"]]:
    """Return the part's result for a tile of queries, and the base-2 logarithm of its sum of weights.

    `part.start` is the position of the tile's first token.
    """
    tiles, width = call.tiles, tile.here.shape[1]
    scale = width**-0.5 * log2(e)
    shape = (TILE_QUERIES, CHUNK)

    def visit(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, result = state
        stage = lax.rem(index, jnp.int32(tiles.stages))
        position = (part.first + index) * CHUNK

        def score_keys(sums: Any) -> Array:
            plgpu.wgmma(sums, tile.here, k.tiles.at[stage].transpose((1, 0)))
            if tiles.takes_turns:
                turns.pass_on()
            return sums[...]

        score = pl.run_scoped(score_keys, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        score = lax.optimization_barrier(score)  # else arithmetic on it may move to before the product is done
        plgpu.barrier_arrive(k.free.at[stage])
        score = _mask(part, position, score, call)
        # Scaled where it is subtracted from: one instruction does both.
        after = jnp.maximum(highest, score.max(axis=1) * scale)
        shrink = jnp.exp2(highest - after)
        weight = jnp.exp2(score * scale - over_columns(after, shape))
        result = result * over_columns(shrink, result.shape)
        operand = weight.astype(v.tiles.dtype)
        if tiles.takes_turns:
            plgpu.barrier_arrive(turns.change)
        plgpu.barrier_wait(v.here.at[stage])
        _clear_unowned(part, position, v.tiles.at[stage], tile, turns, call)
        if tiles.takes_turns:
            plgpu.barrier_wait(turns.change)
        total = total * shrink + weight.sum(axis=1)

        def await_next() -> None:
            following = lax.rem(index + 1, jnp.int32(tiles.stages))
            pl.when(index + 1 < part.count)(lambda: plgpu.barrier_wait(k.here.at[following]))

        result = _add_values(result, operand, v.tiles.at[stage], await_next, interpret=call.interpret)
        plgpu.barrier_arrive(v.free.at[stage])
        return after, total, result

    state = (
        plgpu.layout_cast(jnp.full((TILE_QUERIES,), LOWEST, jnp.float32), _COLUMN),
        plgpu.layout_cast(jnp.zeros((TILE_QUERIES,), jnp.float32), _COLUMN),
        plgpu.layout_cast(jnp.zeros((TILE_QUERIES, width), jnp.float32), plgpu.Layout.WGMMA),
    )
    plgpu.barrier_wait(k.here.at[0])
    if tiles.takes_turns:  # the first warpgroup begins; for each change there are two arrivals, so the other ends
        pl.when(tile.warpgroup == WARPGROUPS - 1)(turns.pass_on)
    highest, total, result = lax.fori_loop(0, part.count, visit, state)
    if tiles.takes_turns:
        pl.when(tile.warpgroup == 0)(turns.pass_on)
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
        for first in range(0, tiles.heads * tiles.tokens, size):
            for column in range(0, tile.here.shape[1], tiles.columns):
                columns = pl.ds(column, tiles.columns)
                values = plgpu.load(tile.here.at[pl.ds(first, size), columns], layout=layout)
                plain.at[:, columns][...] = values
            plgpu.commit_smem()

            def store_row(index: Array, nothing: None, first: int = first) -> None:
                head, place = lax.div(first + index, tiles.tokens), lax.rem(first + index, tiles.tokens)
                token = tile.token + place

                @pl.when((token >= tile.begin) & (token < tile.end) & (head < tiles.heads))
                def _() -> None:
                    there = out.at[pl.ds(token, 1), tile.head + head]
                    plgpu.copy_smem_to_gmem(plain.at[pl.ds(index, 1)], there)

                return nothing

            lax.fori_loop(0, size, store_row, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next rows take the same place

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile, before the program ends


def _mask(part: Part, position: Array, score: Float[Array, "queries keys"], call: Call) -> Float[Array, "queries keys"]:
    """Return the scores of a page's keys, of which the first stands at `position`; masked where a query sees no key."""

    def mask(score: Array) -> Array:
        query = plgpu.broadcasted_iota(jnp.int32, score.shape, 0, layout=plgpu.Layout.WGMMA)
        query = (query & (call.tiles.tokens - 1)) + part.start
        key = keys_of(position, score.shape, 1)
        return jnp.where((key <= query) & is_owned(part, key, call.first_key), score, MASKED)

    end = position + CHUNK
    whole = (end <= part.start + 1) & (end <= part.num_keys) & (position >= call.first_key)
    return lax.cond(whole, lambda score: score, mask, score)


def _clear_unowned(part: Part, position: Array, values: Any, tile: QueryTile, turns: Turns, call: Call) -> None:
    """Zero the values that no query may see: unowned memory may hold anything, and a weight of 0 times NaN is NaN."""

    @pl.when((position + CHUNK > part.num_keys) | (position < call.first_key))
    def _() -> None:
        @pl.when(tile.warpgroup == 0)
        def _() -> None:
            clear_values(part, position, values, first_key=call.first_key, columns=call.tiles.columns)
            plgpu.barrier_arrive(turns.cleared)

        plgpu.barrier_wait(turns.cleared)


def _add_values(result: Array, weight: Array, values: Any, meanwhile: Any, *, interpret: bool) -> jax.Array:
    """Return `result + weight @ values`, calling `meanwhile` while the product is under way."""
    if interpret:
        meanwhile()
        return add_product(result, weight, values, interpret=True)

    def multiply(sums: Any) -> None:
        plgpu.wgmma(sums, weight, values)
        meanwhile()

    return lax.optimization_barrier(pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(result)))
