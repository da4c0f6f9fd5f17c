"""Building large device arrays piece by piece, so that filling one needs little memory beside it.

A slab is a range of an array's leading axis. Arrays of more than one slab are written in place, slab by slab; whoever
makes the slabs (a file reader, a random generator) holds one at a time.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int

SLAB_BYTES = 64 * 2**20  # small beside a model, large beside the fixed cost of a transfer


def slab_ranges(shape: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """Cut the leading axis into ranges (start, stop) of at most SLAB_BYTES each, but at least one index.

    Args:
        shape: of the whole array, one axis or more; a vector is never cut.
        itemsize: bytes per element.
    """
    length = shape[0]
    step = length if len(shape) == 1 else max(1, SLAB_BYTES // max(1, math.prod(shape[1:]) * itemsize))
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def build_array(
    target: jax.ShapeDtypeStruct, make_slab: Callable[[int, int], Float[Array, "..."]], put_on: Sharding | None
) -> Float[Array, "..."]:
    """Fill an array on the device from slabs, waiting for each, so that one slab at a time is in flight.

    Args:
        target: shape and dtype.
        make_slab: returns `whole[start:stop]` on the device, in the target's dtype.
        put_on: where it goes, as a whole; None is JAX's default device.
    """
    ranges = slab_ranges(target.shape, target.dtype.itemsize)
    if len(ranges) == 1:
        return make_slab(*ranges[0]).block_until_ready()
    whole = jnp.zeros(target.shape, target.dtype, device=put_on)
    for start, stop in ranges:
        whole = _store(whole, make_slab(start, stop), start).block_until_ready()
    return whole


@partial(jax.jit, donate_argnums=0)
def _store(whole: Float[Array, "..."], slab: Float[Array, "..."], start: int | Int[Array, ""]) -> Float[Array, "..."]:
    return jax.lax.dynamic_update_slice_in_dim(whole, slab, start, axis=0)
