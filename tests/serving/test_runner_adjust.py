"""Histories on lanes: put there when a request that adjusts gets its lane, without a compilation of its own."""

import jax
import numpy as np
from oracles.runner_rig import SIZES, blocks, make_runner, row, run

from gdn_jax.serving.core.plan import Phase
from gdn_jax.serving.runner.adjust import RowAdjustments, pack_history
from gdn_jax.serving.runner.runner import RequestSampling, Runner
from gdn_jax.serving.runner.sampling import RowSampling
from gdn_jax.serving.runner.steps import place_history

VOCAB = 320
PENALISED = RowAdjustments(frequency=0.5, bad_words=((3, 4),))


def asked(adjustments: RowAdjustments, num_prompt: int) -> RequestSampling:
    return RequestSampling(row=RowSampling(), num_logprobs=None, adjustments=adjustments, num_prompt=num_prompt)


def on_lane(runner: Runner, lane: int) -> list[list[int]]:
    return [np.asarray(array)[lane].tolist() for array in jax.tree.leaves(runner.device.history)]


def packed(prompt: list[int], output: list[int]) -> list[list[int]]:
    return [np.asarray(array).tolist() for array in jax.tree.leaves(pack_history(prompt, output, VOCAB))]


def test_a_lane_holds_what_was_known_and_then_each_token_that_a_row_emits() -> None:
    """The known tokens include output: so it is when a preempted request comes back."""
    runner = make_runner()
    prompt, output = [5, 6, 7], [8, 8, 9]
    sampling = asked(PENALISED, 3)
    first = row("a", tokens=(5, 6), new_blocks=blocks(1), lane=1, history=(*prompt, *output))
    run(runner, first, sampling=sampling)
    assert on_lane(runner, 1) == packed(prompt, output)  # the row does not emit, whatever was drawn for it
    rest = row("a", tokens=(7, 8, 8, 9), start=2, emits=True, lane=1, table_start=1, read_anchor=1)
    ((token,),) = (result.tokens for result in run(runner, rest, sampling=sampling))
    assert on_lane(runner, 1) == packed(prompt, [*output, token])
    pending = row("a", phase=Phase.DECODE, tokens=(token,), start=6, emits=True, lane=1, table_start=1, read_anchor=1)
    ((next_token,),) = (result.tokens for result in run(runner, pending, sampling=sampling))
    assert on_lane(runner, 1) == packed(prompt, [*output, token, next_token])


def test_a_request_that_adjusts_nothing_leaves_its_lane_as_it_was() -> None:
    runner = make_runner()
    before = on_lane(runner, 0)
    run(runner, row("a", tokens=(5, 6), new_blocks=blocks(1), emits=True), sampling=asked(RowAdjustments(), 2))
    assert on_lane(runner, 0) == before


def test_the_first_request_that_adjusts_compiles_nothing_after_warm_up() -> None:
    runner = make_runner()
    runner.warm_up()
    compiled = place_history._cache_size()
    for lane in range(SIZES.num_lanes):
        place = {"new_blocks": blocks(lane + 1), "lane": lane, "write_anchor": lane + 1}
        mine = row(str(lane), tokens=(5, 6), emits=True, history=(5, 6), **place)
        run(runner, mine, sampling=asked(PENALISED, 2))
    assert place_history._cache_size() == compiled
