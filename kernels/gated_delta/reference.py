"""The gated delta rule token by token in float32: slow, and the definition of what the other versions compute."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gdn_jax.kernels.anchors import NULL_SLOT, AdvanceRows, PrefillRows, load_slots, store_slots
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs
from gdn_jax.kernels.numerics import einsum


def delta_update(
    state: Float[Array, "Nv dv dk"],
    k: Float[Array, "Nk dk"],
    v: Float[Array, "Nv dv"],
    g: Float[Array, "Nv"],
    beta: Float[Array, "Nv"],
) -> Float[Array, "Nv dv dk"]:
    """Return the state after one token: decay it, then move its reading at k towards v by beta.

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T, with S stored transposed, all in float32.
    """
    k = jnp.repeat(
        k.astype(jnp.float32), state.shape[0] // k.shape[0], axis=0
    )  # value head h reads key head h // (Nv / Nk)
    state = jnp.exp(g)[:, None, None] * state
    error = v.astype(jnp.float32) - einsum("hvk,hk->hv", state, k)
    return state + (beta[:, None] * error)[:, :, None] * k[:, None, :]


def delta_read(state: Float[Array, "Nv dv dk"], q: Float[Array, "Nk dk"]) -> Float[Array, "Nv dv"]:
    """Return o = S^T q of every value head, in float32."""
    q = jnp.repeat(q.astype(jnp.float32), state.shape[0] // q.shape[0], axis=0)
    return einsum("hvk,hk->hv", state, q)


def gdn_prefill(
    q: Float[Array, "T Nk dk"],
    inputs: DeltaInputs,
    rows: PrefillRows,
    pool: Float[Array, "slots Nv dv dk"],
) -> tuple[Float[Array, "T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Run packed spans token by token; as `gated_delta.gdn_prefill`, which says what the arguments mean."""
    num_tokens = q.shape[0]
    row_of, is_owned = rows.row_of(num_tokens)
    count_after = rows.positions(num_tokens) + 1  # tokens of the sequence that the state holds after each packed token
    boundary, export_slot = rows.boundaries()

    def run_token(carry: tuple[Array, Array], token: Array) -> tuple[tuple[Array, Array], Array]:
        state, pool = carry
        row, owned = row_of[token], is_owned[token]
        is_first = owned & (token == rows.offset[row])
        state = jnp.where(is_first, load_slots(pool, rows.read_slot[row]).astype(jnp.float32), state)

        after = delta_update(state, inputs.k[token], inputs.v[token], inputs.g[token], inputs.beta[token])
        state = jnp.where(owned, after, state)
        output = jnp.where(owned, delta_read(state, q[token]), jnp.zeros((), jnp.float32))

        is_boundary = owned & (boundary[row] == count_after[token])
        export = jnp.max(jnp.where(is_boundary, export_slot[row], NULL_SLOT), initial=NULL_SLOT)
        pool = store_slots(pool, export, state)
        is_last = owned & (token == rows.last_token()[row])
        pool = store_slots(pool, jnp.where(is_last, rows.write_slot[row], NULL_SLOT), state)
        return (state, pool), output.astype(inputs.v.dtype)

    nothing = jnp.zeros(pool.shape[1:], jnp.float32)
    (_, pool), outputs = jax.lax.scan(run_token, (nothing, pool), jnp.arange(num_tokens, dtype=jnp.int32))
    moved_to = jnp.where(rows.length == 0, rows.write_slot, NULL_SLOT)
    return outputs, store_slots(pool, moved_to, load_slots(pool, rows.read_slot))


def gdn_forward(
    q: Float[Array, "rows T Nk dk"], inputs: DeltaInputs, is_first: Bool[Array, "rows T"]
) -> Float[Array, "rows T Nv dv"]:
    """Run rows of documents token by token; as `gated_delta.gdn_forward`."""

    def run_row(q: Array, inputs: DeltaInputs, is_first: Array) -> Array:
        def run_token(state: Array, token: tuple[Array, DeltaInputs, Array]) -> tuple[Array, Array]:
            query, new, first = token
            state = jnp.where(first, jnp.zeros_like(state), state)
            state = delta_update(state, new.k, new.v, new.g, new.beta)
            return state, delta_read(state, query).astype(new.v.dtype)

        nothing = jnp.zeros((*inputs.v.shape[1:], q.shape[-1]), jnp.float32)
        return jax.lax.scan(run_token, nothing, (q, inputs, is_first))[1]

    return jax.vmap(run_row)(q, inputs, is_first)


def gdn_advance(
    q: Float[Array, "rows T Nk dk"],
    new: DeltaInputs,
    replay: DeltaInputs,
    rows: AdvanceRows,
    pool: Float[Array, "slots Nv dv dk"],
) -> tuple[Float[Array, "rows T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Fold replay windows and run new tokens, row by row; as `gated_delta.gdn_advance`."""
    num_rows, num_new = q.shape[:2]
    num_replay = replay.g.shape[1]

    def run_row(pool: Array, row: Array) -> tuple[Array, Array]:
        def fold(carry: tuple[Array, Array], j: Array) -> tuple[tuple[Array, Array], None]:
            state, pool = carry
            after = delta_update(state, replay.k[row, j], replay.v[row, j], replay.g[row, j], replay.beta[row, j])
            state = jnp.where(j < rows.num_replay[row], after, state)
            is_save = rows.saves()[row] & (rows.folded[row] + j + 1 == rows.save_at[row])
            return (state, store_slots(pool, jnp.where(is_save, rows.save_slot[row], NULL_SLOT), state)), None

        def run(state: Array, t: Array) -> tuple[Array, Array]:
            after = delta_update(state, new.k[row, t], new.v[row, t], new.g[row, t], new.beta[row, t])
            is_new = t < rows.num_new[row]
            state = jnp.where(is_new, after, state)
            output = jnp.where(is_new, delta_read(state, q[row, t]), jnp.zeros((), jnp.float32))
            return state, output.astype(new.v.dtype)

        state = load_slots(pool, rows.read_slot[row]).astype(jnp.float32)
        (state, pool), _ = jax.lax.scan(fold, (state, pool), jnp.arange(num_replay, dtype=jnp.int32))
        pool = store_slots(pool, rows.write_slot[row], state)
        _, outputs = jax.lax.scan(run, state, jnp.arange(num_new, dtype=jnp.int32))
        return pool, outputs

    pool, outputs = jax.lax.scan(run_row, pool, jnp.arange(num_rows, dtype=jnp.int32))
    return outputs, pool
