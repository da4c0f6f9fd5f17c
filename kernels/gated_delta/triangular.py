"""Inverse of unit lower triangular matrices by blockwise forward substitution.

Diagonal blocks of 16 rows are inverted row by row, then pairs of blocks are merged until one is left:

    [[L11, 0], [L21, L22]]^-1 = [[L11^-1, 0], [-L22^-1 L21 L11^-1, L22^-1]]

The product form prod (I + (-A)^(2^m)) is not used: for repeated keys its factors reach 1e17 and float32 cancels to
nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.kernels.numerics import einsum

_BLOCK = 16  # rows inverted one after the other; one vector register of float32


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
    count = lower.shape[-1] // _BLOCK
    grid = lower.reshape(*lower.shape[:-2], count, _BLOCK, count, _BLOCK)
    blocks = jnp.moveaxis(jnp.diagonal(grid, axis1=-4, axis2=-2), -1, -3)

    def next_row(i: Array, known: Array) -> Array:
        row = jax.lax.dynamic_index_in_dim(blocks, i, axis=-2)  # zero from place i on, as rows of `known` are
        row = jax.nn.one_hot(i, _BLOCK, dtype=lower.dtype) - jnp.sum(jnp.swapaxes(row, -1, -2) * known, axis=-2)
        return jax.lax.dynamic_update_index_in_dim(known, row, i, axis=-2)

    # A loop, since unrolled it is most of what a model's compilation takes.
    return jax.lax.fori_loop(0, _BLOCK, next_row, jnp.zeros_like(blocks))


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
