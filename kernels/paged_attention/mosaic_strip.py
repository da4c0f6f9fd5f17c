"""What one warpgroup of the Mosaic prefill attention computes for a strip: it attends to a run of pages.

A warpgroup multiplies one tile of 64 queries: some tokens for each of some heads, head after head. Two of them share
the pages that a third copies (`mosaic_strip_copies.py`). They take turns at the tensor cores, so that one forms its
softmax while the other multiplies, as in FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608, section 3.1): a turn is
the product with the values of one page and, behind it, that with the keys of the next one.
"""

from math import e, log2
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.mosaic import add_product, over_columns
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.mosaic_pages import LOWEST, MASKED, Part, Ring, is_owned, keys_of
from gdn_jax.kernels.paged_attention.mosaic_strip_copies import Call, QueryTile
from gdn_jax.kernels.paged_attention.prefill_tiles import WARPGROUPS
from gdn_jax.kernels.paged_attention.tiles import TILE_QUERIES

_State = tuple[Array, Array, Array, Array]  # highest score so far, sum of weights, result, scores of the next page
_COLUMN = plgpu.Layout.WGMMA.reduce(1)


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
