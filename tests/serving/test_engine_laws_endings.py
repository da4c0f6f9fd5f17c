"""After the last request nothing is held, however it ended; a step that fails costs its own requests at most."""

import gc
import random

import pytest
from oracles.engine_rig import (
    Oracle,
    ask,
    assert_right,
    cached,
    fail_once,
    floor,
    greedy,
    idle,
    make_llm,
    random_ids,
    runner_of,
    scheduler_of,
    step,
    tiny_oracle,
    tokens_of,
)

from gdn_jax.serving.core.errors import InvariantError


@pytest.fixture
def oracle() -> Oracle:
    return tiny_oracle()


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 7])
def test_a_stream_left_in_the_middle_frees_everything_and_the_same_prompt_then_answers_right(
    oracle: Oracle, steps: int
) -> None:
    llm = make_llm(max_num_batched_tokens=64, state_interval=64)
    prompt = random_ids(1, 200)
    stream = llm.stream(prompt, greedy(12))
    step(llm, steps)
    stream.close()
    assert idle(llm.stats())
    retry = ask(llm, [prompt], greedy(12))
    assert cached(retry) == [floor(min(64 * steps, 199))]
    assert_right(retry, oracle)


def test_a_stream_that_nobody_reads_is_dropped_with_its_iterator() -> None:
    llm = make_llm()
    stream = llm.stream(random_ids(1, 30), greedy())
    assert llm.stats().waiting == 1
    del stream
    gc.collect()
    assert idle(llm.stats())


def test_waiting_requests_that_are_aborted_leak_nothing(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = random_ids(1, 130)
    ask(llm, [prompt], greedy(8))
    before = llm.stats().checkpoints
    for _ in range(20):
        streams = [llm.stream(prompt, greedy(8)) for _ in range(6)]  # two more than there are lanes
        step(llm)
        for stream in streams:
            stream.close()
    assert idle(llm.stats())
    assert llm.stats().checkpoints == before
    assert llm.stats().hit_tokens == 20 * 4 * 128
    assert_right(ask(llm, [prompt], greedy(8)), oracle)


def test_a_request_that_ends_in_its_first_step_gives_everything_back() -> None:
    llm = make_llm()
    long = llm.stream(random_ids(1, 40), greedy(40))
    for seed in range(20):
        ask(llm, [random_ids(seed, 3), random_ids(seed, 70)], greedy(1))
    list(long)
    assert idle(llm.stats())


def test_a_finished_neighbour_of_an_aborted_stream_leaves_nothing_behind() -> None:
    llm = make_llm()
    ending, going_on = llm.stream(random_ids(1, 62), greedy(4)), llm.stream(random_ids(2, 30), greedy(40))
    list(ending)
    going_on.close()
    assert idle(llm.stats())
    read_late, dropped = llm.stream(random_ids(3, 62), greedy(4)), llm.stream(random_ids(4, 30), greedy(40))
    step(llm, 4)  # the first one ends unread, and its closing row is still to come
    dropped.close()
    assert idle(llm.stats())
    assert [len(output.outputs[0].token_ids) for output in read_late][-1] == 4


def test_after_a_hundred_requests_every_book_is_that_of_a_fresh_engine() -> None:
    llm = make_llm()
    for seed in range(20):
        ask(llm, [random_ids(seed + part, 1 + seed % 5) for part in range(5)], greedy(1 + seed % 2))
    engine, scheduler, runner = llm._engine, scheduler_of(llm), runner_of(llm)
    for book in (llm._live, engine._live, runner._requests, scheduler._queues._live):
        assert len(book) == 0
    scheduler.check()
    assert idle(llm.stats())


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_after_any_mix_of_endings_nothing_is_held_and_the_cache_is_right(
    oracle: Oracle, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(prefix_cache=mode, state_interval=64, num_blocks=8, num_state_slots=6, max_num_batched_tokens=64)
    dice, streams, ends = random.Random(2), {}, []
    texts = [random_ids(seed, 100) for seed in range(2)]
    for number in range(24):
        text = dice.choice(texts)
        prompt = [*text[: dice.randint(50, len(text))], *random_ids(number, dice.randint(1, 30))]
        streams[number] = llm.stream(prompt, greedy(dice.randint(1, 70)))
        step(llm, dice.randint(1, 15))
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
    assert min(stats.preemptions, stats.failed_steps) > 0
    assert_right([end for end in ends if end.outputs[0].finish_reason != "error"], oracle)
    assert_right(ask(llm, texts, greedy(4)), oracle)
    again = ask(llm, texts, greedy(4))
    assert cached(again) == [0 if mode == "none" else 64] * 2
    assert_right(again, oracle)


# Faults of the device.


@pytest.mark.parametrize("name", ["prefill_step", "advance_step"])
def test_a_step_that_raises_fails_its_rows_and_the_engine_goes_on(
    oracle: Oracle, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(state_interval=64)
    prompts = [random_ids(seed, 130) for seed in range(2)]
    ask(llm, prompts, greedy(12))
    fail_once(monkeypatch.setattr, name, RuntimeError("the device says no"))
    outputs = ask(llm, prompts, greedy(12))
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert all(len(tokens) < 12 for tokens in tokens_of(outputs))
    assert "the device says no" in caplog.text
    stats = llm.stats()
    assert idle(stats)
    assert (stats.failed_steps, stats.checkpoints) == (1, 0)
    again = ask(llm, prompts, greedy(12))
    assert cached(again) == [0, 0]
    assert_right(again, oracle)


def test_requests_that_had_no_row_in_a_failed_step_are_run_again(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt takes the budget, so the others wait without a row when the step fails."""
    llm = make_llm(max_num_batched_tokens=64)
    streams = [llm.stream(random_ids(seed, length), greedy(8)) for seed, length in enumerate((128, 40, 70))]
    fail_once(monkeypatch.setattr, "prefill_step", RuntimeError("lost"))
    ends = [list(stream)[-1] for stream in streams]
    assert [end.outputs[0].finish_reason for end in ends] == ["error", "length", "length"]
    assert_right(ends[1:], oracle)
    assert idle(llm.stats())


def test_an_interrupt_in_the_middle_of_a_step_only_sends_its_rows_back_to_wait(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    prompt = random_ids(1, 70)
    stream = llm.stream(prompt, greedy(12))
    step(llm, 3)
    fail_once(monkeypatch.setattr, "advance_step", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ask(llm, [random_ids(2, 20)], greedy(4))
    assert llm.stats().waiting == 1  # the interrupted call's own request is gone
    assert_right([*list(stream)[-1:], *ask(llm, [prompt], greedy(12))], oracle)
    assert idle(llm.stats())


def test_a_contradiction_in_the_books_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    monkeypatch.setattr(runner_of(llm), "_requests", {})
    monkeypatch.setattr(runner_of(llm), "add", lambda *args: None)
    with pytest.raises(InvariantError, match="never made known"):
        ask(llm, [[1, 2, 3]], greedy())
