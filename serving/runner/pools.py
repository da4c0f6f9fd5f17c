"""DeviceState: everything on the device that steps change, as one pytree; every step gets it donated.

Slots and pages are indexed by what the scheduler lends; arrays here that are indexed by lane follow a request from its
admission to its release.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from gdn_jax.config import ModelConfig
from gdn_jax.serving.runner.adjust import LaneHistory, make_history
from gdn_jax.state import ModelState, make_state


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """Sizes of the pools, null block and null slot included.

    Attributes:
        num_blocks: KV blocks.
        num_slots: state slots.
        num_lanes: lanes.
        window: tokens of a verify row and of a replay window, 1 + k: the pending token and the drafts.
        block_size: tokens per block.
        max_blocks: most blocks of one sequence.
        state_dtype: of recurrent states at rest, by name.
    """

    num_blocks: int
    num_slots: int
    num_lanes: int
    window: int
    block_size: int
    max_blocks: int
    state_dtype: str

    @property
    def num_drafts(self) -> int:
        """Drafts made in a step, k."""
        return self.window - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """What steps read and write.

    Attributes:
        model: state slots, KV pages and replay windows.
        newest: by lane, the token that a row of it emitted last.
        drafts: by lane, the tokens guessed to follow that one.
        history: by lane, what the sequences hold, for penalties and bad words.
    """

    model: ModelState
    newest: Int[Array, "lanes 1"]
    drafts: Int[Array, "lanes k"]
    history: LaneHistory


def make_device_state(config: ModelConfig, sizes: PoolSizes, *, dtype: jnp.dtype) -> DeviceState:
    """Allocate zeroed pools.

    Args:
        config: the model.
        sizes: of the pools.
        dtype: activations, KV pages and convolution windows.
    """
    model = make_state(
        config,
        num_slots=sizes.num_slots,
        num_pages=sizes.num_blocks,
        num_lanes=sizes.num_lanes,
        window=sizes.window,
        dtype=dtype,
        state_dtype=jnp.dtype(sizes.state_dtype),
        block_size=sizes.block_size,
    )
    return DeviceState(
        model=model,
        newest=jnp.zeros((sizes.num_lanes, 1), jnp.int32),
        drafts=jnp.zeros((sizes.num_lanes, sizes.num_drafts), jnp.int32),
        history=make_history(sizes.num_lanes, config.vocab_size),
    )
