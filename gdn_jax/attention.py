"""Full attention with an output gate, over KV pages.

    [q | gate] per head = x W_q^T;   q = rope(norm(q)), k = rope(norm(x W_k^T)), v = x W_v^T
    o = softmax(q k^T / sqrt(D), causal) v;   y = (o * sigmoid(gate)) W_o^T

The output gate is that of Qiu et al. 2025 (arXiv:2505.06708), elementwise and per head; it takes no norm and no
rotation, and stands in W_q interleaved per head: D rows of query, then D rows of gate. The layer owns no cache: pages
come in and go out.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.document_attention import KeyValues, document_attention, visible_keys
from gdn_jax.kernels.paged_attention import (
    paged_attention_advance,
    paged_attention_prefill,
    token_slots,
    write_pages,
)
from gdn_jax.linear import JoinedLinear, Linear
from gdn_jax.norm import RMSNorm
from gdn_jax.rope import inverse_frequencies, rotate
from gdn_jax.state import AdvanceBatch, KVPages, PrefillBatch


class GatedAttention(nnx.Module):
    """One full-attention mixer."""

    def __init__(
        self, config: ModelConfig, *, dtype: jnp.dtype, implementation: Implementation, rngs: nnx.Rngs
    ) -> None:
        """Create the parameters of one layer.

        Args:
            config: the model.
            dtype: parameters and activations.
            implementation: which kernels compute it.
            rngs: source of the initial values.
        """
        hidden, width, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.config = config
        self.implementation = implementation
        self.q_proj = Linear(hidden, 2 * config.num_attention_heads * width, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(hidden, config.num_kv_heads * width, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(hidden, config.num_kv_heads * width, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(config.num_attention_heads * width, hidden, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.k_norm = RMSNorm(width, eps=eps, dtype=dtype)
        self.joined: JoinedLinear | None = nnx.data(None)

    def join(self) -> None:
        """Hold the projections of queries, keys and values as one matrix: see `joined.py`."""
        self.joined = JoinedLinear((self.q_proj, self.k_proj, self.v_proj))
        del self.q_proj, self.k_proj, self.v_proj

    def prefill(
        self, x: Float[Array, "T H"], pages: KVPages, batch: PrefillBatch, *, rope_offset: int = 0, first_key: int = 0
    ) -> tuple[Float[Array, "T H"], KVPages]:
        """Store the keys and values of packed spans, and attend to all keys of their sequences.

        Args:
            x: layer input, after its norm.
            pages: keys and values of this layer.
            batch: packing and block tables.
            rope_offset: added to a token's position for the rotation only; the slot it is stored at does not move.
            first_key: keys before this position do not exist.

        Returns:
            The mixer's output, zeros for tokens that no row owns, and the pages.
        """
        row, owned = batch.rows.row_of(x.shape[0])
        position = batch.rows.positions(x.shape[0])
        slot = token_slots(batch.block_tables, row, position, owned)
        attend = partial(paged_attention_prefill, rows=batch.rows, block_tables=batch.block_tables, first_key=first_key)
        return self._mix(x, pages, position + rope_offset, slot, attend)

    def advance(
        self,
        x: Float[Array, "rows T H"],
        pages: KVPages,
        batch: AdvanceBatch,
        *,
        rope_offset: int = 0,
        first_key: int = 0,
    ) -> tuple[Float[Array, "rows T H"], KVPages]:
        """Store and attend for one window of new tokens per row; as `prefill`."""
        window = x.shape[1]
        position = batch.rows.positions(window)
        row = jnp.broadcast_to(jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], position.shape)
        slot = token_slots(batch.block_tables, row, position, batch.rows.is_new(window))
        attend = partial(paged_attention_advance, rows=batch.rows, block_tables=batch.block_tables, first_key=first_key)
        return self._mix(x, pages, position + rope_offset, slot, attend)

    def forward(self, x: Float[Array, "rows T H"], document: Int[Array, "rows T"]) -> Float[Array, "rows T H"]:
        """Run rows of whole documents without pages: what training differentiates."""
        q, keys, gate = self.project(x, positions_in_row(x))
        return self.output(document_attention(q, keys, visible_keys(document)), gate)

    def project(
        self, x: Float[Array, "*tokens H"], position: Int[Array, "*tokens"]
    ) -> tuple[Float[Array, "*tokens Hq D"], KeyValues, Float[Array, "*tokens Hq D"]]:
        """Return queries and keys, normed and rotated, values, and the gate before its sigmoid."""
        lead, width = x.shape[:-1], self.config.head_dim
        q, k, v = (self.q_proj(x), self.k_proj(x), self.v_proj(x)) if self.joined is None else self.joined(x)
        q, gate = jnp.split(q.reshape(*lead, -1, 2 * width), 2, axis=-1)
        k, v = k.reshape(*lead, -1, width), v.reshape(*lead, -1, width)
        inv_freq, scale = inverse_frequencies(self.config)
        q = rotate(self.q_norm(q), position, inv_freq, scale)
        k = rotate(self.k_norm(k), position, inv_freq, scale)
        return q, KeyValues(k=k, v=v), gate

    def output(
        self, attended: Float[Array, "*tokens Hq D"], gate: Float[Array, "*tokens Hq D"]
    ) -> Float[Array, "*tokens H"]:
        """Gate in float32, and project."""
        gated = attended.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
        return self.o_proj(gated.astype(attended.dtype).reshape(*attended.shape[:-2], -1))

    def _mix(
        self,
        x: Float[Array, "*tokens H"],
        pages: KVPages,
        position: Int[Array, "*tokens"],
        slot: Int[Array, "*tokens"],
        attend: Callable[..., Float[Array, "*tokens Hq D"]],
    ) -> tuple[Float[Array, "*tokens H"], KVPages]:
        """Store the tokens' keys and values at their slots, and attend by `attend`."""
        q, new, gate = self.project(x, position)
        pages = KVPages(k=write_pages(pages.k, new.k, slot), v=write_pages(pages.v, new.v, slot))
        return self.output(attend(q, pages.k, pages.v, implementation=self.implementation), gate), pages


def positions_in_row(x: Float[Array, "rows T H"]) -> Int[Array, "rows T"]:
    """Return 0, 1, 2, ... for each row; scores of rotated vectors depend on differences alone."""
    return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
