"""What the mixer eats: projections of tokens, and the layer's small parameters."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.kernels.agreement import Described


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MixerTokens:
    """Projections of tokens: `[rows, T, ...]` of windows of new tokens, or `[T, ...]` of packed ones.

    They stand side by side, as one product makes them: parts of an array are views for the compiler, and copies for a
    kernel that is given them.

    Attributes:
        packed: `[raw | z | b | a]`, and padding to a multiple of the width of a head.
        num_channels: static: of raw.
        num_heads: static: value heads.
        width: static: of a value head.
    """

    packed: Float[Array, "*tokens W"]
    num_channels: int = field(metadata={"static": True})
    num_heads: int = field(metadata={"static": True})
    width: int = field(metadata={"static": True})

    @classmethod
    def of(
        cls,
        raw: Float[Array, "*tokens C"],
        z: Float[Array, "*tokens Nv dv"],
        b: Float[Array, "*tokens Nv"],
        a: Float[Array, "*tokens Nv"],
    ) -> "MixerTokens":
        """Put the projections side by side."""
        heads, width = z.shape[-2:]
        parts = [raw, z.reshape(*raw.shape[:-1], heads * width), b, a]
        missing = -sum(part.shape[-1] for part in parts) % width
        parts.append(jnp.zeros((*raw.shape[:-1], missing), raw.dtype))
        packed = jnp.concatenate(parts, axis=-1)
        return cls(packed=packed, num_channels=raw.shape[-1], num_heads=heads, width=width)

    @property
    def raw(self) -> Float[Array, "*tokens C"]:
        """q, k and v before the convolution."""
        return self.packed[..., : self.num_channels]

    @property
    def z(self) -> Float[Array, "*tokens Nv dv"]:
        """The output gate."""
        flat = self.packed[..., self.num_channels : self.first_b]
        return flat.reshape(*flat.shape[:-1], self.num_heads, self.width)

    @property
    def b(self) -> Float[Array, "*tokens Nv"]:
        """The write strength, before its sigmoid."""
        return self.packed[..., self.first_b : self.first_b + self.num_heads]

    @property
    def a(self) -> Float[Array, "*tokens Nv"]:
        """The decay, before its softplus."""
        return self.packed[..., self.first_b + self.num_heads : self.first_b + 2 * self.num_heads]

    @property
    def first_b(self) -> int:
        """The column in which b begins; a follows it."""
        return self.num_channels + self.num_heads * self.width


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

    def described(self) -> dict[str, Described]:
        """Return every field with its dimensions, for `agreement.py`."""
        return {
            "weights.taps": Described(self.taps, "K C"),
            "weights.a_log": Described(self.a_log, "Nv", dtype="float32"),
            "weights.dt_bias": Described(self.dt_bias, "Nv", dtype="float32"),
            "weights.norm": Described(self.norm, "dv", dtype="float32"),
        }
