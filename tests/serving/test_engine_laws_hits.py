"""The length of a hit is that of the rules, and every warm answer is right."""

import pytest
from oracles.engine_rig import (
    Oracle,
    ask,
    assert_right,
    cached,
    floor,
    greedy,
    make_llm,
    random_ids,
    scheduler_of,
    step,
    tiny_oracle,
    tokens_of,
)

NEAR_BOUNDARIES = (*range(62, 67), *range(126, 131))


@pytest.fixture
def oracle() -> Oracle:
    return tiny_oracle()


@pytest.mark.parametrize("mode", ["align", "all"])
def test_hits_near_boundaries_are_as_long_as_the_rules_say(oracle: Oracle, mode: str) -> None:
    llm = make_llm(prefix_cache=mode)
    for length in NEAR_BOUNDARIES:
        llm.reset_prefix_cache()
        prompt = random_ids(length, length)
        (answer,) = tokens_of(ask(llm, [prompt], greedy(5)))
        resend = ask(llm, [prompt], greedy(5))
        sibling = ask(llm, [[*prompt, *random_ids(1, 6)]], greedy(3))
        turn = ask(llm, [[*prompt, *answer, *random_ids(2, 6)]], greedy(3))
        assert tokens_of(resend) == [answer]
        assert cached(resend) == [floor(length - 1)], length
        assert cached(sibling) == [floor(length)], length
        assert cached(turn) == [floor(length + 5 - 1)], length
        for outputs in (resend, sibling, turn):
            assert_right(outputs, oracle)


def test_without_a_cache_nothing_is_ever_hit_or_kept(oracle: Oracle) -> None:
    llm = make_llm(prefix_cache="none")
    prompt = random_ids(1, 130)
    outputs = [ask(llm, [prompt], greedy(5))[0] for _ in range(2)]
    assert cached(outputs) == [0, 0]
    assert_right(outputs, oracle)
    stats = llm.stats()
    assert (stats.queried_tokens, stats.hit_tokens, stats.saves, stats.checkpoints) == (0, 0, 0, 0)


def test_a_prompt_of_whole_blocks_still_runs_its_last_token_and_its_extension_still_hits(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = random_ids(1, 128)
    assert cached(ask(llm, [prompt], greedy(8))) == [0]
    resend = ask(llm, [prompt], greedy(8))
    longer = ask(llm, [[*prompt, *random_ids(3, 40)]], greedy(8))
    assert (cached(resend), cached(longer)) == ([64], [128])
    assert_right([*resend, *longer], oracle)


def test_text_inserted_in_the_middle_ends_the_hit_there(oracle: Oracle) -> None:
    llm = make_llm(state_interval=64)
    blocks = [random_ids(seed, 64) for seed in range(4)]
    ask(llm, [[*blocks[0], *blocks[1], 7]], greedy(2))
    outputs = ask(llm, [[*blocks[0], *blocks[2], *blocks[1], 7]], greedy(8))
    assert cached(outputs) == [64]
    assert_right(outputs, oracle)


@pytest.mark.parametrize("mode", ["align", "all"])
def test_prompts_that_part_inside_a_block_share_the_blocks_before_it(oracle: Oracle, mode: str) -> None:
    """In `align` the second request to part there leaves the junction for the third; `all` has it at once."""
    llm = make_llm(prefix_cache=mode, state_interval=64)
    common = random_ids(1, 64 * 3 + 32)
    prompts = [[*common, *random_ids(seed, 100)] for seed in (11, 12, 13)]
    hits = [cached(ask(llm, [prompt], greedy(2)))[0] for prompt in prompts]
    assert hits == [0, 0 if mode == "align" else 192, 192]
    outputs = ask(llm, prompts, greedy(8))
    assert cached(outputs) == [floor(324 - 1)] * 3
    assert_right(outputs, oracle)
    assert llm.stats().gap_tokens == (192 if mode == "align" else 0)


def test_decode_far_beyond_the_prompt_keeps_the_prompts_checkpoint(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = random_ids(1, 192)
    ask(llm, [prompt], greedy(250))
    outputs = ask(llm, [[*prompt, 5]], greedy(8))
    assert cached(outputs) == [192]
    assert_right(outputs, oracle)


def test_each_turn_of_a_growing_conversation_reuses_the_one_before(oracle: Oracle) -> None:
    llm = make_llm()
    text = random_ids(1, 50)
    expected = 0
    for turn in range(5):
        (output,) = ask(llm, [text], greedy(20))
        assert output.num_cached_tokens == expected
        assert_right([output], oracle)
        answer = output.outputs[0].token_ids
        expected = floor(len(text) + len(answer) - 1)
        text = [*text, *answer, *random_ids(100 + turn, 30)]
    assert expected > 200


def test_states_may_go_while_blocks_stay_and_the_answer_is_still_right(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = random_ids(1, 200)
    cold = ask(llm, [prompt], greedy(8))
    scheduler_of(llm).holdings.checkpoints.drop_all()
    outputs = ask(llm, [prompt], greedy(8))
    assert cached(outputs) == [0]
    assert llm.stats().gap_tokens == 192
    assert tokens_of(outputs) == tokens_of(cold)
    assert_right(outputs, oracle)


def test_a_cache_salt_separates_and_an_equal_one_shares(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = random_ids(1, 130)
    hits = []
    for salt in ("", "alice", "bob", "alice", ""):
        outputs = ask(llm, [prompt], greedy(8), cache_salt=salt)
        assert_right(outputs, oracle)
        hits += cached(outputs)
    assert hits == [0, 0, 0, 128, 128]


def test_a_reset_cache_knows_nothing_and_requests_under_way_go_on(oracle: Oracle) -> None:
    llm = make_llm(state_interval=64, max_num_batched_tokens=64)
    prompts = [random_ids(seed, 150) for seed in range(2)]
    streams = [llm.stream(prompt, greedy(60)) for prompt in prompts]
    for steps in (2, 20):  # in the middle of prefill and of decode
        step(llm, steps)
        llm.reset_prefix_cache()
        assert llm.stats().checkpoints == 0
    assert_right([list(stream)[-1] for stream in streams], oracle)
    assert llm.stats().checkpoints == 0  # what they compute belongs to the old cache
    cold = ask(llm, prompts, greedy(8))
    warm = ask(llm, prompts, greedy(8))
    assert (cached(cold), cached(warm)) == ([0, 0], [128, 128])
    assert tokens_of(cold) == tokens_of(warm)
    assert_right([*cold, *warm], oracle)
