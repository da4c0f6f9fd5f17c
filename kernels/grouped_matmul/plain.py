"""Grouped product in plain JAX: a scan over row tiles, each of one group, with a slice of the weights.

A tile is `tile_rows` consecutive rows that begin inside one group; where it reaches into the next group, that group's
own tiles, which come later, overwrite what it wrote. So tiles are contiguous slices, and nothing is gathered or padded
per group. `jax.lax.ragged_dot` is not used: on GPUs it becomes one dense product over all groups.

The gradient is written out, since a scan's own would add a gradient of the size of all weights once per tile.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.late import late_zeros
from gdn_jax.kernels.numerics import einsum

MIN_TILE_ROWS = 8
MAX_TILE_ROWS = 128


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "M K"], weight: Float[Array, "E N K"], group_sizes: Int[Array, "E"]
) -> Float[Array, "M N"]:
    """Multiply tile by tile; products in x's dtype, sums in float32."""
    return _multiply("mk,nk->mn", x, weight, group_sizes)


def tile_rows(num_rows: int, num_groups: int) -> int:
    """Return the rows of a tile: the mean group size rounded up to a power of two, within bounds."""
    mean = -(-num_rows // num_groups)
    return min(max(1 << (mean - 1).bit_length(), MIN_TILE_ROWS), MAX_TILE_ROWS)


def _tiles(
    num_rows: int, group_sizes: Int[Array, "E"], height: int
) -> tuple[Int[Array, "tiles"], Int[Array, "tiles"], Int[Array, "tiles"]]:
    """Return each tile's first row, its group, and how many of its rows are the group's.

    Tiles past the last group's start at or after its end, so they write rows that no group owns; they own none.
    """
    num_groups = group_sizes.shape[0]
    count = -(-group_sizes // height)
    count_end, row_end = jnp.cumsum(count), jnp.cumsum(group_sizes)
    # Every group's last tile may be partial, and every tile in use holds a row.
    tile = jnp.arange(min(num_rows, num_rows // height + num_groups), dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(count_end, tile, side="right"), num_groups - 1)
    first = row_end[group] - group_sizes[group] + (tile - count_end[group] + count[group]) * height
    return first, group, jnp.clip(row_end[group] - first, 0, height)


def _multiply(
    spec: str, x: Float[Array, "M K"], weight: Float[Array, "E _ _"], group_sizes: Int[Array, "E"]
) -> Float[Array, "M N"]:
    """Contract each row with its group's matrix as `spec` says ("mk,nk->mn", or "mk,kn->mn" for stored [in, out])."""
    num_rows = x.shape[0]
    height = tile_rows(num_rows, weight.shape[0])
    width = weight.shape[1 + spec.split(",")[1].index("n")]
    padded = jnp.pad(x, ((0, height), (0, 0)))  # the last tiles may reach past the rows

    def step(out: Float[Array, "rows N"], tile: tuple[Array, Array, Array]) -> tuple[Float[Array, "rows N"], None]:
        first, group, _ = tile
        rows = jax.lax.dynamic_slice_in_dim(padded, first, height)
        answer = einsum(spec, rows, weight[group]).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, answer, first, 0), None

    out = late_zeros((num_rows + height, width), x.dtype, x)
    out, _ = jax.lax.scan(step, out, _tiles(num_rows, group_sizes, height))
    owned = jnp.arange(num_rows) < group_sizes.sum()
    return jnp.where(owned[:, None], out[:num_rows], 0)


def _forward(
    x: Float[Array, "M K"], weight: Float[Array, "E N K"], group_sizes: Int[Array, "E"]
) -> tuple[Float[Array, "M N"], tuple[Array, Array, Array]]:
    return grouped_matmul(x, weight, group_sizes), (x, weight, group_sizes)


def _backward(
    kept: tuple[Array, Array, Array], gradient: Float[Array, "M N"]
) -> tuple[Float[Array, "M K"], Float[Array, "E N K"], None]:
    """Return the gradients of x and of the weights, the latter summed in float32 one tile at a time."""
    x, weight, group_sizes = kept
    num_rows = x.shape[0]
    height = tile_rows(num_rows, weight.shape[0])
    pad = partial(jnp.pad, pad_width=((0, height), (0, 0)))
    padded_x, padded_gradient = pad(x), pad(gradient)

    def step(total: Float[Array, "E N K"], tile: tuple[Array, Array, Array]) -> tuple[Float[Array, "E N K"], None]:
        first, group, owned = tile
        mine = (jnp.arange(height) < owned)[:, None]
        rows, gradients = (
            jnp.where(mine, jax.lax.dynamic_slice_in_dim(padded, first, height), 0)
            for padded in (padded_x, padded_gradient)
        )
        return total.at[group].add(einsum("mn,mk->nk", gradients, rows)), None

    total = jnp.zeros(weight.shape, jnp.float32)
    total, _ = jax.lax.scan(step, total, _tiles(num_rows, group_sizes, height))
    return _multiply("mk,kn->mn", gradient, weight, group_sizes), total.astype(weight.dtype), None


grouped_matmul.defvjp(_forward, _backward)
