"""Packed rows laid out on the chunk grid: every row begins at a chunk of its own, and every chunk is whole.

A row of a prefill may begin anywhere on the packed axis and anywhere in a chunk of its sequence. On the *grid axis* the
row's chunks stand one after the other, from chunk `offset // CHUNK + 2 row` on: with a row that starts at position 70
and has 123 tokens, 6 places before its first token and 63 after its last one hold zeros. The delta rule takes such
zeros, with gates of zero, for tokens that leave a state as it is.

A span of n tokens touches at most n // CHUNK + 2 chunks, so that rows never share one, and a kernel that knows a row's
span knows its chunks: no running sum over rows is needed. `chunk_table.py`, for plain JAX, packs chunks closely by such
a sum, and gives an empty row one, too.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.numerics import CHUNK

NOBODY = -1  # the row of a chunk that no row uses, the place of a token that no row owns, the token of a free place


def num_chunks(num_tokens: int, num_rows: int) -> int:
    """Return how many chunks the grid axis has."""
    return num_tokens // CHUNK + 2 * num_rows


def num_places(num_tokens: int, num_rows: int) -> int:
    """Return the length of the grid axis, a multiple of CHUNK."""
    return num_chunks(num_tokens, num_rows) * CHUNK


def used_chunks(rows: PrefillRows, count: int) -> Bool[Array, "chunks"]:
    """Return which chunks of the grid axis, of which there are `count`, hold tokens."""
    return jnp.any(_is_of_row(_first_chunk(rows), _num_chunks(rows), count), axis=1)


def row_of_chunks(rows: PrefillRows, num_tokens: int) -> Int[Array, "chunks"]:
    """Return the row of each chunk of the grid axis, NOBODY where no row is. An empty row has one that is free."""
    num_rows = rows.offset.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # Whatever the offset of an empty row, the chunk after those of the rows before it is free.
    end = lax.cummax(jnp.where(rows.length > 0, rows.offset + rows.length, 0))
    first = jnp.where(rows.length > 0, _first_chunk(rows), end // CHUNK + 2 * row)
    is_of_row = _is_of_row(first, jnp.maximum(_num_chunks(rows), 1), num_chunks(num_tokens, num_rows))
    return jnp.sum(jnp.where(is_of_row, row[None] + 1, 0), axis=1, dtype=jnp.int32) - 1


def place_of_tokens(rows: PrefillRows, num_tokens: int) -> Int[Array, "T"]:
    """Return where each packed token stands on the grid axis; NOBODY for a token that no row owns."""
    row, is_owned = rows.row_of(num_tokens)
    first_place = _first_chunk(rows) * CHUNK + rows.start % CHUNK - rows.offset
    return jnp.where(is_owned, first_place[row] + jnp.arange(num_tokens, dtype=jnp.int32), NOBODY)


def token_of_places(place: Int[Array, "T"], num_places: int) -> Int[Array, "places"]:
    """Return which packed token stands at each place, NOBODY where none does; from `place_of_tokens`."""
    there = jnp.where(place == NOBODY, num_places, place)  # beyond the axis, where nothing is written
    token = jnp.arange(place.shape[0], dtype=jnp.int32)
    return jnp.full((num_places,), NOBODY, jnp.int32).at[there].set(token, mode="drop")


def take(array: Shaped[Array, "there ..."], index: Int[Array, "here"]) -> Shaped[Array, "here ..."]:
    """Return entries of `array`, zeros for an index of NOBODY whatever the array holds."""
    is_there = (index != NOBODY).reshape(-1, *(1,) * (array.ndim - 1))
    return jnp.where(is_there, array[jnp.maximum(index, 0)], jnp.zeros((), array.dtype))


def _is_of_row(first: Int[Array, "rows"], length: Int[Array, "rows"], count: int) -> Bool[Array, "chunks rows"]:
    """Return which of `count` chunks are among the `length` ones of a row from `first` on."""
    chunk = jnp.arange(count, dtype=jnp.int32)[:, None]
    return (chunk >= first[None]) & (chunk < (first + length)[None])


def _first_chunk(rows: PrefillRows) -> Int[Array, "rows"]:
    return rows.offset // CHUNK + 2 * jnp.arange(rows.offset.shape[0], dtype=jnp.int32)


def _num_chunks(rows: PrefillRows) -> Int[Array, "rows"]:
    return jnp.where(rows.length > 0, (rows.start % CHUNK + rows.length + CHUNK - 1) // CHUNK, 0)
