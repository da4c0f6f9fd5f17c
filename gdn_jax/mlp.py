"""Dense feed-forward: y = down( silu(gate x) * up x )."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from gdn_jax.linear import JoinedLinear, Linear


def swiglu(gate: Float[Array, "*tokens I"], up: Float[Array, "*tokens I"]) -> Float[Array, "*tokens I"]:
    """Return silu(gate) * up, in float32, cast once to gate's dtype (Shazeer 2020, arXiv:2002.05202, eq. 6)."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


class DenseMLP(nnx.Module):
    """The feed-forward of dense layers, and the shared expert of mixture layers."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Create the three projections.

        Args:
            hidden_size: width in and out.
            intermediate_size: width between.
            dtype: parameters and activations.
            rngs: source of the initial values.
        """
        self.gate_proj = Linear(hidden_size, intermediate_size, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(hidden_size, intermediate_size, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype=dtype, rngs=rngs)
        self.joined: JoinedLinear | None = nnx.data(None)

    def join(self) -> None:
        """Hold gate and up as one matrix: see `joined.py`."""
        self.joined = JoinedLinear((self.gate_proj, self.up_proj))
        del self.gate_proj, self.up_proj

    def __call__(self, x: Float[Array, "*tokens H"]) -> Float[Array, "*tokens H"]:
        """Return the feed-forward of every token."""
        gate, up = (self.gate_proj(x), self.up_proj(x)) if self.joined is None else self.joined(x)
        return self.down_proj(swiglu(gate, up))
