"""Linear layers and embeddings: weights as stored, `[out, in]`, no bias.

y = x W^T, products in x's dtype, summed in float32, rounded once to x's dtype
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.numerics import einsum, project


def normal_weight(shape: tuple[int, ...], *, fan_in: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Param:
    """Return a parameter of normal values with deviation fan_in^-0.5, so that unit inputs give unit outputs."""
    return nnx.Param(nnx.initializers.normal(fan_in**-0.5)(rngs.params(), shape, dtype))


class Linear(nnx.Module):
    """A product with one matrix `weight` `[out, in]`."""

    def __init__(self, in_features: int, out_features: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Create the weight.

        Args:
            in_features: width of the input.
            out_features: width of the output.
            dtype: of the weight; inputs have the same.
            rngs: source of the initial values.
        """
        self.weight = normal_weight((out_features, in_features), fan_in=in_features, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*tokens in"]) -> Float[Array, "*tokens out"]:
        """Return the product in x's dtype."""
        return project(x, self.weight[...])

    def in_float32(self, x: Float[Array, "*tokens in"]) -> Float[Array, "*tokens out"]:
        """Return the product of float32 operands, not rounded: for the few outputs that choose or scale others."""
        return einsum("...i,oi->...o", x.astype(jnp.float32), self.weight[...].astype(jnp.float32))


class JoinedLinear(nnx.Module):
    """Several linear layers of one input as one matrix `weight` `[sum of outs, in]`, so that one product makes all."""

    def __init__(self, parts: Sequence[Linear], *, multiple_of: int = 1) -> None:
        """Put the rows of the parts one after the other.

        Args:
            parts: layers of one input width and dtype.
            multiple_of: rows of zeros are added until there are a multiple of so many.
        """
        weights = [part.weight[...] for part in parts]
        ends = np.cumsum([weight.shape[0] for weight in weights])
        self.ends = tuple(int(end) for end in ends)
        padding = jnp.zeros((int(-ends[-1] % multiple_of), weights[0].shape[1]), weights[0].dtype)
        self.weight = nnx.Param(jnp.concatenate([*weights, padding]))

    def __call__(self, x: Float[Array, "*tokens in"]) -> list[Float[Array, "*tokens out"]]:
        """Return the product of each part, in x's dtype."""
        return jnp.split(self.product(x), self.ends, axis=-1)[: len(self.ends)]

    def product(self, x: Float[Array, "*tokens in"]) -> Float[Array, "*tokens outs"]:
        """Return the products of all parts side by side, and zeros where rows were added, in x's dtype."""
        return project(x, self.weight[...])


class Embedding(nnx.Module):
    """A table `weight` `[num, width]` of one vector per token id; also the output matrix of tied models."""

    def __init__(self, num: int, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Create the table.

        Args:
            num: vectors, one per token id.
            width: width of a vector.
            dtype: of the table, and so of what it returns.
            rngs: source of the initial values.
        """
        self.weight = normal_weight((num, width), fan_in=width, dtype=dtype, rngs=rngs)

    def __call__(self, token_ids: Int[Array, "*tokens"]) -> Float[Array, "*tokens width"]:
        """Return the vectors of token ids, which must be in range: others give NaN."""
        return self.weight[...].at[token_ids].get(mode="fill", fill_value=jnp.nan)
