"""Where a token's key and value stand, and writing them there."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.kernels.numerics import CHUNK

NULL_PAGE = 0  # padding may name it; nothing is stored there and nothing reads it


def token_slots(
    block_tables: Int[Array, "rows blocks"],
    row: Int[Array, "*tokens"],
    position: Int[Array, "*tokens"],
    valid: Bool[Array, "*tokens"],
) -> Int[Array, "*tokens"]:
    """Return the token slot of each (row, position); slots of the null block where not `valid` or past the table."""
    block = position // CHUNK
    inside = valid & (block < block_tables.shape[1])
    page = jnp.where(inside, block_tables[row, jnp.minimum(block, block_tables.shape[1] - 1)], 0)
    return page * CHUNK + position % CHUNK


def owned_keys(block_tables: Int[Array, "rows blocks"]) -> Int[Array, "rows"]:
    """Return how many keys the pages hold that each row's table names before its first null page."""
    index = jnp.arange(block_tables.shape[1], dtype=jnp.int32)[None]
    return jnp.where(block_tables == NULL_PAGE, index, block_tables.shape[1]).min(axis=1) * CHUNK


def write_pages(
    pages: Float[Array, "num_pages block Hkv D"],
    values: Float[Array, "*tokens Hkv D"],
    token_slot: Int[Array, "*tokens"],
) -> Float[Array, "num_pages block Hkv D"]:
    """Return the pages with one vector per KV head stored at each token slot, cast to the pages' dtype.

    Vectors for the null page are dropped: its content stays what it was.
    """
    flat = pages.reshape(-1, *pages.shape[2:])
    index = jnp.where(token_slot < pages.shape[1], flat.shape[0], token_slot)  # out of range: skipped by mode="drop"
    return flat.at[index].set(values.astype(pages.dtype), mode="drop").reshape(pages.shape)
