"""Where the Mosaic prefill keeps what it computes for each chunk, and the gates by chunk.

A row's chunks are numbered from `offset // CHUNK + 2 row`. A span of n tokens touches at most n // CHUNK + 2 chunks of
the absolute grid, so that rows never share a number, and a kernel that knows a row's span knows its numbers: no running
sum over rows is needed. Numbers that no row uses have no tokens.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs
from gdn_jax.kernels.numerics import CHUNK

TOKEN, FIRST, END = range(3)  # of what is known of a chunk


def num_slots(num_tokens: int, num_rows: int) -> int:
    """Return how many chunks there is room for."""
    return num_tokens // CHUNK + 2 * num_rows


def chunk_slots(rows: PrefillRows, num_tokens: int) -> Int[Array, "chunks 3"]:
    """Number the chunks of packed rows.

    Returns:
        Of each chunk: TOKEN, the packed index of the token at its first place, negative where places before the row's
        first token would stand before the packed axis; FIRST, the first place that holds a token of the row; END, one
        past the last such place. All 0 for a number that no row uses.
    """
    num_rows = rows.offset.shape[0]
    lead = rows.start % CHUNK
    count = jnp.where(rows.length > 0, (lead + rows.length + CHUNK - 1) // CHUNK, 0)
    base = rows.offset // CHUNK + 2 * jnp.arange(num_rows, dtype=jnp.int32)

    chunk = jnp.arange(num_slots(num_tokens, num_rows), dtype=jnp.int32)[:, None]
    begin = (chunk - base[None]) * CHUNK  # first place of the chunk, from that of the row's first chunk
    is_used = (begin >= 0) & (begin < (count * CHUNK)[None])
    token = (rows.offset - lead)[None] + begin
    first = jnp.maximum(lead[None] - begin, 0)
    end = jnp.minimum((lead + rows.length)[None] - begin, CHUNK)
    of_rows = jnp.stack([token, first, end], axis=1)  # [chunks, 3, rows], of which one row at most uses a number
    return jnp.sum(jnp.where(is_used[:, None], of_rows, 0), axis=2, dtype=jnp.int32)


def gates_by_chunk(slots: Int[Array, "chunks 3"], inputs: DeltaInputs) -> dict[str, Float[Array, "chunks places Nv"]]:
    """Return g and beta, zeros where no token stands whatever unowned tokens hold."""
    place = jnp.arange(CHUNK, dtype=jnp.int32)[None]
    is_token = (place >= slots[:, FIRST, None]) & (place < slots[:, END, None])
    token = jnp.clip(slots[:, TOKEN, None] + place, 0, inputs.g.shape[0] - 1)
    return {
        name: jnp.where(is_token[..., None], packed[token], 0.0)
        for name, packed in (("g", inputs.g), ("beta", inputs.beta))
    }
