"""Attention over pages in plain JAX: tiles of queries, tiles of keys, an online softmax.

The softmax is formed key tile by key tile (Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3), so the scores
held at once are bounded whatever the sequence's length; key tiles past the last visible key are skipped. Both tilings
are absolute: the query at position p is entry p % CHUNK of its tile, and key tiles have a fixed width and start at
position 0, so how a prompt was cut and how wide its block table is do not change the sums.

Scores, softmax and accumulators are float32. Operands of both products keep q's dtype: softmax weights are rounded to
it (they are at most 1, so that costs no more than the rounding of the values), while their sum is taken before that.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.late import scan_late
from gdn_jax.kernels.numerics import CHUNK, einsum
from gdn_jax.kernels.paged_attention.pages import NULL_PAGE

KEY_TILE_PAGES = 8  # pages scored at once; a block table is padded to a multiple of it
KEY_TILE = KEY_TILE_PAGES * CHUNK
_MASKED = -1e30  # score of a key that a query must not see; finite, so that a query with no key meets no inf - inf


def paged_attention_prefill(
    q: Float[Array, "T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    rows: PrefillRows,
    first_key: int,
) -> Float[Array, "T Hq D"]:
    """Attend tile by tile; a tile holds up to CHUNK queries of one row.

    Reverse-differentiable: each tile is computed again in the backward pass, so memory stays bounded there too.
    """
    num_tokens = q.shape[0]
    count, first = _tiles_per_row(rows)
    before = jnp.cumsum(count) - count
    # A row of n tokens touches at most (n + 2 (CHUNK - 1)) // CHUNK tiles, and every tile in use holds a token.
    num_tiles = min(num_tokens, (num_tokens + 2 * (CHUNK - 1) * count.shape[0]) // CHUNK)

    @jax.checkpoint
    def attend_tile(nothing: tuple[()], tile: Int[Array, ""]) -> tuple[tuple[()], Float[Array, "block Hq D"]]:
        row = jnp.searchsorted(before + count, tile, side="right")
        row = jnp.minimum(row, count.shape[0] - 1)  # past the last tile in use: all queries lie outside the row
        position = (first[row] + tile - before[row]) * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        index = position - rows.start[row]
        inside = (index >= 0) & (index < rows.length[row])
        queries = q[jnp.clip(rows.offset[row] + index, 0, num_tokens - 1)]
        position = jnp.where(inside, position, -1)
        out = _attend(queries[None], position[None], k_pages, v_pages, block_tables[row][None], first_key)[0]
        return nothing, out

    _, out = scan_late(attend_tile, (), jnp.arange(num_tiles, dtype=jnp.int32), after=q)
    row, owned = rows.row_of(num_tokens)
    position = rows.positions(num_tokens)
    tile = before[row] + position // CHUNK - first[row]
    return jnp.where(owned[:, None, None], out[jnp.where(owned, tile, 0), position % CHUNK], 0)


def paged_attention_advance(
    q: Float[Array, "rows T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    rows: AdvanceRows,
    first_key: int,
) -> Float[Array, "rows T Hq D"]:
    """Attend with the windows of all rows at once."""
    window = q.shape[1]
    position = jnp.where(rows.is_new(window), rows.positions(window), -1)
    return _attend(q, position, k_pages, v_pages, block_tables, first_key)


def _tiles_per_row(rows: PrefillRows) -> tuple[Int[Array, "rows"], Int[Array, "rows"]]:
    """Return how many tiles of the absolute grid each row touches, and the first of them."""
    first = rows.start // CHUNK
    last = (rows.start + rows.length - 1) // CHUNK
    return jnp.where(rows.length > 0, last - first + 1, 0), first


def _attend(
    q: Float[Array, "rows T Hq D"],
    position: Int[Array, "rows T"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    first_key: int,
) -> Float[Array, "rows T Hq D"]:
    """Attend to keys at positions first_key..position; a query at position -1 has none and gives zeros."""
    num_rows, window, _, width = q.shape
    heads = k_pages.shape[2]
    grouped = q.reshape(num_rows, window, heads, -1, width)
    lead = (num_rows, heads, grouped.shape[3], window)
    start = (
        jnp.full(lead, _MASKED, jnp.float32),
        jnp.zeros(lead, jnp.float32),
        jnp.zeros((*lead, width), jnp.float32),
    )
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % KEY_TILE_PAGES)), constant_values=NULL_PAGE)
    tables = tables.reshape(num_rows, -1, KEY_TILE_PAGES).swapaxes(0, 1)
    end = position.max() + 1

    def visit(
        carry: tuple[Array, Array, Array], first: Int[Array, ""], table: Int[Array, "rows tile_pages"]
    ) -> tuple[Array, Array, Array]:
        key = (first + jnp.arange(KEY_TILE, dtype=jnp.int32))[None]
        real = (jnp.repeat(table, CHUNK, axis=1) != NULL_PAGE) & (key >= first_key)
        # Unowned memory may hold anything, and 0 * NaN is NaN: it is cleared, not only masked.
        owned = (real & (key <= position.max(axis=1, keepdims=True)))[:, :, None, None]
        k, v = (
            jnp.where(owned, pages[table].reshape(num_rows, -1, heads, width), 0).astype(q.dtype)
            for pages in (k_pages, v_pages)
        )
        visible = (real[:, None] & (key[:, None] <= position[:, :, None]))[:, None, None]
        return _accumulate(carry, grouped, k, v, visible)

    def step(carry: tuple[Array, Array, Array], tile: tuple[Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        first, table = tile
        return jax.lax.cond(first < end, visit, lambda same, *_: same, carry, first, table), None

    firsts = jnp.arange(tables.shape[0], dtype=jnp.int32) * KEY_TILE
    (_, total, out), _ = jax.lax.scan(step, start, (firsts, tables))
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def _accumulate(
    carry: tuple[Array, Array, Array],
    q: Float[Array, "rows T Hkv group D"],
    k: Float[Array, "rows S Hkv D"],
    v: Float[Array, "rows S Hkv D"],
    visible: Array,
) -> tuple[Array, Array, Array]:
    """Fold one tile of keys into (highest score, sum of weights, weighted sum of values) of every query and head."""
    highest, total, out = carry
    score = jnp.where(visible, einsum("rthgd,rshd->rhgts", q, k) * q.shape[-1] ** -0.5, _MASKED)
    # The result does not depend on the shift, so no gradient flows through it.
    after = jnp.maximum(highest, jax.lax.stop_gradient(score).max(axis=-1))
    weight = jnp.where(visible, jnp.exp(score - after[..., None]), 0.0)
    shrink = jnp.exp(highest - after)
    out = out * shrink[..., None] + einsum("rhgts,rshd->rhgtd", weight.astype(v.dtype), v)
    return after, total * shrink + weight.sum(axis=-1), out
