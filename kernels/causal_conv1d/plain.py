"""The causal convolution in plain JAX: taps and windows are gathered from "initial window, then the row's inputs".

One index map does all: raw input i of a row, counted from its first token, is a packed input for i >= 0 and an entry
of its initial window for i < 0. So spans shorter than the window, and boundaries closer than the window to the start,
need no case of their own. Sums are float32, oldest tap first; windows hold raw inputs, never rounded on the way.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import NULL_SLOT, AdvanceRows, PrefillRows, load_slots, store_slots
from gdn_jax.kernels.chunk_table import chunk_table
from gdn_jax.kernels.documents import same_document


def causal_conv1d_prefill(
    x: Float[Array, "T C"], weight: Float[Array, "C K"], rows: PrefillRows, pool: Float[Array, "slots K1 C"]
) -> tuple[Float[Array, "T C"], Float[Array, "slots K1 C"]]:
    """Convolve packed spans; as `causal_conv1d.causal_conv1d_prefill`."""
    num_tokens, num_channels = x.shape
    window_size = pool.shape[1]
    windows = load_slots(pool, rows.read_slot).astype(x.dtype)
    history = jnp.concatenate([windows.reshape(-1, num_channels), x])
    num_before = history.shape[0] - num_tokens

    def raw_input(row: Int[Array, "..."], i: Int[Array, "..."]) -> Float[Array, "... C"]:
        """Gather raw input i of each row, -window_size <= i < length; any input where i is beyond the row."""
        index = jnp.where(i < 0, (row + 1) * window_size + i, num_before + rows.offset[row] + i)
        return history[jnp.clip(index, 0, history.shape[0] - 1)]

    row, is_owned = rows.row_of(num_tokens)
    own = jnp.arange(num_tokens, dtype=jnp.int32) - rows.offset[row]
    outputs = _convolve([raw_input(row, own - back) for back in range(window_size, 0, -1)] + [x], weight)

    table = chunk_table(rows, num_tokens)  # a chunk's end is the only place where a window is exported or final
    oldest = table.tokens_done - window_size
    ends = jnp.stack([raw_input(table.row, oldest + j) for j in range(window_size)], axis=1)
    pool = store_slots(store_slots(pool, table.export_slot, ends), table.write_slot, ends)
    return jnp.where(is_owned[:, None], outputs, jnp.zeros((), x.dtype)), pool


def causal_conv1d_advance(
    x: Float[Array, "rows T C"],
    replay: Float[Array, "rows R C"],
    weight: Float[Array, "C K"],
    rows: AdvanceRows,
    pool: Float[Array, "slots K1 C"],
) -> tuple[Float[Array, "rows T C"], Float[Array, "slots K1 C"]]:
    """Fold replay windows and convolve new inputs; as `causal_conv1d.causal_conv1d_advance`."""
    window_size, num_new = pool.shape[1], x.shape[1]
    history = jnp.concatenate([load_slots(pool, rows.read_slot).astype(x.dtype), replay], axis=1)

    def window_after(count: Int[Array, "rows"]) -> Float[Array, "rows K1 C"]:
        """Return each row's window after folding `count` inputs: entries count..count + K - 2 of its history."""
        index = jnp.clip(count, 0, replay.shape[1])[:, None] + jnp.arange(window_size, dtype=jnp.int32)[None]
        return jnp.take_along_axis(history, index[:, :, None], axis=1)

    pool = store_slots(
        pool, jnp.where(rows.saves(), rows.save_slot, NULL_SLOT), window_after(rows.save_at - rows.folded)
    )
    window = window_after(rows.num_replay)
    pool = store_slots(pool, rows.write_slot, window)
    inputs = jnp.concatenate([window, x], axis=1)
    outputs = _convolve([inputs[:, j : j + num_new] for j in range(window_size + 1)], weight)
    return jnp.where(rows.is_new(num_new)[:, :, None], outputs, jnp.zeros((), x.dtype)), pool


def causal_conv1d_forward(
    x: Float[Array, "rows T C"], weight: Float[Array, "C K"], document: Int[Array, "rows T"]
) -> Float[Array, "rows T C"]:
    """Convolve rows of whole documents; as `causal_conv1d.causal_conv1d_forward`."""
    num_tokens, taps = x.shape[1], []
    for back in range(weight.shape[1] - 1, 0, -1):
        tap = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :num_tokens]
        taps.append(jnp.where(same_document(document, back)[..., None], tap, jnp.zeros((), x.dtype)))
    return _convolve([*taps, x], weight)


def _convolve(taps: list[Float[Array, "*tokens C"]], weight: Float[Array, "C K"]) -> Float[Array, "*tokens C"]:
    """Return silu(sum_j w_j tap_j), summed in float32 from the oldest tap on, in the taps' dtype."""
    total = jnp.zeros(taps[0].shape, jnp.float32)
    for j, tap in enumerate(taps):
        total = total + jnp.broadcast_to(weight[:, j].astype(jnp.float32), tap.shape) * tap.astype(jnp.float32)
    return jax.nn.silu(total).astype(taps[0].dtype)
