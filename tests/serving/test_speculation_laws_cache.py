"""What speculation leaves in the cache is what plain decode leaves there, and nothing is held after the last request.

An audit computes every published state, hidden vector and page again after each step, the MTP head's pages too. A
rejected draft must be in none of them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.engine_rig import (
    BLOCKS,
    LANES,
    SLOTS,
    ask,
    assert_right,
    cached,
    fail_once,
    floor,
    greedy,
    idle,
    poison_what_nobody_owns,
    put_state,
    random_ids,
    record_plans,
    runner_of,
    scheduler_of,
    step,
    tokens_of,
)
from oracles.markov import END_CLASS, HOPELESS, MIXED, Markov, prompt_before, successor_table, write_markov
from oracles.speculation_rig import (
    DraftOracle,
    Window,
    accepted,
    limit_drafts,
    make_spec_llm,
    record_windows,
    write_little,
)

from gdn_jax import LLM, SamplingParams
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.state import ModelState, RecurrentState

MODES = ("none", "align", "all")
NEAR_BOUNDARIES = (*range(62, 67), *range(126, 131))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> DraftOracle:
    return write_little(tmp_path_factory.mktemp("little"))


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> Markov:
    return write_markov(tmp_path_factory.mktemp("perfect"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Markov:
    return write_markov(tmp_path_factory.mktemp("mixed"), head=MIXED)


def make(folder: Path, depth: int = 3, **settings: Any) -> LLM:
    """Start an engine whose steps are compiled for three drafts, whatever the depth."""
    return make_spec_llm(folder, depth, compiled=3, **settings)


def right_counts(model: Markov, windows: Sequence[Window]) -> list[int]:
    """Return how many drafts ought to stand in each row that verified some."""
    return [model.num_right(window.known[-1], window.num_drafts) for window in windows if window.num_drafts]


# What is published is right.


@pytest.mark.parametrize("mode", ["align", "all"])
def test_every_published_thing_equals_a_fresh_computation_after_every_step(oracle: DraftOracle, mode: str) -> None:
    """Saved by prefill, by folds of accepted windows and by closing rows; with hits, preemptions and evictions."""
    llm = make(oracle.folder, prefix_cache=mode, num_blocks=8, num_state_slots=6, audit=True)
    windows = record_windows(llm)
    prompts = [random_ids(seed, 90 + 20 * seed) for seed in range(3)]
    outputs = ask(llm, prompts, greedy(70))
    turn = [*prompts[0], *tokens_of(outputs)[0], 5, 6]
    outputs += ask(llm, [turn, random_ids(7, 64)], greedy(20))
    assert cached(outputs[-2:]) == [128, 0]
    assert_right(outputs, oracle)
    assert oracle.check_drafts(windows) > 100
    stats = llm.stats()
    assert min(stats.preemptions, stats.saves - stats.checkpoints, stats.evictions, stats.checkpoints) > 0
    assert stats.accepted_tokens > 20


@pytest.mark.parametrize(("head", "mode"), [(MIXED, "align"), (MIXED, "all"), (HOPELESS, "all")])
def test_over_many_boundaries_every_saved_state_is_right(head: tuple[int, ...], mode: str, tmp_path: Path) -> None:
    """Windows cross each boundary at another offset; a rejection there pulls the row back over it."""
    model = write_markov(tmp_path, head=head, table=successor_table(period=29))  # no two blocks have the same text
    llm = make(model.folder, prefix_cache=mode, audit=True)
    windows = record_windows(llm)
    prompts = [prompt_before(kind, 20 + kind) for kind in (0, 11)]
    outputs = ask(llm, prompts, greedy(340))
    assert tokens_of(outputs) == [model.answer(prompt, 340) for prompt in prompts]
    assert accepted(windows) == right_counts(model, windows)
    assert sum(floor(w.start + 1 + w.num_drafts) > floor(w.start + len(w.emitted)) for w in windows) > 3
    turns = ask(llm, [[*p, *a, 7] for p, a in zip(prompts, tokens_of(outputs), strict=True)], greedy(4))
    assert cached(turns) == [floor(len(prompt) + 339) for prompt in prompts]


def test_an_audit_sees_a_page_of_the_head_or_a_hidden_vector_that_something_overwrites(oracle: DraftOracle) -> None:
    def keys(state: ModelState, slot: int, page: int) -> ModelState:
        assert state.mtp is not None
        return replace(state, mtp=replace(state.mtp, k=state.mtp.k.at[page, 63, 0, 0].add(1.0)))

    def values(state: ModelState, slot: int, page: int) -> ModelState:
        assert state.mtp is not None
        return replace(state, mtp=replace(state.mtp, v=state.mtp.v.at[page, 1, 0, 0].add(1.0)))

    def hidden(state: ModelState, slot: int, page: int) -> ModelState:
        return replace(state, hidden=state.hidden.at[slot, 5].add(1.0))

    harms: list[tuple[str, Callable[[ModelState, int, int], ModelState]]]
    harms = [("MTP head's keys", keys), ("MTP head's values", values), ("hidden vector", hidden)]
    for name, harm in harms:
        llm = make(oracle.folder, audit=True)
        ask(llm, [random_ids(1, 70)], greedy(2))
        holdings = scheduler_of(llm).holdings
        (slot,), (page,) = holdings.checkpoints.names().values(), holdings.blocks.names().values()
        put_state(runner_of(llm), harm(runner_of(llm).state, slot, page))
        with pytest.raises(InvariantError, match=f"{name} differs from a fresh computation"):
            ask(llm, [[1, 2, 3]], greedy(2))


# Hit lengths.


@pytest.mark.parametrize(("depth", "mode"), [(1, "align"), (3, "align"), (3, "all")])
def test_hits_near_boundaries_are_as_long_as_without_drafts(mixed: Markov, depth: int, mode: str) -> None:
    llm = make(mixed.folder, depth, prefix_cache=mode)
    for length in NEAR_BOUNDARIES:
        for num_tokens in (1, 6):
            llm.reset_prefix_cache()
            prompt = random_ids(length, length)
            (answer,) = tokens_of(ask(llm, [prompt], greedy(num_tokens)))
            resend = ask(llm, [prompt], greedy(num_tokens))
            sibling = ask(llm, [[*prompt, *random_ids(1, 6)]], greedy(3))
            turn = ask(llm, [[*prompt, *answer, *random_ids(2, 6)]], greedy(3))
            assert tokens_of(resend) == [answer] == [mixed.answer(prompt, num_tokens)]
            assert cached(resend) == [floor(length - 1)], length
            assert cached(sibling) == [floor(length)], length
            assert cached(turn) == [floor(length + num_tokens - 1)], length


def test_warm_answers_near_boundaries_are_right_and_draft_like_cold_ones(oracle: DraftOracle) -> None:
    """The first entry after a hit is made from the checkpoint's hidden vector, those before it are another's."""
    llm = make(oracle.folder)
    windows = record_windows(llm)
    for length in NEAR_BOUNDARIES:
        llm.reset_prefix_cache()
        prompt = random_ids(length, length)
        (answer,) = tokens_of(ask(llm, [prompt], greedy(9)))
        warm = ask(llm, [prompt, [*prompt, *answer, *random_ids(2, 6)]], greedy(9))
        assert cached(warm) == [floor(length - 1), floor(length + 8)]
        assert_right(warm, oracle)
    assert oracle.check_drafts(windows) > 150


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 3])
def test_a_turn_that_ends_inside_a_window_leaves_the_state_after_its_last_token(
    perfect: Markov, depth: int, mode: str
) -> None:
    """Around a boundary, at every place of a window; the end token itself may have been run as a draft."""
    llm = make(perfect.folder, depth, prefix_cache=mode, audit=True)
    for length in range(59, 66):
        for back in range(depth + 2):
            llm.reset_prefix_cache()
            prompt = prompt_before(END_CLASS - back, length, seed=length)
            (output,) = ask(llm, [prompt], SamplingParams(temperature=0, max_tokens=24))
            tokens = output.outputs[0].token_ids
            assert len(tokens) == back + 1
            (turn,) = ask(llm, [[*prompt, *tokens, *random_ids(1, 9)]], greedy(6))
            least, most = floor(length + len(tokens) - 1), floor(length + len(tokens))
            assert turn.num_cached_tokens == 0 if mode == "none" else least <= turn.num_cached_tokens <= most
            assert tokens_of([turn]) == [perfect.answer(turn.prompt_token_ids, 6)]
            assert idle(llm.stats())


def test_a_conversation_of_speculated_turns_reuses_each_turn_whole(oracle: DraftOracle) -> None:
    llm = make(oracle.folder, audit=True)
    text, expected = random_ids(1, 50), 0
    for turn in range(5):
        (output,) = ask(llm, [text], greedy(20))
        assert output.num_cached_tokens == expected
        assert_right([output], oracle)
        expected = floor(len(text) + 19)
        text = [*text, *output.outputs[0].token_ids, *random_ids(100 + turn, 30)]
    assert expected > 200


# Nothing is held.


@pytest.mark.parametrize("mode", MODES)
def test_after_any_mix_of_endings_nothing_is_held_and_the_cache_is_right(
    oracle: DraftOracle, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(oracle.folder, prefix_cache=mode, num_blocks=8, num_state_slots=6, audit=True)
    windows = record_windows(llm)
    dice, streams, ends = random.Random(5), {}, []
    texts = [random_ids(seed, 100) for seed in range(2)]
    for number in range(24):
        text = dice.choice(texts)
        prompt = [*text[: dice.randint(50, len(text))], *random_ids(number, dice.randint(1, 30))]
        streams[number] = llm.stream(prompt, greedy(dice.randint(1, 70)))
        step(llm, dice.randint(1, 6))
        what = dice.choice(["read", "close", "go on", "go on", "go on", "reset", "fail"])
        if what in ("read", "close"):
            stream = streams.pop(dice.choice(list(streams)))
            ends += list(stream)[-1:] if what == "read" else stream.close() or []
        elif what == "reset":
            llm.reset_prefix_cache()
        elif what == "fail" and number % 2:
            fail_once(monkeypatch.setattr, dice.choice(["prefill_step", "advance_step"]), RuntimeError("lost"))
    ends += [list(stream)[-1] for stream in streams.values()]
    stats = llm.stats()
    assert idle(stats)
    assert min(stats.preemptions, stats.failed_steps, stats.aborted_requests, stats.accepted_tokens) > 0
    assert_right([end for end in ends if end.outputs[0].finish_reason != "error"], oracle)
    assert oracle.check_drafts(windows) > 100
    assert_right(ask(llm, texts, greedy(4)), oracle)
    again = ask(llm, texts, greedy(4))
    assert cached(again) == [0 if mode == "none" else 64] * 2
    assert_right(again, oracle)
    scheduler_of(llm).check()


def test_counts_of_accepted_drafts_stay_with_their_request_when_lanes_change_hands(mixed: Markov) -> None:
    llm = make(mixed.folder)
    windows, plans = record_windows(llm), record_plans(llm)
    prompts = [prompt_before(5 * index, 50 + 3 * index) for index in range(16)]
    lengths = [3 + 7 * index % 24 for index in range(16)]
    outputs = ask(llm, prompts, *map(greedy, lengths))
    assert tokens_of(outputs) == [mixed.answer(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    assert accepted(windows) == right_counts(mixed, windows)
    rows = [row for plan in plans for row in plan.rows]
    assert len({(row.lane, row.request_id) for row in rows}) == 16  # four requests on each lane
    assert idle(llm.stats())


@pytest.mark.parametrize("mode", MODES)
def test_twins_in_one_step_read_nothing_that_the_other_is_writing(oracle: DraftOracle, mode: str) -> None:
    llm = make(oracle.folder, prefix_cache=mode)
    windows, plans = record_windows(llm), record_plans(llm)
    outputs = ask(llm, [random_ids(1, 30)] * 4, greedy(50))
    assert len(plans[0].rows) >= 2
    assert_right(outputs, oracle)
    assert oracle.check_drafts(windows) > 40
    assert idle(llm.stats())


# Shortage.


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("num_known", [65, 66, 127, 129])
def test_who_comes_back_with_any_number_of_tokens_has_every_entry_made(
    oracle: DraftOracle, num_known: int, drafts: int
) -> None:
    """Above all with all but the newest token in the cache, or at the end of a chunk: nobody else makes its entry."""
    llm = make(oracle.folder, audit=True)
    limit_drafts(llm, lambda: drafts)
    scheduler, lost = scheduler_of(llm), list[int]()
    prompt = random_ids(5, 64 if num_known < 100 else 100, 200)
    stream = llm.stream(prompt, greedy(80))
    while not lost:
        step(llm)
        (request,) = scheduler.running()
        if request.num_known >= num_known:
            lost.append(request.num_known)
            scheduler._preempt(request)
            poison_what_nobody_owns(llm)
    if drafts == 0 or num_known == 65:
        assert lost == [num_known]
    output = list(stream)[-1]
    assert llm.stats().preemptions == 1
    assert_right([output], oracle)
    (again,) = ask(llm, [[*prompt, *output.outputs[0].token_ids]], greedy(8))
    assert again.num_cached_tokens == floor(len(prompt) + 80 - 1)
    assert_right([again], oracle)


def test_drafts_are_cut_before_anybody_is_preempted(perfect: Markov) -> None:
    """Both rows want a block for their drafts; the second one runs without, and is only later preempted."""
    llm = make(perfect.folder, num_blocks=3, max_model_len=128, max_num_batched_tokens=128)
    windows, plans = record_windows(llm), record_plans(llm)
    prompts = [prompt_before(0, 62), prompt_before(9, 62)]
    streams = [llm.stream(prompt, greedy(12)) for prompt in prompts]
    while len(windows) < 2:
        step(llm)
    assert [(row.start, row.num_drafts) for row in plans[-1].rows] == [(62, 3), (62, 0)]
    assert llm.stats().preemptions == 0
    ends = [list(stream)[-1] for stream in streams]
    assert tokens_of(ends) == [perfect.answer(prompt, 12) for prompt in prompts]
    assert llm.stats().preemptions == 1
    assert idle(llm.stats())


def test_only_as_many_drafts_are_cut_as_the_blocks_at_hand_ask_for(perfect: Markov) -> None:
    llm = make(perfect.folder, num_blocks=3, max_model_len=128, max_num_batched_tokens=128)
    windows, plans = record_windows(llm), record_plans(llm)
    prompts = [prompt_before(0, 62), prompt_before(9, 61)]
    outputs = ask(llm, prompts, greedy(6))
    pairs = {tuple((row.start, row.num_drafts) for row in plan.rows) for plan in plans}
    assert ((62, 3), (61, 1)) in pairs
    assert tokens_of(outputs) == [perfect.answer(prompt, 6) for prompt in prompts]
    assert all(window.num_accepted == window.num_drafts for window in windows)


@pytest.mark.parametrize("mode", MODES)
def test_tiny_pools_serve_everybody_in_the_end(oracle: DraftOracle, mode: str) -> None:
    llm = make(oracle.folder, prefix_cache=mode, num_blocks=6, num_state_slots=3, max_model_len=320)
    windows = record_windows(llm)
    common = random_ids(1, 64)
    prompts = [[*common, *random_ids(seed, 50 + 10 * seed)] for seed in range(5)]
    outputs = ask(llm, prompts, greedy(90))
    assert_right(outputs, oracle)
    assert oracle.check_drafts(windows) > 100
    assert llm.stats().preemptions > 0
    assert idle(llm.stats())


# NaN where nobody owns anything, and where somebody does.


def test_what_nobody_owns_may_hold_nan_at_any_time(oracle: DraftOracle) -> None:
    llm = make(oracle.folder)
    windows = record_windows(llm)
    prompt = random_ids(1, 130)
    stream = llm.stream(prompt, greedy(40))
    for _ in range(6):
        step(llm, 2)
        poison_what_nobody_owns(llm)
    late = ask(llm, [random_ids(2, 65), [*prompt, 3]], greedy(8))
    assert cached(late) == [0, 128]
    assert_right([*late, list(stream)[-1]], oracle)
    assert oracle.check_drafts(windows) > 20


def test_nan_in_one_requests_state_ends_that_request_alone_and_none_of_it_is_found(
    oracle: DraftOracle, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make(oracle.folder)
    prompts = [random_ids(seed, 70) for seed in range(3)]
    streams = [llm.stream(prompt, greedy(20)) for prompt in prompts]
    step(llm, 6)
    broken = scheduler_of(llm).running()[1]
    state = runner_of(llm).state
    layers = tuple(
        replace(layer, recurrent=layer.recurrent.at[broken.slot].set(jnp.nan))
        if isinstance(layer, RecurrentState)
        else layer
        for layer in state.layers
    )
    put_state(runner_of(llm), replace(state, layers=layers))
    ends = [list(stream)[-1] for stream in streams]
    assert [end.outputs[0].finish_reason for end in ends] == ["length", "error", "length"]
    assert "not finite" in caplog.text
    assert_right([ends[0], ends[2]], oracle)
    assert idle(llm.stats())
    again = ask(llm, prompts, greedy(8))  # on slots and pages that held NaN
    assert cached(again) == [64, 64, 64]
    assert_right(again, oracle)


def test_nan_in_the_heads_pages_costs_drafts_and_no_token(oracle: DraftOracle) -> None:
    """The target decides: a head that guesses nonsense, or nothing that is a number, changes no answer."""
    llm = make(oracle.folder)
    prompts = [random_ids(seed, 70) for seed in range(3)]
    streams = [llm.stream(prompt, greedy(20)) for prompt in prompts]
    step(llm, 6)
    state = runner_of(llm).state
    put_state(runner_of(llm), replace(state, mtp=jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), state.mtp)))
    ends = [list(stream)[-1] for stream in streams]
    assert_right(ends, oracle)
    assert idle(llm.stats())


# Steps of padding alone.


def content(llm: LLM) -> list[np.ndarray]:
    """Return all device state but the null slot, the null page and the lane of padding, which padding may write."""
    real = {BLOCKS + 1: slice(1, None), SLOTS + 1: slice(1, None), LANES + 1: slice(LANES)}
    arrays = map(np.array, jax.tree.leaves(runner_of(llm).device))
    return [array[real.get(array.shape[0], slice(None))] for array in arrays]


def test_steps_of_padding_alone_change_nothing_even_between_windows(oracle: DraftOracle) -> None:
    llm = make(oracle.folder)
    windows = record_windows(llm)
    stream = llm.stream(random_ids(1, 100), greedy(40))
    for _ in range(4):
        step(llm, 3)
        before = content(llm)
        runner_of(llm).warm_up()
        for old, new in zip(before, content(llm), strict=True):
            np.testing.assert_array_equal(old, new)  # NaN equals NaN
    assert_right([list(stream)[-1]], oracle)
    assert oracle.check_drafts(windows) > 10


def test_a_reset_cache_knows_nothing_and_windows_under_way_go_on(oracle: DraftOracle) -> None:
    llm = make(oracle.folder)
    windows = record_windows(llm)
    prompts = [random_ids(seed, 150) for seed in range(2)]
    streams = [llm.stream(prompt, greedy(60)) for prompt in prompts]
    for steps in (2, 15):  # in the middle of prefill and of decode
        step(llm, steps)
        llm.reset_prefix_cache()
        assert llm.stats().checkpoints == 0
    assert_right([list(stream)[-1] for stream in streams], oracle)
    assert llm.stats().checkpoints == 0  # what they compute belongs to the old cache
    cold, warm = ask(llm, prompts, greedy(8)), ask(llm, prompts, greedy(8))
    assert (cached(cold), cached(warm)) == ([0, 0], [128, 128])
    assert_right([*cold, *warm], oracle)
    assert oracle.check_drafts(windows) > 40
