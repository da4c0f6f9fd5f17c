"""The gated delta rule in chunks of 64 tokens: the plain-JAX version, for any device, differentiable in reverse.

`chunk.py` holds the maths of one chunk. Here a serial scan over the chunks carries the float32 state: with the pool for
packed spans, or many sequences side by side from an empty state.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gdn_jax.kernels.anchors import NULL_SLOT, AdvanceRows, PrefillRows, load_slots, store_slots
from gdn_jax.kernels.chunk_table import chunk_table
from gdn_jax.kernels.gated_delta.chunk import LEAST_DECAY, Chunk, prepare_chunks, run_chunk
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs
from gdn_jax.kernels.gated_delta.reference import delta_read, delta_update
from gdn_jax.kernels.late import scan_late
from gdn_jax.kernels.numerics import CHUNK


def gdn_prefill(
    q: Float[Array, "T Nk dk"],
    inputs: DeltaInputs,
    rows: PrefillRows,
    pool: Float[Array, "slots Nv dv dk"],
) -> tuple[Float[Array, "T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Run packed spans chunk by chunk; as `gated_delta.gdn_prefill`, which says what the arguments mean."""
    _, num_heads, dv, dk = pool.shape
    table = chunk_table(rows, q.shape[0])
    chunks = prepare_chunks(table.take(q), jax.tree.map(table.take, inputs))

    def step(carry: tuple[Array, Array], scanned: tuple) -> tuple[tuple[Array, Array], Array]:
        state, pool = carry
        chunk, is_first, read_slot, export_slot, write_slot = scanned
        state = jnp.where(is_first, load_slots(pool, read_slot).astype(jnp.float32).reshape(state.shape), state)
        state, output = run_chunk(state, chunk)
        by_head = state.reshape(num_heads, dv, dk)
        pool = store_slots(store_slots(pool, export_slot, by_head), write_slot, by_head)
        return (state, pool), output

    nothing = jnp.zeros((q.shape[1], num_heads // q.shape[1], dv, dk), jnp.float32)
    scanned = (chunks, table.is_first, table.read_slot, table.export_slot, table.write_slot)
    (_, pool), outputs = scan_late(step, (nothing, pool), scanned, after=inputs.v)
    outputs = outputs.reshape(-1, num_heads, CHUNK, dv)
    return table.put(jnp.moveaxis(outputs, 1, 2)), pool


def gdn_forward(
    q: Float[Array, "rows T Nk dk"], inputs: DeltaInputs, is_first: Bool[Array, "rows T"]
) -> Float[Array, "rows T Nv dv"]:
    """Run rows of documents side by side, chunk by chunk; as `gated_delta.gdn_forward`."""
    num_rows, num_tokens, num_key_heads, dk = q.shape
    num_heads, dv = inputs.v.shape[2:]
    # A decay of zero at a document's first token forgets all before it, in the state and inside the chunk.
    g = jnp.where(is_first[..., None], LEAST_DECAY, inputs.g)
    inputs = DeltaInputs(k=inputs.k, v=inputs.v, g=g, beta=inputs.beta)
    pads = -num_tokens % CHUNK

    def by_chunk(x: Array) -> Array:  # [rows, T, ...] to [chunks * rows, places, ...]
        x = jnp.pad(x, [(0, 0), (0, pads)] + [(0, 0)] * (x.ndim - 2))
        x = jnp.moveaxis(x.reshape(num_rows, -1, CHUNK, *x.shape[2:]), 1, 0)
        return x.reshape(-1, *x.shape[2:])

    chunks = prepare_chunks(by_chunk(q), jax.tree.map(by_chunk, inputs))
    chunks: Chunk = jax.tree.map(lambda x: x.reshape(-1, num_rows, *x.shape[1:]), chunks)
    nothing = jnp.zeros((num_rows, num_key_heads, num_heads // num_key_heads, dv, dk), jnp.float32)
    _, outputs = jax.lax.scan(jax.vmap(run_chunk), nothing, chunks)
    outputs = outputs.reshape(-1, num_rows, num_heads, CHUNK, dv)  # [chunks, rows, Nv, places, dv]
    outputs = jnp.transpose(outputs, (1, 0, 3, 2, 4)).reshape(num_rows, -1, num_heads, dv)
    return outputs[:, :num_tokens]


def gdn_advance(
    q: Float[Array, "rows T Nk dk"],
    new: DeltaInputs,
    replay: DeltaInputs,
    rows: AdvanceRows,
    pool: Float[Array, "slots Nv dv dk"],
) -> tuple[Float[Array, "rows T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Advance all rows at once, a token at a time; as `gated_delta.gdn_advance`."""
    num_replay, num_new = replay.g.shape[1], q.shape[1]
    update, read = jax.vmap(delta_update), jax.vmap(delta_read)
    save_after = jnp.where(rows.saves(), rows.save_at - rows.folded, 0)  # folded tokens to save after; 0: never

    def fold(carry: tuple[Array, Array], step: tuple[Array, DeltaInputs]) -> tuple[tuple[Array, Array], None]:
        state, saved = carry
        j, token = step
        state = _where_row(j < rows.num_replay, update(state, token.k, token.v, token.g, token.beta), state)
        return (state, _where_row(save_after == j + 1, state, saved)), None

    def run(state: Array, step: tuple[Array, Array, DeltaInputs]) -> tuple[Array, Array]:
        t, query, token = step
        is_new = t < rows.num_new
        state = _where_row(is_new, update(state, token.k, token.v, token.g, token.beta), state)
        output = read(state, query)
        return state, _where_row(is_new, output, jnp.zeros_like(output)).astype(new.v.dtype)

    def by_token(x: DeltaInputs) -> DeltaInputs:
        return jax.tree.map(lambda field: jnp.moveaxis(field, 1, 0), x)

    state = load_slots(pool, rows.read_slot).astype(jnp.float32)
    folds = (jnp.arange(num_replay, dtype=jnp.int32), by_token(replay))
    (state, saved), _ = jax.lax.scan(fold, (state, state), folds)
    pool = store_slots(pool, jnp.where(rows.saves(), rows.save_slot, NULL_SLOT), saved)
    pool = store_slots(pool, rows.write_slot, state)

    runs = (jnp.arange(num_new, dtype=jnp.int32), jnp.moveaxis(q, 1, 0), by_token(new))
    _, outputs = jax.lax.scan(run, state, runs)
    return jnp.moveaxis(outputs, 0, 1), pool


def _where_row(
    mask: Bool[Array, "rows"], yes: Float[Array, "rows ..."], no: Float[Array, "rows ..."]
) -> Float[Array, "rows ..."]:
    """Select whole rows."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (yes.ndim - 1)), yes, no)
