"""Steps of rows that ask for little, compiled apart: the tokens of the general step, and for no other rows."""

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
from gdn_jax.serving.runner.sampling import RowSampling
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
    "row_sampling", [RowSampling(), RowSampling(temperature=0.9, seed=2**33 + 5), RowSampling(temperature=2, min_p=0.1)]
)
def test_a_simple_step_gives_the_tokens_of_the_general_one(model: LanguageModel, row_sampling: RowSampling) -> None:
    apart, general = (make_runner(model, sizes=DRAFTING, simple_steps=simple) for simple in (True, False))
    asked = RequestSampling(row=row_sampling, num_logprobs=None)
    assert decode(apart, asked) == decode(general, asked)
    assert {step for step, _ in apart._shapes} == {"prefill", "simple decode"}
    assert {step for step, _ in general._shapes} == {"prefill", "decode"}


def test_a_row_that_asks_for_log_probabilities_has_them_where_simple_steps_are_apart(model: LanguageModel) -> None:
    runner = make_runner(model, sizes=DRAFTING, simple_steps=True)
    tokens = decode(runner, RequestSampling(row=RowSampling(), num_logprobs=2))
    assert {step for step, _ in runner._shapes} == {"prefill", "decode"}
    assert tokens == decode(make_runner(model, sizes=DRAFTING, simple_steps=True))


def test_warm_up_compiles_both_steps(model: LanguageModel) -> None:
    runner = make_runner(model, sizes=DRAFTING, simple_steps=True)
    runner.warm_up()
    compiled = runner.num_compiled
    decode(runner)
    decode(runner, RequestSampling(row=RowSampling(temperature=0.7, top_k=5, seed=3), num_logprobs=None))
    assert runner.num_compiled == compiled


@pytest.mark.parametrize(
    ("row_sampling", "num_logprobs", "adjustments", "expected"),
    [
        (RowSampling(), None, RowAdjustments(), True),
        (RowSampling(top_k=5, top_p=0.5, seed=9), None, RowAdjustments(), True),  # of no meaning at temperature 0
        (RowSampling(temperature=0.5, min_p=0.1), None, RowAdjustments(), True),
        (RowSampling(temperature=0.5, top_k=20), None, RowAdjustments(), False),
        (RowSampling(temperature=0.5, top_p=0.9), None, RowAdjustments(), False),
        (RowSampling(banned=(4,), banned_until=30), None, RowAdjustments(), False),
        (RowSampling(), 0, RowAdjustments(), False),
        (RowSampling(), None, RowAdjustments(presence=0.1), False),
    ],
)
def test_a_step_is_simple_only_if_none_of_its_rows_asks_for_more(
    row_sampling: RowSampling, num_logprobs: int | None, adjustments: RowAdjustments, expected: bool
) -> None:
    lanes = LaneSampling(3, tell_simple=True)
    lanes.assign(1, row_sampling, num_logprobs, adjustments)
    emits = np.ones((2,), np.bool_)
    assert lanes.gather(np.asarray([1, 3]), emits).is_simple == expected
    assert lanes.gather(np.asarray([0, 3]), emits).is_simple
    lanes.release(1)
    assert lanes.gather(np.asarray([1, 3]), emits).is_simple
    assert not LaneSampling(3).gather(np.asarray([0, 3]), emits).is_simple
