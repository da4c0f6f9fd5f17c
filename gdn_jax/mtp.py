"""The multi-token-prediction head: one extra full-attention layer that drafts the token after the next.

    e = norm(embed[token_p]);  h = norm(hidden_{p-1});  x = [e, h] fc^T;  m = norm(layer(x));  draft logits = m
    lm_head^T

`hidden` is the target's vector after its final norm; when drafts feed each other, it is the head's own m. Embedding and
output matrix are the decoder's. The key and value made from (hidden of p - 1, token p) stand at token slot p, so that
an entry depends only on tokens its block's hash covers; slot 0 has none and is masked; the rotary position stays p - 1.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax.attention import positions_in_row
from gdn_jax.config import ModelConfig
from gdn_jax.decoder import DecoderLayer
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.document_attention import KeyValues, document_attention, visible_keys
from gdn_jax.kernels.documents import same_document
from gdn_jax.linear import Linear
from gdn_jax.norm import RMSNorm
from gdn_jax.state import AdvanceBatch, KVPages, PrefillBatch

ROPE_OFFSET = -1  # an entry at slot p is rotated as position p - 1, the position of the hidden vector it is made from
FIRST_KEY = 1  # no entry exists at slot 0


class MTPHead(nnx.Module):
    """Drafts from (embedding of token p, target's final hidden vector of token p - 1)."""

    def __init__(
        self, config: ModelConfig, *, dtype: jnp.dtype, implementation: Implementation, rngs: nnx.Rngs
    ) -> None:
        """Create the head's own parameters.

        Args:
            config: the model.
            dtype: parameters and activations.
            implementation: which kernels compute it.
            rngs: source of the initial values.
        """
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(width, eps=eps, dtype=dtype)
        self.pre_fc_norm_hidden = RMSNorm(width, eps=eps, dtype=dtype)
        self.fc = Linear(2 * width, width, dtype=dtype, rngs=rngs)
        self.layer = DecoderLayer(
            config,
            kind="full_attention",
            is_moe=config.mtp_is_moe,
            dtype=dtype,
            implementation=implementation,
            rngs=rngs,
        )
        self.norm = RMSNorm(width, eps=eps, dtype=dtype)

    def prefill(
        self,
        embeddings: Float[Array, "T H"],
        hidden: Float[Array, "T H"],
        pages: KVPages,
        batch: PrefillBatch,
    ) -> tuple[Float[Array, "T H"], KVPages]:
        """Run packed spans of entries; `batch.rows.start` is the slot position p of each row's first entry, at least 1.

        Args:
            embeddings: embeddings of the tokens p.
            hidden: final hidden vectors of the tokens p - 1.
            pages: the head's own pages.
            batch: packing and block tables; its token ids and state slots are not used.

        Returns:
            The head's output m after its norm, and the pages.
        """
        x = self._combine(embeddings, hidden)
        x, pages = self.layer.prefill(x, pages, batch, rope_offset=ROPE_OFFSET, first_key=FIRST_KEY)
        return self.norm(x), pages

    def advance(
        self,
        embeddings: Float[Array, "rows T H"],
        hidden: Float[Array, "rows T H"],
        pages: KVPages,
        batch: AdvanceBatch,
    ) -> tuple[Float[Array, "rows T H"], KVPages]:
        """Run one window of entries per row; `batch.rows.start()` is the slot position of each row's first entry."""
        x = self._combine(embeddings, hidden)
        x, pages = self.layer.advance(x, pages, batch, rope_offset=ROPE_OFFSET, first_key=FIRST_KEY)
        return self.norm(x), pages

    def forward(
        self,
        embeddings: Float[Array, "rows T H"],
        hidden: Float[Array, "rows T H"],
        document: Int[Array, "rows T"],
        *,
        depth: int,
    ) -> list[Float[Array, "rows T H"]]:
        """Run rows of whole documents as drafting would from every token, without pages; differentiable.

        The d-th output at token p is what the head gives there after feeding itself d - 1 times: it saw the target's
        hidden vectors up to token p - d, its own outputs after that, and the true tokens up to p. Its keys are the
        entries made from true hidden vectors up to token p - d + 1, and its own d - 1 since.

        Args:
            embeddings: of every token.
            hidden: the target's final hidden vectors of every token.
            document: which document of its row a token belongs to.
            depth: outputs per token, at least 1.

        Returns:
            The outputs for d = 1, 2, ..., depth. The d-th means nothing at the first d tokens of a document.
        """
        attention: Any = self.layer.mixer  # the layer's kind is full attention
        position = positions_in_row(embeddings) + ROPE_OFFSET
        has_entry = same_document(document, 1)  # the first token of a document has none
        outputs: list[Array] = []
        entries: list[KeyValues] = []  # of each depth
        for fed in range(depth):
            source = hidden if fed == 0 else outputs[-1]
            x = self._combine(embeddings, jnp.pad(source, ((0, 0), (1, 0), (0, 0)))[:, :-1])
            q, keys, gate = attention.project(self.layer.input_layernorm(x), position)
            entries.append(keys)
            own = tuple(entries[d].shifted(fed - d) for d in range(1, fed + 1))
            attended = document_attention(q, entries[0], visible_keys(document, has_entry, lag=fed), own)
            outputs.append(self.norm(self.layer.feed_forward(x + attention.output(attended, gate))))
        return outputs

    def _combine(
        self, embeddings: Float[Array, "*tokens H"], hidden: Float[Array, "*tokens H"]
    ) -> Float[Array, "*tokens H"]:
        e, h = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)
        return self.fc(jnp.concatenate([e, h], axis=-1))
