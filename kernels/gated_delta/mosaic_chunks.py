"""What a chunk contributes whatever the state, for all chunks at once: the first kernel of the Mosaic prefill.

In a chunk with places i, j, G the running sum of g and D_ij = exp(G_i - G_j) for j <= i, 0 above the diagonal:

    X = (I + strictly_lower(diag(beta) K K^T))^-1        T = X o D        P = Q K^T o D

T is (I + A)^-1 of `chunk.py`: decays are a similarity by a diagonal, so that X needs no exp, and K K^T serves all value
heads of a key head. Both matrices are written transposed, as that kernel multiplies with them.

One program of one warpgroup does a pair of value heads of one key head in one chunk. g is summed in float32, coarse
part and rest apart, as in `chunk.py`, but in units of ln 2, of which exp is one instruction. Each g is rounded once
more for it, before it is split, so that sums are as exact as they are of g.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from gdn_jax.kernels.gated_delta.chunk import DECAY_GRID, LEAST_DECAY
from gdn_jax.kernels.gated_delta.mosaic_heads import FirstHeads
from gdn_jax.kernels.gated_delta.mosaic_substitution import (
    HALF,
    PAIR,
    inverse_scratch,
    merge_halves,
    store_gram,
    store_halves,
    store_parts,
    substitute_forward,
)
from gdn_jax.kernels.mosaic import all_arrive, everywhere, over_columns, over_rows, product, row_by_row, swizzled
from gdn_jax.kernels.numerics import CHUNK

# Of the numbers by place: decay from after a token to the chunk's end, from the chunk's start to there, write strength.
# The serial kernel copies OUT with IN, and IN with BETA, each two at once.
OUT, IN, BETA = range(3)
_SHAPE = (CHUNK, CHUNK)
_MATRIX = plgpu.Layout.WGMMA
_COLUMN = plgpu.Layout.WGMMA.reduce(1)
_ROW = plgpu.Layout.WGMMA.reduce(0)
# A head's coarse parts or rests in each warp. Lanes are counted by two, or else Mosaic loads them by instructions that
# read 16 bytes from multiples of 16 bytes alone.
_SUMS = plgpu.Layout.TILED(
    plgpu.Tiling(((PAIR, 2, 32), (2,), (1,))), warp_dims=(-5, -4), lane_dims=(-3, -2), vector_dim=-1
)
_LOG2_E = math.log2(math.e)


def chunk_factors(
    q: Float[Array, "places heads_q dk"],
    k: Float[Array, "places heads_k dk"],
    gates: dict[str, Float[Array, "chunks CHUNK Nv"]],
    is_used: Bool[Array, "chunks"],
    *,
    first_heads: FirstHeads,
    interpret: bool,
) -> dict[str, Float[Array, "chunks Nv ..."]]:
    """Compute what each chunk contributes.

    Args:
        q: queries on the grid axis.
        k: keys, there too.
        gates: g and beta by chunk, float32.
        is_used: whether a chunk holds tokens.
        first_heads: which heads of their arrays are those of q and k.
        interpret: whether this is traced for the interpreter.

    Returns:
        `inverses` T^T and `scores` P^T `[chunks, Nv, CHUNK, CHUNK]` in the dtype of k, and float32 `gates`
        `[chunks, Nv, 3, CHUNK]`, of OUT, IN and BETA; anything for chunks that are not in use.
    """
    num_chunks, _, num_heads = gates["g"].shape
    num_key, width = first_heads.num_key, k.shape[2]
    group = num_heads // num_key
    pairs = -(-group // PAIR)
    matrix = jax.ShapeDtypeStruct((num_chunks, num_heads, *_SHAPE), k.dtype)
    keys = plgpu.SMEM((CHUNK, width), k.dtype, transforms=swizzled(k.dtype))
    tiles = plgpu.SMEM((2, *_SHAPE), k.dtype, transforms=swizzled(k.dtype))
    gram, halves, merged = inverse_scratch(k.dtype)
    inverses, scores, by_place = plgpu.kernel(
        _make_body(group, pairs, first_heads, interpret=interpret),
        kernel_name="gdn_prefill_chunks",
        out_type=(matrix, matrix, jax.ShapeDtypeStruct((num_chunks, num_heads, 3, CHUNK), jnp.float32)),
        scratch_types={
            "room": plgpu.RefUnion((keys, keys), (tiles, merged)),  # products are done when inverses are merged
            "halves_room": plgpu.RefUnion(gram, halves),
            "sums": {
                "summed": plgpu.SMEM((PAIR, 2, 2 * CHUNK), jnp.float32, transforms=row_by_row(1)),
                "along": plgpu.SMEM((PAIR, 2, CHUNK), jnp.float32),  # twice, as no place can be loaded in two layouts
                "down": plgpu.SMEM((PAIR, 2, CHUNK), jnp.float32),
            },
            "strengths": plgpu.SMEM((PAIR, 2, HALF), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2),
        },
        grid=(num_chunks, num_key * pairs),
        grid_names=("chunk", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )(q, k, gates, is_used.astype(jnp.int32))
    return {"inverses": inverses, "scores": scores, "gates": by_place}


def _make_body(group: int, pairs: int, first_heads: FirstHeads, *, interpret: bool) -> Callable[..., None]:
    """Return the program for `group` value heads per key head, `pairs` programs of them."""

    def gdn_prefill_chunks_body(
        q: Any,
        k: Any,
        gates: dict[str, Any],
        is_used: Any,
        inverses: Any,
        scores: Any,
        by_place: Any,
        *,
        room: Any,
        halves_room: Any,
        sums: dict[str, Any],
        strengths: Any,
        loaded: Any,
    ) -> None:
        (keys, queries), (tiles, merged) = room
        gram, halves = halves_room
        chunk, part = lax.axis_index("chunk"), lax.axis_index("part")
        key_head, pair = lax.div(part, jnp.int32(pairs)), lax.rem(part, jnp.int32(pairs))

        def head_of(member: int) -> Array:
            """Return a head of the pair; the second one of the last pair of an odd group is the first one again."""
            return key_head * group + jnp.minimum(pair * PAIR + member, group - 1)

        def gate(name: str, member: int) -> Float[Array, "places"]:
            return plgpu.load(gates[name].at[chunk, :, head_of(member)], layout=_COLUMN, optimized=False)

        def for_each_head(store: Callable[[int], None]) -> None:
            """Store what each head has, but nothing twice."""
            for member in range(PAIR):
                if member < (group % PAIR or PAIR):
                    store(member)
                else:  # the last pair of an odd group lacks this one
                    pl.when(pair < pairs - 1)(partial(store, member))

        @pl.when(is_used[chunk] != 0)
        def _() -> None:
            there = pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)
            plgpu.copy_gmem_to_smem(k.at[there, first_heads.k + key_head], keys, loaded)
            plgpu.copy_gmem_to_smem(q.at[there, first_heads.q + key_head], queries, loaded)

            # While keys are on their way.
            strength, decay = ([gate(name, member) for member in range(PAIR)] for name in ("beta", "g"))
            summed = sums["summed"]
            summed[:, :, pl.ds(0, CHUNK)] = plgpu.layout_cast(jnp.zeros((PAIR, 2, CHUNK), jnp.float32), _SUMS)
            for member in range(PAIR):
                store_halves(strength[member], strengths.at[member], interpret=interpret)
                for i, portion in enumerate(_split_decay(decay[member])):
                    summed[member, i, pl.ds(CHUNK, CHUNK)] = portion
            all_arrive()
            sums["along"][...] = sums["down"][...] = _sum_up(summed)
            all_arrive()

            @for_each_head
            def _(member: int) -> None:
                stored = by_place.at[chunk, head_of(member)]
                stored[BETA] = strength[member]
                coarse, rest = _down(sums["down"].at[member])
                stored[IN] = jnp.exp2(coarse + rest)
                all_coarse, all_rest = (everywhere(sums["down"][member, i, CHUNK - 1], (CHUNK,)) for i in range(2))
                stored[OUT] = jnp.exp2((all_coarse - coarse) + (all_rest - rest))

            plgpu.barrier_wait(loaded)

            store_gram(product(keys, keys.transpose((1, 0))), gram, interpret=interpret)
            all_arrive()
            substitute_forward(gram, strengths, halves)
            # Only now, and K K^T a second time: registers do not last for them and the substitution.
            key_queries = product(keys, queries.transpose((1, 0)))
            row, column = (plgpu.broadcasted_iota(jnp.int32, _SHAPE, axis, layout=_MATRIX) for axis in range(2))
            key_queries = jnp.where(column >= row, key_queries, 0.0)
            at_corner = product(keys, keys.at[pl.ds(HALF, HALF)].transpose((1, 0)))
            all_arrive()  # keys and queries, whose room this is, have been read; and the halves are all there
            store_parts(at_corner, merged["corner"])

            @for_each_head
            def _(member: int) -> None:
                inverse = merge_halves(halves.at[member], strengths.at[member, 1], **merged, interpret=interpret)
                decays = _decays(sums["along"].at[member], sums["down"].at[member])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # those of the other head have left the tiles
                for which, matrix in enumerate((key_queries, inverse)):
                    tiles[which] = (matrix * decays).astype(tiles.dtype)
                plgpu.commit_smem()
                for which, to in enumerate((scores, inverses)):
                    plgpu.copy_smem_to_gmem(tiles.at[which], to.at[chunk, head_of(member)])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tiles, before the program ends

    return gdn_prefill_chunks_body


def _split_decay(g: Float[Array, "places"]) -> tuple[Float[Array, "places"], Float[Array, "places"]]:
    """Return g / ln 2 as a multiple of the grid, sums of which are exact, and a small rest."""
    g = jnp.maximum(g, LEAST_DECAY) * _LOG2_E
    coarse = lax.round(g * DECAY_GRID, lax.RoundingMethod.TO_NEAREST_EVEN) / DECAY_GRID
    return coarse, g - coarse


def _sum_up(summed: Any) -> Float[Array, "heads parts places"]:
    """Return sums up to and with each place, of numbers that have as many zeros before them; overwrites the numbers.

    All are to be there: a barrier comes before.
    """
    total = plgpu.load(summed.at[:, :, pl.ds(CHUNK, CHUNK)], layout=_SUMS, optimized=False)
    for step in (1, 4, 16):
        if step > 1:
            all_arrive()
            summed[:, :, pl.ds(CHUNK, CHUNK)] = total
            all_arrive()
        for earlier in (step, 2 * step, 3 * step):
            total = total + plgpu.load(summed.at[:, :, pl.ds(CHUNK - earlier, CHUNK)], layout=_SUMS, optimized=False)
    return total


def _decays(along: Any, down: Any) -> Float[Array, "places places"]:
    """Return D^T, [j, i] = exp(G_i - G_j) for j <= i, 1 elsewhere, from the parts of G / ln 2."""
    rows = (over_rows(plgpu.load(along.at[i], layout=_ROW, optimized=False), _SHAPE) for i in range(2))
    coarse, rest = (row - over_columns(column, _SHAPE) for row, column in zip(rows, _down(down), strict=True))
    return jnp.exp2(jnp.minimum(coarse + rest, 0.0))  # below the diagonal exp would overflow


def _down(sums: Any) -> list[Float[Array, "places"]]:
    """Return the coarse part and the rest as columns."""
    return [plgpu.load(sums.at[i], layout=_COLUMN, optimized=False) for i in range(2)]
