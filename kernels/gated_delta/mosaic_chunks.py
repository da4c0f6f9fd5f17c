"""What a chunk contributes whatever the state, for all chunks at once: the first kernel of the Mosaic prefill.

In a chunk with places i, j, G the running sum of g and D_ij = exp(G_i - G_j) for j <= i, 0 above the diagonal:

    X = (I + strictly_lower(diag(beta) K K^T))^-1        T = X o D        P = Q K^T o D

T is (I + A)^-1 of `chunk.py`: decays are a similarity by a diagonal, so that X needs no exp, and K K^T serves all value
heads of a key head. Both matrices are written transposed, as that kernel multiplies with them.

One program of one warpgroup does a pair of value heads of one key head in one chunk. Sums of g are float32 sums over a
triangle, coarse part and rest apart, as in `chunk.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.gated_delta.chunk import DECAY_GRID, LEAST_DECAY
from gdn_jax.kernels.gated_delta.chunk_slots import END, FIRST, TOKEN
from gdn_jax.kernels.gated_delta.mosaic_cuts import ROWS, is_cut
from gdn_jax.kernels.gated_delta.mosaic_heads import FirstHeads
from gdn_jax.kernels.gated_delta.mosaic_substitution import (
    PADDED,
    PAIR,
    SLICE,
    load_padded,
    store_padded,
    substitute_forward,
)
from gdn_jax.kernels.mosaic import everywhere, over_columns, over_rows, product, row_by_row, swizzled
from gdn_jax.kernels.numerics import CHUNK

# Of the numbers by place: decay from a chunk's start to after a token, from there to the chunk's end, write strength.
IN, OUT, BETA = range(3)
_SHAPE = (CHUNK, CHUNK)
_MATRIX = plgpu.Layout.WGMMA
_COLUMN = plgpu.Layout.WGMMA.reduce(1)
_ROW = plgpu.Layout.WGMMA.reduce(0)


def chunk_factors(
    q: Float[Array, "T heads_q dk"],
    k: Float[Array, "T heads_k dk"],
    cuts: dict[str, Float[Array, "cuts places heads width"]],
    gates: dict[str, Float[Array, "chunks places Nv"]],
    slots: Int[Array, "chunks 3"],
    *,
    first_heads: FirstHeads,
) -> dict[str, Float[Array, "chunks Nv ..."]]:
    """Compute what each chunk contributes.

    Args:
        q: packed queries.
        k: packed keys.
        cuts: the same of cut chunks.
        gates: g and beta by chunk.
        slots: where chunks stand.
        first_heads: which heads of their arrays are those of q and k.

    Returns:
        `inverses` T^T and `scores` P^T `[chunks, Nv, places, places]` in the dtype of k, and float32 `gates`
        `[chunks, Nv, 3, places]`, of IN, OUT and BETA; anything for chunks that are not in use.
    """
    num_chunks, _, num_heads = gates["g"].shape
    num_key, width = first_heads.num_key, k.shape[2]
    group = num_heads // num_key
    pairs = -(-group // PAIR)
    matrix = jax.ShapeDtypeStruct((num_chunks, num_heads, *_SHAPE), k.dtype)
    keys = plgpu.SMEM((CHUNK, width), k.dtype, transforms=swizzled(k.dtype))
    padded = plgpu.SMEM((PAIR, CHUNK, PADDED), jnp.float32, transforms=row_by_row(SLICE))
    inverses, scores, by_place = plgpu.kernel(
        _make_body(group, pairs, first_heads),
        kernel_name="gdn_prefill_chunks",
        out_type=(matrix, matrix, jax.ShapeDtypeStruct((num_chunks, num_heads, 3, CHUNK), jnp.float32)),
        scratch_types={
            # Queries and keys are done with when the inverse is begun, its operand when results are stored.
            "before": plgpu.RefUnion((keys, keys), padded),
            "after": plgpu.RefUnion(padded, plgpu.SMEM(_SHAPE, k.dtype, transforms=swizzled(k.dtype))),
            "sums": plgpu.SMEM((2, CHUNK), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2),
        },
        grid=(num_chunks, num_key * pairs),
        grid_names=("chunk", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(q, k, cuts["q"], cuts["k"], gates, slots)
    return {"inverses": inverses, "scores": scores, "gates": by_place}


def _make_body(group: int, pairs: int, first_heads: FirstHeads) -> Callable[..., None]:
    """Return the program for `group` value heads per key head, `pairs` programs of them."""

    def gdn_prefill_chunks_body(
        q: Any,
        k: Any,
        q_cut: Any,
        k_cut: Any,
        gates: dict[str, Any],
        slots: Any,
        inverses: Any,
        scores: Any,
        by_place: Any,
        *,
        before: Any,
        after: Any,
        sums: Any,
        loaded: Any,
    ) -> None:
        ((queries, keys), solved), (lower, tile) = before, after
        chunk, part = lax.axis_index("chunk"), lax.axis_index("part")
        key_head, pair = lax.div(part, jnp.int32(pairs)), lax.rem(part, jnp.int32(pairs))
        token, first, end = (slots[chunk, which] for which in (TOKEN, FIRST, END))

        def gate(name: str, head: Array) -> Float[Array, "places"]:
            return plgpu.load(gates[name].at[chunk, :, head], layout=_COLUMN, optimized=False)

        def send(matrix: Array, to: Any) -> None:
            """Round a matrix and store it, once the one before has left the tile."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tile[...] = matrix.astype(tile.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, to)

        def finish(member: int, head: Array, key_queries: Array) -> None:
            """Store the gates, P^T and T^T of a head whose inverse is known."""
            decay = _decays(gate("g", head), sums, by_place.at[chunk, head])
            by_place[chunk, head, BETA] = gate("beta", head)
            send(key_queries * decay, scores.at[chunk, head])
            send(load_padded(solved.at[member]) * decay, inverses.at[chunk, head])

        @pl.when(end > first)
        def _() -> None:
            cut, there = is_cut(token, first, end), pl.ds(pl.multiple_of(token, ROWS), CHUNK)

            @pl.when(~cut)
            def _() -> None:
                plgpu.copy_gmem_to_smem(k.at[there, first_heads.k + key_head], keys, loaded)
                plgpu.copy_gmem_to_smem(q.at[there, first_heads.q + key_head], queries, loaded)

            @pl.when(cut)
            def _() -> None:
                plgpu.copy_gmem_to_smem(k_cut.at[chunk, :, first_heads.k + key_head], keys, loaded)
                plgpu.copy_gmem_to_smem(q_cut.at[chunk, :, first_heads.q + key_head], queries, loaded)

            plgpu.barrier_wait(loaded)
            # The second head of the last pair of an odd group is the first one again, of which nothing is stored.
            heads = [key_head * group + jnp.minimum(pair * PAIR + member, group - 1) for member in range(PAIR)]
            transposed = keys.transpose((1, 0))
            row, column = (plgpu.broadcasted_iota(jnp.int32, _SHAPE, axis, layout=_MATRIX) for axis in range(2))
            products = product(keys, transposed)
            for member, head in enumerate(heads):
                entries = over_columns(gate("beta", head), _SHAPE) * products
                store_padded(jnp.where(column < row, entries, jnp.zeros_like(entries)), lower.at[member])
            key_queries = product(keys, queries.transpose((1, 0)))
            substitute_forward(lower, solved)
            for member, head in enumerate(heads):
                finish_member = partial(finish, member, head, key_queries)
                if member < (group % PAIR or PAIR):
                    finish_member()
                else:  # the last pair of an odd group lacks this one
                    pl.when(pair < pairs - 1)(finish_member)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile, before the program ends

    return gdn_prefill_chunks_body


def _decays(g: Float[Array, "places"], sums: Any, stored: Any) -> Float[Array, "places places"]:
    """Return D^T, [j, i] = exp(G_i - G_j) for j <= i, zeros elsewhere; store the decays to start and end."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, _SHAPE, axis, layout=_MATRIX) for axis in range(2))
    g = jnp.maximum(g, LEAST_DECAY)
    coarse = lax.round(g * DECAY_GRID, lax.RoundingMethod.TO_NEAREST_EVEN) / DECAY_GRID
    exponents, before, after = [], [], []
    for which, part in enumerate((coarse, g - coarse)):

        def along(which: int = which) -> Float[Array, "places places"]:
            return over_rows(plgpu.load(sums.at[which], layout=_ROW, optimized=False), _SHAPE)

        sums[which] = part
        total = jnp.sum(jnp.where(column <= row, along(), 0.0), axis=1)
        sums[which] = total
        before.append(total)
        after.append(everywhere(sums[which, CHUNK - 1], (CHUNK,)) - total)
        exponents.append(along() - over_columns(total, _SHAPE))
    stored[IN] = jnp.exp(before[0] + before[1])
    stored[OUT] = jnp.exp(after[0] + after[1])
    exponent = exponents[0] + exponents[1]
    return jnp.exp(jnp.where(column >= row, exponent, -jnp.inf))  # above the diagonal exp would overflow
