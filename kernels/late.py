"""Output buffers that are made when they are needed, and not before.

A loop writes into a buffer that begins as zeros. Zeros depend on nothing, so a compiler that looks for work to do early
makes those of all layers before the first layer runs: on a CPU a prefill of 2,048 tokens through 8 layers of 256
experts kept 2.4 GiB that way, of which 0.5 were in use at a time. Zeros that wait for a number of their own layer
cannot be made early.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def late_zeros(shape: tuple[int, ...], dtype: jnp.dtype, after: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return zeros that cannot be made before `after`, a floating array, is known; whatever that holds."""
    first = after[(0,) * after.ndim]
    # Always 0; a compiler that does not know that a flag is never negative has to compute it.
    zero = jnp.minimum(jnp.isnan(first).astype(jnp.int32), 0)
    return jnp.broadcast_to(zero.astype(dtype), shape)


def scan_late(
    body: Callable[[Any, Any], tuple[Any, Array]], carry: Any, xs: Any, *, after: Float[Array, "..."]
) -> tuple[Any, Float[Array, "length ..."]]:
    """Do as `jax.lax.scan` with one array as output, whose buffer is made once `after` is known."""
    length = jax.tree.leaves(xs)[0].shape[0]
    _, output = jax.eval_shape(body, carry, jax.tree.map(lambda x: x[0], xs))
    outputs = late_zeros((length, *output.shape), output.dtype, after)

    def step(carry: tuple[Any, Array], scanned: tuple[Array, Any]) -> tuple[tuple[Any, Array], None]:
        inner, outputs = carry
        index, x = scanned
        inner, output = body(inner, x)
        return (inner, jax.lax.dynamic_update_index_in_dim(outputs, output, index, 0)), None

    (carry, outputs), _ = jax.lax.scan(step, (carry, outputs), (jnp.arange(length, dtype=jnp.int32), xs))
    return carry, outputs
