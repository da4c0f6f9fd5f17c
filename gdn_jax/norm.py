"""Zero-centred RMS norm: layer norms, final norm, per-head norms of queries and keys, all norms of the MTP head.

    y = x rsqrt(mean(x^2) + eps) (1 + w)

Everything is float32 and cast once at the end; the stored w is near 0. This is eq. 4 of Zhang and Sennrich 2019
(arXiv:1910.07467) with the gain written as 1 + w. The GDN output norm is another: `gdn_jax.kernels.gated_rms_norm`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*tokens width"], weight: Float[Array, "width"], eps: float
) -> Float[Array, "*tokens width"]:
    """Return the norm of x over its last axis, in x's dtype.

    Args:
        x: any floating dtype.
        weight: w, any floating dtype.
        eps: added to the mean of squares.
    """
    x32 = x.astype(jnp.float32)
    gain = jnp.expand_dims(1.0 + weight.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps) * gain).astype(x.dtype)


class RMSNorm(nnx.Module):
    """The norm with its `weight` `[width]`, zero at first."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype) -> None:
        """Create the weight.

        Args:
            width: of the normed axis.
            eps: added to the mean of squares.
            dtype: of the weight.
        """
        self.eps = eps
        self.weight = nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, x: Float[Array, "*tokens width"]) -> Float[Array, "*tokens width"]:
        """Return the norm of x over its last axis, in x's dtype."""
        return rms_norm(x, self.weight[...], self.eps)
