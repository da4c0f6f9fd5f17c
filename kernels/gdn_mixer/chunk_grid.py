"""Packed rows laid out on the chunk grid: every row begins at a chunk of its own, and every chunk is whole.

A row of a prefill may begin anywhere on the packed axis and anywhere in a chunk of its sequence. On the *grid axis* the
row's chunks stand one after the other, from chunk `offset // CHUNK + 2 row` on, as `chunk_slots` numbers them: with a
row that starts at position 70 and has 123 tokens, 6 places before its first token and 63 after its last one hold zeros.
The delta rule takes such zeros, with gates of zero, for tokens that leave a state as it is, so that rows on the grid
axis are rows like any others, of whole chunks.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.gated_delta.chunk_slots import num_slots
from gdn_jax.kernels.numerics import CHUNK

NOBODY = -1  # the row of a chunk that no row uses, the place of a token that no row owns


def num_places(num_tokens: int, num_rows: int) -> int:
    """Return the length of the grid axis, a multiple of CHUNK."""
    return num_slots(num_tokens, num_rows) * CHUNK


def rows_on_grid(rows: PrefillRows) -> PrefillRows:
    """Return the rows as they stand on the grid axis; anchors and exports stay what they are."""
    lead = rows.start % CHUNK
    return replace(
        rows,
        offset=_first_chunk(rows) * CHUNK,
        length=_num_chunks(rows) * CHUNK,
        start=rows.start - lead,
        # A row's last chunk is whole on the grid; that its end is a boundary must not follow from that.
        export_slot=rows.boundaries()[1],
    )


def row_of_chunks(rows: PrefillRows, num_tokens: int) -> Int[Array, "chunks"]:
    """Return the row of each chunk of the grid axis, NOBODY where no row is. An empty row has one that is free."""
    num_rows = rows.offset.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # Whatever the offset of an empty row, the chunk after those of the rows before it is free.
    end = lax.cummax(jnp.where(rows.length > 0, rows.offset + rows.length, 0))
    first = jnp.where(rows.length > 0, _first_chunk(rows), end // CHUNK + 2 * row)
    chunk = jnp.arange(num_slots(num_tokens, num_rows), dtype=jnp.int32)[:, None]
    is_used = (chunk >= first[None]) & (chunk < (first + jnp.maximum(_num_chunks(rows), 1))[None])
    return jnp.sum(jnp.where(is_used, row[None] + 1, 0), axis=1, dtype=jnp.int32) - 1


def place_of_tokens(rows: PrefillRows, num_tokens: int) -> Int[Array, "T"]:
    """Return where each packed token stands on the grid axis; NOBODY for a token that no row owns."""
    row, is_owned = rows.row_of(num_tokens)
    first_place = _first_chunk(rows) * CHUNK + rows.start % CHUNK - rows.offset
    return jnp.where(is_owned, first_place[row] + jnp.arange(num_tokens, dtype=jnp.int32), NOBODY)


def _first_chunk(rows: PrefillRows) -> Int[Array, "rows"]:
    return rows.offset // CHUNK + 2 * jnp.arange(rows.offset.shape[0], dtype=jnp.int32)


def _num_chunks(rows: PrefillRows) -> Int[Array, "rows"]:
    return jnp.where(rows.length > 0, (rows.start % CHUNK + rows.length + CHUNK - 1) // CHUNK, 0)
