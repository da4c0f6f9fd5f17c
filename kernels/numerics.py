"""Matrix products with their precision spelled out, and the small float32 pieces every kernel shares.

A float32 product is IEEE float32 everywhere (never TF32); a bfloat16 product accumulates in float32.
Callers decide where a result is rounded, so functions here return float32; `project` alone rounds its result, once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CHUNK = 64  # tokens handled together in the chunkwise delta rule; the grid is absolute


def einsum(spec: str, *operands: Float[Array, "..."]) -> Float[Array, "..."]:
    """Contract `operands`, multiplying in their own dtype and accumulating in float32.

    Differentiated, products of 16-bit operands are 16-bit ones again: the gradient of the result is rounded to the
    operands' dtype first. Unrounded, every product of a backward pass would be float32, ten times as slow on a GPU.

    Args:
        spec: an einsum specification.
        operands: arrays of one floating dtype.

    Returns:
        The contraction in float32.
    """
    if all(operand.dtype == jnp.float32 for operand in operands):
        return _contract(spec, *operands)
    return _contract_16_bit(spec, *operands)


def project(x: Float[Array, "*tokens in"], weight: Float[Array, "out in"]) -> Float[Array, "*tokens out"]:
    """Return x W^T, accumulated in float32 and rounded once to x's dtype.

    The product itself rounds, so that float32 numbers, twice as large, never pass through memory. For a single token a
    GPU makes no product of it but sums, which it would make in the dtype of the result.

    Args:
        x: vectors of one floating dtype.
        weight: in that dtype, too.
    """
    if x.dtype == jnp.float32 or x.size == x.shape[-1]:
        return einsum("...i,oi->...o", x, weight).astype(x.dtype)
    return jnp.einsum("...i,oi->...o", x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=x.dtype)


def _contract(spec: str, *operands: Array) -> Array:
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract_16_bit(spec: str, *operands: Array) -> Array:
    return _contract(spec, *operands)


def _contract_forward(spec: str, *operands: Array) -> tuple[Array, tuple[Array, ...]]:
    return _contract(spec, *operands), operands


def _contract_backward(spec: str, operands: tuple[Array, ...], gradient: Array) -> tuple[Array, ...]:
    rounded = partial(jnp.einsum, spec, precision=jax.lax.Precision.HIGHEST)  # its result has the operands' dtype
    return jax.vjp(rounded, *operands)[1](gradient.astype(operands[0].dtype))


_contract_16_bit.defvjp(_contract_forward, _contract_backward)
