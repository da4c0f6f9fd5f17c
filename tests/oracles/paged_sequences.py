"""Sequences in KV pages whose every other entry is NaN, and attention over them in NumPy float64."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.numerics import CHUNK

TABLE, NUM_PAGES = 12, 48  # 12 blocks are two key tiles of the plain version


@dataclass(frozen=True)
class Sequences:
    """One sequence per row, and its pages; everything else in the pages is NaN."""

    k: list[np.ndarray]  # [positions, Hkv, D] each
    v: list[np.ndarray]
    k_pages: np.ndarray
    v_pages: np.ndarray
    tables: np.ndarray


def sequences(lengths, *, heads=2, width=16, table=TABLE):
    rng = np.random.default_rng(0)
    k, v = ([rng.normal(size=(n, heads, width)).astype(np.float32) for n in lengths] for _ in range(2))
    free = rng.permutation(np.arange(1, NUM_PAGES))
    tables = np.zeros((len(lengths), table), np.int32)
    pages = np.full((2, NUM_PAGES, CHUNK, heads, width), np.nan, np.float32)
    for row, length in enumerate(lengths):
        count = -(-length // CHUNK)
        tables[row, :count], free = free[:count], free[count:]
        for side, values in enumerate((k[row], v[row])):
            flat = np.full((count * CHUNK, heads, width), np.nan, np.float32)
            flat[:length] = values
            pages[side, tables[row, :count]] = flat.reshape(count, CHUNK, heads, width)
    return Sequences(k, v, *pages, tables)


def dense_attention(q, k, v, position, first_key=0):
    """Return attention of queries [n, Hq, D] at `position` [n], in float64; zeros where no key is visible."""
    group = q.shape[1] // k.shape[1]
    q = np.asarray(q, np.float64)
    k, v = (np.repeat(np.asarray(side, np.float64), group, axis=1) for side in (k, v))
    out = np.zeros(q.shape)
    for i, p in enumerate(position):
        keys = slice(first_key, p + 1)
        if p >= first_key:
            score = np.einsum("hd,shd->hs", q[i], k[keys]) / np.sqrt(q.shape[-1])
            weight = np.exp(score - score.max(axis=-1, keepdims=True))
            out[i] = np.einsum("hs,shd->hd", weight / weight.sum(axis=-1, keepdims=True), v[keys])
    return out


def advance_rows(starts, num_new):
    start, num_new = np.array(starts, np.int32), np.array(num_new, np.int32)
    replay = np.minimum(start, 2)
    folded, replay, num_new, null = (jnp.asarray(array) for array in (start - replay, replay, num_new, 0 * start))
    anchors = {"read_slot": null, "write_slot": null, "save_slot": null, "save_at": null}
    return AdvanceRows(folded=folded, num_replay=replay, num_new=num_new, **anchors)


def prefill_rows(spans, *, gap=3):
    """Pack spans with `gap` unowned tokens before each."""
    start, length = np.array(spans, np.int32).T
    offset = np.cumsum(length + gap, dtype=np.int32) - length
    offset, length, start, null = (jnp.asarray(array) for array in (offset, length, start, 0 * start))
    anchors = {"read_slot": null, "write_slot": null, "export_slot": jnp.zeros((len(spans), 1), jnp.int32)}
    return PrefillRows(offset=offset, length=length, start=start, **anchors)


def span_of(rows, row):
    offset, length = np.asarray(rows.offset), np.asarray(rows.length)
    return slice(offset[row], offset[row] + length[row])


def queries(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
