"""Ends, reports and streams with drafts are those without: nothing past a request's end is kept, counted or sent.

Every case runs on a model that is a table and whose head is perfect, so that ends fall at every place of an accepted
window; what plain decode gives is the measure, and the answer itself is known beforehand.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from oracles.engine_rig import ask, cached, fail_once, floor, greedy, idle, runner_of, step, tokens_of
from oracles.markov import ALPHABET, END_CLASS, MIXED, Markov, prompt_before, write_markov
from oracles.speculation_rig import (
    DEPTHS,
    Window,
    accepted,
    assert_same_answers,
    force_drafts,
    make_spec_llm,
    record_windows,
)

from gdn_jax import LLM, RequestOutput, SamplingParams
from gdn_jax.serving.runner.steps import split_model
from gdn_jax.serving.sampling_params import RequestOutputKind

STARTS = range(6)  # how many tokens before the end token the answer starts
END, OTHER_END = ALPHABET[END_CLASS], ALPHABET[END_CLASS + 1]


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> Markov:
    return write_markov(tmp_path_factory.mktemp("perfect"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Markov:
    return write_markov(tmp_path_factory.mktemp("mixed"), head=MIXED)


def make(folder: Path, depth: int, **settings: Any) -> LLM:
    """Start an engine whose steps are compiled for four drafts, whatever the depth: at 0 it decodes plainly."""
    return make_spec_llm(folder, depth, compiled=4, **settings)


def params(max_tokens: int = 24, **others: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "logprobs": 2} | others)


def letters(*classes: int) -> list[int]:
    return [ALPHABET[kind] for kind in classes]


def check_draft_counts(outputs: Sequence[RequestOutput], windows: Sequence[Window]) -> None:
    """Compare what completions say of their drafts with what their rows did; a draft that was cut off did not stand."""
    for output in outputs:
        own = [window for window in windows if window.request_id == output.request_id]
        completion = output.outputs[0]
        text = len(output.prompt_token_ids) + len(completion.token_ids)
        stood = [min(window.num_accepted, text - len(window.known)) for window in own]
        assert completion.num_accepted_drafts == sum(stood)
        assert completion.num_rejected_drafts == sum(window.num_drafts for window in own) - sum(stood)


def both(model: Markov, depth: int, prompts: list[list[int]], *asked: SamplingParams) -> list[RequestOutput]:
    """Ask plainly and with drafts, compare, and return the latter; some window must have been accepted."""
    plain, llm = make(model.folder, 0), make(model.folder, depth)
    expected = ask(plain, prompts, *asked)
    windows = record_windows(llm)
    outputs = ask(llm, prompts, *asked)
    assert any(accepted(windows))
    assert plain.stats().verified_rows == 0
    assert_same_answers(outputs, expected)
    check_draft_counts(outputs, windows)
    assert llm.stats().output_tokens == plain.stats().output_tokens
    assert llm.stats().finished_requests == plain.stats().finished_requests
    assert idle(llm.stats())
    return outputs


# Length.


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_window_that_crosses_max_tokens_gives_exactly_so_many(perfect: Markov, depth: int) -> None:
    """Tokens, reports and usage agree, and no draft is verified that could not be sent."""
    lengths = list(range(1, 3 * depth + 4))
    prompts = [prompt_before(index, 10) for index in lengths]
    outputs = both(perfect, depth, prompts, *[params(length, ignore_eos=True) for length in lengths])
    for output, prompt, length in zip(outputs, prompts, lengths, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == perfect.answer(prompt, length)
        assert (completion.finish_reason, len(completion.logprobs or [])) == ("length", length)


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_draft_runs_past_the_last_token_that_may_be_sent(perfect: Markov, depth: int) -> None:
    for length in range(1, 2 * depth + 4):
        llm = make(perfect.folder, depth)
        windows = record_windows(llm)
        ask(llm, [prompt_before(0, 10)], greedy(length))
        assert all(window.start + window.num_drafts <= 10 + length - 2 for window in windows)
        assert sum(len(window.emitted) for window in windows) == length - 1


@pytest.mark.parametrize("length", range(506, 512))
@pytest.mark.parametrize("depth", [1, 4])
def test_drafts_end_where_the_context_does(perfect: Markov, depth: int, length: int) -> None:
    """A prompt that leaves room for a few tokens is answered with exactly those, whether or not they are named."""
    llm = make(perfect.folder, depth, max_model_len=512)
    prompt = prompt_before(0, length)
    for max_tokens in (None, 512 - length):
        (output,) = ask(llm, [prompt], params(max_tokens, ignore_eos=True))
        assert output.outputs[0].token_ids == perfect.answer(prompt, 512 - length)
        assert output.outputs[0].finish_reason == "length"
    assert idle(llm.stats())


def test_rows_at_the_end_of_the_context_run_beside_others(perfect: Markov) -> None:
    prompts = [prompt_before(index, length) for index, length in enumerate((509, 20, 511, 505))]
    outputs = both(perfect, 3, prompts, *[params(count, ignore_eos=True) for count in (3, 30, 1, 7)])
    assert [len(tokens) for tokens in tokens_of(outputs)] == [3, 30, 1, 7]


# End tokens and stop tokens.


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_end_token_at_any_place_of_a_window_ends_the_answer_there(perfect: Markov, depth: int) -> None:
    prompts = [prompt_before(END_CLASS - back, 20 + back) for back in range(2 * depth + 3)]
    outputs = both(perfect, depth, prompts, params())
    for back, completion in enumerate(output.outputs[0] for output in outputs):
        assert completion.token_ids == letters(*range(END_CLASS - back, END_CLASS + 1))
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert len(completion.logprobs or []) == back + 1


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("back", STARTS)
def test_each_kind_of_end_is_honoured_in_a_window(perfect: Markov, depth: int, back: int) -> None:
    prompts = [prompt_before(END_CLASS - back, 30)] * 5
    kinds = [
        params(stop_token_ids=[END]),
        params(ignore_eos=True, stop_token_ids=[END, 5]),
        params(ignore_eos=True),
        params(include_stop_str_in_output=True, skip_special_tokens=False),
        params(ignore_eos=True, stop_token_ids=[OTHER_END], skip_special_tokens=False),
    ]
    outputs = both(perfect, depth, prompts, *kinds)
    found = [(one.outputs[0].finish_reason, len(one.outputs[0].token_ids)) for one in outputs]
    assert found == [("stop", back + 1), ("stop", back + 1), ("length", 24), ("stop", back + 1), ("stop", back + 2)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_below_min_tokens_each_place_of_a_window_has_its_own_ban(perfect: Markov, depth: int) -> None:
    """An end token is banned at some places of a window and not at others; drafts obey as the target does."""
    for back in range(depth + 2):
        prompts = [prompt_before(END_CLASS - back, 20)] * (depth + 3)
        asked = [params(min_tokens=count) for count in range(depth + 3)]
        outputs = both(perfect, depth, prompts, *asked)
        for count, output in enumerate(outputs):
            tokens = output.outputs[0].token_ids
            assert not {END, OTHER_END} & set(tokens[:count])
            assert len(tokens) == back + 1 if count <= back else len(tokens) > count
    llm = make(perfect.folder, depth)
    windows = record_windows(llm)
    ask(llm, [prompt_before(END_CLASS - 2, 20)], params(min_tokens=24, max_tokens=24))
    assert all(window.num_accepted == window.num_drafts for window in windows)


@pytest.mark.parametrize("depth", DEPTHS)
def test_of_a_stop_and_the_length_in_one_window_the_first_decides(perfect: Markov, depth: int) -> None:
    prompts, asked, expected = [], [], []
    for max_tokens in range(1, depth + 4):
        for stop_at in range(1, depth + 4):  # the end token would be this one of the answer
            prompts.append(prompt_before(END_CLASS - stop_at + 1, 20))
            asked.append(params(max_tokens))
            expected.append(("stop" if stop_at <= max_tokens else "length", min(stop_at, max_tokens)))
    outputs = both(perfect, depth, prompts, *asked)
    assert [(one.outputs[0].finish_reason, len(one.outputs[0].token_ids)) for one in outputs] == expected


# Stop strings.

STOPS: list[dict[str, Any]] = [
    {"stop": "e"},
    {"stop": "def"},
    {"stop": ["xyz", "ghi"]},
    {"stop": "def", "include_stop_str_in_output": True},
    {"stop": "bcdefghij"},
    {"stop": ["abz", "gx"]},  # near misses
    {"stop": "hij", "min_tokens": 9},
    {"stop": "\u20ac"},  # one character of three tokens
    {"stop": "z \u20ac", "include_stop_str_in_output": True},
]


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: "-".join(map(str, stop.values())).replace("\u20ac", "euro"))
def test_a_stop_string_is_found_inside_windows_and_across_them(perfect: Markov, stop: dict, depth: int) -> None:
    starts = (*range(5), 24, 25, 26)
    outputs = both(perfect, depth, [prompt_before(kind, 20) for kind in starts], params(20, ignore_eos=True, **stop))
    assert {one.outputs[0].finish_reason for one in outputs} >= ({"stop"} if stop["stop"] != ["abz", "gx"] else set())


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_string_ends_with_the_token_that_completes_it(perfect: Markov, depth: int) -> None:
    (output,) = both(perfect, depth, [prompt_before(0, 9)], params(24, stop="fg"))
    assert output.outputs[0].text == "abcde"
    assert output.outputs[0].token_ids == letters(*range(7))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "fg")


# Streams.

KINDS = list(RequestOutputKind)


def pieces(llm: LLM, prompt: list[int], asked: SamplingParams) -> list[RequestOutput]:
    return list(llm.stream(prompt, asked))


@pytest.mark.parametrize("depth", [2, 4])
def test_a_stream_tells_the_same_in_other_pieces(perfect: Markov, depth: int) -> None:
    """Deltas add up, each item says what stands so far, and no item ends in half a character."""
    plain, llm = make(perfect.folder, 0), make(perfect.folder, depth)
    for kind in (20, 24, 25, 28, 0):
        prompt = prompt_before(kind, 12)
        for extra in ({}, {"stop": "cd"}, {"ignore_eos": True}, {"ignore_eos": True, "stop": ["z \u20ac!", "bcdef"]}):
            asked = params(20, **extra)
            (whole,) = ask(plain, [prompt], asked)
            deltas = [one.outputs[0] for one in pieces(llm, prompt, replace(asked, output_kind=KINDS[1]))]
            assert "".join(one.text for one in deltas) == whole.outputs[0].text
            assert [token for one in deltas for token in one.token_ids] == whole.outputs[0].token_ids
            assert sum(len(one.logprobs or []) for one in deltas) == len(whole.outputs[0].token_ids)
            if kind != 28:  # that answer begins inside a character
                assert not any("\ufffd" in one.text for one in deltas[:-1])
            assert [one.finish_reason for one in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert len(deltas) <= len(whole.outputs[0].token_ids)
            cumulative = pieces(llm, prompt, asked)
            assert_same_answers(cumulative[-1:], [whole])
            for earlier, later in pairwise(cumulative):
                assert later.outputs[0].text.startswith(earlier.outputs[0].text)
                assert later.outputs[0].token_ids[: len(earlier.outputs[0].token_ids)] == earlier.outputs[0].token_ids


def test_short_answers_are_told_to_their_last_character(perfect: Markov) -> None:
    plain, llm = make(perfect.folder, 0), make(perfect.folder, 4)
    for length in (*range(1, 9), 13, 21, 30):
        prompt, asked = prompt_before(1, 12), params(length, ignore_eos=True)
        (whole,) = ask(plain, [prompt], asked)
        deltas = pieces(llm, prompt, replace(asked, output_kind=RequestOutputKind.DELTA))
        assert "".join(one.outputs[0].text for one in deltas) == whole.outputs[0].text


# Counts of drafts.


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_completion_says_how_many_drafts_stood_and_fell(mixed: Markov, depth: int) -> None:
    llm = make(mixed.folder, depth)
    windows = record_windows(llm)
    prompts = [prompt_before(5 * index, 20) for index in range(6)]
    outputs = ask(llm, prompts, greedy(40))
    check_draft_counts(outputs, windows)
    assert min(output.outputs[0].num_rejected_drafts for output in outputs) > 0
    (plain,) = ask(make(mixed.folder, 0), prompts[:1], greedy(4))
    assert (plain.outputs[0].num_accepted_drafts, plain.outputs[0].num_rejected_drafts) == (0, 0)


# Leaving, and steps that fail.


@pytest.mark.parametrize("steps", range(6))
def test_a_stream_left_in_the_middle_frees_everything_and_the_same_prompt_then_answers_right(
    perfect: Markov, steps: int
) -> None:
    llm = make(perfect.folder, 3)
    prompt = prompt_before(0, 125)
    stream = llm.stream(prompt, greedy(30))
    step(llm, steps)
    stream.close()
    assert idle(llm.stats())
    retry = ask(llm, [prompt], greedy(30))
    assert cached(retry) == [floor(min(64 * steps, 124))]
    assert tokens_of(retry) == [perfect.answer(prompt, 30)]


def during_step(llm: LLM, number: int, act: Callable[[], object]) -> None:
    """Do something while the device runs the given step of those to come, counted from 0."""
    runner = llm._engine._runner
    collect, count = runner.collect, iter(range(10**6))

    def acting(launched: Any) -> Any:
        result = collect(launched)
        if next(count) == number:
            act()
        return result

    runner.collect = acting  # type: ignore[method-assign]


@pytest.mark.parametrize("number", range(5))
def test_an_abort_while_a_window_is_verified_leaves_its_drafts_nowhere(perfect: Markov, number: int) -> None:
    llm = make(perfect.folder, 3)
    prompts = [prompt_before(0, 61), prompt_before(9, 30)]
    streams = [llm.stream(prompt, greedy(30)) for prompt in prompts]
    during_step(llm, number, lambda: llm._engine.abort("0"))
    step(llm, 5)
    assert tokens_of(list(streams[1])[-1:]) == [perfect.answer(prompts[1], 30)]
    llm._live.pop("0", None)
    streams[0].close()
    assert idle(llm.stats())
    again = ask(llm, prompts, greedy(30))
    assert tokens_of(again) == [perfect.answer(prompt, 30) for prompt in prompts]


@pytest.mark.parametrize("name", ["prefill_step", "advance_step"])
def test_a_step_that_raises_costs_its_rows_and_no_draft_of_theirs_comes_back(
    mixed: Markov, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(mixed.folder, 3)
    prompts = [prompt_before(kind, 60 + kind) for kind in range(3)]
    streams = [llm.stream(prompt, greedy(30)) for prompt in prompts]
    step(llm, 5)
    fail_once(monkeypatch.setattr, name, RuntimeError("the device says no"))
    late = llm.stream(prompt_before(5, 20), greedy(8))
    ends = [list(stream)[-1] for stream in [*streams, late]]
    assert {end.outputs[0].finish_reason for end in ends} >= {"error"}
    for end in ends:
        tokens = end.outputs[0].token_ids
        assert tokens == mixed.answer(end.prompt_token_ids, 30)[: len(tokens)]
    assert llm.stats().failed_steps == 1
    assert idle(llm.stats())
    windows = record_windows(llm)
    again = ask(llm, prompts, greedy(30))
    assert cached(again) == [0, 0, 0]
    assert tokens_of(again) == [mixed.answer(prompt, 30) for prompt in prompts]
    expected = [mixed.num_right(window.known[-1], window.num_drafts) for window in windows if window.num_drafts]
    assert accepted(windows) == expected


def test_an_interrupted_step_sends_its_rows_back_without_their_drafts(
    mixed: Markov, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(mixed.folder, 3)
    prompt = prompt_before(2, 70)
    stream = llm.stream(prompt, greedy(30))
    step(llm, 4)
    fail_once(monkeypatch.setattr, "advance_step", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        step(llm)
    windows = record_windows(llm)
    assert tokens_of(list(stream)[-1:]) == [mixed.answer(prompt, 30)]
    expected = [mixed.num_right(window.known[-1], window.num_drafts) for window in windows if window.num_drafts]
    assert accepted(windows) == expected


def test_drafts_that_spoil_their_window_change_no_answer_and_end_nobody_else(tmp_path: Path) -> None:
    """A token whose embedding is NaN, drafted again and again: only the request that really draws it ends there."""
    model = write_markov(tmp_path)
    llm = make(model.folder, 3)
    runner = runner_of(llm)
    broken = ALPHABET[9]
    edited = runner._static.model(runner._params)
    table = edited.decoder.embed_tokens.weight
    table[...] = table[...].at[broken].set(jnp.nan)
    static = runner._static
    runner._static, runner._params = split_model(
        edited, num_valid_tokens=static.num_valid_tokens, num_top=static.num_top
    )
    ends, lasts = prompt_before(2, 20, 1), prompt_before(11, 20, 2)
    texts = [[*ends, *model.answer(ends, 40)], [*lasts, *model.answer(lasts, 40)]]
    windows = record_windows(llm)
    force_drafts(llm, texts, lambda row: 3)  # right drafts: in time the broken token is one of them
    (first,) = ask(llm, [ends], greedy(16))
    assert first.outputs[0].finish_reason == "error"
    assert first.outputs[0].token_ids == texts[0][20 : 21 + texts[0][20:].index(broken)]
    assert any(window.num_drafts and not window.emitted for window in windows)  # one ran for nothing
    assert idle(llm.stats())
    (other,) = ask(llm, [lasts], greedy(16))
    assert (other.outputs[0].finish_reason, other.outputs[0].token_ids) == ("length", texts[1][20:36])
