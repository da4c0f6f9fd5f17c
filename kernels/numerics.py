"""Matrix products with their precision spelled out, and the small float32 pieces every kernel shares.

A float32 product is IEEE float32 everywhere (never TF32); a bfloat16 product accumulates in float32.
Callers decide where a result is rounded, so every function here returns float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CHUNK = 64  # tokens handled together in the chunkwise delta rule; the grid is absolute


def einsum(spec: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    """Contract `operands`, multiplying in their own dtype and accumulating in float32.

    Args:
        spec: an einsum specification.
        operands: arrays of one floating dtype.

    Returns:
        The contraction in float32.
    """
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
