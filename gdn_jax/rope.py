"""Rotary position embedding on the first R channels of each head, halves convention, with YaRN.

    a, b = x[0 : R/2], x[R/2 : R];   angle_i = t base^(-2i/R);   a' = a cos - b sin,   b' = b cos + a sin

(Su et al. 2021, arXiv:2104.09864.) Frequencies use the rotated width R, not the head's. YaRN (Peng et al. 2023,
arXiv:2309.00071, "NTK-by-parts" interpolation) divides slow frequencies by a factor, keeps fast ones, ramps linearly
between, and scales cos and sin. It is static: it changes short contexts too. Text has equal positions on all three axes
of the multi-axis rotation in some configs, which is then exactly this one.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gdn_jax.config import ModelConfig, YarnConfig


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Return the angle per position of each channel pair, and what cos and sin are multiplied by.

    Formed in float64.

    Returns:
        Float32 `[R/2]`, fastest first; the scale, 1 without YaRN.
    """
    width, base = config.rotary_dim, config.rope_theta
    plain = base ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if config.yarn is None:
        return plain.astype(np.float32), 1.0
    slowed = _slowed_share(config.yarn, width, base)
    blend = plain * (1.0 - slowed) + plain / config.yarn.factor * slowed
    return blend.astype(np.float32), config.yarn.attention_factor


def _slowed_share(yarn: YarnConfig, width: int, base: float) -> np.ndarray:
    """Return, per channel pair, how much of its frequency is the divided one: 0 for fast pairs, 1 for slow ones."""

    def pair_of(rotations: float) -> float:
        """Return the (fractional) pair that turns this often over the original context."""
        turns = yarn.original_max_position / (2.0 * math.pi * rotations)
        return width * math.log(turns) / (2.0 * math.log(base))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), width - 1)
    return np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)


def rotate(
    x: Float[Array, "*tokens heads D"],
    position: Int[Array, "*tokens"],
    inv_freq: Float[np.ndarray, "half"],
    scale: float,
) -> Float[Array, "*tokens heads D"]:
    """Rotate the first 2 * half channels of every head; the others pass through.

    Angles, cos and sin are float32 (half precision shows at large positions); the result is cast to x's dtype.

    Args:
        x: queries or keys.
        position: of each token.
        inv_freq: angle per position, as from `inverse_frequencies`.
        scale: what cos and sin are multiplied by.
    """
    half = inv_freq.shape[0]
    frequency = jnp.expand_dims(jnp.asarray(inv_freq), tuple(range(position.ndim)))
    angle = (position.astype(jnp.float32)[..., None] * frequency)[..., None, :]  # the same for every head
    cos, sin = jnp.cos(angle) * scale, jnp.sin(angle) * scale
    a, b, rest = jnp.split(x, (half, 2 * half), axis=-1)
    a32, b32 = a.astype(jnp.float32), b.astype(jnp.float32)
    turned = jnp.concatenate([a32 * cos - b32 * sin, b32 * cos + a32 * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
