"""What the gated delta rule eats: normalised queries and keys, values, log decay and beta."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.kernels.agreement import Described

L2_EPS = 1e-6  # added to the sum of squares; fixed by the architecture, not rms_norm_eps


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeltaInputs:
    """Keys, values and gates of some tokens, rounded exactly as first used; what a replay window keeps.

    Attributes:
        k: l2-normalised keys, activation dtype.
        v: values, activation dtype.
        g: log decay, float32, <= 0.
        beta: write strength, float32, in [0, 1].
    """

    k: Float[Array, "*tokens Nk dk"]
    v: Float[Array, "*tokens Nv dv"]
    g: Float[Array, "*tokens Nv"]
    beta: Float[Array, "*tokens Nv"]

    def described(self, name: str, tokens: str) -> dict[str, Described]:
        """Return every field with its dimensions, for `agreement.py`, by the name of the object and those of tokens."""
        return {
            f"{name}.k": Described(self.k, f"{tokens} Nk dk"),
            f"{name}.v": Described(self.v, f"{tokens} Nv dv"),
            f"{name}.g": Described(self.g, f"{tokens} Nv", dtype="float32"),
            f"{name}.beta": Described(self.beta, f"{tokens} Nv", dtype="float32"),
        }


def l2_normalize(x: Float[Array, "*tokens heads width"], scale: float = 1.0) -> Float[Array, "*tokens heads width"]:
    """Return x / sqrt(sum(x^2) + 1e-6) * scale over the last axis, in float32, cast back at the end."""
    x32 = x.astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + L2_EPS)
    return (x32 * norm * scale).astype(x.dtype)


def gates(
    a: Float[Array, "*tokens Nv"],
    b: Float[Array, "*tokens Nv"],
    a_log: Float[Array, "Nv"],
    dt_bias: Float[Array, "Nv"],
) -> tuple[Float[Array, "*tokens Nv"], Float[Array, "*tokens Nv"]]:
    """Return (g, beta): g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), in float32."""
    a32, b32 = a.astype(jnp.float32), b.astype(jnp.float32)
    lead = tuple(range(a.ndim - 1))
    rate, bias = (jnp.expand_dims(x.astype(jnp.float32), lead) for x in (a_log, dt_bias))
    return -jnp.exp(rate) * jax.nn.softplus(a32 + bias), jax.nn.sigmoid(b32)


@partial(jax.jit, static_argnames=("num_key_heads", "key_dim"))
def delta_inputs(
    conv_out: Float[Array, "*tokens C"],
    a: Float[Array, "*tokens Nv"],
    b: Float[Array, "*tokens Nv"],
    a_log: Float[Array, "Nv"],
    dt_bias: Float[Array, "Nv"],
    *,
    num_key_heads: int,
    key_dim: int,
) -> tuple[Float[Array, "*tokens Nk dk"], DeltaInputs]:
    """Split the convolution's output into q, k, v, normalise q and k, and form the gates.

    `conv_out` is [q of all heads | k of all heads | v of all heads], after SiLU; q is also scaled by dk^-0.5.

    Returns:
        q, and the inputs that a replay window keeps.
    """
    lead, width = conv_out.shape[:-1], num_key_heads * key_dim
    q, k, v = jnp.split(conv_out, (width, 2 * width), axis=-1)
    q = l2_normalize(q.reshape(*lead, num_key_heads, key_dim), key_dim**-0.5)
    k = l2_normalize(k.reshape(*lead, num_key_heads, key_dim))
    v = v.reshape(*lead, a.shape[-1], -1)
    g, beta = gates(a, b, a_log, dt_bias)
    return q, DeltaInputs(k=k, v=v, g=g, beta=beta)
