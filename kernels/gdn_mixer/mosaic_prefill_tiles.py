"""Which tokens a program of the kernel before the delta rule sees to: rows, and tiles of their places.

A *tile* is some places of one chunk, as many for all programs. A row's places are counted from the first one of its
first chunk, its tokens from its first one.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from gdn_jax.kernels.gated_delta.mosaic_ring import Span, span_of
from gdn_jax.kernels.numerics import CHUNK


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Some places of one chunk of a row."""

    begin: Array  # the first of them, among the places of the row
    first: Array  # the first one that holds a token, counted from `begin`
    end: Array  # one past the last one that does
    token: Array  # which of the row's tokens stands at `first`
    there: Array  # `begin` on the grid axis
    size: int

    def reaches_boundary(self, span: Span) -> Array:
        """Return whether the chunk, and the row's tokens in it, go up to the tile's end and no further."""
        after = self.begin + self.size
        return (after & (CHUNK - 1) == 0) & (after <= span.end)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row, of which a program has one tile."""

    index: Array
    span: Span
    offset: Array
    length: Array
    read_slot: Array
    write_slot: Array
    size: int  # of a tile

    @property
    def entry(self) -> Array:
        """The tile that has the row's first token."""
        return lax.div(self.span.lead, jnp.int32(self.size))

    def tile(self, number: Array) -> Tile:
        """Return a tile of the row."""
        begin = number * self.size
        first, end = (jnp.clip(place - begin, 0, self.size) for place in (self.span.lead, self.span.end))
        there = self.span.number * CHUNK + begin
        token = jnp.maximum(begin - self.span.lead, 0)
        return Tile(begin=begin, first=first, end=end, token=token, there=there, size=self.size)

    def own_tile(self, tile: Array) -> Array:
        """Return which of the row's tiles one of the grid axis is; for an empty row, the first of its chunk is."""
        per_chunk = CHUNK // self.size
        in_chunk = lax.rem(tile, jnp.int32(per_chunk)) + self.entry
        return jnp.where(self.span.count > 0, tile - self.span.number * per_chunk, in_chunk)

    def tiles_of_program(self, own: Array, reach: int) -> tuple[Array, Array]:
        """Return the first tile that a program convolves, and one past the last one, from its own tile.

        The program of the entry takes the next tile, too, where that begins less than `reach` tokens after the row.
        """
        takes_next = self.size - (self.span.lead & (self.size - 1)) < reach
        begin = jnp.where(takes_next & (own == self.entry + 1), own + 1, own)
        end = jnp.where(takes_next & (own == self.entry), own + 2, own + 1)
        return begin, jnp.maximum(begin, jnp.minimum(end, self.span.count * (CHUNK // self.size)))


def row_at(rows: dict[str, Any], index: Array, size: int) -> Row:
    """Return a row, to be done in tiles of `size` places; for inside a kernel."""
    fields = {name: rows[name][index] for name in ("offset", "length", "read_slot", "write_slot")}
    return Row(index=index, span=span_of(rows, index), size=size, **fields)
