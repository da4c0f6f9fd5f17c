"""What the mixer eats: projections of tokens, and the layer's small parameters."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MixerTokens:
    """Projections of tokens: `[rows, T, ...]` of windows of new tokens, or `[T, ...]` of packed ones.

    Attributes:
        raw: of q, k and v, before the convolution.
        a: of the decay.
        b: of the write strength.
        z: of the output gate.
    """

    raw: Float[Array, "*tokens C"]
    a: Float[Array, "*tokens Nv"]
    b: Float[Array, "*tokens Nv"]
    z: Float[Array, "*tokens Nv dv"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MixerWeights:
    """Parameters of one layer beside its projections.

    Attributes:
        taps: of the convolution; the last one multiplies the current token.
        a_log: logarithm of the decay rate, float32.
        dt_bias: added to a, float32.
        norm: of the gated norm, float32.
    """

    taps: Float[Array, "K C"]
    a_log: Float[Array, "Nv"]
    dt_bias: Float[Array, "Nv"]
    norm: Float[Array, "dv"]
