"""The inverse of unit lower triangular matrices in one warpgroup, exact in float32, as part of a Mosaic kernel.

    X = (I + L)^-1,   row i of X = e_i - sum_{k < i} L_ik (row k of X)

Every thread of CUDA owns one column of X of one of two matrices and substitutes forward on its own: columns do not
depend on each other, so threads exchange nothing. Rows are taken in blocks, so that the sums of a block stay in
registers: first what earlier blocks contribute, block after block, then row by row within the block. All threads of a
warp read the same entries of L, 16 bytes at a time. X lies transposed in shared memory, a column side by side.

The product form (I - L)(I + L^2)(I + L^4)... is not used, as in `triangular.py`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.numerics import CHUNK

PAIR = 2  # matrices inverted side by side, with a thread for each of their columns
PADDED = CHUNK + 8  # numbers from row to row in shared memory, so that few threads side by side meet in a bank
_SHAPE = (PAIR, CHUNK, 4)  # matrix, column, four rows
_ROWS = 16  # of a block; as many sums of four numbers take 64 registers
_SLICE = 8  # columns of a padded matrix that a warpgroup moves at once


def _layout() -> Any:
    """Return the layout of four rows of both matrices: a column for each thread."""
    return plgpu.Layout.TILED(plgpu.Tiling((_SHAPE, (32, 4))), warp_dims=(-5, -4), lane_dims=(-2,), vector_dim=-1)


def store_padded(matrix: Float[Array, "rows columns"], padded: Any) -> None:
    """Store a matrix in the layout of tensor cores into rows PADDED numbers apart."""
    for begin in range(0, CHUNK, _SLICE):
        padded[:, pl.ds(begin, _SLICE)] = matrix[:, begin : begin + _SLICE]


def load_padded(padded: Any) -> Float[Array, "rows columns"]:
    """Return what `store_padded` stores."""
    slices = [
        plgpu.load(padded.at[:, pl.ds(begin, _SLICE)], layout=plgpu.Layout.WGMMA, optimized=False)
        for begin in range(0, CHUNK, _SLICE)
    ]
    return jnp.concatenate(slices, axis=1)


def substitute_forward(lower: Any, solved: Any) -> None:
    """Write the transposes of (I + L)^-1 of two matrices; for inside a kernel.

    Args:
        lower: strictly lower triangular L, zeros above, `[PAIR, CHUNK, PADDED]` float32 in shared memory.
        solved: receives X^T, of the same shape; columns from CHUNK on are not touched.
    """
    layout = _layout()
    column = plgpu.broadcasted_iota(jnp.int32, _SHAPE, 1, layout=layout)
    of_four = plgpu.broadcasted_iota(jnp.int32, _SHAPE, 2, layout=layout)
    nothing = plgpu.layout_cast(jnp.zeros(_SHAPE, jnp.float32), layout)

    def entries(row: Any, k: Any) -> Array:
        """Return L[row, k : k + 4] for all columns of X."""
        four = plgpu.load(lower.at[:, row, pl.ds(k, 4)], layout=layout.reduce(1), optimized=False)
        return lax.broadcast_in_dim(four, _SHAPE, (0, 2))

    def rows_from(k: Any) -> Array:
        return plgpu.load(solved.at[:, :, pl.ds(k, 4)], layout=layout, optimized=False)

    def solve_block(block: Array, carry: None) -> None:
        first = block * _ROWS

        def subtract(earlier: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            starts = [earlier * _ROWS + four for four in range(0, _ROWS, 4)]
            known = [rows_from(start) for start in starts]
            for i in range(_ROWS):
                for start, rows in zip(starts, known, strict=True):
                    sums = (*sums[:i], sums[i] + entries(first + i, start) * rows, *sums[i + 1 :])
            return sums

        sums = lax.fori_loop(0, block, subtract, (nothing,) * _ROWS)
        rows = [nothing] * (_ROWS // 4)  # of the block; those not yet known are zero
        for i in range(_ROWS):
            total = sums[i]
            for four in range(-(-i // 4)):
                total = total + entries(first + i, first + 4 * four) * rows[four]
            unit = jnp.where(column == first + i, 1.0, 0.0)
            row = unit - lax.broadcast_in_dim(jnp.sum(total, axis=2), _SHAPE, (0, 1))
            rows[i // 4] = jnp.where(of_four == i % 4, row, rows[i // 4])
        for four, values in enumerate(rows):
            solved[:, :, pl.ds(first + 4 * four, 4)] = values
        return carry

    lax.fori_loop(0, CHUNK // _ROWS, solve_block, None)
