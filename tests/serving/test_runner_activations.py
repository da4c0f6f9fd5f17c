"""The estimate of a step's memory, compared with what XLA assigns: never less, at most twice as much.

Released widths, two layers, no weights: steps are compiled from shapes. float32, since a CPU makes float32
copies of bfloat16 weights. The number of layers must not count, since layers run one after the other.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from released_configs import RELEASED

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.model import abstract_model
from gdn_jax.serving.runner.activations import advance_bytes, prefill_bytes, score_bytes
from gdn_jax.serving.runner.buckets import Buckets
from gdn_jax.serving.runner.inputs import BlockTables, build_advance, build_prefill, padded_lanes
from gdn_jax.serving.runner.lanes import LaneSampling
from gdn_jax.serving.runner.memory import MemoryRequest, activation_bytes
from gdn_jax.serving.runner.packed import pack_inputs
from gdn_jax.serving.runner.pools import PoolSizes, make_device_state
from gdn_jax.serving.runner.prompt_scores import score_prompts
from gdn_jax.serving.runner.steps import StepStatic, advance_step, prefill_step

LANES, WIDTH = 64, 256
FLOAT32 = 4
DENSE, MOE, LARGE = "qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3.5-27b"


def short(name: str, *, vocab_size: int = 0, periods: int = 1, window: int = 1) -> ModelConfig:
    """A released model of few layers; a small vocabulary leaves the layers as what counts. With drafts, a head."""
    config = ModelConfig.from_dict(RELEASED[name])
    return replace(
        config,
        num_layers=2 * periods,
        layer_types=("linear_attention", "full_attention") * periods,
        is_moe_layer=config.is_moe_layer[: 2 * periods],
        num_mtp_layers=int(window > 1),
        vocab_size=vocab_size or config.vocab_size,
    )


def assigned(config: ModelConfig, *, num_tokens: int = 0, num_rows: int, window: int = 1) -> int:
    """Return the bytes that XLA assigns beside arguments, the pools among them; an advance without `num_tokens`."""
    static, params = abstract_split(config)
    pools: dict[str, Any] = {"num_slots": 9, "num_blocks": 9, "num_lanes": LANES, "window": window}
    sizes = PoolSizes(block_size=64, max_blocks=WIDTH, state_dtype="float32", **pools)
    state = make_device_state(config, sizes, dtype=jnp.dtype("float32"))
    shape = Buckets(prefill=((num_tokens, num_rows),), advance_rows=(num_rows,), table_blocks=(WIDTH,))
    tables, nobody = BlockTables(LANES, WIDTH), np.zeros((num_rows,), np.bool_)
    sampling = LaneSampling(LANES).gather(padded_lanes([], num_rows, LANES), nobody)
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

    needed = jax.jit(run, donate_argnums=tuple(of_state)).lower(*leaves).compile().memory_analysis()
    return needed.temp_size_in_bytes + needed.output_size_in_bytes - needed.alias_size_in_bytes


def abstract_split(config: ModelConfig) -> tuple[StepStatic, list[Any]]:
    """Return what a step of a model without weights is compiled for, and the shapes of its parameters."""
    graph, shapes = nnx.split(abstract_model(config, dtype=jnp.dtype("float32"), implementation=Implementation.JAX))
    params, tree = jax.tree.flatten(shapes)
    valid = config.vocab_size - 200  # as in the releases, whose last ids have no text
    return StepStatic(graph=graph, tree=tree, num_valid_tokens=valid, num_top=20), params


@pytest.mark.parametrize(
    ("name", "num_tokens", "num_rows", "window"),
    [(DENSE, 2048, 8, 4), (MOE, 2048, 1, 1), (LARGE, 512, 8, 1)],
)
def test_a_prefill_call_stays_within_its_estimate(name: str, num_tokens: int, num_rows: int, window: int) -> None:
    config = short(name, vocab_size=1024, window=window)
    needed = assigned(config, num_tokens=num_tokens, num_rows=num_rows, window=window)
    assert needed <= prefill_bytes(config, FLOAT32, num_tokens=num_tokens, num_rows=num_rows) <= 2 * needed


@pytest.mark.parametrize(
    ("name", "vocab_size", "num_rows", "window"),
    [(DENSE, 0, 64, 4), (MOE, 1024, 64, 1), (LARGE, 1024, 16, 1)],
)
def test_a_decode_or_verify_call_stays_within_its_estimate(
    name: str, vocab_size: int, num_rows: int, window: int
) -> None:
    """States count where heads are many, logits where the vocabulary is large."""
    config = short(name, vocab_size=vocab_size, window=window)
    needed = assigned(config, num_rows=num_rows, window=window)
    assert needed <= advance_bytes(config, FLOAT32, num_rows=num_rows, window=window) <= 2 * needed


@pytest.mark.parametrize(("name", "num_tokens"), [(DENSE, 64), (MOE, 2048)])
def test_a_call_that_scores_prompts_stays_within_its_estimate(name: str, num_tokens: int) -> None:
    """However many tokens there are, the logits of one tile of them exist at a time."""
    config = short(name)
    static, params = abstract_split(config)
    hidden = jax.ShapeDtypeStruct((num_tokens, config.hidden_size), jnp.float32)

    def run(hidden: Any, next_ids: Any, *params: Any) -> Any:
        return score_prompts(static, params, hidden, next_ids)

    lowered = jax.jit(run).lower(hidden, jax.ShapeDtypeStruct((num_tokens,), jnp.int32), *params)
    needed = lowered.compile().memory_analysis()
    total = needed.temp_size_in_bytes + needed.output_size_in_bytes + hidden.size * hidden.dtype.itemsize
    assert total <= score_bytes(config, FLOAT32, num_tokens=num_tokens) <= 2 * total


def test_more_layers_need_no_more_memory() -> None:
    two, four = (
        assigned(short(MOE, vocab_size=1024, periods=periods), num_tokens=512, num_rows=8) for periods in (1, 2)
    )
    assert four <= 1.2 * two  # 1.6 times where each layer keeps buffers of its own


def test_the_plan_counts_the_largest_of_all_calls() -> None:
    config = ModelConfig.from_dict(RELEASED[DENSE])
    asked: dict[str, Any] = {"total_bytes": 1, "pool_bytes": 0, "dtype": "float32", "state_dtype": "float32"}
    asked |= {"max_model_len": 0, "block_size": 64, "window": 1}
    many_tokens = MemoryRequest(budget=8191, max_num_seqs=4, **asked)
    assert activation_bytes(config, many_tokens) == prefill_bytes(config, FLOAT32, num_tokens=8192, num_rows=4)
    neither = MemoryRequest(budget=64, max_num_seqs=1, **asked)
    assert activation_bytes(config, neither) == score_bytes(config, FLOAT32, num_tokens=64)
    many_rows = MemoryRequest(budget=64, max_num_seqs=256, **asked)
    assert activation_bytes(config, many_rows) == advance_bytes(config, FLOAT32, num_rows=256, window=1)
