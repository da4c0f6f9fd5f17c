"""Penalties, biases and bad words through the engine, judged token by token by NumPy on a float64 model's logits.

Each token of an answer must be the one that the raw logits after the tokens before it give once they are adjusted, in
NumPy, for those very tokens. Pools and histories start full of rubbish (see the rig).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.engine_rig import (
    LOGPROB_ERROR,
    Oracle,
    ask,
    cached,
    fail_once,
    floor,
    greedy,
    make_llm,
    random_ids,
    step,
    tiny_oracle,
    tokens_of,
)
from oracles.numpy_adjust import Wishes, assert_chosen

from gdn_jax import LLM, RequestOutput, SamplingParams
from gdn_jax.serving.bad_words import bad_word_tokens
from gdn_jax.serving.runner.sampling import gumbel_noise

NUM_TOKENS, VOCAB = 318, 320
SEED = 7
noise_of = jax.jit(gumbel_noise, static_argnums=2)


@pytest.fixture
def oracle() -> Oracle:
    return tiny_oracle()


@cache
def noise_at(position: int) -> np.ndarray:
    return np.asarray(noise_of(jnp.asarray([0, SEED], jnp.uint32), jnp.int32(position), VOCAB))


def wishes_of(llm: LLM, params: SamplingParams) -> Wishes:
    return Wishes(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias or {},
        bad_words=bad_word_tokens(params.bad_words or (), llm.get_tokenizer()),
    )


def assert_as_asked(llm: LLM, params: SamplingParams, outputs: Sequence[RequestOutput], oracle: Oracle) -> None:
    """Compare answers that only their length ended with what the adjusted logits give, token by token."""
    wishes = wishes_of(llm, params)
    for output in outputs:
        prompt, (completion,) = output.prompt_token_ids, output.outputs
        answer = completion.token_ids
        assert len(answer) == params.max_tokens
        raw = oracle.model.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        noise = np.stack([noise_at(len(prompt) + place) for place in range(len(answer))])
        assert_chosen(
            raw,
            wishes,
            prompt,
            answer,
            num_tokens=NUM_TOKENS,
            error=LOGPROB_ERROR,
            noise=noise if params.temperature > 0 else None,  # 1 here: nothing is divided
        )
        reported = [found[token].logprob for found, token in zip(completion.logprobs or [], answer, strict=True)]
        expected = raw[np.arange(len(answer)), answer] - np.logaddexp.reduce(raw, axis=1)  # of the logits as they were
        np.testing.assert_allclose(reported, expected, atol=LOGPROB_ERROR, rtol=0)


WORDS = ["a", "hello", "the"]
ALONE: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6},
    {"logit_bias": {5: 6.0, 70: 5.0, 319: 100.0, 9: -100.0}},
]
ALL: dict[str, Any] = {
    "presence_penalty": 0.4,
    "frequency_penalty": 0.6,
    "repetition_penalty": 1.3,
    "logit_bias": {5: 1.5, 70: 1.0, 319: 100.0},
    "bad_words": WORDS,
}


@pytest.mark.parametrize("temperature", [0, 1])
def test_each_parameter_gives_the_tokens_of_the_adjusted_logits_and_others_than_without(
    oracle: Oracle, temperature: float
) -> None:
    llm = make_llm()
    prompt = [*random_ids(3, 40), *[11] * 5]
    common = {"temperature": temperature, "seed": SEED, "max_tokens": 24}
    (plain,) = ask(llm, [prompt], greedy(**common))
    for asked in [*ALONE, ALL]:
        params = greedy(**common, **asked)
        outputs = ask(llm, [prompt], params)
        assert_as_asked(llm, params, outputs, oracle)
        assert tokens_of(outputs) != tokens_of([plain]), asked


def test_a_bad_word_never_appears_however_likely_it_is(oracle: Oracle) -> None:
    llm = make_llm()
    spelt = bad_word_tokens(["hello"], llm.get_tokenizer())
    bias: dict[int, float] = {token: 100.0 for word in spelt for token in word}
    prompts = [random_ids(1, 20), [*random_ids(2, 20), *spelt[0][:-1]]]
    params = greedy(20, logit_bias=bias, bad_words=["hello"])
    outputs = ask(llm, prompts, params)
    assert_as_asked(llm, params, outputs, oracle)
    tempted = ask(llm, prompts, greedy(20, logit_bias=bias))
    assert tokens_of(tempted) != tokens_of(outputs)
    for output in outputs:
        assert "hello" not in output.outputs[0].text


def test_alone_batched_warm_and_preempted_give_the_same_tokens(oracle: Oracle) -> None:
    params = greedy(60, **ALL)
    prompts = [random_ids(index, 100 + index) for index in range(4)]
    roomy, tight = make_llm(prefix_cache="all", state_interval=64), make_llm(num_blocks=8)
    batched = ask(roomy, prompts, params)
    assert_as_asked(roomy, params, batched, oracle)
    expected = tokens_of(batched)
    for prompt, answer in zip(prompts, expected, strict=True):
        again = ask(roomy, [prompt], params)
        assert cached(again) == [floor(len(prompt) - 1)]
        assert tokens_of(again) == [answer]
    assert tokens_of(ask(tight, prompts, params)) == expected
    assert tight.stats().preemptions > 0


def test_a_request_that_is_run_again_after_a_lost_step_counts_each_token_once(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt loses a step's tokens with the device state; those before it come to a lane again."""
    llm = make_llm()
    prompt, params = random_ids(8, 50), greedy(24, **ALL)
    stream = llm.stream(prompt, params)
    step(llm, 9)
    fail_once(monkeypatch.setattr, "advance_step", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ask(llm, [random_ids(2, 20)], params)
    outputs = [*list(stream)[-1:], *ask(llm, [prompt], params)]
    assert_as_asked(llm, params, outputs, oracle)


def test_neighbours_that_ask_for_something_else_change_nothing(oracle: Oracle) -> None:
    llm = make_llm(prefix_cache="none")
    prompts = [random_ids(index, 30 + index) for index in range(4)]
    asked = [greedy(20), greedy(20, **ALL), greedy(20, frequency_penalty=2.0), greedy(20, logit_bias={5: 4.0})]
    together = ask(llm, prompts, *asked)
    for params, output in zip(asked, together, strict=True):
        assert_as_asked(llm, params, [output], oracle)
    reverse = ask(llm, prompts[::-1], *asked[::-1])  # on lanes that others had
    assert tokens_of(reverse) == tokens_of(together)[::-1]


def test_siblings_are_penalised_for_their_own_tokens(oracle: Oracle) -> None:
    llm = make_llm()
    params = greedy(16, temperature=1, seed=SEED, n=3, **ALL)
    (output,) = ask(llm, [random_ids(5, 70)], params)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    (again,) = ask(llm, [random_ids(5, 70)], greedy(16, temperature=1, seed=SEED, **ALL))
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert_as_asked(llm, greedy(16, temperature=1, **ALL), [again], oracle)


TURNS: dict[str, Any] = {"logit_bias": dict.fromkeys(range(40, 52), 60.0), "frequency_penalty": 2.0}


@pytest.mark.parametrize("asked", [*ALONE, ALL, TURNS])
@pytest.mark.parametrize("temperature", [0, 1])
def test_speculation_changes_no_token(oracle: Oracle, asked: dict[str, Any], temperature: float) -> None:
    """Penalties count tokens and not steps, and the drafter is penalised as the target is."""
    plain, drafting = make_llm(prefix_cache="none"), make_llm(prefix_cache="none", speculative_tokens=3)
    prompts = [random_ids(index, 40 + index) for index in range(3)]
    params = greedy(30, temperature=temperature, seed=SEED, min_tokens=8, ignore_eos=False, **asked)
    expected = ask(plain, prompts, params)
    assert tokens_of(ask(drafting, prompts, params)) == tokens_of(expected)


def test_a_drafter_that_is_adjusted_as_the_target_is_guesses_right() -> None:
    """Biases far apart would give QQQQ; what they may not spell leaves QXZJQXZJ, draft after draft."""
    llm = make_llm(prefix_cache="none", speculative_tokens=3)
    bias = {llm.get_tokenizer().encode(letter)[0]: 100.0 - 25 * rank for rank, letter in enumerate("QXZJ")}
    words = ["QQ", "XQ", "XX", "ZQ", "ZX", "ZZ"]
    (output,) = ask(llm, [random_ids(1, 40)], greedy(33, logit_bias=bias, bad_words=words))
    assert output.outputs[0].text == "QXZJ" * 8 + "Q"
    stats = llm.stats()
    assert stats.accepted_tokens == stats.drafted_tokens == 24
