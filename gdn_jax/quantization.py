"""Block-quantized FP8 weights: what a scale must look like, and turning stored values back into numbers.

The published layout keeps `X.weight` in float8 e4m3 (finite, no infinities) beside `X.weight_scale_inv` with one scale
per block of 128 rows and 128 columns. Despite its name the scale multiplies:

    value[r, c] = fp8[r, c] * scale[r // 128, c // 128]

also when the matrix is no multiple of 128 in size. Whether a tensor is quantized is told by its scale alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

FLOAT8 = "F8_E4M3"  # the file format's name of the stored dtype
BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
SCALE_DTYPES = ("BF16", "F32")


def num_blocks(size: int) -> int:
    """Return how many blocks an axis of `size` elements has; the last may be short."""
    return -(-size // BLOCK)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales of a `[rows, columns]` matrix."""
    rows, columns = shape
    return num_blocks(rows), num_blocks(columns)


def row_scales(
    scale: Float[np.ndarray, "row_blocks column_blocks"], first_row: int, num_rows: int
) -> Float[np.ndarray, "rows column_blocks"]:
    """Return the scales of each of `num_rows` rows from `first_row` on, in float32.

    Args:
        scale: of the whole matrix.
        first_row: a row of that matrix, which need not begin a block: a run of rows keeps the scales of the place it
            came from, wherever it goes.
        num_rows: rows of the run.
    """
    return scale[np.arange(first_row, first_row + num_rows) // BLOCK].astype(np.float32)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def decode(
    stored: Float[Array, "rows width"],
    scale: Float[Array, "rows column_blocks"] | None,
    *,
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> Float[Array, "..."]:
    """Turn stored rows into a parameter's values.

    Args:
        stored: float8 or any other floating values.
        scale: float32 scales per row and block of 128 columns, as `row_scales` gives; None where nothing is quantized.
        shape: of the result; the same elements.
        dtype: of the result. The product is formed in float32 and rounded to it once.
    """
    if scale is not None:
        columns = jnp.arange(stored.shape[1]) // BLOCK
        stored = stored.astype(jnp.float32) * scale[:, columns]
    return stored.reshape(shape).astype(dtype)
