"""Many requests at once: nobody reads what this step writes, nobody starves, and outputs come back in order."""

import random

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
    record_ends,
    record_plans,
    tiny_oracle,
)


@pytest.fixture
def oracle() -> Oracle:
    return tiny_oracle()


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_twins_in_one_step_read_nothing_that_the_other_is_writing(oracle: Oracle, mode: str) -> None:
    llm = make_llm(prefix_cache=mode, state_interval=64)
    prompt = random_ids(1, 60)
    plans = record_plans(llm)
    outputs = ask(llm, [prompt] * 4, greedy(12))
    assert len(plans[0].rows) == 4  # all in the first step, and later over a boundary together
    assert cached(outputs) == [0] * 4
    assert_right(outputs, oracle)
    assert idle(llm.stats())


def test_siblings_wait_for_the_first_ones_prompt_and_start_from_it(oracle: Oracle) -> None:
    llm = make_llm()
    outputs = ask(llm, [random_ids(1, 130)], greedy(12, n=3))
    assert_right(outputs, oracle)
    assert len(outputs[0].outputs) == 3
    assert llm.stats().hit_tokens == 2 * 128
    assert llm.stats().prefilled_tokens == 130 + 2 * 2


def test_many_more_siblings_than_lanes_all_come_back(oracle: Oracle) -> None:
    llm = make_llm()
    outputs = ask(llm, [random_ids(1, 65)], greedy(6, n=9))
    assert_right(outputs, oracle)
    assert len(outputs[0].outputs) == 9
    assert llm.stats().hit_tokens == 8 * 64


def test_two_long_prompts_advance_on_a_budget_that_is_no_multiple_of_a_block(oracle: Oracle) -> None:
    llm = make_llm(max_num_batched_tokens=255, state_interval=64)
    outputs = ask(llm, [random_ids(seed, 450) for seed in range(2)], greedy(4))
    assert_right(outputs, oracle)


def test_short_prompts_share_the_step_in_which_a_long_one_before_them_ends(oracle: Oracle) -> None:
    llm = make_llm()
    plans = record_plans(llm)
    outputs = ask(llm, [random_ids(1, 400), random_ids(2, 20), random_ids(3, 21)], greedy(2))
    assert [[len(row.tokens) for row in plan.rows] for plan in plans[:2]] == [[256], [144, 20, 21]]
    assert_right(outputs, oracle)


def test_lower_priority_numbers_go_first_and_outputs_stay_in_the_order_of_the_prompts(oracle: Oracle) -> None:
    llm = make_llm(max_num_seqs=1)
    ends = record_ends(llm)
    prompts = [random_ids(seed, 20) for seed in range(3)]
    outputs = ask(llm, prompts, greedy(4), priority=[5, -1, 0])
    assert [name.split("-")[0] for name in ends] == ["1", "2", "0"]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert_right(outputs, oracle)


def test_answers_of_unequal_length_come_back_in_the_order_of_their_prompts(oracle: Oracle) -> None:
    llm = make_llm()
    prompts = [random_ids(seed, 1 + seed % 9) for seed in range(20)]
    lengths = [1 + seed * 7 % 11 for seed in range(20)]
    outputs = ask(llm, prompts, *map(greedy, lengths))
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert_right(outputs, oracle)


def test_call_after_call_of_any_size_returns_all_its_outputs_in_order(oracle: Oracle) -> None:
    llm = make_llm()
    dice = random.Random(1)
    for call in range(14):
        prompts = [random_ids(call * 7 + part, dice.randint(1, 20)) for part in range(1 + call % 7)]
        outputs = ask(llm, prompts, greedy(2))
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert_right(outputs, oracle)
    assert idle(llm.stats())


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_tiny_pools_serve_everybody_in_the_end(oracle: Oracle, mode: str) -> None:
    llm = make_llm(prefix_cache=mode, state_interval=64, num_blocks=8, num_state_slots=3, max_num_batched_tokens=64)
    common = random_ids(1, 64)
    prompts = [[*common, *random_ids(seed, 50 + 10 * seed)] for seed in range(5)]
    outputs = ask(llm, prompts, greedy(90))
    assert_right(outputs, oracle)
    stats = llm.stats()
    assert stats.preemptions > 0
    assert (stats.hit_tokens > 0) == (mode != "none")
    assert idle(stats)
