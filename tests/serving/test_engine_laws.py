"""The laws of the engine, on a tiny float32 model whose every answer a float64 oracle knows.

Cold, warm, chunked, batched, preempted and hit into generated text, a request gives the same tokens; after the last one
nothing is held. Pools start full of NaN (see the rig), so every test also shows that what nobody owns never counts.
"""

from typing import Any

import pytest
from oracles.engine_rig import (
    Oracle,
    ask,
    assert_right,
    cached,
    greedy,
    idle,
    make_llm,
    random_ids,
    tiny_oracle,
    tokens_of,
)

LENGTHS = (1, 3, 63, 64, 65, 130)
MODES = ("none", "align", "all")


@pytest.fixture
def oracle() -> Oracle:
    return tiny_oracle()


def floor(count: int) -> int:
    """The last boundary at or before a token count."""
    return count // 64 * 64


# Law 1: the same tokens, however they are computed.


@pytest.mark.parametrize("budget", [64, 256])
@pytest.mark.parametrize("mode", MODES)
def test_alone_batched_chunked_and_warm_give_the_oracles_tokens(oracle: Oracle, mode: str, budget: int) -> None:
    llm = make_llm(prefix_cache=mode, state_interval=64, max_num_batched_tokens=budget)
    prompts = [oracle.lively(length, 12) for length in LENGTHS]
    batched = ask(llm, prompts, greedy(12))
    assert_right(batched, oracle)
    assert cached(batched) == [0] * len(prompts)
    for prompt in prompts:
        alone = ask(llm, [prompt], greedy(12))
        assert_right(alone, oracle)
        assert cached(alone) == [0 if mode == "none" else floor(len(prompt) - 1)]
    assert idle(llm.stats())


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_go_on_as_if_nothing_had_happened(oracle: Oracle, mode: str) -> None:
    llm = make_llm(prefix_cache=mode, state_interval=64, num_blocks=8)
    prompts = [oracle.lively(100 + index, 100, seed=index) for index in range(4)]
    outputs = ask(llm, prompts, greedy(100))
    assert llm.stats().preemptions > 0
    assert_right(outputs, oracle)
    assert idle(llm.stats())


def test_one_slot_serves_everybody_in_turn_and_hands_over_nothing(oracle: Oracle, caplog: Any) -> None:
    """A request whose hit is in the only slot takes that checkpoint over; an unrelated one starts from nothing."""
    llm = make_llm(num_state_slots=1)
    assert "max_num_seqs is 1 instead of 4" in caplog.text
    first, second = oracle.lively(118, 12), oracle.lively(70, 12)  # the first one's turn ends one token past a boundary
    (answer,) = tokens_of(ask(llm, [first], greedy(12)))
    turn = [*first, *answer, *random_ids(1, 9)]
    for prompt, hit in (
        (turn, 128),
        (turn, 0),
        (second, 0),
        (first, 0),
        (second, 0),
        (turn, 0),
        (first, 0),
        (turn, 128),
    ):
        outputs = ask(llm, [prompt], greedy(12))
        assert cached(outputs) == [hit]
        assert_right(outputs, oracle)


@pytest.mark.parametrize("generated", [30, 65])
@pytest.mark.parametrize("mode", ["align", "all"])
def test_the_next_turn_hits_into_the_generated_text(oracle: Oracle, mode: str, generated: int) -> None:
    llm = make_llm(prefix_cache=mode)
    prompt = oracle.lively(100, generated)
    (answer,) = tokens_of(ask(llm, [prompt], greedy(generated)))
    turn = [*prompt, *answer, *random_ids(5, 9)]
    outputs = ask(llm, [turn], greedy(12))
    assert cached(outputs) == [128]
    assert_right(outputs, oracle)
