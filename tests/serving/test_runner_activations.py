"""The estimate of a step's memory, compared with what XLA assigns: never less, at most twice as much.

Released widths, two layers, no weights: steps are compiled from shapes. float32, since a CPU makes float32
copies of bfloat16 weights. The number of layers must not count, since layers run one after the other.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from oracles.abstract_steps import abstract_call, abstract_split, short
from released_configs import RELEASED

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.serving.runner.activations import advance_bytes, mosaic_prefill_bytes, prefill_bytes, score_bytes
from gdn_jax.serving.runner.memory import MemoryRequest, activation_bytes
from gdn_jax.serving.runner.prompt_scores import score_prompts

FLOAT32 = 4
DENSE, MOE, LARGE = "qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3.5-27b"


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile what never runs: XLA has assigned all memory before LLVM would make the code quick."""
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})


def assigned(config: ModelConfig, **sizes: int) -> int:
    """Return the bytes that XLA assigns beside arguments, the pools among them."""
    needed = compiled(abstract_call(config, **sizes).lowered).memory_analysis()
    return needed.temp_size_in_bytes + needed.output_size_in_bytes - needed.alias_size_in_bytes


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
    needed = compiled(lowered).memory_analysis()
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


def test_the_plan_counts_few_tokens_too_where_mosaic_kernels_split_their_attention() -> None:
    config = ModelConfig.from_dict(RELEASED[DENSE])
    asked: dict[str, Any] = {"total_bytes": 1, "pool_bytes": 0, "state_dtype": "float32", "block_size": 64, "window": 1}
    asked |= {"budget": 2048, "max_num_seqs": 8, "implementation": Implementation.MOSAIC}
    sizes = {"num_rows": 8, "num_blocks": 4096}
    widest = MemoryRequest(dtype="bfloat16", max_model_len=4096 * 64, **asked)
    few, many = (mosaic_prefill_bytes(config, 2, num_tokens=tokens, **sizes) for tokens in (512, 2048))
    assert activation_bytes(config, widest) >= few > many
    for num_seqs in range(1, 9):  # if fewer requests fit than were asked for
        fewer = replace(widest, max_num_seqs=num_seqs)
        assert activation_bytes(config, fewer) <= activation_bytes(config, widest)
    narrow = MemoryRequest(dtype="bfloat16", max_model_len=256, **asked)
    assert activation_bytes(config, narrow) < few
    wide = MemoryRequest(dtype="float32", max_model_len=4096 * 64, **asked)  # in plain JAX
    assert activation_bytes(config, wide) == prefill_bytes(config, FLOAT32, num_tokens=2048, num_rows=8)
