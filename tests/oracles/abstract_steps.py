"""Steps of released models without weights: what is compiled to see how much memory a call needs.

Released widths, a layer of each kind; a small vocabulary leaves the layers as what counts.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from released_configs import RELEASED

from gdn_jax.config import ModelConfig
from gdn_jax.joined import join_projections
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.model import LanguageModel
from gdn_jax.serving.runner.buckets import Buckets
from gdn_jax.serving.runner.inputs import BlockTables, build_advance, build_prefill, padded_lanes
from gdn_jax.serving.runner.lanes import LaneSampling
from gdn_jax.serving.runner.packed import pack_inputs
from gdn_jax.serving.runner.pools import PoolSizes, make_device_state
from gdn_jax.serving.runner.sampling import Demand
from gdn_jax.serving.runner.steps import StepStatic, advance_step, prefill_step

LANES = 64


@dataclass(frozen=True, kw_only=True)
class AbstractCall:
    """A call of a step: a function of arrays alone, and what they are like."""

    leaves: tuple[Any, ...]
    donated: tuple[int, ...]  # the state
    function: Any

    @property
    def lowered(self) -> Any:
        """The call, lowered for the device at hand."""
        return jax.jit(self.function, donate_argnums=self.donated).lower(*self.leaves)


def short(name: str, *, vocab_size: int = 0, periods: int = 1, window: int = 1) -> ModelConfig:
    """A released model of few layers. With drafts, a head."""
    config = ModelConfig.from_dict(RELEASED[name])
    return replace(
        config,
        num_layers=2 * periods,
        layer_types=("linear_attention", "full_attention") * periods,
        is_moe_layer=config.is_moe_layer[: 2 * periods],
        num_mtp_layers=int(window > 1),
        vocab_size=vocab_size or config.vocab_size,
    )


def abstract_split(
    config: ModelConfig, dtype: str = "float32", implementation: Implementation = Implementation.JAX
) -> tuple[StepStatic, list[Any]]:
    """Return what a step of a model without weights is compiled for, and the shapes of its parameters."""

    def joined() -> LanguageModel:
        model = LanguageModel(config, dtype=jnp.dtype(dtype), implementation=implementation, rngs=nnx.Rngs(0))
        join_projections(model)
        return model

    graph, shapes = nnx.split(nnx.eval_shape(joined))
    params, tree = jax.tree.flatten(shapes)
    valid = config.vocab_size - 200  # as in the releases, whose last ids have no text
    return StepStatic(graph=graph, tree=tree, num_valid_tokens=valid, num_top=20), params


def abstract_call(
    config: ModelConfig,
    *,
    num_tokens: int = 0,
    num_rows: int,
    window: int = 1,
    num_blocks: int = 256,
    dtype: str = "float32",
    implementation: Implementation = Implementation.JAX,
) -> AbstractCall:
    """Describe a prefill of so many tokens, or without any a decode or verify call."""
    static, params = abstract_split(config, dtype, implementation)
    pools: dict[str, Any] = {"num_slots": 9, "num_blocks": 9, "num_lanes": LANES, "window": window}
    sizes = PoolSizes(block_size=64, max_blocks=num_blocks, state_dtype="float32", **pools)
    state = make_device_state(config, sizes, dtype=jnp.dtype(dtype))
    shape = Buckets(prefill=((num_tokens, num_rows),), advance_rows=(num_rows,), table_blocks=(num_blocks,))
    tables, nobody = BlockTables(LANES, num_blocks), np.zeros((num_rows,), np.bool_)
    nothing = LaneSampling(LANES).gather(padded_lanes([], num_rows, LANES), nobody)
    sampling = replace(nothing, demand=Demand.ANYTHING)
    if num_tokens:
        step, batch = prefill_step, build_prefill([], tables, shape, 64)
    else:
        step, batch = advance_step, build_advance([], tables, shape, window=window)
    # Leaves alone, as lowering puts descriptions in an argument's place, and those fail the check of annotations.
    leaves, structure = jax.tree.flatten((tuple(params), state, pack_inputs(batch, sampling)))
    first = len(params)
    of_state = range(first, first + len(jax.tree.leaves(state)))

    def run(*leaves: Any) -> Any:
        *words, after = step(static, *jax.tree.unflatten(structure, leaves))
        return words, jax.tree.leaves(after)

    return AbstractCall(leaves=tuple(leaves), donated=tuple(of_state), function=run)
