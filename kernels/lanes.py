"""Buffers that follow a request, indexed by its lane: what rows read of them, and what rows put back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def gather_lanes[Tree](windows: Tree, lane: Int[Array, "rows"]) -> Tree:
    """Return each row's lane of every array of a pytree `[lanes, ...]`; a lane past the end reads the last one."""
    return jax.tree.map(lambda array: array[jnp.minimum(lane, array.shape[0] - 1)], windows)


def scatter_lanes[Tree](windows: Tree, lane: Int[Array, "rows"], values: Tree) -> Tree:
    """Return the pytree with the first tokens of each row's lane replaced; lanes past the end are dropped.

    A row narrower than the lanes' windows leaves the rest of the window as it was: nothing replays past `num_replay`.
    """

    def put(array: Array, value: Array) -> Array:
        return array.at[lane, : value.shape[1]].set(value.astype(array.dtype), mode="drop")

    return jax.tree.map(put, windows, values)
