"""Gated RMS norm: the GDN layer's output norm, over the channels of one value head.

    y = x rsqrt(mean(x^2) + eps) w silu(z)

The weight is used as it is (stored near 1), unlike the zero-centred norms of the rest of the model; the norm comes
before the gate. Everything is float32 and cast once at the end.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.jit, static_argnames="eps")
def gated_rms_norm(
    x: Float[Array, "*tokens Nv dv"],
    z: Float[Array, "*tokens Nv dv"],
    weight: Float[Array, "dv"],
    *,
    eps: float,
) -> Float[Array, "*tokens Nv dv"]:
    """Return the gated norm of x in x's dtype.

    Args:
        x: delta-rule outputs.
        z: gate inputs, of the same layer input.
        weight: one weight per channel, shared by all heads.
        eps: added to the mean of squares.
    """
    x32, z32 = x.astype(jnp.float32), z.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    gain = jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (normed * gain * jax.nn.silu(z32)).astype(x.dtype)
