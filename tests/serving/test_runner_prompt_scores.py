"""Scores of prompts on the device and around it: every token after its position, tile by tile, against plain sums."""

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.runner_rig import NUM_VALID, row, small_model

from gdn_jax.model import LanguageModel
from gdn_jax.serving.core.plan import RowPlan
from gdn_jax.serving.core.request import RequestId
from gdn_jax.serving.runner.outputs import unpack_logprobs
from gdn_jax.serving.runner.prompt_scores import ScoredPrompt, next_prompt_ids, prompt_logprobs, score_prompts
from gdn_jax.serving.runner.steps import split_model

NUM_TOP = 3
A, B, C = map(RequestId, "abc")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return small_model()


def scored(token_ids: list[int], num_top: int = NUM_TOP) -> ScoredPrompt:
    return ScoredPrompt(token_ids=token_ids, num_top=num_top)


def spans(*given: tuple[RequestId, int, int]) -> list[RowPlan]:
    """Rows of (request, start, length); their tokens count for nothing here."""
    return [row(name, tokens=(0,) * length, start=start) for name, start, length in given]


@pytest.mark.parametrize("num_tokens", [64, 192])
def test_scores_are_those_of_a_log_softmax_over_the_whole_vocabulary(model: LanguageModel, num_tokens: int) -> None:
    dice = np.random.RandomState(num_tokens)
    hidden = dice.standard_normal((num_tokens, model.config.hidden_size)).astype(np.float32)
    ids = dice.randint(0, model.config.vocab_size, num_tokens).astype(np.int32)
    static, params = split_model(model, num_valid_tokens=NUM_VALID, num_top=NUM_TOP)
    words = score_prompts(static, params, jnp.asarray(hidden), ids)
    assert (words.shape, words.dtype) == ((num_tokens, 2 + 2 * NUM_TOP), jnp.int32)
    found = unpack_logprobs(np.asarray(words), window=1, num_top=NUM_TOP)
    logits = np.asarray(model.decoder.logits(jnp.asarray(hidden)), np.float64)
    expected = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    chosen = np.take_along_axis(expected, ids[:, None], axis=1)
    np.testing.assert_allclose(found.logprob, chosen, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(found.rank[:, 0], 1 + (expected[:, :NUM_VALID] > chosen).sum(axis=1))
    likeliest = np.argsort(-expected[:, :NUM_VALID], axis=1)[:, :NUM_TOP]
    np.testing.assert_array_equal(found.top_ids[:, 0], likeliest)
    np.testing.assert_allclose(
        found.top_logprobs[:, 0], np.take_along_axis(expected, likeliest, axis=1), atol=1e-5, rtol=0
    )


def test_a_tile_of_which_nothing_is_wanted_is_passed_over_and_others_do_not_change(model: LanguageModel) -> None:
    hidden = jnp.asarray(np.random.RandomState(1).standard_normal((192, model.config.hidden_size)), jnp.float32)
    static, params = split_model(model, num_valid_tokens=NUM_VALID, num_top=NUM_TOP)
    every = np.arange(192, dtype=np.int32)
    some = np.where((every == 5) | (every >= 128), every, -1).astype(np.int32)
    whole, part = (np.asarray(score_prompts(static, params, hidden, ids)) for ids in (every, some))
    np.testing.assert_array_equal(part[some >= 0], whole[some >= 0])
    assert not part[64:128].any()


def test_a_position_scores_the_next_token_of_its_prompt_wherever_its_row_is_packed() -> None:
    rows = spans((B, 0, 3), (A, 2, 2), (C, 0, 2))
    prompts = {A: scored([10, 11, 12, 13, 14, 15]), C: scored([20, 21])}
    ids = next_prompt_ids(rows, prompts, 8)
    assert ids is not None
    assert ids.tolist() == [-1, -1, -1, 13, 14, 21, -1, -1]


@pytest.mark.parametrize(
    "rows",
    [spans((B, 0, 3)), spans((A, 1, 1)), spans((A, 2, 3)), []],
    ids=["nobody-asks", "the-last-token", "beyond-the-prompt", "no-rows"],
)
def test_nothing_is_scored_where_no_prompt_token_follows(rows: list[RowPlan]) -> None:
    assert next_prompt_ids(rows, {A: scored([1, 2])}, 8) is None


def test_each_request_gets_its_own_scores_and_as_many_alternatives_as_it_asked_for() -> None:
    rows = spans((B, 0, 2), (A, 0, 2), (C, 0, 4))
    prompts = {A: scored([1, 2, 3], 0), C: scored([5, 6, 7], 2)}
    words = np.arange(8, dtype=np.int32)[:, None] + 100 * np.arange(2 + 2 * NUM_TOP, dtype=np.int32)
    found = dict(prompt_logprobs(rows, prompts, words, NUM_TOP))
    assert [(one.rank, one.top_ids) for one in found[A]] == [(2, ()), (3, ())]
    assert [(one.rank, one.top_ids) for one in found[C]] == [(4, (204, 304)), (5, (205, 305))]
    assert list(found) == [A, C]
