"""The arithmetic of the mixer's Pallas kernels on vectors in registers, float32; Mosaic has no implicit broadcast."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from gdn_jax.kernels.gated_delta.inputs import L2_EPS
from gdn_jax.kernels.mosaic import over_columns


def convolve(entries: list[Array], taps: list[Array]) -> Float[Array, "heads width"]:
    """Return silu(sum_j w_j u_j), summed from the oldest entry on."""
    total = weighted_sum(entries, taps)
    return total * sigmoid(total)


def weighted_sum(entries: list[Array], taps: list[Array]) -> Float[Array, "heads width"]:
    """Return sum_j w_j u_j, summed from the oldest entry on."""
    total = jnp.zeros_like(entries[0])
    for entry, tap in zip(entries, taps, strict=True):
        total = total + tap * entry
    return total


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x / (1 + exp(-x)) without a division, which takes as long as all the rest: 1 / y = rsqrt(y)^2."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return x * (root * root)


def normalized(x: Float[Array, "heads width"], scale: float | Float[Array, ""]) -> Float[Array, "heads width"]:
    """Return x / sqrt(sum(x^2) + 1e-6) * scale in float32."""
    x = x.astype(jnp.float32)
    return x * over_columns(lax.rsqrt(jnp.sum(x * x, axis=1) + L2_EPS), x.shape) * scale


def sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + jnp.exp(-x))


def softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), right to the last bits for any x.

    Mosaic has no log1p, and log(1 + s) loses a small s. Here log1p(s) = 2 artanh(z) with z = s / (2 + s), at most 1/3,
    so that eight terms of the series leave 2e-9 of it.
    """
    small = jnp.exp(-jnp.abs(x))
    z = small / (2.0 + small)
    series = jnp.zeros_like(z)
    for odd in range(15, 0, -2):
        series = series * (z * z) + 1.0 / odd
    return jnp.maximum(x, 0.0) + 2.0 * z * series
