"""What layers read and return: KV pages, state slots, replay windows; their shapes and bytes.

A state slot is one index into `recurrent` and `conv` of every GDN layer and into `hidden`; a page is one index into
`k` and `v` of every full-attention layer. Replay windows and nothing else are indexed by lane. Owners of the indices
live in `serving`; here are only arrays. What one GDN layer remembers is `kernels/gdn_mixer/state.py`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.anchors import AdvanceRows, AnyArray, PrefillRows
from gdn_jax.kernels.gated_delta import DeltaInputs
from gdn_jax.kernels.gdn_mixer import RecurrentState, ReplayWindow
from gdn_jax.kernels.numerics import CHUNK


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVPages:
    """Keys (normed, rotated) and values of one full-attention layer, by page."""

    k: Float[Array, "pages block Hkv D"]
    v: Float[Array, "pages block Hkv D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Everything a step reads and writes; one pytree, donated to every step.

    Attributes:
        layers: `RecurrentState` or `KVPages`, one per decoder layer.
        hidden: the target's final hidden vector (after the final norm) of each slot's newest token.
        replay_hidden: final hidden vectors of the tokens in the replay windows.
        mtp: pages of the MTP layer; None without one. The entry made from (hidden of p - 1, token p) stands at token
        slot p.
    """

    layers: tuple[RecurrentState | KVPages, ...]
    hidden: Float[Array, "slots H"]
    replay_hidden: Float[Array, "lanes R H"]
    mtp: KVPages | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """Packed spans of several sequences. Token ids of padding are any valid id."""

    token_ids: Int[AnyArray, "T"]
    rows: PrefillRows
    block_tables: Int[AnyArray, "rows blocks"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AdvanceBatch:
    """One window of new tokens per row. A padding row's lane lies past the last lane: its stores are dropped."""

    token_ids: Int[AnyArray, "rows T"]
    rows: AdvanceRows
    lane: Int[AnyArray, "rows"]
    block_tables: Int[AnyArray, "rows blocks"]


def make_state(
    config: ModelConfig,
    *,
    num_slots: int,
    num_pages: int,
    num_lanes: int,
    window: int,
    dtype: jnp.dtype,
    state_dtype: jnp.dtype | None = None,
    block_size: int = CHUNK,
) -> ModelState:
    """Allocate zeroed pools.

    Args:
        config: the model.
        num_slots: state slots, the null slot included.
        num_pages: KV pages, the null page included.
        num_lanes: lanes.
        window: tokens per replay window, 1 + k.
        dtype: activations, KV pages and convolution windows.
        state_dtype: recurrent states at rest; float32 by default.
        block_size: tokens per KV page, a multiple of the chunk.
    """
    state_dtype = jnp.dtype(jnp.float32) if state_dtype is None else state_dtype

    def pages() -> KVPages:
        shape = (num_pages, block_size, config.num_kv_heads, config.head_dim)
        return KVPages(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))

    def slots() -> RecurrentState:
        nk, nv = config.num_linear_key_heads, config.num_linear_value_heads
        dk, dv = config.linear_key_dim, config.linear_value_dim
        lead = (num_lanes, window)
        delta = DeltaInputs(
            k=jnp.zeros((*lead, nk, dk), dtype),
            v=jnp.zeros((*lead, nv, dv), dtype),
            g=jnp.zeros((*lead, nv), jnp.float32),
            beta=jnp.zeros((*lead, nv), jnp.float32),
        )
        return RecurrentState(
            recurrent=jnp.zeros((num_slots, nv, dv, dk), state_dtype),
            conv=jnp.zeros((num_slots, config.conv_window, config.conv_channels), dtype),
            replay=ReplayWindow(conv=jnp.zeros((*lead, config.conv_channels), dtype), delta=delta),
        )

    return ModelState(
        layers=tuple(slots() if kind == "linear_attention" else pages() for kind in config.layer_types),
        hidden=jnp.zeros((num_slots, config.hidden_size), dtype),
        replay_hidden=jnp.zeros((num_lanes, window, config.hidden_size), dtype),
        mtp=pages() if config.num_mtp_layers else None,
    )
