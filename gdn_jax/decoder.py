"""The decoder: embeddings, the stack of GDN and full-attention layers, the final norm, logits.

    x = embed[ids];  per layer: x += mixer(norm(x)), x += ffn(norm(x));  h = norm(x);  logits = h lm_head^T

Three ways through the same weights: `prefill` for packed spans, `advance` for one window of new tokens per row, which
both take the whole state and return it; and `forward` for rows of whole documents without any state, for training.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax.attention import GatedAttention
from gdn_jax.config import ModelConfig
from gdn_jax.gated_delta_net import GatedDeltaNet
from gdn_jax.kernels.anchors import carry_last_advance, carry_last_prefill
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.lanes import gather_lanes, scatter_lanes
from gdn_jax.kernels.numerics import einsum
from gdn_jax.linear import Embedding, Linear
from gdn_jax.mlp import DenseMLP
from gdn_jax.moe import MoE
from gdn_jax.norm import RMSNorm
from gdn_jax.state import AdvanceBatch, KVPages, ModelState, PrefillBatch, RecurrentState

LayerState = RecurrentState | KVPages  # a layer returns the kind it was given


class DecoderLayer(nnx.Module):
    """One residual pair of mixer and feed-forward; also the layer of the MTP head."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        kind: str,
        is_moe: bool,
        dtype: jnp.dtype,
        implementation: Implementation,
        rngs: nnx.Rngs,
    ) -> None:
        """Create the layer.

        Args:
            config: the model.
            kind: "linear_attention" or "full_attention".
            is_moe: whether the feed-forward is a mixture of experts.
            dtype: parameters and activations.
            implementation: which kernels compute it.
            rngs: source of the initial values.
        """
        mixer = GatedDeltaNet if kind == "linear_attention" else GatedAttention
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mixer = mixer(config, dtype=dtype, implementation=implementation, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        if is_moe:
            self.mlp = MoE(config, dtype=dtype, implementation=implementation, rngs=rngs)
        else:
            self.mlp = DenseMLP(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def prefill[State: (RecurrentState, KVPages, LayerState)](
        self, x: Float[Array, "T H"], state: State, batch: PrefillBatch, **attention: int
    ) -> tuple[Float[Array, "T H"], State]:
        """Run packed spans; `attention` holds `rope_offset` and `first_key` of the MTP layer."""
        mixer: Any = self.mixer  # each kind takes and returns its own kind of state
        mixed, state = mixer.prefill(self.input_layernorm(x), state, batch, **attention)
        return self.feed_forward(x + mixed), state

    def advance[State: (RecurrentState, KVPages, LayerState)](
        self, x: Float[Array, "rows T H"], state: State, batch: AdvanceBatch, **attention: int
    ) -> tuple[Float[Array, "rows T H"], State]:
        """Run one window per row; `attention` as for `prefill`."""
        mixer: Any = self.mixer
        mixed, state = mixer.advance(self.input_layernorm(x), state, batch, **attention)
        return self.feed_forward(x + mixed), state

    def forward(self, x: Float[Array, "rows T H"], document: Int[Array, "rows T"]) -> Float[Array, "rows T H"]:
        """Run rows of whole documents; `document` says which one of its row a token belongs to."""
        return self.feed_forward(x + self.mixer.forward(self.input_layernorm(x), document))

    def feed_forward(self, x: Float[Array, "*tokens H"]) -> Float[Array, "*tokens H"]:
        """Add the second half of the layer to what the mixer left."""
        flat = self.post_attention_layernorm(x).reshape(-1, x.shape[-1])
        return x + self.mlp(flat).reshape(x.shape)


class Decoder(nnx.Module):
    """The target model without its MTP head."""

    def __init__(
        self, config: ModelConfig, *, dtype: jnp.dtype, implementation: Implementation, rngs: nnx.Rngs
    ) -> None:
        """Create the parameters.

        Args:
            config: the model.
            dtype: parameters and activations.
            implementation: which kernels compute it.
            rngs: source of the initial values.
        """
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            DecoderLayer(config, kind=kind, is_moe=is_moe, dtype=dtype, implementation=implementation, rngs=rngs)
            for kind, is_moe in zip(config.layer_types, config.is_moe_layer, strict=True)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        )

    def prefill(self, batch: PrefillBatch, state: ModelState) -> tuple[Float[Array, "T H"], ModelState]:
        """Run packed spans.

        Returns:
            Final hidden vectors (after the final norm) of every packed token, and the new state.
        """
        x, layers = self.embed_tokens(batch.token_ids), []
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x, after = layer.prefill(x, layer_state, batch)
            layers.append(after)
        hidden = self.norm(x)
        return hidden, ModelState(
            layers=tuple(layers),
            hidden=carry_last_prefill(hidden, batch.rows, state.hidden),
            replay_hidden=state.replay_hidden,
            mtp=state.mtp,
        )

    def advance(self, batch: AdvanceBatch, state: ModelState) -> tuple[Float[Array, "rows T H"], ModelState]:
        """Fold replay windows and run one window of new tokens per row.

        Returns:
            Final hidden vectors of the new tokens, and the new state, whose replay windows hold them.
        """
        x, layers = self.embed_tokens(batch.token_ids), []
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x, after = layer.advance(x, layer_state, batch)
            layers.append(after)
        hidden = self.norm(x)
        replay = gather_lanes(state.replay_hidden, batch.lane)
        return hidden, ModelState(
            layers=tuple(layers),
            hidden=carry_last_advance(replay, batch.rows, state.hidden),
            replay_hidden=scatter_lanes(state.replay_hidden, batch.lane, hidden),
            mtp=state.mtp,
        )

    def forward(self, token_ids: Int[Array, "rows T"], document: Int[Array, "rows T"]) -> Float[Array, "rows T H"]:
        """Run rows of whole documents from empty states; differentiable in the parameters.

        Args:
            token_ids: any documents one after the other.
            document: at least 0; which document of its row a token belongs to. Nothing passes from one to another.

        Returns:
            Final hidden vectors (after the final norm).
        """
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer.forward(x, document)
        return self.norm(x)

    def logits(self, hidden: Float[Array, "*tokens H"]) -> Float[Array, "*tokens V"]:
        """Return float32 logits of final hidden vectors."""
        table = self.embed_tokens.weight[...] if self.lm_head is None else self.lm_head.weight[...]
        return einsum("...h,vh->...v", hidden, table)
