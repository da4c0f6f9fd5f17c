"""What the Pallas kernels for Hopper GPUs share: how they run where there is no such GPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

SWIZZLE_BYTES = 128


def interpreter(interpret: bool) -> plgpu.InterpretGPUParams | None:
    """Return what `plgpu.kernel` takes as `interpret`: None to compile, else the interpreter, which looks for races.

    The interpreter runs on the CPU and simulates shared memory, barriers and asynchronous copies. Memory that nothing
    was written to holds NaN in it.
    """
    return plgpu.InterpretGPUParams(detect_races=True) if interpret else None


def swizzled(dtype: DTypeLike) -> tuple[Any, ...]:  # of plgpu.Transform, which cannot be checked at run time
    """Return how a matrix lies in shared memory so that tensor cores and copies meet no bank conflicts.

    Its columns are a multiple of 128 bytes, its rows of 8.
    """
    columns = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    # A method that these classes inherit is abstract to a type checker alone.
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(SWIZZLE_BYTES)  # pyright: ignore[reportAbstractUsage]


def product(left, right) -> jax.Array:
    """Return `left @ right` in float32 from two matrices in shared memory, by the tensor cores; for inside a kernel."""

    def multiply(sums):
        plgpu.wgmma(sums, left, right)
        return sums[...]

    sums = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((left.shape[0], right.shape[1]), jnp.float32))
    return lax.optimization_barrier(sums)  # else arithmetic on the sums may move to before the product is done


def add_product(sums: jax.Array, left: jax.Array, right, *, interpret: bool) -> jax.Array:
    """Return `sums + left @ right`, with `right` alone in shared memory, by the tensor cores; for inside a kernel."""
    if interpret:  # the interpreter's tensor cores take nothing from registers
        values = plgpu.load(right)
        plgpu.commit_smem()  # a tensor core reads as copies do; this read is to be ordered with them, too
        return sums + jnp.dot(left, values, preferred_element_type=jnp.float32)

    def multiply(accumulator):
        plgpu.wgmma(accumulator, left, right)

    return lax.optimization_barrier(pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(sums)))
