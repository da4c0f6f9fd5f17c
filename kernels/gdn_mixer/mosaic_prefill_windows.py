"""Convolution windows in prefill: from the initial one and from packed inputs to wherever the next ones are wanted.

A window is moved a token at a time. Each thread loads and stores the same channels, so that a slot that is read and
written by one program needs no barrier.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import NULL_SLOT
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_tiles import Row, Tile
from gdn_jax.kernels.mosaic import HeadsOverWarps, everywhere
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

        def store(window: list[Array]) -> None:
            for place, value in enumerate(window):
                there = to(place)
                there[...] = value.astype(there.dtype)

        oldest = token - self.reach
        pl.when(oldest < 0)(lambda: store([self._early_input(row, oldest + j) for j in range(self.reach)]))
        pl.when(oldest >= 0)(lambda: store([self._own_input(row, oldest + j) for j in range(self.reach)]))

    def put_into_slot(self, row: Row, token: Array, slot: Array) -> None:
        """Store them into a slot, but never the null one."""
        pl.when(slot != NULL_SLOT)(lambda: self.put(row, token, lambda place: self.slots.at[slot, place, self.heads]))

    def export(self, row: Row, tile: Tile, export_slot: Any) -> None:
        """Export the window after a tile, if that is at a boundary for which the row has a slot."""
        num_boundaries = export_slot.shape[1]
        if num_boundaries:
            after = tile.begin + tile.size
            boundary = after // CHUNK - 1
            slot = export_slot[row.index, jnp.clip(boundary, 0, num_boundaries - 1)]
            is_listed = tile.reaches_boundary(row.span) & (boundary < num_boundaries)
            self.put_into_slot(row, after - row.span.lead, jnp.where(is_listed, slot, NULL_SLOT))

    def _own_input(self, row: Row, token: Array) -> Float[Array, "heads width"]:
        last = self.tokens.shape[0] - 1  # beyond which an empty row may begin
        return self.layout.load_as_stored(self.tokens.at[jnp.minimum(row.offset + token, last), self.heads])

    def _early_input(self, row: Row, token: Array) -> Float[Array, "heads width"]:
        """Return the input of a token; of the initial window for a negative one."""
        own = self._own_input(row, jnp.clip(token, 0, jnp.maximum(row.length - 1, 0)))
        place = jnp.clip(token + self.reach, 0, self.reach - 1)
        before = self.layout.load_as_stored(self.slots.at[row.read_slot, place, self.heads]).astype(own.dtype)
        # A choice, not a product: the null slot may hold NaN.
        before = jnp.where(everywhere(row.read_slot == NULL_SLOT, own.shape), jnp.zeros_like(before), before)
        return jnp.where(everywhere(token < 0, own.shape), before, own)
