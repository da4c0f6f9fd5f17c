"""What the Pallas kernels for Hopper GPUs share: how arrays lie in registers and in shared memory, and products.

A *thread* of Pallas' Mosaic GPU is a warpgroup: 4 warps of 32 lanes. Without a GPU kernels are tried in an interpreter,
under `plgpu.force_gpu_interpret_mode`; those that multiply out of registers, which the interpreter cannot, take an
argument for it.

Mosaic puts a barrier before and after each store of a vector, and before each copy to shared memory. The kernels of the
delta rule and of its mixer ask it not to (`unsafe_no_auto_barriers`), and call `all_arrive` wherever a thread of CUDA
reads what another one stores, or stores what another one may not have read yet. `wait_smem_to_gmem` is a barrier too;
`barrier_wait` is none, since each thread waits by itself. The interpreter runs a warpgroup as one thread, so that a
barrier that is missing shows on a GPU alone, where tests compare with Mosaic's own. Scalars have no barrier in any
kernel: each of 128 threads loads and stores them on its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

SWIZZLE_BYTES = 128


# Transforms are of plgpu.Transform, which cannot be checked at run time.
def swizzled(dtype: DTypeLike, num_bytes: int = SWIZZLE_BYTES) -> tuple[Any, ...]:
    """Return how a matrix lies in shared memory so that tensor cores and copies meet no bank conflicts.

    Its columns are a multiple of `num_bytes`, which are 128, 64 or 32; its rows of 8.
    """
    # A method that these classes inherit is abstract to a type checker alone.
    tiling = plgpu.TilingTransform((8, num_bytes // jnp.dtype(dtype).itemsize))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(num_bytes)  # pyright: ignore[reportAbstractUsage]


def row_by_row(columns: int) -> tuple[Any, ...]:  # of plgpu.Transform, which cannot be checked at run time
    """Return that a matrix lies in shared memory as it is written, where slices begin at multiples of `columns`.

    Mosaic swizzles memory of which nothing is said whenever all accesses allow it, and takes each slice for the
    beginning of a swizzle's pattern, while copies count it from the memory's own: slices of single rows read other
    columns than were copied there.
    """
    return (plgpu.TilingTransform((columns,)),)  # pyright: ignore[reportAbstractUsage]


def all_arrive() -> None:
    """Have all threads of a warpgroup wait for one another, and see what each has stored; for inside a kernel."""
    plgpu.commit_smem()  # a barrier, behind a fence that copies and tensor cores need


def product(left, right) -> jax.Array:
    """Return `left @ right` in float32 from two matrices in shared memory, by the tensor cores; for inside a kernel."""

    def multiply(sums):
        plgpu.wgmma(sums, left, right)
        return sums[...]

    sums = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((left.shape[0], right.shape[1]), jnp.float32))
    return lax.optimization_barrier(sums)  # else arithmetic on the sums may move to before the product is done


def add_product(sums: jax.Array, left: jax.Array, right, *, interpret: bool) -> jax.Array:
    """Return `sums + left @ right`, with `right` alone in shared memory, by the tensor cores; for inside a kernel."""
    return add_products(sums, [(left, right)], interpret=interpret)


def add_products(sums: jax.Array, pairs: Sequence[tuple[jax.Array, Any]], *, interpret: bool) -> jax.Array:
    """Return sums and the products of all pairs together, as `add_product` does of one."""
    if interpret:  # the interpreter's tensor cores take nothing from registers
        for left, right in pairs:
            values = plgpu.load(right)
            plgpu.commit_smem()  # a tensor core reads as copies do; this read is to be ordered with them, too
            sums = sums + jnp.dot(left, values, preferred_element_type=jnp.float32)
        return sums

    def multiply(accumulator):
        for left, right in pairs:
            plgpu.wgmma(accumulator, left, right)

    return lax.optimization_barrier(pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(sums)))


def store_apart(ref: Any, values: Shaped[Array, "..."]) -> None:
    """Store values whose layout fills no whole 32 bytes of global memory at once; for inside a kernel."""
    store = getattr(plgpu, "store", None)  # from JAX 0.12 on, where a plain store refuses such a layout
    if store is None:
        ref[...] = values
    else:
        store(ref, values, optimized=False)


@dataclass(frozen=True)
class RowsOverLanes:
    """A matrix in registers whose rows are shared by a few lanes each: a lane has 4 of each `4 lanes` columns.

    Warp w owns a quarter of the rows, one after the other. Which of each 8 rows its lanes have at once is chosen so
    that they read and write a `swizzled` matrix without bank conflicts: lanes that take their turn together have rows
    whose swizzled columns lie in different banks.

    Attributes:
        num_rows: rows, a multiple of 32.
        lanes: that share a row, 4 or 8, or 16 if numbers have 16 bits. With fewer, sums over columns take fewer
            exchanges, but a row that all rows are multiplied with takes more registers. With 16 they write 64 columns
            of rows that are not swizzled without bank conflicts, too.
        dtype: of the numbers in shared memory.
    """

    num_rows: int
    lanes: int
    dtype: DTypeLike

    @property
    def matrix(self) -> Any:
        """The layout of the matrix `[num_rows, columns]`, columns a multiple of 32."""
        vector_bytes, columns = 4 * jnp.dtype(self.dtype).itemsize, 4 * self.lanes
        # Of 8 rows, the swizzle tells apart those that lie `near` apart; as many next to each other fill the lanes.
        near = self.lanes * vector_bytes // 16
        heights = dict.fromkeys((self.num_rows, self.num_rows // 4, 8, near, vector_bytes // 4))
        tiles = [(height, columns) for height in heights]
        # Each tile but the first adds two dimensions: its rows and columns within the tile before it.
        far = () if near == 8 else (-1 - 2 * (len(tiles) - tiles.index((8, columns))),)
        tiling = plgpu.Tiling((*tiles, (4,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-1 - 2 * len(tiles),), lane_dims=(-3, *far, -2), vector_dim=-1)

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
    """Vectors of some heads, or of a head's tokens, in registers: each whole in a warp, a lane's numbers side by side.

    Attributes:
        num_heads: 1 or 2, which four or two warps then hold alike, or a multiple of 4, each warp having a quarter.
        width: of a head, 64 or 128.
    """

    num_heads: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the vectors."""
        return self.num_heads, self.width

    @property
    def matrix(self) -> Any:
        """The layout of the vectors."""
        in_warp = max(self.num_heads // 4, 1)
        tiles = self.shape, (self.width * in_warp // 32,)
        if in_warp > 1:
            tiling = plgpu.Tiling((self.shape, (in_warp, self.width), tiles[1]))
            return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
        alike = () if self.num_heads == 4 else (plgpu.Replicated(4 // self.num_heads),)
        warps = alike if self.num_heads == 1 else (-3, *alike)
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warps, lane_dims=(-2,), vector_dim=-1)

    def load(self, ref: Any) -> Float[Array, "num_heads width"]:
        """Load vectors in float32."""
        return self.load_as_stored(ref).astype(jnp.float32)

    def load_as_stored(self, ref: Any) -> Float[Array, "num_heads width"]:
        """Load vectors in their own dtype."""
        return plgpu.load(ref, layout=self.matrix, optimized=False)


def over_rows(row: Float[Array, "columns"], shape: tuple[int, ...]) -> Float[Array, "num_rows columns"]:
    """Repeat one row in every row; Mosaic has no implicit broadcast."""
    return lax.broadcast_in_dim(row, shape, (1,))


def over_columns(column: Float[Array, "num_rows"], shape: tuple[int, ...]) -> Float[Array, "num_rows columns"]:
    """Repeat one column in every column."""
    return lax.broadcast_in_dim(column, shape, (0,))


def everywhere(scalar: Shaped[Array, ""], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
    """Repeat a scalar in every place."""
    return lax.broadcast_in_dim(scalar, shape, ())
