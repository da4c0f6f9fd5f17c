"""The convolution of a prefill over one tile of some heads, from packed inputs to the grid axis.

The tile's inputs come to shared memory at once. Its tokens are parted in groups, and the threads do one token of every
group at a time, 8 channels of it each. So a thread walks through a group with the window in registers, and an input is
read and widened once, not once for every tap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gdn_jax.kernels.gdn_mixer.mosaic_arithmetic import silu, weighted_sum
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_tiles import Row, Tile
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_windows import Windows
from gdn_jax.kernels.gdn_mixer.tiles import MOST_TAPS
from gdn_jax.kernels.mosaic import HeadsOverWarps, all_arrive, over_rows, row_by_row

MOST_BEFORE = MOST_TAPS - 1  # inputs before a tile, for which there is room; whole groups of places
_CHANNELS = 1024  # that are convolved at once: 128 threads with 8 each


@dataclass(frozen=True)
class Groups:
    """How the places of a tile are parted.

    Attributes:
        size: places of a tile.
        width: of a head.
    """

    size: int
    width: int

    @property
    def count(self) -> int:
        """Groups of a tile."""
        return _CHANNELS // self.width

    @property
    def length(self) -> int:
        """Places of a group."""
        return self.size // self.count

    @property
    def layout(self) -> HeadsOverWarps:
        """The layout of one token of every group in registers."""
        return HeadsOverWarps(self.count, self.width)

    def at(self, place: Array) -> tuple[Array, Array]:
        """Return the group of a place, and which of it the place is."""
        return lax.div(place, jnp.int32(self.length)), lax.rem(place, jnp.int32(self.length))

    def room(self, num_heads: int, dtype: DTypeLike) -> dict[str, Any]:
        """Return what a tile takes of shared memory, for the inputs before it and its own, and barriers."""
        groups = (MOST_BEFORE + self.size) // self.length
        return {
            "inputs": plgpu.SMEM(
                (groups, self.length, num_heads, self.width), dtype, transforms=row_by_row(self.width)
            ),
            "loaded": plgpu.Barrier(num_arrivals=self.count),
            "loaded_apart": plgpu.Barrier(num_arrivals=self.size),
        }


@dataclass(frozen=True, kw_only=True)
class Channels:
    """The heads of a program: where their inputs are and go.

    Attributes:
        groups: how a tile is parted.
        windows: inputs of all tokens.
        taps: `[K, heads, width]`.
        first_head: of the program, among those of the taps.
        inputs: room for a tile's inputs, by group.
        loaded: a barrier for those of a tile that begins with a token.
        loaded_apart: one for those of any other.
        out: the heads' results on the grid axis, by group `[groups, length, heads, width]`.
        finish: what is done with convolved tokens, in registers; keeps their dtype.
    """

    groups: Groups
    windows: Windows
    taps: Any
    first_head: Array
    inputs: Any
    loaded: Any
    loaded_apart: Any
    out: Any
    finish: Callable[[Array], Array]

    def run(self, row: Row, tile: Tile) -> None:
        """Convolve a tile of the row; zeros where no token stands."""

        @pl.when(tile.end > tile.first)
        def _() -> None:
            self._load(row, tile)

            def run_head(member: Array, nothing: None) -> None:
                self._convolve(tile, member)
                return nothing

            lax.fori_loop(0, self.out.shape[2], run_head, None)

        @pl.when(tile.end - tile.first < tile.size)
        def _() -> None:
            all_arrive()  # all have stored what stood beside the tokens
            self._clear(tile)

        all_arrive()  # all are done with the inputs

    def _input_at(self, place: Array) -> Any:
        return self.inputs.at[self.groups.at(place + MOST_BEFORE)]

    def _load(self, row: Row, tile: Tile) -> None:
        """Bring the inputs of all places, and of those before them."""
        tokens, heads = self.windows.tokens, self.windows.heads
        packed, is_whole, length = row.offset + tile.token, tile.first == 0, self.groups.length

        @pl.when(is_whole)
        def _() -> None:
            for group in range(self.groups.count):
                source = tokens.at[pl.ds(packed + group * length, length), heads]
                plgpu.copy_gmem_to_smem(source, self.inputs.at[MOST_BEFORE // length + group], self.loaded)

        @pl.when(~is_whole)
        def _() -> None:
            # Token by token, to any place; always as many copies, which is what the barrier counts.
            def load_one(index: Array, nothing: None) -> None:
                token = packed + jnp.minimum(index, tile.end - tile.first - 1)
                there = self._input_at((tile.first + index) & (tile.size - 1))
                plgpu.copy_gmem_to_smem(tokens.at[token, heads], there, self.loaded_apart)
                return nothing

            lax.fori_loop(0, tile.size, load_one, None)
            plgpu.barrier_wait(self.loaded_apart)  # some have come to where the window is to stand

        oldest = tile.first - self.windows.reach
        self.windows.put(row, tile.token, lambda place: self._input_at(oldest + place))
        all_arrive()  # the window is there
        pl.when(is_whole)(lambda: plgpu.barrier_wait(self.loaded))

    def _convolve(self, tile: Tile, member: Array) -> None:
        """Do all places for one head; what comes to stand beside the tokens is anything."""
        layout, length, num_taps = self.groups.layout, self.groups.length, self.taps.shape[0]

        def load_inputs(back: int) -> Float[Array, "groups width"]:
            """Return the inputs of one token of each group, counted from the group's first one."""
            group, which = divmod(MOST_BEFORE + back, length)
            return layout.load(self.inputs.at[pl.ds(group, self.groups.count), which, member])

        def load_tap(tap: int) -> Float[Array, "groups width"]:
            source = self.taps.at[tap, self.first_head + member]
            vector = plgpu.load(source, layout=layout.matrix.reduce(0), optimized=False)
            return over_rows(vector.astype(jnp.float32), layout.shape)

        taps = [load_tap(tap) for tap in range(num_taps)]
        there = pl.ds(lax.div(tile.there, jnp.int32(length)), self.groups.count)
        reached = [load_inputs(back) for back in range(1 - num_taps, 0)]
        for which in range(length):
            reached = [*reached, load_inputs(which)][-num_taps:]
            mixed = silu(weighted_sum(reached, taps)).astype(self.out.dtype)
            # Rounded here as one, lest the compiler round number by number what it widens again.
            self.out[there, which, member] = self.finish(lax.optimization_barrier(mixed))

    def _clear(self, tile: Tile) -> None:
        """Store zeros where no token stands."""
        layout = self.windows.layout

        def clear(index: Array, nothing: None) -> None:
            place = jnp.where(index < tile.first, index, index - tile.first + tile.end)
            zeros = jnp.zeros(layout.shape, self.out.dtype)
            self.out[self.groups.at(tile.there + place)] = plgpu.layout_cast(zeros, layout.matrix)
            return nothing

        lax.fori_loop(0, tile.first + tile.size - tile.end, clear, None)
