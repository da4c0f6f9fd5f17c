"""Packed rows re-laid on the absolute chunk grid: a static table of chunks, and the way back.

Chunk c of a sequence covers positions [CHUNK c, CHUNK (c + 1)) whatever span is computed, so a token always stands at
the same place inside its chunk. A row that starts at position 70 with 123 tokens takes three chunks:

    positions    64..127              128..191    192..255
    tokens       58, from place 6     64          1, at place 0

Places that no token of the row takes are pads. Every row has at least one chunk, so that an empty row still moves its
state from its read slot to its write slot.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from gdn_jax.kernels.anchors import NULL_SLOT, PrefillRows
from gdn_jax.kernels.numerics import CHUNK


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChunkTable:
    """Chunks in row order, then unused ones; what each reads and writes, and where each packed token stands.

    Attributes:
        row: the row a chunk belongs to; in range for an unused chunk.
        is_first: whether the chunk is its row's first one, which loads the state at `read_slot`.
        read_slot: the row's state before its first token.
        export_slot: receives the state at the chunk's end; null unless that is an exported boundary.
        write_slot: receives the state at the chunk's end; null unless the row ends here.
        tokens_done: tokens of the row up to and with this chunk.
        token: packed index of the token at each place; in range for a pad.
        is_token: whether a place holds a token.
        place: where each packed token stands, as `chunk * CHUNK + place`; in range for an unowned token.
        is_owned: whether any row owns the packed token.
    """

    row: Int[Array, "chunks"]
    is_first: Bool[Array, "chunks"]
    read_slot: Int[Array, "chunks"]
    export_slot: Int[Array, "chunks"]
    write_slot: Int[Array, "chunks"]
    tokens_done: Int[Array, "chunks"]
    token: Int[Array, "chunks places"]
    is_token: Bool[Array, "chunks places"]
    place: Int[Array, "T"]
    is_owned: Bool[Array, "T"]

    def take(self, packed: Shaped[Array, "T ..."]) -> Shaped[Array, "chunks places ..."]:
        """Return `packed` laid out by chunk, zeros at the pads whatever the unowned tokens hold."""
        mask = self.is_token.reshape(self.is_token.shape + (1,) * (packed.ndim - 1))
        return jnp.where(mask, packed[self.token], jnp.zeros((), packed.dtype))

    def put(self, by_chunk: Shaped[Array, "chunks places ..."]) -> Shaped[Array, "T ..."]:
        """Return `by_chunk` laid out on the packed axis, zeros for tokens that no row owns."""
        flat = by_chunk.reshape(-1, *by_chunk.shape[2:])
        mask = self.is_owned.reshape(self.is_owned.shape + (1,) * (flat.ndim - 1))
        return jnp.where(mask, flat[self.place], jnp.zeros((), flat.dtype))


def max_chunks(num_tokens: int, num_rows: int) -> int:
    """Return the most chunks that rows of `num_tokens` tokens in all can touch, one at least per row.

    A row's first two tokens may stand in two chunks (positions 63 and 64); each further chunk takes CHUNK tokens more.
    """
    pairs = min(num_rows, num_tokens // 2)
    return num_rows + pairs + (num_tokens - 2 * pairs) // CHUNK


def chunk_table(rows: PrefillRows, num_tokens: int) -> ChunkTable:
    """Lay packed rows out on the chunk grid.

    Args:
        rows: the packing, the anchors and the exports.
        num_tokens: length of the packed axis.

    Returns:
        A table of `max_chunks` chunks, whatever the rows.
    """
    lead = rows.start % CHUNK  # pads before a row's first token
    num_chunks = jnp.maximum((lead + rows.length + CHUNK - 1) // CHUNK, 1)
    chunks_before = jnp.cumsum(num_chunks) - num_chunks

    chunk = jnp.arange(max_chunks(num_tokens, rows.offset.shape[0]), dtype=jnp.int32)
    inside = (chunk[:, None] >= chunks_before[None]) & (chunk[:, None] < (chunks_before + num_chunks)[None])
    is_used, row = inside.any(axis=1), jnp.argmax(inside, axis=1).astype(jnp.int32)
    index = chunk - chunks_before[row]  # which of the row's chunks
    is_last = is_used & (index == num_chunks[row] - 1)

    row_token = (index * CHUNK - lead[row])[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    is_token = is_used[:, None] & (row_token >= 0) & (row_token < rows.length[row][:, None])
    token = jnp.clip(rows.offset[row][:, None] + row_token, 0, max(num_tokens - 1, 0))

    owner, is_owned = rows.row_of(num_tokens)
    place = chunks_before[owner] * CHUNK + lead[owner] + jnp.arange(num_tokens, dtype=jnp.int32) - rows.offset[owner]
    return ChunkTable(
        row=row,
        is_first=is_used & (index == 0),
        read_slot=rows.read_slot[row],
        export_slot=jnp.where(is_used, _export_at(rows, row, index), NULL_SLOT),
        write_slot=jnp.where(is_last, rows.write_slot[row], NULL_SLOT),
        tokens_done=jnp.minimum((index + 1) * CHUNK - lead[row], rows.length[row]),
        token=token,
        is_token=is_token,
        place=jnp.where(is_owned, place, 0),
        is_owned=is_owned,
    )


def _export_at(rows: PrefillRows, row: Int[Array, "chunks"], index: Int[Array, "chunks"]) -> Int[Array, "chunks"]:
    """Return the export slot of each chunk's end: the end of a row's chunk j is its boundary j."""
    _, slot = rows.boundaries()
    num_boundaries = slot.shape[1]
    if num_boundaries == 0:
        return jnp.full_like(row, NULL_SLOT)
    return jnp.where(index < num_boundaries, slot[row, jnp.clip(index, 0, num_boundaries - 1)], NULL_SLOT)
