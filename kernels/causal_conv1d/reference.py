"""The causal convolution token by token, one window at a time: slow, and the definition."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import NULL_SLOT, AdvanceRows, PrefillRows, load_slots, store_slots
from gdn_jax.kernels.documents import same_document


def convolve(history: Float[Array, "K C"], weight: Float[Array, "C K"]) -> Float[Array, "C"]:
    """Return silu(sum_j w[c, j] u_j) over the last K raw inputs, in float32, rounded to their dtype."""
    total = jnp.zeros(history.shape[1], jnp.float32)
    for j in range(history.shape[0]):
        total = total + weight[:, j].astype(jnp.float32) * history[j].astype(jnp.float32)
    return jax.nn.silu(total).astype(history.dtype)


def causal_conv1d_prefill(
    x: Float[Array, "T C"], weight: Float[Array, "C K"], rows: PrefillRows, pool: Float[Array, "slots K1 C"]
) -> tuple[Float[Array, "T C"], Float[Array, "slots K1 C"]]:
    """Convolve packed spans token by token; as `causal_conv1d.causal_conv1d_prefill`."""
    num_tokens = x.shape[0]
    row_of, is_owned = rows.row_of(num_tokens)
    count_after = rows.positions(num_tokens) + 1
    boundary, export_slot = rows.boundaries()

    def run_token(carry: tuple[Array, Array], token: Array) -> tuple[tuple[Array, Array], Array]:
        window, pool = carry
        row, owned = row_of[token], is_owned[token]
        is_first = owned & (token == rows.offset[row])
        window = jnp.where(is_first, load_slots(pool, rows.read_slot[row]).astype(x.dtype), window)

        history = jnp.concatenate([window, x[token][None]])
        output = jnp.where(owned, convolve(history, weight), jnp.zeros((), x.dtype))
        window = jnp.where(owned, history[1:], window)

        is_boundary = owned & (boundary[row] == count_after[token])
        export = jnp.max(jnp.where(is_boundary, export_slot[row], NULL_SLOT), initial=NULL_SLOT)
        pool = store_slots(pool, export, window)
        is_last = owned & (token == rows.last_token()[row])
        pool = store_slots(pool, jnp.where(is_last, rows.write_slot[row], NULL_SLOT), window)
        return (window, pool), output

    nothing = jnp.zeros(pool.shape[1:], x.dtype)
    (_, pool), outputs = jax.lax.scan(run_token, (nothing, pool), jnp.arange(num_tokens, dtype=jnp.int32))
    moved_to = jnp.where(rows.length == 0, rows.write_slot, NULL_SLOT)
    return outputs, store_slots(pool, moved_to, load_slots(pool, rows.read_slot))


def causal_conv1d_advance(
    x: Float[Array, "rows T C"],
    replay: Float[Array, "rows R C"],
    weight: Float[Array, "C K"],
    rows: AdvanceRows,
    pool: Float[Array, "slots K1 C"],
) -> tuple[Float[Array, "rows T C"], Float[Array, "slots K1 C"]]:
    """Fold replay windows and convolve new inputs, row by row; as `causal_conv1d.causal_conv1d_advance`."""
    num_rows, num_new, _ = x.shape

    def run_row(pool: Array, row: Array) -> tuple[Array, Array]:
        def fold(carry: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], None]:
            window, pool = carry
            after = jnp.concatenate([window, replay[row, j][None]])[1:]
            window = jnp.where(j < rows.num_replay[row], after, window)
            is_save = rows.saves()[row] & (rows.folded[row] + j + 1 == rows.save_at[row])
            return (window, store_slots(pool, jnp.where(is_save, rows.save_slot[row], NULL_SLOT), window)), None

        def run(window: Array, t: Array) -> tuple[Array, Array]:
            history = jnp.concatenate([window, x[row, t][None]])
            is_new = t < rows.num_new[row]
            output = jnp.where(is_new, convolve(history, weight), jnp.zeros((), x.dtype))
            return jnp.where(is_new, history[1:], window), output

        window = load_slots(pool, rows.read_slot[row]).astype(x.dtype)
        (window, pool), _ = jax.lax.scan(fold, (window, pool), jnp.arange(replay.shape[1], dtype=jnp.int32))
        pool = store_slots(pool, rows.write_slot[row], window)
        _, outputs = jax.lax.scan(run, window, jnp.arange(num_new, dtype=jnp.int32))
        return pool, outputs

    pool, outputs = jax.lax.scan(run_row, pool, jnp.arange(num_rows, dtype=jnp.int32))
    return outputs, pool


def causal_conv1d_forward(
    x: Float[Array, "rows T C"], weight: Float[Array, "C K"], document: Int[Array, "rows T"]
) -> Float[Array, "rows T C"]:
    """Convolve rows of whole documents token by token; as `causal_conv1d.causal_conv1d_forward`."""

    def run_token(window: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
        new, first = token
        history = jnp.concatenate([jnp.where(first, jnp.zeros_like(window), window), new[None]])
        return history[1:], convolve(history, weight)

    def run_row(x: Array, is_first: Array) -> Array:
        nothing = jnp.zeros((weight.shape[1] - 1, x.shape[1]), x.dtype)
        return jax.lax.scan(run_token, nothing, (x, is_first))[1]

    return jax.vmap(run_row)(x, ~same_document(document, 1))
