"""Inverse of unit lower triangular matrices by blockwise forward substitution.

Diagonal blocks of 16 rows are inverted row by row, then pairs of blocks are merged until one is left:

    [[L11, 0], [L21, L22]]^-1 = [[L11^-1, 0], [-L22^-1 L21 L11^-1, L22^-1]]

The product form prod (I + (-A)^(2^m)) is not used: for repeated keys its factors reach 1e17, and float32 cancels to
nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.kernels.late import late_zeros
from gdn_jax.kernels.numerics import einsum

_BLOCK = 16  # rows inverted one after the other


@jax.custom_jvp
def unit_lower_inverse(lower: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Return (I + lower)^-1 in float32.

    Args:
        lower: strictly lower triangular, float32; n is 16 times a power of two.
    """
    inverse = _invert_diagonal_blocks(lower)
    while inverse.shape[-3] > 1:
        inverse = _merge_pairs(inverse, lower)
    return inverse[..., 0, :, :]


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Differentiate by d(T) = -T d(A) T, which needs nothing of the substitution but its result."""
    inverse = unit_lower_inverse(*primals)
    return inverse, -einsum("...ij,...jk->...ik", inverse, einsum("...ij,...jk->...ik", tangents[0], inverse))


def _invert_diagonal_blocks(lower: Float[Array, "*batch n n"]) -> Float[Array, "*batch blocks b b"]:
    """Return (I + D)^-1 of each diagonal block D, one row at a time: row i = e_i - sum_{j<i} D_ij row j."""
    starts = range(0, lower.shape[-1], _BLOCK)
    blocks = jnp.stack([lower[..., i : i + _BLOCK, i : i + _BLOCK] for i in starts], axis=-3)
    flat = blocks.reshape(-1, _BLOCK, _BLOCK)
    identity = jnp.eye(_BLOCK, dtype=jnp.float32)

    def substitute(i: Array, inverse: Array) -> Array:
        coefficients = jax.lax.dynamic_index_in_dim(flat, i, axis=1, keepdims=False)
        known = einsum("bj,bjk->bk", coefficients, inverse)  # D_ij is zero for j >= i, as are the rows not yet known
        row = jnp.broadcast_to(identity[i], known.shape) - known
        return jax.lax.dynamic_update_index_in_dim(inverse, row, i, axis=1)

    return jax.lax.fori_loop(0, _BLOCK, substitute, late_zeros(flat.shape, jnp.dtype(jnp.float32), flat)).reshape(
        blocks.shape
    )


def _merge_pairs(
    inverse: Float[Array, "*batch blocks b b"], lower: Float[Array, "*batch n n"]
) -> Float[Array, "*batch half b2 b2"]:
    """Return the inverses of the diagonal blocks of twice the size."""
    count, size = inverse.shape[-3:-1]
    corners = [lower[..., i + size : i + 2 * size, i : i + size] for i in range(0, count * size, 2 * size)]
    first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    corner = -einsum("...ij,...jk->...ik", second, einsum("...ij,...jk->...ik", jnp.stack(corners, axis=-3), first))
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
