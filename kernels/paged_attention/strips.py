"""How packed rows are cut for the Mosaic prefill: into strips, one for each program of a KV head.

A *strip* is a run of packed tokens between two multiples of a fixed number; of those only one row's count. Where rows
meet inside a run, each has a strip of its own there. Strips follow from where rows lie, yet a query's result does not
follow from its strip: it meets the same pages in the same order in whichever one it stands.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.pages import owned_keys

# What is known of a strip: its row; the packed index of its first token, and that token's position if it were the row's
# (negative where it would stand before position 0); the packed tokens that are the row's, from BEGIN to before END; how
# many keys the row owns; how many pages hold those that the strip's queries see.
ROW, TOKEN, POSITION, BEGIN, END, KEYS, PAGES = range(7)


def num_strips(num_tokens: int, num_rows: int, strip_tokens: int) -> int:
    """Return how many strips there is room for: every row beyond the first can cut one in two."""
    return -(-num_tokens // strip_tokens) + num_rows


def strips_of(
    rows: PrefillRows, block_tables: Int[Array, "rows blocks"], *, num_tokens: int, strip_tokens: int
) -> Int[Array, "strips 7"]:
    """Cut packed rows into strips.

    Strip number `offset // strip_tokens + r` is the first of row r, and its others follow: as rows stand in order, no
    two share a number. Numbers that no row uses have no pages, and zeros elsewhere.
    """
    row_index = jnp.arange(rows.offset.shape[0], dtype=jnp.int32)
    row_end = rows.offset + rows.length
    first = rows.offset // strip_tokens + row_index
    last = (row_end - 1) // strip_tokens + row_index
    number = jnp.arange(num_strips(num_tokens, rows.offset.shape[0], strip_tokens), dtype=jnp.int32)[:, None]
    is_used = (number >= first[None]) & (number <= last[None]) & (rows.length > 0)[None]

    token = (number - row_index[None]) * strip_tokens
    begin = jnp.maximum(token, rows.offset[None])
    end = jnp.minimum(token + strip_tokens, row_end[None])
    keys = jnp.broadcast_to(jnp.minimum(rows.start + rows.length, owned_keys(block_tables))[None], token.shape)
    to_position = (rows.start - rows.offset)[None]
    seen = jnp.minimum(keys, end + to_position)
    fields = {
        ROW: jnp.broadcast_to(row_index[None], token.shape),
        TOKEN: token,
        POSITION: token + to_position,
        BEGIN: begin,
        END: end,
        KEYS: keys,
        PAGES: jnp.maximum((seen + CHUNK - 1) // CHUNK, 1),  # a row without pages reads the null page, and sees none
    }
    of_rows = jnp.stack([fields[which] for which in range(len(fields))], axis=1)  # of which one row uses a number
    return jnp.sum(jnp.where(is_used[:, None], of_rows, 0), axis=2, dtype=jnp.int32)


def longest_first(strips: Int[Array, "strips 7"]) -> Int[Array, "strips 7"]:
    """Return the strips by falling number of pages, so that those which end last are short."""
    return strips[jnp.argsort(-strips[:, PAGES])]
