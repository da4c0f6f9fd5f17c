"""The gated delta rule inside chunks of 64 tokens: what does not depend on the state, and the step that carries it.

In a chunk with rows i, j, G_i the running sum of g, and D_ij = exp(G_i - G_j) for j <= i, 0 above the diagonal:

    A = strictly_lower( diag(beta) (K K^T o D) )        T = (I + A)^-1 diag(beta)
    V' = T (V - diag(exp G) K S)                        what the chunk's tokens really write
    O = diag(exp G) Q S + (Q K^T o D) V'
    S <- exp(G_n) S + K^T diag(exp(G_n - G)) V'

(Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024, section 3.3, with W and U folded into V'.) The inverse, the
decays and the scores Q K^T o D do not need S and are computed for all chunks at once by `prepare_chunks`; `run_chunk`
is the rest. h counts key heads, r the value heads of one of them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn_jax.kernels.gated_delta.inputs import DeltaInputs
from gdn_jax.kernels.gated_delta.triangular import unit_lower_inverse
from gdn_jax.kernels.numerics import CHUNK, einsum

LEAST_DECAY = -120.0  # exp of this and of anything below is zero in float32
DECAY_GRID = 1024.0  # sums of 64 multiples of 1 / 1024 above -120 are exact in float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What the serial scan needs of each chunk.

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


def prepare_chunks(q: Float[Array, "chunks places Nk dk"], inputs: DeltaInputs) -> Chunk:
    """Compute what does not depend on the state, of all chunks at once.

    Args:
        q: queries, zeros at pads.
        inputs: of the same places, zeros at pads, which leaves the state as it is.
    """
    dtype = inputs.v.dtype

    def by_key_head(x: Array) -> Array:  # [chunks, places, Nk, ...] to [chunks, h, places, ...]
        return _once(jnp.moveaxis(x, 1, 2))

    def by_value_head(x: Array) -> Array:  # [chunks, places, Nv, ...] to [chunks, h, r, places, ...]
        x = by_key_head(x)
        return x.reshape(x.shape[0], q.shape[2], -1, *x.shape[2:])

    keys, queries, beta = by_key_head(inputs.k), by_key_head(q), by_value_head(inputs.beta)
    decay, decay_in, decay_out = _decays(by_value_head(inputs.g))
    key_products = einsum("nhik,nhjk->nhij", keys, keys)[:, :, None]  # once for all value heads of a key head
    query_products = einsum("nhik,nhjk->nhij", queries, keys)[:, :, None]

    below = jnp.tril(jnp.ones((CHUNK, CHUNK), jnp.float32), -1)[None, None, None]
    lower = _once(beta[..., None] * key_products * decay * below)
    return Chunk(
        keys=keys,
        queries=queries,
        values=by_value_head(inputs.v),
        inverse=unit_lower_inverse(lower).astype(dtype),
        scores=(query_products * decay).astype(dtype),
        beta=beta,
        decay_in=decay_in,
        decay_out=decay_out,
    )


def run_chunk(
    state: Float[Array, "h r dv dk"], chunk: Chunk
) -> tuple[Float[Array, "h r dv dk"], Float[Array, "h r places dv"]]:
    """Run one chunk on top of a float32 state; return the state after it, and its outputs in the values' dtype."""
    dtype = chunk.values.dtype
    operand = state.astype(dtype)
    readings = einsum("hik,hrvk->hriv", jnp.concatenate([chunk.keys, chunk.queries], axis=1), operand)
    at_keys, at_queries = (chunk.decay_in[..., None] * x for x in jnp.split(readings, 2, axis=-2))
    error = chunk.beta[..., None] * (chunk.values.astype(jnp.float32) - at_keys)
    written = einsum("hrij,hrjv->hriv", chunk.inverse, error.astype(dtype))

    kept = (chunk.decay_out[..., None] * written).astype(dtype)
    state = chunk.decay_in[..., -1:, None] * state + einsum("hriv,hik->hrvk", kept, chunk.keys)
    output = at_queries + einsum("hrij,hrjv->hriv", chunk.scores, written.astype(dtype))
    return state, output.astype(dtype)


def _decays(g: Float[Array, "*lead places"]) -> tuple[Array, Array, Array]:
    """Return D [..., i, j] with zeros above the diagonal, exp(G_i) and exp(G_n - G_i).

    Differences of running sums would lose the small decays that follow a strong one (after g = -1e4, sums of -0.1 have
    errors of 1e-3). So g splits into a multiple of 1 / 1024, whose sums and differences are exact, and a rest
    whose sums stay below 1 / 16.
    """
    g = jnp.maximum(g, LEAST_DECAY)
    coarse = jax.lax.stop_gradient(jnp.round(g * DECAY_GRID) / DECAY_GRID)
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
