"""What the Mosaic GPU kernels share: how arrays lie in registers and in shared memory.

A *thread* of Pallas' Mosaic GPU is a warpgroup: 4 warps of 32 lanes. Kernels are tried without a GPU under
`plgpu.force_gpu_interpret_mode`, so none takes an argument for that.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Shaped

_SWIZZLE_BYTES = 128  # a row of a tile in shared memory, whose 16-byte pieces are permuted so that banks do not collide


def swizzled(shape: tuple[int, int], dtype: jnp.dtype) -> Any:
    """Return the type of a matrix in shared memory that bulk copies fill, and that lanes read without bank conflicts.

    Rows must be multiples of 128 bytes, and their number one of 8.
    """
    columns = _SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    # jax declares a method of these two abstract that they do not need
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(_SWIZZLE_BYTES)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


@dataclass(frozen=True)
class RowsOverLanes:
    """A matrix in registers whose rows are shared by 8 lanes each: every lane has 4 of each 32 columns.

    Warp w owns a quarter of the rows, one after the other; lanes 8 i .. 8 i + 7 share rows i, i + 4, i + 8, ... of it.

    Attributes:
        num_rows: rows, a multiple of 16.
    """

    num_rows: int

    @property
    def matrix(self) -> Any:
        """The layout of the matrix `[num_rows, columns]`, columns a multiple of 32."""
        of_warp = self.num_rows // 4
        tiling = plgpu.Tiling(((self.num_rows, 32), (of_warp, 32), (4, 32), (4,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)

    @property
    def column(self) -> Any:
        """The layout of a vector `[num_rows]`, one number per row, as a sum over columns leaves it."""
        return self.matrix.reduce(1)

    @property
    def row(self) -> Any:
        """The layout of a vector `[columns]` that every row is multiplied with."""
        return self.matrix.reduce(0)


@dataclass(frozen=True)
class HeadsOverWarps:
    """Vectors of some heads in registers, a warp for each: every lane has a 32nd of the vector, side by side.

    Attributes:
        num_heads: 4, or 1, which all warps then hold alike.
        width: of a head, 64 or 128.
    """

    num_heads: int
    width: int

    @property
    def matrix(self) -> Any:
        """The layout of the vectors `[num_heads, width]`."""
        warps = -3 if self.num_heads == 4 else plgpu.Replicated(4)
        tiling = plgpu.Tiling(((self.num_heads, self.width), (self.width // 32,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=(-2,), vector_dim=-1)

    def load(self, ref: Any) -> Float[Array, "num_heads width"]:
        """Load vectors from global memory, in float32."""
        return plgpu.load(ref, layout=self.matrix, optimized=False).astype(jnp.float32)


def over_rows(row: Float[Array, "columns"], shape: tuple[int, ...]) -> Float[Array, "num_rows columns"]:
    """Repeat one row in every row; Mosaic has no implicit broadcast."""
    return lax.broadcast_in_dim(row, shape, (1,))


def over_columns(column: Float[Array, "num_rows"], shape: tuple[int, ...]) -> Float[Array, "num_rows columns"]:
    """Repeat one column in every column."""
    return lax.broadcast_in_dim(column, shape, (0,))


def everywhere(scalar: Shaped[Array, ""], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
    """Repeat a scalar in every place."""
    return lax.broadcast_in_dim(scalar, shape, ())
