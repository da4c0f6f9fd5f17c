"""The gates of a prefill: g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), float32.

A program makes those of all heads for one tile: its tokens' a and b are copied to shared memory at once, and each
thread does one token and head at a time.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from gdn_jax.kernels.gdn_mixer.mosaic_arithmetic import sigmoid, softplus
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_tiles import Row, Tile
from gdn_jax.kernels.mosaic import everywhere, over_rows, row_by_row, store_apart
from gdn_jax.kernels.numerics import CHUNK

_LANES, _THREADS = 32, 128
_MOST_HEADS = 16  # at once


@dataclass(frozen=True)
class PlacesOverThreads:
    """One number for each of some places and heads in registers, a thread for each.

    Attributes:
        num_heads: a power of two up to 16.
    """

    num_heads: int

    @property
    def num_places(self) -> int:
        """Places at once; of a single head no more than a warp has lanes, and all warps hold them alike."""
        return _THREADS // self.num_heads if self.num_heads > 1 else _LANES

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the numbers."""
        return self.num_places, self.num_heads

    @property
    def matrix(self) -> Any:
        """The layout of the numbers."""
        if self.num_heads == 1:
            alike = (plgpu.Replicated(4),)
            return plgpu.Layout.TILED(plgpu.Tiling((self.shape,)), warp_dims=alike, lane_dims=(-2,), vector_dim=-1)
        tiling = plgpu.Tiling((self.shape, (_LANES // self.num_heads, self.num_heads), (1,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def heads_at_once(num_value: int) -> int:
    """Return for how many heads gates are made at once: a power of two that divides their number."""
    return min(num_value & -num_value, _MOST_HEADS)


def gates_room(size: int, num_value: int, width: int, dtype: DTypeLike) -> Any:
    """Return room for a and b of a tile's tokens, and for as many rows before them.

    Tokens are copied to the last `size` rows. Where the tile's first places hold none, they are read from earlier ones.
    """
    # Fewer heads are too short for a swizzle, and for a copy's pieces.
    transforms = row_by_row(_MOST_HEADS) if heads_at_once(num_value) == _MOST_HEADS else ()
    return plgpu.SMEM((2 * size, -(-2 * num_value // width), width), dtype, transforms=transforms)


def run_gates(
    tokens: Any, row: Row, tile: Tile, weights: dict[str, Any], gates: dict[str, Any], room: Any, loaded: Any
) -> None:
    """Make the gates of a tile, zeros at places that hold no token; for inside a kernel.

    Args:
        tokens: packed projections `[T, blocks, width]`, of which the last blocks hold b and a.
        row: the row.
        tile: which of its places.
        weights: `a_log` and `dt_bias`.
        gates: where `g` and `beta` of the tile's chunk go, `[CHUNK, Nv]`.
        room: as `gates_room` says.
        loaded: a barrier.
    """
    (num_rows, num_blocks, width), num_value = room.shape, gates["g"].shape[1]
    size, layout = num_rows // 2, PlacesOverThreads(heads_at_once(num_value))
    num_places, num_heads = layout.shape

    def run(index: Array, nothing: None) -> None:
        in_tile = jnp.int32(size // num_places)
        first_head, first_place = lax.div(index, in_tile) * num_heads, lax.rem(index, in_tile) * num_places
        heads = pl.ds(first_head, num_heads)

        def load(first_column: int) -> Array:
            column = first_column + first_head
            rows = pl.ds(size + first_place - tile.first, num_places)
            columns = pl.ds(lax.rem(column, jnp.int32(width)), num_heads)
            source = room.at[rows, lax.div(column, jnp.int32(width)), columns]
            return plgpu.load(source, layout=layout.matrix, optimized=False).astype(jnp.float32)

        def parameter(name: str) -> Array:
            vector = plgpu.load(weights[name].at[heads], layout=layout.matrix.reduce(0), optimized=False)
            return over_rows(vector, layout.shape)

        place = plgpu.broadcasted_iota(jnp.int32, layout.shape, 0, layout=layout.matrix)
        place = place + everywhere(first_place, layout.shape)
        is_token = (place >= everywhere(tile.first, layout.shape)) & (place < everywhere(tile.end, layout.shape))

        def store(name: str, values: Array) -> None:
            there = pl.ds((tile.begin & (CHUNK - 1)) + first_place, num_places)
            store_apart(gates[name].at[there, heads], jnp.where(is_token, values, jnp.zeros_like(values)))

        store("g", -jnp.exp(parameter("a_log")) * softplus(load(num_value) + parameter("dt_bias")))
        store("beta", sigmoid(load(0)))
        return nothing

    @pl.when(tile.end > tile.first)
    def _() -> None:
        blocks = pl.ds(tokens.shape[1] - num_blocks, num_blocks)
        plgpu.copy_gmem_to_smem(
            tokens.at[pl.ds(row.offset + tile.token, size), blocks], room.at[pl.ds(size, size)], loaded
        )
        plgpu.barrier_wait(loaded)

    lax.fori_loop(0, size // num_places * (num_value // num_heads), run, None)
