"""Grouped product as one dense product per group, in float32: slow, defines the meaning."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.numerics import einsum


def grouped_matmul(
    x: Float[Array, "M K"], weight: Float[Array, "E N K"], group_sizes: Int[Array, "E"]
) -> Float[Array, "M N"]:
    """Multiply all rows with each group's matrix in turn, keeping the answers of the group's own rows."""
    row = jnp.arange(x.shape[0])
    end = jnp.cumsum(group_sizes)
    out = jnp.zeros((x.shape[0], weight.shape[1]), jnp.float32)
    for group, matrix in enumerate(weight):
        mine = (row >= end[group] - group_sizes[group]) & (row < end[group])
        answer = einsum("mk,nk->mn", x.astype(jnp.float32), matrix.astype(jnp.float32))
        out = jnp.where(mine[:, None], answer, out)
    return out.astype(x.dtype)
