"""A step's inputs as one array: they come out as they went in, and steps of one shape share their layout."""

from typing import Any

import jax
import numpy as np
import pytest
from oracles.runner_rig import BUCKETS, blocks, export, row

from gdn_jax.serving.core.plan import Phase
from gdn_jax.serving.runner.inputs import BlockTables, build_advance, build_prefill, padded_lanes
from gdn_jax.serving.runner.lanes import LaneSampling
from gdn_jax.serving.runner.packed import ALIGNED_WORDS, StepInputs, pack_inputs
from gdn_jax.serving.runner.sampling import SampledRows

LANES = 3


def inputs_of(phase: Phase, token: int) -> tuple[StepInputs, tuple[Any, SampledRows]]:
    """Return packed inputs of one row, and the batch and rows that they were made of."""
    tables = BlockTables(LANES, 4)
    fields = {"lane": 1, "tokens": (token, token + 1), "new_blocks": blocks(5, 6), "exports": (export(64, 7),)}
    plans = [row("r", phase=phase, **fields)]
    tables.extend(plans[0])
    prefill = phase is Phase.PREFILL
    batch = build_prefill(plans, tables, BUCKETS, 64) if prefill else build_advance(plans, tables, BUCKETS, window=2)
    lane = padded_lanes(plans, 3, LANES)
    sampling = LaneSampling(LANES).gather(lane, np.asarray([True, False, True]))
    return pack_inputs(batch, sampling), (batch, sampling)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY])
def test_what_was_packed_comes_out(phase: Phase) -> None:
    packed, meant = inputs_of(phase, 40)
    found = jax.jit(StepInputs.unpack)(packed)
    assert jax.tree.structure(found) == jax.tree.structure(meant)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(meant), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY])
def test_other_numbers_in_the_same_shapes_are_the_same_layout(phase: Phase) -> None:
    first, second = (inputs_of(phase, token)[0] for token in (40, 90))
    assert (first.layout, hash(first.layout)) == (second.layout, hash(second.layout))
    assert first.words.tolist() != second.words.tolist()


def test_every_piece_begins_where_a_kernel_takes_an_array() -> None:
    packed, (batch, sampling) = inputs_of(Phase.PREFILL, 40)
    first = 0
    for leaf in jax.tree.leaves((batch, sampling.lane, sampling.emits)):
        assert packed.words[first : first + leaf.size].tolist() == leaf.reshape(-1).tolist()
        first += -(-leaf.size // ALIGNED_WORDS) * ALIGNED_WORDS
    assert len(packed.words) == first
    assert 4 * ALIGNED_WORDS % 256 == 0, "bytes, where Pallas kernels for GPUs take an array"
