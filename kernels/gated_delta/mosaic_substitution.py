"""The inverses X = (I + strictly_lower(diag(beta) K K^T))^-1 of two heads that share keys, as part of a Mosaic kernel.

In halves of 32 places, with G = K K^T:

    X = [X1 0; X21 X2]        X21 = -X2 diag(beta2) G21 X1

X1 and X2 come from forward substitution, exact in float32: row i of X is e_i - beta_i sum_{k < i} G_ik (row k of X).
Columns of X do not depend on each other. A warp owns a half of a head, a lane a column of it, whose rows stay in
registers; as soon as one is known, all sums below take it in. So the lanes of a warp need the same numbers of G at
once, which they load 16 bytes at a time. What stands on and above the diagonal of G is never used, so that nothing is
masked, and G serves both heads.

X21 comes from products on tensor cores, their operands in bfloat16 parts that add up to them. Two parts, for keys of 16
bits, leave errors of 1e-5 of the largest entry, which is 1 for keys of length 1; three leave those of float32. All of
it is done on X^T, of which a lane has a row, and which is what is wanted.

The product form (I - L)(I + L^2)(I + L^4)... is not used, as in `triangular.py`.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.kernels.mosaic import SWIZZLE_BYTES, add_products, all_arrive, over_rows, row_by_row, swizzled
from gdn_jax.kernels.numerics import CHUNK

PAIR = 2  # heads whose matrices are inverted side by side
HALF = CHUNK // 2
_ROWS = 4  # of a column that a lane loads at once
_PADDED = HALF + 8  # numbers from row to row of G, so that lanes that store at once meet in no bank
_LANES = (PAIR, 2, HALF, _ROWS)  # head, half, column of X, rows
_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling((_LANES,)), warp_dims=(-4, -3), lane_dims=(-2,), vector_dim=-1)
_MATRIX = plgpu.Layout.WGMMA


def inverse_scratch(dtype: DTypeLike) -> tuple[Any, Any, dict[str, Any]]:
    """Return the shared memory that inverses take: for G, for the inverses of halves, and to merge these.

    G and the inverses of halves may share one place.

    Args:
        dtype: of the keys; one of more than 16 bits has its operands in three parts.

    Returns:
        Float32 room for the halves on the diagonal of G, `[2, HALF, _PADDED]`; for the inverses of the halves of both
        heads, `[PAIR, 2, HALF, HALF]`; and what `merge_halves` takes by name, bfloat16 parts `[CHUNK, HALF]`.
    """
    num_parts = 2 if jnp.dtype(dtype).itemsize == 2 else 3
    parts = (plgpu.SMEM((CHUNK, HALF), jnp.bfloat16, transforms=swizzled(jnp.bfloat16, 2 * HALF)),) * num_parts
    # As `swizzled`, but in as many dimensions as are made one; abstract to a type checker alone.
    tiling = plgpu.TilingTransform((1, 8, HALF))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(SWIZZLE_BYTES)  # pyright: ignore[reportAbstractUsage]
    return (
        plgpu.SMEM((2, HALF, _PADDED), jnp.float32, transforms=row_by_row(_ROWS)),
        plgpu.SMEM((PAIR, 2, HALF, HALF), jnp.float32, transforms=(tiling, swizzle)),
        {"corner": parts, "right": parts},
    )


def store_gram(gram: Float[Array, "places places"], diagonal: Any, *, interpret: bool) -> None:
    """Store the halves on the diagonal of G; for inside a kernel.

    Args:
        gram: G, in registers.
        diagonal: receives them, `[2, HALF, _PADDED]` float32 in shared memory; what stands past HALF is not used.
        interpret: whether this is traced for the interpreter.
    """
    halves = jnp.where(_is_upper((CHUNK, HALF)), gram[:, :HALF], gram[:, HALF:])
    # All columns must be stored; those that pad may hold anything.
    store_halves(jnp.concatenate([halves, halves[:, : _PADDED - HALF]], axis=1), diagonal, interpret=interpret)


def substitute_forward(gram: Any, strengths: Any, inverses: Any) -> None:
    """Invert both halves on the diagonal of both heads; for inside a kernel.

    A barrier is to come before, so that all of G and the strengths is there, and one after, before inverses are read.

    Args:
        gram: what `store_gram` leaves, `[2, HALF, _PADDED]` float32 in shared memory.
        strengths: beta of both heads, `[PAIR, 2, HALF]` float32 in shared memory.
        inverses: receives X^T, `[PAIR, 2, HALF, HALF]` float32 in shared memory, zeros below the diagonal.
    """
    column, of_rows = (plgpu.broadcasted_iota(jnp.int32, _LANES, axis, layout=_LAYOUT) for axis in (2, 3))
    sums = plgpu.layout_cast(jnp.zeros((*_LANES[:-1], HALF), jnp.float32), _LAYOUT)  # of the rows not yet known
    known = []
    for first in range(0, HALF, _ROWS):
        there = pl.ds(first, _ROWS)
        beta = plgpu.load(strengths.at[:, :, there], layout=_LAYOUT.reduce(2), optimized=False)
        beta = lax.broadcast_in_dim(beta, _LANES, (0, 1, 3))
        unit, rows = jnp.where(column == of_rows + first, 1.0, 0.0), jnp.zeros(_LANES, jnp.float32)
        for i in range(_ROWS):
            # A sum of -0.0 and one other number is that one: compiled, this takes one row out of several for nothing.
            row = jnp.sum(jnp.where(of_rows == i, unit - beta * sums[..., :_ROWS], -0.0), axis=3)
            rows = jnp.where(of_rows == i, lax.broadcast_in_dim(row, _LANES, (0, 1, 2)), rows)
            later = gram.at[:, first + i, pl.ds(first, HALF - first)]
            entries = plgpu.load(later, layout=_LAYOUT.reduce(2).reduce(0), optimized=False)
            row = lax.broadcast_in_dim(row, sums.shape, (0, 1, 2))
            sums = sums + lax.broadcast_in_dim(entries, sums.shape, (1, 3)) * row
        known.append(rows)
        sums = sums[..., _ROWS:] if first + _ROWS < HALF else sums
    all_arrive()  # all have read G, whose room this may be
    inverses[...] = jnp.concatenate(known, axis=3)


def merge_halves(
    inverses: Any, strengths: Any, *, corner: Sequence[Any], right: Sequence[Any], interpret: bool
) -> Float[Array, "places places"]:
    """Return X^T of a head from the inverses of its halves; for inside a kernel.

    Args:
        inverses: X^T of both halves, `[2, HALF, HALF]` float32 in shared memory.
        strengths: beta of the second half, `[HALF]` float32 in shared memory.
        corner: columns of the second half of G, in parts as `store_parts` leaves them.
        right: room for the parts of an operand.
        interpret: whether this is traced for the interpreter.
    """
    halves = _load_halves(inverses, interpret=interpret)
    parts = store_parts(halves, right)
    plgpu.commit_smem()
    # Tensor cores take 64 rows: those of the second half go through both products for nothing.
    left = _multiply(parts, [part.at[pl.ds(0, HALF)] for part in corner], interpret=interpret)
    beta = plgpu.load(strengths, layout=_MATRIX.reduce(0), optimized=False)
    left = left * over_rows(-beta, left.shape)
    above = _multiply(_split(left, len(parts)), [part.at[pl.ds(HALF, HALF)] for part in right], interpret=interpret)
    is_upper = _is_upper(halves.shape)
    return jnp.concatenate([jnp.where(is_upper, halves, 0.0), jnp.where(is_upper, above, halves)], axis=1)


def store_halves(values: Float[Array, "places ..."], halves: Any, *, interpret: bool) -> None:
    """Store values, `[CHUNK, ...]`, where places are counted half by half, `[2, HALF, ...]`; for inside a kernel."""
    if interpret:  # which reshapes no memory
        halves[0], halves[1] = values[:HALF], values[HALF:]
    else:
        halves.reshape(values.shape)[...] = values


def store_parts(values: Float[Array, "places half"], to: Sequence[Any]) -> list[Array]:
    """Store values in as many bfloat16 parts as there is room for, which add up to them; returns the parts.

    Others see them behind a barrier.
    """
    parts = _split(values, len(to))
    for part, room in zip(parts, to, strict=True):
        room[...] = part
    return parts


def _load_halves(halves: Any, *, interpret: bool) -> Float[Array, "places half"]:
    """Return a matrix whose rows are counted half by half."""
    if interpret:
        return jnp.concatenate([halves[0], halves[1]])
    return plgpu.load(halves.reshape((CHUNK, HALF)), layout=_MATRIX, optimized=False)


def _is_upper(shape: tuple[int, ...]) -> Array:
    """Return whether a row is of the first half."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_MATRIX) < HALF


def _split(values: Float[Array, "..."], num_parts: int) -> list[Float[Array, "..."]]:
    """Return bfloat16 parts that add up to the values, the largest one first."""
    parts = []
    for _ in range(num_parts):
        # Barred from being unrounded at once, since numbers would then be rounded one by one, not two by two.
        parts.append(lax.optimization_barrier(values.astype(jnp.bfloat16)))
        values = values - parts[-1].astype(jnp.float32)
    return parts


def _multiply(left: list[Array], right: list[Any], *, interpret: bool) -> Float[Array, "places half"]:
    """Return the product of two matrices in parts, but for products of parts that are too small to matter."""
    pairs = [(left[i], right[j]) for i in range(len(left)) for j in range(len(left) - i)]
    sums = plgpu.layout_cast(jnp.zeros((CHUNK, HALF), jnp.float32), _MATRIX)
    return add_products(sums, pairs, interpret=interpret)
