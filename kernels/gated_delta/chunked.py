"""The gated delta rule in chunks of 64 tokens: the plain-JAX version, for any device, differentiable in reverse.

In a chunk with rows i, j, G_i the running sum of g, and D_ij = exp(G_i - G_j) for j <= i, 0 above the diagonal:

    A = strictly_lower( diag(beta) (K K^T o D) )        T = (I + A)^-1 diag(beta)
    V' = T (V - diag(exp G) K S)                        what the chunk's tokens really write
    O = diag(exp G) Q S + (Q K^T o D) V'
    S <- exp(G_n) S + K^T diag(exp(G_n - G)) V'

(Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024, section 3.3, with W and U folded into V'.) The inverse, the
decays and the scores Q K^T o D do not need S and are computed for all chunks at once; a serial scan over the chunks
then carries the float32 state and the pool.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gdn_jax.kernels.anchors import NULL_SLOT, AdvanceRows, PrefillRows, load_slots, store_slots
from gdn_jax.kernels.chunk_table import ChunkTable, chunk_table
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs
from gdn_jax.kernels.gated_delta.reference import delta_read, delta_update
from gdn_jax.kernels.gated_delta.triangular import unit_lower_inverse
from gdn_jax.kernels.late import scan_late
from gdn_jax.kernels.numerics import CHUNK, einsum

_LEAST_DECAY = -120.0  # exp of this and of anything below is zero in float32
_DECAY_GRID = 1024.0  # sums of 64 multiples of 1 / 1024 above -120 are exact in float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """What the serial scan needs of each chunk; h counts key heads, r the value heads of one of them.

    Attributes:
        keys: K, operand dtype.
        queries: Q, operand dtype.
        values: V, operand dtype.
        inverse: (I + A)^-1, operand dtype.
        scores: Q K^T o D, operand dtype.
        beta: write strengths.
        decay_in: exp(G_i), from the chunk's start to after token i.
        decay_out: exp(G_n - G_i), from after token i to the chunk's end.
    """

    keys: Float[Array, "*chunks h places dk"]
    queries: Float[Array, "*chunks h places dk"]
    values: Float[Array, "*chunks h r places dv"]
    inverse: Float[Array, "*chunks h r places places"]
    scores: Float[Array, "*chunks h r places places"]
    beta: Float[Array, "*chunks h r places"]
    decay_in: Float[Array, "*chunks h r places"]
    decay_out: Float[Array, "*chunks h r places"]


def gdn_prefill(
    q: Float[Array, "T Nk dk"],
    inputs: DeltaInputs,
    rows: PrefillRows,
    pool: Float[Array, "slots Nv dv dk"],
) -> tuple[Float[Array, "T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Run packed spans chunk by chunk; as `gated_delta.gdn_prefill`, which says what the arguments mean."""
    dtype, (_, num_heads, dv, dk) = inputs.v.dtype, pool.shape
    table = chunk_table(rows, q.shape[0])
    chunks = _prepare(q, inputs, table)

    def run_chunk(carry: tuple[Array, Array], scanned: tuple) -> tuple[tuple[Array, Array], Array]:
        state, pool = carry
        chunk, is_first, read_slot, export_slot, write_slot = scanned
        state = jnp.where(is_first, load_slots(pool, read_slot).astype(jnp.float32).reshape(state.shape), state)

        operand = state.astype(dtype)
        readings = einsum("hik,hrvk->hriv", jnp.concatenate([chunk.keys, chunk.queries], axis=1), operand)
        at_keys, at_queries = (chunk.decay_in[..., None] * x for x in jnp.split(readings, 2, axis=-2))
        error = chunk.beta[..., None] * (chunk.values.astype(jnp.float32) - at_keys)
        written = einsum("hrij,hrjv->hriv", chunk.inverse, error.astype(dtype))

        kept = (chunk.decay_out[..., None] * written).astype(dtype)
        state = chunk.decay_in[..., -1:, None] * state + einsum("hriv,hik->hrvk", kept, chunk.keys)
        by_head = state.reshape(num_heads, dv, dk)
        pool = store_slots(store_slots(pool, export_slot, by_head), write_slot, by_head)
        output = at_queries + einsum("hrij,hrjv->hriv", chunk.scores, written.astype(dtype))
        return (state, pool), output.astype(dtype)

    nothing = jnp.zeros((q.shape[1], num_heads // q.shape[1], dv, dk), jnp.float32)
    scanned = (chunks, table.is_first, table.read_slot, table.export_slot, table.write_slot)
    (_, pool), outputs = scan_late(run_chunk, (nothing, pool), scanned, after=inputs.v)
    outputs = outputs.reshape(-1, num_heads, CHUNK, dv)
    return table.put(jnp.moveaxis(outputs, 1, 2)), pool


def _prepare(q: Float[Array, "T Nk dk"], inputs: DeltaInputs, table: ChunkTable) -> _Chunk:
    """Compute what does not depend on the state, of all chunks at once."""
    dtype = inputs.v.dtype

    def by_key_head(x: Array) -> Array:  # [T, Nk, ...] to [chunks, h, places, ...]
        return _once(jnp.moveaxis(table.take(x), 1, 2))

    def by_value_head(x: Array) -> Array:  # [T, Nv, ...] to [chunks, h, r, places, ...]
        x = by_key_head(x)
        return x.reshape(x.shape[0], q.shape[1], -1, *x.shape[2:])

    keys, queries, beta = by_key_head(inputs.k), by_key_head(q), by_value_head(inputs.beta)
    decay, decay_in, decay_out = _decays(by_value_head(inputs.g))
    key_products = einsum("nhik,nhjk->nhij", keys, keys)[:, :, None]  # once for all value heads of a key head
    query_products = einsum("nhik,nhjk->nhij", queries, keys)[:, :, None]

    below = jnp.tril(jnp.ones((CHUNK, CHUNK), jnp.float32), -1)[None, None, None]
    lower = _once(beta[..., None] * key_products * decay * below)
    return _Chunk(
        keys=keys,
        queries=queries,
        values=by_value_head(inputs.v),
        inverse=unit_lower_inverse(lower).astype(dtype),
        scores=(query_products * decay).astype(dtype),
        beta=beta,
        decay_in=decay_in,
        decay_out=decay_out,
    )


def _decays(g: Float[Array, "*lead places"]) -> tuple[Array, Array, Array]:
    """Return D [..., i, j] with zeros above the diagonal, exp(G_i) and exp(G_n - G_i).

    Differences of running sums would lose the small decays that follow a strong one (after g = -1e4, sums of -0.1 have
    errors of 1e-3). So g splits into a multiple of 1 / 1024, whose sums and differences are exact, and a rest
    whose sums stay below 1 / 16.
    """
    g = jnp.maximum(g, _LEAST_DECAY)
    coarse = jax.lax.stop_gradient(jnp.round(g * _DECAY_GRID) / _DECAY_GRID)
    sums = _once((jnp.cumsum(coarse, axis=-1), jnp.cumsum(g - coarse, axis=-1)))
    exponent = sum(s[..., :, None] - s[..., None, :] for s in sums)
    places = jnp.arange(g.shape[-1])
    mask = _once(jnp.where(places[:, None] >= places[None], 0.0, -jnp.inf))
    mask = mask.reshape((1,) * (g.ndim - 1) + mask.shape)
    decay = _once(jnp.exp(exponent + mask))  # masked before exp: above the diagonal it would overflow
    return decay, jnp.exp(sum(sums)), jnp.exp(sum(s[..., -1:] - s for s in sums))


def _once[T](x: T) -> T:
    """Keep XLA from fusing the making of x into each of its consumers, where it would be computed many times over."""
    return jax.lax.optimization_barrier(x)


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
