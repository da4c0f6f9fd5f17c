"""Convolution windows in prefill: from the initial one and from packed inputs to wherever the next ones are wanted.

A window is moved a token at a time. A slot may be read and written by one program, and several warps hold its heads
alike: so all of them load a window before one stores it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import NULL_SLOT
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_tiles import Row, Tile
from gdn_jax.kernels.mosaic import HeadsOverWarps, all_arrive, everywhere
from gdn_jax.kernels.numerics import CHUNK


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The heads of a program in global memory: inputs of all tokens, and windows of all slots."""

    tokens: Any  # [T, heads, width]
    slots: Any  # [slots, reach, heads, width]
    heads: Any
    layout: HeadsOverWarps  # of one token

    @property
    def reach(self) -> int:
        """Inputs before a token's own that its convolution takes."""
        return self.slots.shape[1]

    def put(self, row: Row, token: Array, to: Callable[[int], Any]) -> None:
        """Store the last inputs before a token of the row, each where `to` says.

        Those of early tokens are of the initial window in part: nobody else's reads it.
        """
        tokens = [token - self.reach + place for place in range(self.reach)]
        window = [self._own_input(row, token) for token in tokens]

        def with_initial() -> list[Array]:
            return [self._initial_input(row, *pair) for pair in zip(tokens, window, strict=True)]

        entries = lax.cond(tokens[0] < 0, with_initial, lambda: window)
        all_arrive()  # warps that hold the window alike have all loaded it before one stores it
        for place, value in enumerate(entries):
            there = to(place)
            there[...] = value.astype(there.dtype)

    def put_into_slots(self, row: Row, tiles: tuple[Array, Array], write_slot: Array, export_slot: Any) -> None:
        """Export the windows after some tiles, then store the row's final one; never into the null slot.

        Args:
            row: the row.
            tiles: the first tile, and one past the last one.
            write_slot: of the final window.
            export_slot: slots of the rows' boundaries.
        """
        begin, end = tiles

        def put(number: Array, nothing: None) -> None:
            is_final = number == end
            token, slot = self._exported(row, row.tile(number), export_slot)
            token, slot = jnp.where(is_final, row.length, token), jnp.where(is_final, write_slot, slot)

            @pl.when(slot != NULL_SLOT)
            def _() -> None:
                self.put(row, token, lambda place: self.slots.at[slot, place, self.heads])

            return nothing

        lax.fori_loop(begin, end + 1, put, None)

    def _exported(self, row: Row, tile: Tile, export_slot: Any) -> tuple[Array, Array]:
        """Return the token after a tile and, if that is at a boundary, the slot that the row has for it."""
        after, num_boundaries = tile.begin + tile.size, export_slot.shape[1]
        token, slot = after - row.span.lead, jnp.int32(NULL_SLOT)
        if num_boundaries:
            boundary = after // CHUNK - 1
            is_listed = tile.reaches_boundary(row.span) & (boundary < num_boundaries)
            listed = export_slot[row.index, jnp.clip(boundary, 0, num_boundaries - 1)]
            slot = jnp.where(is_listed, listed, slot)
        return token, slot

    def _own_input(self, row: Row, token: Array) -> Float[Array, "heads width"]:
        """Return the input of a token; of any one of the packed axis for a negative one."""
        last = self.tokens.shape[0] - 1  # beyond which an empty row may begin
        packed = jnp.minimum(row.offset + jnp.maximum(token, 0), last)
        return self.layout.load_as_stored(self.tokens.at[packed, self.heads])

    def _initial_input(self, row: Row, token: Array, own: Float[Array, "heads width"]) -> Float[Array, "heads width"]:
        """Return the input of a token, which is its own unless it is negative: that of the initial window then."""
        place = jnp.clip(token + self.reach, 0, self.reach - 1)
        before = self.layout.load_as_stored(self.slots.at[row.read_slot, place, self.heads]).astype(own.dtype)
        # A choice, not a product: the null slot may hold NaN.
        before = jnp.where(everywhere(row.read_slot == NULL_SLOT, own.shape), jnp.zeros_like(before), before)
        return jnp.where(everywhere(token < 0, own.shape), before, own)
