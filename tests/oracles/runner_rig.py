"""A runner of a model of two layers, and rows of plans from a few numbers, for tests of the device side alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from oracles.engine_rig import TINY, poison_all

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.model import LanguageModel, abstract_model
from gdn_jax.serving.core.blocks import BlockId
from gdn_jax.serving.core.checkpoints import Retention, SlotId
from gdn_jax.serving.core.plan import Export, Phase, RowPlan, RowResult, StepPlan
from gdn_jax.serving.core.request import RequestId
from gdn_jax.serving.runner.buckets import Buckets
from gdn_jax.serving.runner.pools import PoolSizes
from gdn_jax.serving.runner.runner import RequestSampling, Runner
from gdn_jax.serving.runner.sampling import RowSampling
from gdn_jax.weights import dummy_weights

SIZES = PoolSizes(num_blocks=9, num_slots=8, num_lanes=3, window=1, block_size=64, max_blocks=4, state_dtype="float32")
BUCKETS = Buckets(prefill=((128, 3),), advance_rows=(3,), table_blocks=(4,))
GREEDY = RequestSampling(row=RowSampling(), num_logprobs=None)
NUM_VALID = 318


def small_config() -> ModelConfig:
    """One GDN layer and one attention layer, an output matrix of its own, no MTP head."""
    config = ModelConfig.from_folder(TINY)
    layers = ("linear_attention", "full_attention")
    return replace(
        config,
        num_layers=2,
        layer_types=layers,
        is_moe_layer=(False,) * 2,
        num_mtp_layers=0,
        tie_word_embeddings=False,
    )


def small_model(dtype: str = "float32") -> LanguageModel:
    """The model of that config with dummy weights."""
    return dummy_weights(abstract_model(small_config(), dtype=jnp.dtype(dtype), implementation=Implementation.JAX))


def make_runner(
    model: LanguageModel | None = None,
    *,
    sizes: PoolSizes = SIZES,
    buckets: Buckets = BUCKETS,
    steps_by_demand: bool = False,
) -> Runner:
    """A runner on pools full of NaN."""
    runner = Runner(model or small_model(), sizes, buckets, num_valid_tokens=NUM_VALID, steps_by_demand=steps_by_demand)
    poison_all(runner)
    return runner


def row(name: str, **changes: Any) -> RowPlan:
    """A row of request `name` on lane 0; a prefill row from an empty state into slot 1 unless told otherwise."""
    fields: dict[str, Any] = {
        "request_id": RequestId(name),
        "phase": Phase.PREFILL,
        "tokens": (),
        "num_drafts": 0,
        "emits": False,
        "start": 0,
        "num_replay": 0,
        "lane": 0,
        "table_start": 0,
        "new_blocks": (),
        "read_anchor": SlotId(0),
        "write_anchor": SlotId(1),
        "exports": (),
        "seed": 0,
    }
    return RowPlan(**fields | changes)


def export(boundary: int, slot: int) -> Export:
    return Export(boundary=boundary, slot=SlotId(slot), retention=Retention.PLACED)


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


def span(name: str, lane: int, tokens: Sequence[int], **changes: Any) -> RowPlan:
    """A prefill row of a lane that has blocks and a slot of its own."""
    fields = {"write_anchor": lane + 1, "new_blocks": blocks(2 * lane + 1, 2 * lane + 2)}
    return row(name, lane=lane, tokens=tuple(tokens), **fields | changes)


def pending(name: str, lane: int, token: int, start: int, **changes: Any) -> RowPlan:
    """A decode row that follows a prefill of `start` tokens."""
    fields = {"tokens": (token,), "start": start, "table_start": 2, "emits": True}
    fields |= {"read_anchor": lane + 1, "write_anchor": lane + 1}
    return row(name, phase=Phase.DECODE, lane=lane, **fields | changes)


def run(runner: Runner, *rows: RowPlan, sampling: RequestSampling = GREEDY) -> Sequence[RowResult]:
    """Run one step whose requests all sample alike."""
    for each in rows:
        runner.add(each.request_id, sampling)
    return runner.run(StepPlan(index=0, rows=rows)).rows
