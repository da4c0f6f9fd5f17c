"""Steps compiled for what their rows ask for: the tokens of the general step, and for no rows that ask for more."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.runner_rig import GREEDY, SIZES, blocks, make_runner, row, run, small_config

from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.model import LanguageModel, abstract_model
from gdn_jax.serving.core.plan import Phase
from gdn_jax.serving.runner.adjust import RowAdjustments
from gdn_jax.serving.runner.lanes import LaneSampling
from gdn_jax.serving.runner.runner import RequestSampling, Runner
from gdn_jax.serving.runner.sampling import Demand, RowSampling
from gdn_jax.weights import dummy_weights

PROMPT = tuple(range(10, 30))
DRAFTING = replace(SIZES, window=3)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    config = replace(small_config(), num_mtp_layers=1)
    return dummy_weights(abstract_model(config, dtype=jnp.dtype("float32"), implementation=Implementation.JAX))


def decode(runner: Runner, sampling: RequestSampling = GREEDY, num_tokens: int = 12) -> list[int]:
    """Answer the prompt on lane 0 with two drafts a step."""
    first = row("r", tokens=PROMPT, emits=True, new_blocks=blocks(1, 2))
    tokens, num_replay = list(run(runner, first, sampling=sampling)[0].tokens), 0
    while len(tokens) < num_tokens:
        plan = {"num_drafts": 2, "num_replay": num_replay, "emits": True, "tokens": (tokens[-1],)}
        anchors = {"start": len(PROMPT) + len(tokens) - 1, "read_anchor": 1, "table_start": 2}
        emitted = run(runner, row("r", phase=Phase.VERIFY, **anchors, **plan), sampling=sampling)[0].tokens
        tokens, num_replay = [*tokens, *emitted], len(emitted)
    return tokens[:num_tokens]


@pytest.mark.parametrize(
    ("row_sampling", "step"),
    [
        (RowSampling(), "decode (greedy)"),
        (RowSampling(temperature=0.9, seed=2**33 + 5), "decode (draw)"),
        (RowSampling(temperature=2, min_p=0.1), "decode (draw)"),
        (RowSampling(temperature=2, top_k=9), "decode (anything)"),
    ],
)
def test_each_step_gives_the_tokens_of_the_general_one(
    model: LanguageModel, row_sampling: RowSampling, step: str
) -> None:
    apart, general = (make_runner(model, sizes=DRAFTING, steps_by_demand=apart) for apart in (True, False))
    asked = RequestSampling(row=row_sampling, num_logprobs=None)
    assert decode(apart, asked) == decode(general, asked)
    assert {step for step, _ in apart._shapes} == {"prefill", step}
    assert {step for step, _ in general._shapes} == {"prefill", "decode (anything)"}


def test_a_row_that_asks_for_log_probabilities_gets_the_general_step(model: LanguageModel) -> None:
    runner = make_runner(model, sizes=DRAFTING, steps_by_demand=True)
    tokens = decode(runner, RequestSampling(row=RowSampling(), num_logprobs=2))
    assert {step for step, _ in runner._shapes} == {"prefill", "decode (anything)"}
    assert tokens == decode(make_runner(model, sizes=DRAFTING, steps_by_demand=True))


def test_warm_up_compiles_all_of_them(model: LanguageModel) -> None:
    runner = make_runner(model, sizes=DRAFTING, steps_by_demand=True)
    runner.warm_up()
    compiled = runner.num_compiled
    for row_sampling in (RowSampling(), RowSampling(temperature=0.7, seed=3), RowSampling(temperature=0.7, top_k=5)):
        decode(runner, RequestSampling(row=row_sampling, num_logprobs=None))
    assert runner.num_compiled == compiled


@pytest.mark.parametrize(
    ("row_sampling", "num_logprobs", "adjustments", "expected"),
    [
        (RowSampling(), None, RowAdjustments(), Demand.GREEDY),
        (RowSampling(top_k=5, top_p=0.5, seed=9), None, RowAdjustments(), Demand.GREEDY),  # no matter at temperature 0
        (RowSampling(temperature=0.5, min_p=0.1), None, RowAdjustments(), Demand.DRAW),
        (RowSampling(temperature=0.5, top_k=20), None, RowAdjustments(), Demand.ANYTHING),
        (RowSampling(temperature=0.5, top_p=0.9), None, RowAdjustments(), Demand.ANYTHING),
        (RowSampling(banned=(4,), banned_until=30), None, RowAdjustments(), Demand.ANYTHING),
        (RowSampling(), 0, RowAdjustments(), Demand.ANYTHING),
        (RowSampling(), None, RowAdjustments(presence=0.1), Demand.ANYTHING),
    ],
)
def test_the_demand_of_a_step_is_the_most_that_its_rows_ask_for(
    row_sampling: RowSampling, num_logprobs: int | None, adjustments: RowAdjustments, expected: Demand
) -> None:
    lanes, emits = LaneSampling(3, tell_demand=True), np.ones((2,), np.bool_)
    lanes.assign(1, row_sampling, num_logprobs, adjustments)
    assert lanes.gather(np.asarray([1, 3]), emits).demand is expected
    assert lanes.gather(np.asarray([0, 1]), emits).demand is expected
    assert lanes.gather(np.asarray([0, 3]), emits).demand is Demand.GREEDY
    lanes.release(1)
    assert lanes.gather(np.asarray([1, 3]), emits).demand is Demand.GREEDY
    assert LaneSampling(3).gather(np.asarray([0, 3]), emits).demand is Demand.ANYTHING
