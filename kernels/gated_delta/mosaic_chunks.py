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
            "room": plgpu.RefUnion((keys, keys), padded),  # both products are done when an inverse is begun
            "tiles": plgpu.SMEM((PAIR, *_SHAPE), k.dtype, transforms=swizzled(k.dtype)),
            "sums": plgpu.SMEM((PAIR, 4, CHUNK), jnp.float32),
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
        room: Any,
        tiles: Any,
        sums: Any,
        loaded: Any,
    ) -> None:
        (keys, queries), matrices = room
        chunk, part = lax.axis_index("chunk"), lax.axis_index("part")
        key_head, pair = lax.div(part, jnp.int32(pairs)), lax.rem(part, jnp.int32(pairs))
        token, first, end = (slots[chunk, which] for which in (TOKEN, FIRST, END))

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

        def send(matrix: Array, member: int, to: Any) -> None:
            """Round a matrix of a head and store it."""
            tile = tiles.at[member]
            tile[...] = matrix.astype(tile.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, to.at[chunk, head_of(member)])

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

            members = range(PAIR)
            strengths, decays = ([gate(name, member) for member in members] for name in ("beta", "g"))

            @for_each_head
            def _(member: int) -> None:  # while keys are on their way
                stored = by_place.at[chunk, head_of(member)]
                stored[BETA] = strengths[member]
                _sum_up(decays[member], sums.at[member], stored)

            plgpu.barrier_wait(loaded)

            key_queries = product(keys, queries.transpose((1, 0)))
            for_each_head(lambda member: send(key_queries * _decays(sums.at[member]), member, scores))
            products = product(keys, keys.transpose((1, 0)))
            row, column = (plgpu.broadcasted_iota(jnp.int32, _SHAPE, axis, layout=_MATRIX) for axis in range(2))
            for member in members:
                entries = over_columns(strengths[member], _SHAPE) * products
                store_padded(jnp.where(column < row, entries, jnp.zeros_like(entries)), matrices.at[member])
            substitute_forward(matrices)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # scores have left the tiles
            # Below the diagonal stands what was inverted, which is finite, and decays are zero. They are formed again:
            # registers do not last for them and the substitution.
            for_each_head(lambda m: send(load_padded(matrices.at[m]) * _decays(sums.at[m]), m, inverses))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tiles, before the program ends

    return gdn_prefill_chunks_body


def _sum_up(g: Float[Array, "places"], sums: Any, stored: Any) -> None:
    """Leave G in shared memory, coarse part and rest, each twice; store the decays to start and end."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, _SHAPE, axis, layout=_MATRIX) for axis in range(2))
    g = jnp.maximum(g, LEAST_DECAY)
    coarse = lax.round(g * DECAY_GRID, lax.RoundingMethod.TO_NEAREST_EVEN) / DECAY_GRID
    before, after = [], []
    for which, part in enumerate((coarse, g - coarse)):
        sums[which] = part
        total = jnp.sum(jnp.where(column <= row, _along(sums, which), 0.0), axis=1)
        # Twice, since one place cannot be loaded in two layouts.
        sums[which] = total
        sums[2 + which] = total
        before.append(total)
        after.append(everywhere(sums[which, CHUNK - 1], (CHUNK,)) - total)
    stored[IN] = jnp.exp(before[0] + before[1])
    stored[OUT] = jnp.exp(after[0] + after[1])


def _decays(sums: Any) -> Float[Array, "places places"]:
    """Return D^T, [j, i] = exp(G_i - G_j) for j <= i, zeros elsewhere, from what `_sum_up` leaves."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, _SHAPE, axis, layout=_MATRIX) for axis in range(2))
    coarse, rest = (
        _along(sums, which) - over_columns(plgpu.load(sums.at[2 + which], layout=_COLUMN, optimized=False), _SHAPE)
        for which in range(2)
    )
    return jnp.exp(jnp.where(column >= row, coarse + rest, -jnp.inf))  # above the diagonal exp would overflow


def _along(sums: Any, which: int) -> Float[Array, "places places"]:
    """Return the coarse part or the rest in every row."""
    return over_rows(plgpu.load(sums.at[which], layout=_ROW, optimized=False), _SHAPE)
