"""The inverse of unit lower triangular matrices in one warpgroup, exact in float32, as part of a Mosaic kernel.

    X = (I + L)^-1,   row i of X = e_i - sum_{k < i} L_ik (row k of X)

Columns of X do not depend on each other. Two threads of CUDA, side by side in a warp, own two columns of one of two
matrices; each holds every other four rows of both columns, sums over those, and the two add their sums once for each
row. So each entry of L that comes from shared memory, 16 bytes at a time, serves two columns: what limits this is how
fast shared memory fills registers. Rows are taken in blocks, so that the sums of a block stay in registers: first what
earlier blocks contribute, block after block, then row by row within the block. X comes to lie transposed, a column side
by side, in the half of L's place that holds zeros.

The product form (I - L)(I + L^2)(I + L^4)... is not used, as in `triangular.py`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.mosaic import everywhere
from gdn_jax.kernels.numerics import CHUNK

PAIR = 2  # matrices inverted side by side
PADDED = CHUNK + 8  # numbers from row to row in shared memory, so that few threads side by side meet in a bank
_ROWS = 8  # of a block, and of an array in registers
_SHAPE = (PAIR, CHUNK, _ROWS)  # matrix, column, row of a block
SLICE = 8  # columns of a padded matrix that a warpgroup moves at once, and rows of a block


def _layout() -> Any:
    """Return the layout of a block of rows: two columns and four rows for each thread."""
    tiling = plgpu.Tiling((_SHAPE, (32, 8), (16, 8), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-8, -7), lane_dims=(-3, -2), vector_dim=-1)


def store_padded(matrix: Float[Array, "rows columns"], padded: Any) -> None:
    """Store a matrix in the layout of tensor cores into rows PADDED numbers apart."""
    for begin in range(0, CHUNK, SLICE):
        padded[:, pl.ds(begin, SLICE)] = matrix[:, begin : begin + SLICE]


def load_padded(padded: Any) -> Float[Array, "rows columns"]:
    """Return what `store_padded` stores."""
    slices = [
        plgpu.load(padded.at[:, pl.ds(begin, SLICE)], layout=plgpu.Layout.WGMMA, optimized=False)
        for begin in range(0, CHUNK, SLICE)
    ]
    return jnp.concatenate(slices, axis=1)


def substitute_forward(matrices: Any) -> None:
    """Put (I + L)^-1 of two matrices in their place; for inside a kernel.

    Args:
        matrices: strictly lower triangular L, zeros above, `[PAIR, CHUNK, PADDED]` float32 in shared memory; receives
            X^T on the diagonal and above. What stands below stays L, columns from CHUNK on are not touched.
    """
    layout = _layout()
    column = plgpu.broadcasted_iota(jnp.int32, _SHAPE, 1, layout=layout)
    of_block = plgpu.broadcasted_iota(jnp.int32, _SHAPE, 2, layout=layout)
    nothing = plgpu.layout_cast(jnp.zeros(_SHAPE, jnp.float32), layout)

    def entries(row: Array, first: Array) -> Array:
        """Return L[row, first : first + _ROWS] for all columns of X."""
        some = plgpu.load(matrices.at[:, row, pl.ds(first, _ROWS)], layout=layout.reduce(1), optimized=False)
        return lax.broadcast_in_dim(some, _SHAPE, (0, 2))

    def solve_block(block: Array, carry: None) -> None:
        first = block * _ROWS

        def own(there: Array, values: Array, others: Array) -> Array:
            """Return values where a column of X^T has its own, from row `there` on, and others where L stands."""
            return jnp.where(of_block + everywhere(there, _SHAPE) >= column, values, others)

        def load(there: Array) -> Array:
            return plgpu.load(matrices.at[:, :, pl.ds(there, _ROWS)], layout=layout, optimized=False)

        def subtract(earlier: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            there = earlier * _ROWS
            known = own(there, load(there), nothing)
            return tuple(total + entries(first + i, there) * known for i, total in enumerate(sums))

        sums = lax.fori_loop(0, block, subtract, (nothing,) * _ROWS)
        rows = nothing  # of the block; those not yet known are zero
        for i, total in enumerate(sums):
            total = total + entries(first + i, first) * rows
            unit = jnp.where(column == first + i, 1.0, 0.0)
            row = unit - lax.broadcast_in_dim(jnp.sum(total, axis=2), _SHAPE, (0, 1))
            rows = jnp.where(of_block == i, row, rows)
        matrices[:, :, pl.ds(first, _ROWS)] = own(first, rows, load(first))
        return carry

    lax.fori_loop(0, CHUNK // _ROWS, solve_block, None)
