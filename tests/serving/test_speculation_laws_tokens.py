"""The same tokens with and without drafts, however they are computed; as many tokens a step as drafts stand.

A float64 oracle judges the answers of a random model, its log probabilities too, and the drafts behind them. Pools
start full of NaN. On models that are a table (see `oracles.markov`) it is known after which tokens the head is right.
"""

import random
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any

import pytest
from oracles import markov
from oracles.engine_rig import (
    ask,
    assert_right,
    cached,
    floor,
    greedy,
    idle,
    random_ids,
    record_plans,
    runner_of,
    step,
    tokens_of,
)
from oracles.markov import HOPELESS, MIXED, Markov, prompt_before, write_markov
from oracles.speculation_rig import (
    DEPTHS,
    DraftOracle,
    Window,
    accepted,
    assert_same_answers,
    force_drafts,
    limit_drafts,
    make_spec_llm,
    record_windows,
    write_little,
)

from gdn_jax import LLM, RequestOutput, SamplingParams
from gdn_jax.serving.core.plan import Phase
from gdn_jax.serving.runner.steps import advance_step, prefill_step

LENGTHS = (1, 3, 63, 64, 65, 130)
COMPILED = (0, 1, 2, 4)  # the tests of the cache compile steps of three drafts
MODES = ("none", "align", "all")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> DraftOracle:
    return write_little(tmp_path_factory.mktemp("little"))


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> Markov:
    return write_markov(tmp_path_factory.mktemp("perfect"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Markov:
    return write_markov(tmp_path_factory.mktemp("mixed"), head=MIXED)


def make(folder: Path, depth: int, **settings: Any) -> LLM:
    """Start an engine whose steps some test compiles anyway."""
    return make_spec_llm(folder, depth, compiled=depth if depth in COMPILED else 4, **settings)


def check_counts(llm: LLM, windows: list[Window]) -> None:
    """Compare the engine's counts with what its rows did."""
    stats, verified = llm.stats(), [window for window in windows if window.num_drafts]
    assert stats.verified_rows == len(verified)
    assert stats.drafted_tokens == sum(window.num_drafts for window in verified)
    assert stats.accepted_tokens == sum(window.num_accepted for window in verified)
    assert stats.accepted_by_position == tuple(
        sum(window.num_accepted > position for window in verified) for position in range(llm.config.speculative_tokens)
    )


# On a model whose states matter.


@pytest.mark.parametrize("depth", COMPILED)
def test_alone_batched_chunked_and_warm_give_the_oracles_tokens_and_drafts(oracle: DraftOracle, depth: int) -> None:
    llm = make_spec_llm(oracle.folder, depth)
    windows = record_windows(llm)
    prompts = [random_ids(length, length) for length in LENGTHS]
    batched = ask(llm, prompts, greedy(20))
    assert_right(batched, oracle)
    assert cached(batched) == [0] * len(prompts)
    for prompt, before in zip(prompts, tokens_of(batched), strict=True):
        alone = ask(llm, [prompt], greedy(20))
        assert_right(alone, oracle)
        assert tokens_of(alone) == [before]
        assert cached(alone) == [floor(len(prompt) - 1)]
    assert idle(llm.stats())
    if depth:
        assert oracle.check_drafts(windows) > 100
        assert {0, depth} <= set(accepted(windows))
        check_counts(llm, windows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", range(5))
def test_any_number_of_drafts_in_any_mode_gives_the_oracles_tokens(oracle: DraftOracle, depth: int, mode: str) -> None:
    """Batched in a pool that starves, preempted, chunked; then again, and a turn further, from what that left."""
    llm = make(oracle.folder, depth, prefix_cache=mode, num_blocks=8)
    prompts = [random_ids(length, length) for length in (110, 120, 62, 3)]
    for turn in range(3):
        outputs = ask(llm, prompts, greedy(30))
        assert_right(outputs, oracle)
        if turn == 1:
            prompts = [
                [*prompt, *answer, *random_ids(turn, 5)]
                for prompt, answer in zip(prompts, tokens_of(outputs), strict=True)
            ]
        assert idle(llm.stats())
    assert llm.stats().preemptions > 0
    assert (llm.stats().hit_tokens > 0) == (mode != "none")


def test_eight_drafts_are_as_right_as_one(oracle: DraftOracle, perfect: Markov) -> None:
    """The most there may be."""
    llm = make_spec_llm(oracle.folder, 8, audit=True)
    windows = record_windows(llm)
    prompts = [random_ids(length, length) for length in (3, 60)]
    for _ in range(2):
        assert_right(ask(llm, prompts, greedy(20)), oracle)
    assert oracle.check_drafts(windows) > 20
    known = make_spec_llm(perfect.folder, 8)
    windows = record_windows(known)
    prompt = prompt_before(0, 60)
    assert tokens_of(ask(known, [prompt], greedy(28))) == [perfect.answer(prompt, 28)]
    assert accepted(windows) == [8, 8, 8]


@pytest.mark.parametrize("mode", MODES)
def test_drafts_depend_on_tokens_alone_and_not_on_where_the_state_came_from(oracle: DraftOracle, mode: str) -> None:
    """A hit begins with the hidden vector of its checkpoint, and attends to entries that another request made."""
    llm = make(oracle.folder, 3, prefix_cache=mode)
    windows = record_windows(llm)
    prompt = random_ids(1, 131)
    cold = ask(llm, [prompt], greedy(24))
    first = list(windows)
    warm = ask(llm, [prompt], greedy(24))
    assert cached(warm) == [0 if mode == "none" else 128]
    assert_right([*cold, *warm], oracle)
    assert [window[1:] for window in windows[len(first) :]] == [window[1:] for window in first]
    assert oracle.check_drafts(windows) > 20


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_go_on_as_if_nothing_had_happened(oracle: DraftOracle, mode: str) -> None:
    llm = make(oracle.folder, 3, prefix_cache=mode, num_blocks=8)
    windows = record_windows(llm)
    prompts = [random_ids(index, 100 + index) for index in range(4)]
    outputs = ask(llm, prompts, greedy(60))
    stats = llm.stats()
    assert stats.preemptions > 0
    assert (stats.hit_tokens > 0) == (mode != "none")  # who returns starts from what it left
    assert_right(outputs, oracle)
    assert oracle.check_drafts(windows) > 100
    assert idle(stats)


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_next_turn_hits_into_text_that_was_accepted(oracle: DraftOracle, depth: int) -> None:
    """Wherever the turn ends, and whatever stood around the boundary, the state there is the one of plain decode."""
    llm = make(oracle.folder, depth, prefix_cache="align")
    prompt = random_ids(1, 100)
    (answer,) = tokens_of(ask(llm, [prompt], greedy(40)))
    for generated in range(26, 33):
        llm.reset_prefix_cache()
        windows = record_windows(llm)
        ask(llm, [prompt], greedy(generated))
        outputs = ask(llm, [[*prompt, *answer[:generated], *random_ids(5, 9)]], greedy(12))
        assert cached(outputs) == [floor(100 + generated - 1)]
        assert_right(outputs, oracle)
        assert oracle.check_drafts(windows) > 0


def test_a_turn_that_edits_the_generated_text_hits_an_interval_checkpoint_inside_it(oracle: DraftOracle) -> None:
    llm = make(oracle.folder, 3)
    prompt = random_ids(1, 70)
    (answer,) = tokens_of(ask(llm, [prompt], greedy(130)))
    windows = record_windows(llm)
    outputs = ask(llm, [[*prompt, *answer[:70], *random_ids(6, 20)]], greedy(12))
    assert cached(outputs) == [128]
    assert_right(outputs, oracle)
    assert oracle.check_drafts(windows) > 0


@pytest.mark.parametrize("budget", [64, 100, 128])
def test_any_chunking_gives_the_same_tokens_and_drafts(oracle: DraftOracle, budget: int) -> None:
    llm = make(oracle.folder, 3, max_num_batched_tokens=budget)
    windows = record_windows(llm)
    prompts = [random_ids(length, length) for length in (300, 64, 129)]
    assert_right(ask(llm, prompts, greedy(12)), oracle)
    assert oracle.check_drafts(windows) > 20


def test_one_slot_serves_everybody_in_turn_and_hands_over_no_draft(oracle: DraftOracle) -> None:
    """A request whose hit is in the only slot takes that checkpoint over, its hidden vector too."""
    llm = make(oracle.folder, 3, num_state_slots=1)
    windows = record_windows(llm)
    first, second = random_ids(1, 118), random_ids(2, 70)  # the first one's turn ends one token past a boundary
    (answer,) = tokens_of(ask(llm, [first], greedy(12)))
    turn = [*first, *answer, *random_ids(3, 9)]
    for prompt, hit in ((turn, 128), (turn, 0), (second, 0), (first, 0), (turn, 128)):
        outputs = ask(llm, [prompt], greedy(12))
        assert cached(outputs) == [hit]
        assert_right(outputs, oracle)
    assert oracle.check_drafts(windows) > 20


def test_siblings_start_from_the_first_ones_prompt_and_draft_like_it(oracle: DraftOracle) -> None:
    llm = make(oracle.folder, 3)
    windows = record_windows(llm)
    outputs = ask(llm, [random_ids(1, 130)], greedy(12, n=5))
    assert_right(outputs, oracle)
    assert llm.stats().hit_tokens == 4 * 128
    assert oracle.check_drafts(windows) > 20
    by_sibling = {name: [w[1:] for w in windows if w.request_id == name] for name in {w.request_id for w in windows}}
    assert len(by_sibling) == 5
    assert all(one == other for one, other in pairwise(by_sibling.values()))


# Windows over a boundary.


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_window_over_a_boundary_leaves_the_right_state_whatever_is_rejected(oracle: DraftOracle, depth: int) -> None:
    """Every number of accepted drafts, in windows at every offset from a boundary, and in the windows after them."""
    prompts = [random_ids(20 + back, 64 - back) for back in range(depth + 2)]
    plain = ask(make(oracle.folder, 0), prompts, greedy(3 * depth + 9))
    assert_right(plain, oracle)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, tokens_of(plain), strict=True)]
    llm = make(oracle.folder, depth)
    windows, right = record_windows(llm), {}
    force_drafts(llm, texts, lambda row: right["before"] if row.start < 64 else right["after"])
    for before, after in product(range(depth + 1), (0, depth)):
        right |= {"before": before, "after": after}
        llm.reset_prefix_cache()
        outputs = ask(llm, prompts, greedy(2 * depth + 8))
        for output, text in zip(outputs, texts, strict=True):
            report = output.outputs[0]
            assert [*output.prompt_token_ids, *report.token_ids] == text[: -depth - 1]
            reports = zip(report.token_ids, report.logprobs or [], strict=True)
            logprobs = [entry[token].logprob for token, entry in reports]
            oracle.check(output.prompt_token_ids, report.token_ids, logprobs)
        turns = ask(llm, [text[:-depth] for text in texts[:2]], greedy(1))  # hits the state saved at the boundary
        assert cached(turns) == [64, 64]
        assert_right(turns, oracle)
    seen = {(window.start, window.num_accepted) for window in windows if window.num_drafts == depth}
    for start in range(64 - depth, 64):
        assert {stood for at, stood in seen if at == start} == set(range(depth + 1)), start


@pytest.mark.parametrize("depth", DEPTHS)
def test_windows_of_any_length_in_any_order_give_the_same_tokens(oracle: DraftOracle, depth: int) -> None:
    """Steps without drafts after steps that accepted some, and windows shorter than the one before."""
    prompt = random_ids(3, 50)
    (text,) = ([*prompt, *answer] for answer in tokens_of(ask(make(oracle.folder, 0), [prompt], greedy(50))))
    for lengths in ((depth, 0), (1, 0, 0, depth), (depth, depth, 1, 0, 2)):
        llm = make(oracle.folder, depth)
        windows, script = record_windows(llm), cycle(lengths)
        limit_drafts(llm, lambda script=script: next(script))
        force_drafts(llm, [text], lambda row: depth - row.start % 2)
        outputs = ask(llm, [prompt], greedy(42))
        assert_right(outputs, oracle)
        assert tokens_of(outputs) == [text[50:92]]
        phases = [bool(window.num_drafts) for window in windows]
        assert (True, False) in pairwise(phases)
        assert (False, True) in pairwise(phases)


# On models whose drafts are known.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_perfect_head_gives_a_full_window_at_every_step(perfect: Markov, depth: int, temperature: float) -> None:
    """Drafts are drawn as the target draws, so a head that knows the target's logits is never wrong."""
    llm = make(perfect.folder, depth)
    windows = record_windows(llm)
    prompts = [prompt_before(4 * index, 60 + index) for index in range(4)]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=1 + 6 * (depth + 1), ignore_eos=True)
    outputs = ask(llm, prompts, params)
    assert [len(window.emitted) for window in windows] == [depth + 1] * 6 * 4
    assert all(window.num_drafts == depth for window in windows)
    check_counts(llm, windows)
    assert [output.outputs[0].num_accepted_drafts for output in outputs] == [6 * depth] * 4
    assert [output.outputs[0].num_rejected_drafts for output in outputs] == [0] * 4
    if not temperature:
        assert tokens_of(outputs) == [perfect.answer(prompt, params.max_tokens or 0) for prompt in prompts]


def test_a_perfect_head_stays_perfect_on_a_hit_and_after_a_preemption(perfect: Markov) -> None:
    llm = make(perfect.folder, 3, num_blocks=8)
    windows = record_windows(llm)
    prompts = [prompt_before(index, 100 + index) for index in range(4)]
    for _ in range(2):
        outputs = ask(llm, prompts, greedy(61))
        assert tokens_of(outputs) == [perfect.answer(prompt, 61) for prompt in prompts]
    stats = llm.stats()
    assert min(stats.preemptions, stats.hit_tokens) > 0
    assert all(window.num_accepted == window.num_drafts for window in windows)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_head_that_is_always_wrong_costs_nothing_but_time(
    depth: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hopeless = write_markov(tmp_path_factory.mktemp("hopeless"), head=HOPELESS)
    llm = make(hopeless.folder, depth)
    windows = record_windows(llm)
    prompt = prompt_before(0, 30)
    outputs = ask(llm, [prompt], greedy(100))
    assert tokens_of(outputs) == [hopeless.answer(prompt, 100)]
    assert len(windows) == 99
    assert accepted(windows) == [0] * 98  # the last row has room for one token alone
    check_counts(llm, windows)
    assert outputs[0].outputs[0].num_accepted_drafts == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_as_many_drafts_stand_as_the_head_gets_right(mixed: Markov, depth: int) -> None:
    llm = make(mixed.folder, depth)
    windows = record_windows(llm)
    prompts = [prompt_before(7 * index, 1 + 20 * index) for index in range(8)]
    outputs = ask(llm, prompts, greedy(50))
    assert tokens_of(outputs) == [mixed.answer(prompt, 50) for prompt in prompts]
    expected = [mixed.num_right(window.known[-1], window.num_drafts) for window in windows if window.num_drafts]
    assert accepted(windows) == expected
    assert set(expected) == set(range(depth + 1))
    check_counts(llm, windows)


# Seeds.


def sampled(seed: int | None, **params: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": seed, "max_tokens": 16, "ignore_eos": True, "logprobs": 3} | params
    )


@pytest.mark.parametrize("depth", DEPTHS)
def test_sampled_tokens_are_those_of_plain_decode_alone_and_in_a_crowd(mixed: Markov, depth: int) -> None:
    """Also under filters and penalties, and beside requests that sample otherwise or not at all."""
    plain, llm = (make(mixed.folder, count) for count in (0, depth))
    prompts = [prompt_before(3 * index, 3 + 25 * index) for index in range(10)]
    params = [
        sampled(1),
        sampled(2, temperature=2.0),
        greedy(16, logprobs=3),
        sampled(4, top_k=3),
        sampled(5, top_p=0.7),
        sampled(6, min_p=0.2, temperature=0.1),
        sampled(7, top_k=12, top_p=0.9, temperature=1.5),
        sampled(-1, temperature=3.0),
        sampled(8, frequency_penalty=1.5, presence_penalty=0.5),
        greedy(16, logprobs=3, repetition_penalty=1.7, logit_bias={5: 4.0}),
    ]
    expected = [ask(plain, [prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    windows = record_windows(llm)
    crowd = ask(llm, prompts, *params)
    assert set(accepted(windows)) == set(range(depth + 1))
    alone = [ask(llm, [prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert cached(alone)[-1] > 0
    assert_same_answers(crowd, expected)
    assert_same_answers(alone, expected)


@pytest.mark.parametrize("depth", COMPILED)
def test_a_seed_gives_one_answer_and_other_seeds_give_others(mixed: Markov, depth: int) -> None:
    llm = make(mixed.folder, depth)
    prompt = prompt_before(0, 20)
    again = [tokens_of(ask(llm, [prompt], sampled(42, temperature=2.0)))[0] for _ in range(3)]
    assert all(one == again[0] for one in again)
    others = tokens_of(ask(llm, [prompt] * 8, *[sampled(seed) for seed in range(1, 9)]))
    assert len({tuple(tokens) for tokens in others}) == 8
    (siblings,) = ask(llm, [prompt], sampled(1, n=4))
    assert len({tuple(one.token_ids) for one in siblings.outputs}) == 4
    assert siblings.outputs[0].token_ids == others[0]


def test_an_unseeded_request_leaves_a_seeded_and_a_greedy_neighbour_alone(mixed: Markov) -> None:
    llm = make(mixed.folder, 3)
    prompts = [prompt_before(kind, 30) for kind in (0, 9, 18)]
    solo = [ask(llm, [prompts[0]], sampled(7, temperature=0.1))[0], ask(llm, [prompts[1]], greedy(16, logprobs=3))[0]]
    for _ in range(3):
        together = ask(llm, prompts, sampled(7, temperature=0.1), greedy(16, logprobs=3), sampled(None))
        assert_same_answers(together[:2], solo)


def test_sampled_answers_and_their_log_probabilities_are_those_of_a_plain_scoring_run(oracle: DraftOracle) -> None:
    """Each window's rows are reported from the position that chose them, before temperature and filters."""
    llm = make(oracle.folder, 3)
    windows = record_windows(llm)
    prompts = [random_ids(length, length) for length in (5, 62, 90, 126)]
    outputs = ask(llm, prompts, *[sampled(seed, logprobs=5, temperature=0.7) for seed in range(4)])
    assert max(accepted(windows)) > 0
    for output in outputs:
        completion = output.outputs[0]
        rows = oracle.logprobs(output.prompt_token_ids, completion.token_ids)
        assert len(completion.logprobs or []) == len(completion.token_ids) == 16
        for token, report, row in zip(completion.token_ids, completion.logprobs or [], rows, strict=True):
            assert 5 <= len(report) <= 6
            for listed, entry in report.items():
                assert abs(entry.logprob - row[listed]) < 2e-4
            valid = row[: markov.NUM_TOKENS]
            assert report[token].rank == 1 + int((valid > valid[token]).sum())


# Compilation.


def test_after_warm_up_a_mixed_workload_compiles_nothing(mixed: Markov) -> None:
    llm = make(mixed.folder, 3)
    runner_of(llm).warm_up()
    traced = prefill_step._cache_size(), advance_step._cache_size()
    stream = llm.stream(prompt_before(0, 30), greedy(40))
    step(llm, 2)
    plans = record_plans(llm)
    dice = random.Random(1)
    prompts = [prompt_before(index, length) for index, length in enumerate((1, 64, 100, 256, 300, 5, 80))]
    params = [dice.choice([greedy(6), sampled(index, top_k=5)]) for index in range(len(prompts))]
    outputs: list[RequestOutput] = ask(llm, prompts, *params)
    assert len(outputs) == 7
    assert len(list(stream)) > 0
    assert {row.phase for plan in plans for row in plan.rows} == set(Phase)
    assert (prefill_step._cache_size(), advance_step._cache_size()) == traced
