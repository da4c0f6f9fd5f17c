"""Attention over pages as one dense softmax per row, in float32: slow, defines the meaning."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.numerics import CHUNK, einsum
from gdn_jax.kernels.paged_attention.pages import NULL_PAGE


def paged_attention_prefill(
    q: Float[Array, "T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    rows: PrefillRows,
    first_key: int,
) -> Float[Array, "T Hq D"]:
    """Attend with every packed query to each row's keys in turn, keeping the answers of the row's own queries."""
    num_tokens = q.shape[0]
    row, owned = rows.row_of(num_tokens)
    position = rows.positions(num_tokens)

    def attend_row(index: Int[Array, ""]) -> Float[Array, "T Hq D"]:
        mine = jnp.where(owned & (row == index), position, -1)
        return _attend(q, mine, k_pages, v_pages, block_tables[index], first_key)

    answers = jax.lax.map(attend_row, jnp.arange(block_tables.shape[0]))
    return answers[row, jnp.arange(num_tokens)].astype(q.dtype)


def paged_attention_advance(
    q: Float[Array, "rows T Hq D"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    block_tables: Int[Array, "rows blocks"],
    rows: AdvanceRows,
    first_key: int,
) -> Float[Array, "rows T Hq D"]:
    """Attend one row after the other."""
    position = jnp.where(rows.is_new(q.shape[1]), rows.positions(q.shape[1]), -1)

    def attend_row(index: Int[Array, ""]) -> Float[Array, "T Hq D"]:
        return _attend(q[index], position[index], k_pages, v_pages, block_tables[index], first_key)

    return jax.lax.map(attend_row, jnp.arange(q.shape[0])).astype(q.dtype)


def _attend(
    q: Float[Array, "T Hq D"],
    position: Int[Array, "T"],
    k_pages: Float[Array, "pages block Hkv D"],
    v_pages: Float[Array, "pages block Hkv D"],
    table: Int[Array, "blocks"],
    first_key: int,
) -> Float[Array, "T Hq D"]:
    """Attend to one sequence's keys; a query at position -1 has none and gives zeros."""
    group = q.shape[1] // k_pages.shape[2]
    key = jnp.arange(table.shape[0] * CHUNK)
    real = (jnp.repeat(table, CHUNK) != NULL_PAGE) & (key >= first_key) & (key <= position.max())
    k, v = (_keys_of(pages, table, real, group) for pages in (k_pages, v_pages))
    visible = real[None, None] & (key[None, None] <= position[None, :, None])
    score = einsum("thd,shd->hts", q.astype(jnp.float32), k) * q.shape[-1] ** -0.5
    score = jnp.where(visible, score, -jnp.inf)
    highest = jnp.where(visible.any(axis=-1, keepdims=True), score.max(axis=-1, keepdims=True), 0.0)
    weight = jnp.exp(score - highest)
    total = weight.sum(axis=-1, keepdims=True)
    return einsum("hts,shd->thd", weight / jnp.where(total > 0, total, 1.0), v)


def _keys_of(
    pages: Float[Array, "pages block Hkv D"], table: Int[Array, "blocks"], real: Bool[Array, "S"], group: int
) -> Float[Array, "S Hq D"]:
    """Return a sequence's keys or values in float32, one per query head; zeros where unowned memory would be read."""
    flat = pages[table].reshape(-1, *pages.shape[2:]).astype(jnp.float32)
    return jnp.repeat(jnp.where(real[:, None, None], flat, 0.0), group, axis=1)
