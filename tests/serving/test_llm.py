"""The Python API: what comes back, streams beside calls, and bad input that leaves nothing behind."""

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import jaxtyping
import numpy as np
import pytest
from oracles.engine_rig import TINY, greedy, make_llm
from oracles.quick_engine import answer, audit, lasting, parts_of, quick_llm

from gdn_jax import LLM, RequestOutputKind, SamplingParams
from gdn_jax.errors import ConfigError
from gdn_jax.model import load_model
from gdn_jax.serving.collector import Collector
from gdn_jax.serving.core.errors import (
    InvalidParameterError,
    InvalidPromptError,
    PromptTooLongError,
    RequestError,
    StartupError,
)

PROMPT = [5, 80, 7, 12, 200, 31, 31, 9]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


def test_one_prompt_and_a_list_of_prompts_come_back_in_order(llm):
    alone = [llm.generate(text, greedy(), use_tqdm=False)[0] for text in ("one", "two")]
    both = llm.generate(["one", "two"], greedy(), use_tqdm=False)
    assert [o.prompt for o in both] == ["one", "two"]
    assert [o.outputs[0].token_ids for o in both] == [o.outputs[0].token_ids for o in alone]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in both)


def test_text_ids_and_dicts_of_either_are_the_same_prompt(llm):
    ids = llm.get_tokenizer().encode("hello")
    forms = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}]
    outputs = [llm.generate(form, greedy(), use_tqdm=False)[0] for form in forms]
    assert [o.prompt_token_ids for o in outputs] == [ids] * len(forms)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1


def test_a_bar_says_that_a_call_waits_for_a_step_to_be_compiled_and_only_then(llm, capsys):
    def shown(**params: object) -> str:
        llm.generate([PROMPT], greedy(4, **params))
        return capsys.readouterr().err

    shown()
    first, second = shown(prompt_logprobs=2), shown(prompt_logprobs=2)  # scoring a prompt is a step of its own
    told = "prompts (compiling a step for its first use)"
    assert told in first
    assert first.rindex("prompts:") > first.rindex(told)  # and no longer than that
    assert told not in second
    assert "prompts:" in second
    llm.generate([PROMPT], greedy(4, prompt_logprobs=2), use_tqdm=False)
    assert list(llm.stream([PROMPT[0]] * 200, greedy(2, prompt_logprobs=2)))
    assert capsys.readouterr().err == ""


def test_an_engine_goes_with_its_llm_at_once():
    own = make_llm()
    engine = weakref.ref(own._engine)
    gc.collect()
    gc.disable()
    try:
        del own
        assert engine() is None
    finally:
        gc.enable()


def test_log_probabilities_are_those_of_the_models_logits(llm):
    (output,) = llm.generate([PROMPT], greedy(4, logprobs=3), use_tqdm=False)
    done = output.outputs[0]
    logits = np.asarray(load_model(TINY, dtype="float32").logits([*PROMPT, *done.token_ids]), np.float64)
    expected = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    expected -= logits.max(-1, keepdims=True)
    for place, (token, report) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
        row = expected[len(PROMPT) - 1 + place]
        assert len(report) == 3
        for candidate, found in report.items():
            assert found.logprob == pytest.approx(row[candidate], abs=1e-3)  # float32 logits of size 10
        assert report[token].rank == 1
    chosen = [report[token].logprob for token, report in zip(done.token_ids, done.logprobs, strict=True)]
    assert done.cumulative_logprob == pytest.approx(sum(chosen))


def test_several_completions_differ_by_seed_and_repeat_with_it(llm):
    params = SamplingParams(n=3, temperature=1.5, seed=7, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate([PROMPT], params, use_tqdm=False)[0] for _ in range(2))
    answers = [tuple(done.token_ids) for done in first.outputs]
    assert [done.index for done in first.outputs] == [0, 1, 2]
    assert len(set(answers)) == 3
    assert answers == [tuple(done.token_ids) for done in second.outputs]


def test_a_stop_string_cuts_the_text_and_is_named(llm):
    whole = llm.generate([PROMPT], greedy(12), use_tqdm=False)[0].outputs[0].text
    stop = whole[3:5]
    cut = llm.generate([PROMPT], greedy(12, stop=stop), use_tqdm=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[: whole.index(stop)], "stop", stop)
    kept = llm.generate([PROMPT], greedy(12, stop=stop, include_stop_str_in_output=True), use_tqdm=False)[0].outputs[0]
    assert kept.text == whole[: whole.index(stop) + len(stop)]


def test_a_stop_token_ends_the_answer_and_min_tokens_forbids_it_before(llm):
    tokens = llm.generate([PROMPT], greedy(6), use_tqdm=False)[0].outputs[0].token_ids
    stop = tokens[2]
    done = llm.generate([PROMPT], greedy(6, stop_token_ids=[stop]), use_tqdm=False)[0].outputs[0]
    first = tokens.index(stop)
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (tokens[: first + 1], "stop", stop)
    later = llm.generate([PROMPT], greedy(6, stop_token_ids=[stop], min_tokens=5), use_tqdm=False)[0].outputs[0]
    assert stop not in later.token_ids[:4]


def test_streamed_text_grows_to_the_generated_text(llm):
    whole = llm.generate([PROMPT], greedy(12), use_tqdm=False)[0]
    parts = list(llm.stream(PROMPT, greedy(12)))
    texts = [part.outputs[0].text for part in parts]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert parts[-1].outputs[0].text == whole.outputs[0].text
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]


def test_two_streams_and_a_call_in_between_lose_nothing(llm):
    alone = {text: llm.generate(text, greedy(10), use_tqdm=False)[0].outputs[0].token_ids for text in ("a", "b", "c")}
    first, second = llm.stream("a", greedy(10)), llm.stream("b", greedy(10))
    next(first), next(second), next(first)
    (third,) = llm.generate("c", greedy(10), use_tqdm=False)
    found = {"a": list(first)[-1], "b": list(second)[-1], "c": third}
    assert {name: output.outputs[0].token_ids for name, output in found.items()} == alone


def test_a_chat_is_rendered_and_its_next_turn_hits_what_both_turns_share(llm):
    turn = [{"role": "user", "content": "The river ran past the mill. " * 6}]
    (first,) = llm.chat(turn, greedy(8), use_tqdm=False)
    assert first.prompt.startswith("<|im_start|>user")
    turn += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
    (second,) = llm.chat(turn, greedy(8), use_tqdm=False)
    shared = next(
        i for i, (a, b) in enumerate(zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)) if a != b
    )
    assert second.num_cached_tokens == shared // 64 * 64 > 0


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("", InvalidPromptError, "at least one token"),
        ([], InvalidPromptError, "at least one token"),
        ([1, -1], InvalidPromptError, "0..319"),
        ([1, 320], InvalidPromptError, "320"),
        ([1, True], InvalidPromptError, "integers"),
        ({"prompt": "a", "prompt_token_ids": [1]}, InvalidPromptError, "exactly one"),
        ("\ud800", InvalidPromptError, None),
        ([3] * 512, PromptTooLongError, "512"),
        ([3] * 505, PromptTooLongError, "505"),
    ],
    ids=repr,
)
def test_a_bad_prompt_is_refused_by_name_and_its_neighbour_never_runs(llm, prompt, error, words):
    before = llm.stats()
    with pytest.raises(error, match=words):
        llm.generate([PROMPT, prompt], greedy(8), use_tqdm=False)
    after = llm.stats()
    assert (after.steps, after.waiting, after.running) == (before.steps, 0, 0)


def test_bad_parameters_are_refused_and_the_engine_goes_on(llm):
    with pytest.raises(InvalidParameterError, match="one entry per prompt"):
        llm.generate(["a", "b"], [greedy()], use_tqdm=False)
    with pytest.raises(InvalidParameterError, match="vocabulary"):
        llm.generate(["a"], greedy(stop_token_ids=[320]), use_tqdm=False)
    with pytest.raises(InvalidParameterError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidParameterError, match="temperature"):
        SamplingParams(temperature=float("nan"))
    with pytest.raises(TypeError, match="temperature"):
        SamplingParams(temprature=1)
    assert issubclass(RequestError, ValueError)
    assert llm.generate(["a"], greedy(), use_tqdm=False)[0].finished


def test_a_start_that_cannot_be_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(TypeError, match="max_model_len"):
        LLM(str(TINY), max_model_length=5)
    with pytest.raises(ConfigError, match="no-such"):
        LLM(str(tmp_path / "no-such"))
    with pytest.raises(ValueError, match="state_interval"):
        LLM(str(TINY), state_interval=100)
    with pytest.raises(StartupError, match="max_model_len"):
        LLM(str(TINY), max_model_len=10**6, use_tqdm=False)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        LLM(str(TINY), tensor_parallel_size=2)


# What needs no model runs on one that answers at once.


@pytest.fixture
def quick() -> LLM:
    return quick_llm()


@pytest.fixture
def _no_type_checker() -> Iterator[None]:
    """As for a user: the code itself answers a value of the wrong type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_fifty_prompts_of_different_lengths_come_back_in_the_order_given(quick):
    prompts = [[index, 7] for index in range(50)]
    counts = [(index * 7) % 11 + 1 for index in range(50)]
    outputs = quick.generate(prompts, [lasting(count) for count in counts], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == list(map(answer, prompts, counts))


def test_a_hundred_calls_on_one_engine_lose_nothing(quick):
    for index in range(100):
        prompts = [[index % 100, other] for other in range(index % 7 + 1)]
        outputs = quick.generate(prompts, lasting(3), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [answer(prompt, 3) for prompt in prompts]
    assert not quick._live


def test_calls_from_several_threads_are_complete_and_ordered(quick):
    faults: list[object] = []

    def call(number: int) -> None:
        try:
            for index in range(15):
                prompts = [[number, index, other] for other in range(index % 5 + 1)]
                outputs = quick.generate(prompts, lasting(index % 4 + 1), use_tqdm=False)
                got = [output.outputs[0].token_ids for output in outputs]
                if got != [answer(prompt, index % 4 + 1) for prompt in prompts]:
                    faults.append((number, index, got))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    audit(quick._engine)


def test_a_step_looks_at_one_prompt_however_many_wait(quick, monkeypatch):
    looks = 0
    finished = Collector.finished.fget
    assert finished is not None

    def count(collector: Collector) -> bool:
        nonlocal looks
        looks += 1
        return finished(collector)

    monkeypatch.setattr(Collector, "finished", property(count))
    quick.generate([[index] for index in range(60)], lasting(4), use_tqdm=False)
    steps = quick.stats().steps
    assert looks < 4 * steps + 4 * 60  # looking at all of them in every step would be 60 times the steps


def test_a_dropped_stream_runs_no_step_and_frees_everything(quick):
    stream = quick.stream([1, 2, 3], lasting(100))
    next(stream)
    steps = quick.stats().steps
    del stream
    gc.collect()
    stats = quick.stats()
    assert (stats.steps, stats.running, stats.waiting, stats.blocks_used) == (steps, 0, 0, 0)
    audit(quick._engine)


def test_the_end_of_a_dropped_stream_leaves_the_device_alone_though_steps_are_in_flight_or_to_come(quick):
    runs: list[object] = []
    _, runner = parts_of(quick._engine)
    ending = quick.stream(list(range(1, 23)), lasting(3))  # ends at 25 tokens, and a closing row is to follow
    stream = quick.stream([1, 2, 3], lasting(100))
    while len(quick._live) > 1:
        next(stream)
    assert quick._engine.has_step_in_flight
    assert quick._engine.has_closing_rows
    runner.before_step = runs.append
    launch = runner.launch
    runner.launch = lambda plan: runs.append(plan) or launch(plan)
    del stream
    gc.collect()
    assert runs == []
    stats = quick.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)
    assert [*ending][-1].outputs[0].token_ids == answer(list(range(1, 23)), 3)
    audit(quick._engine)


def test_a_stream_dropped_in_the_middle_of_a_step_is_aborted_after_it(quick):
    _, runner = parts_of(quick._engine)
    streams = [quick.stream([1, 2, 3], lasting(100))]
    next(streams[0])

    def drop(plan: object) -> None:
        streams.clear()
        gc.collect()

    runner.before_step = drop
    (output,) = quick.generate([[9, 9]], lasting(6), use_tqdm=False)
    assert output.outputs[0].token_ids == answer([9, 9], 6)
    stats = quick.stats()
    assert (stats.running, stats.waiting, stats.aborted_requests) == (0, 0, 1)
    audit(quick._engine)


def test_a_whole_call_gives_whole_answers_whatever_the_kind_of_its_items(quick):
    for kind in RequestOutputKind:
        (output,) = quick.generate([[5, 6]], lasting(20, output_kind=kind), use_tqdm=False)
        assert output.outputs[0].token_ids == answer([5, 6], 20)
    deltas = list(quick.stream([5, 6], lasting(20, output_kind=RequestOutputKind.DELTA)))
    assert [token for item in deltas for token in item.outputs[0].token_ids] == answer([5, 6], 20)
    assert len(deltas) == 20


def test_a_failed_step_ends_its_prompts_with_an_error_and_the_call_returns(quick):
    _, runner = parts_of(quick._engine)
    runner.step_error = RuntimeError("the device hiccups")
    outputs = quick.generate([[1], [2], [3]], lasting(4), use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 3
    assert quick.generate([[1]], lasting(4), use_tqdm=False)[0].outputs[0].token_ids == answer([1], 4)


@pytest.mark.usefixtures("_no_type_checker")
@pytest.mark.parametrize("given", [None, 5, [], {}, "Hello"], ids=repr)
def test_what_is_no_conversation_is_refused_by_every_way_in(quick, given):
    for ask in (quick.chat, quick.stream_chat):
        with pytest.raises(InvalidPromptError, match="messages must"):
            ask(given)


@pytest.mark.usefixtures("_no_type_checker")
@pytest.mark.parametrize("given", [None, 5, [None], [5.0]], ids=repr)
def test_what_is_no_prompt_is_refused_by_every_way_in(quick, given):
    for ask in (quick.generate, quick.stream):
        with pytest.raises(InvalidPromptError):
            ask(given)


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 2},
        {"max_tokens": 7},
        {"min_tokens": 9, "stop_token_ids": None},
        {"stop": None},
        {"stop_token_ids": None},
    ],
    ids=lambda params: next(iter(params)),
)
def test_stops_lengths_and_reports_with_drafts_are_those_without(num_drafts, params):
    prompt = [4, 5, 6]
    known = answer(prompt, 30)
    text = quick_llm().get_tokenizer().decode(known)
    if "stop_token_ids" in params:
        params = params | {"stop_token_ids": [known[5], known[14]]}
    if "stop" in params:
        params = params | {"stop": text[9:11]}
    asked = lasting(**{"max_tokens": 30, "logprobs": 0} | params)
    plain = quick_llm().generate([prompt], asked, use_tqdm=False)[0].outputs[0]
    drafting = quick_llm(num_drafts=num_drafts)
    drafted = drafting.generate([prompt], asked, use_tqdm=False)[0].outputs[0]
    counted = {"num_accepted_drafts": 0, "num_rejected_drafts": 0}  # what alone may differ
    assert replace(drafted, **counted) == plain
    assert len(drafted.logprobs) == len(drafted.token_ids)
    assert parts_of(drafting._engine)[1].tell_tale.num_accepted > 0
    parts = list(quick_llm(num_drafts=num_drafts).stream(prompt, asked))
    assert replace(parts[-1].outputs[0], **counted) == plain


# Interrupts.


@pytest.fixture
def _interrupts_raise() -> Iterator[None]:
    """As in a terminal, however the tests were started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_twice(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that gets one interrupt before it has done anything, and one when it has done all."""

    def interrupted(*given: object, **options: object) -> object:
        signal.raise_signal(signal.SIGINT)
        result = function(*given, **options)
        signal.raise_signal(signal.SIGINT)
        return result

    return interrupted


def inner_functions(llm: LLM) -> dict[str, tuple[object, str]]:
    """Where an interrupt may fall: one function in the middle of each part of a step."""
    scheduler, runner = parts_of(llm._engine)
    return {
        "plan": (scheduler.holdings, "try_admit"),
        "run": (runner, "before_step"),
        "cut": (llm._engine, "_cut"),
        "commit": (scheduler, "_commit_row"),
        "hand out": (Collector, "take"),
        "submit": (runner, "add"),
    }


@pytest.mark.usefixtures("_interrupts_raise")
@pytest.mark.parametrize("part", ["plan", "run", "cut", "commit", "hand out", "submit"])
def test_two_interrupts_anywhere_in_a_call_leave_books_that_agree_and_nothing_held(quick, monkeypatch, part):
    prompts = [list(range(1, 23)), [60, 61, 62]]
    for turn in range(12):
        reader = quick.stream([90 + turn, 1], lasting(12))
        next(reader)
        owner, name = inner_functions(quick)[part]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt_twice(getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                quick.generate(prompts, lasting(5), use_tqdm=False)
        audit(quick._engine)
        assert [*reader][-1].outputs[0].token_ids == answer([90 + turn, 1], 12)
        stats = quick.stats()
        assert (stats.running, stats.waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)
        assert not quick._live
        outputs = quick.generate(prompts, lasting(5), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [answer(prompt, 5) for prompt in prompts]
        audit(quick._engine)


@pytest.mark.usefixtures("_interrupts_raise")
def test_a_second_interrupt_breaks_off_the_device_and_a_third_waits_for_the_books(quick, monkeypatch):
    scheduler, runner = parts_of(quick._engine)
    after: list[str] = []

    def hang(plan: object) -> None:
        signal.raise_signal(signal.SIGINT)
        after.append("first")
        signal.raise_signal(signal.SIGINT)
        after.append("second")

    runner.before_step = hang
    monkeypatch.setattr(scheduler, "fail", interrupt_twice(scheduler.fail))
    with pytest.raises(KeyboardInterrupt):
        quick.generate([[1, 2]], lasting(5), use_tqdm=False)
    assert after == ["first"]
    audit(quick._engine)
    runner.before_step = lambda plan: None
    assert quick.generate([[1, 2]], lasting(5), use_tqdm=False)[0].outputs[0].token_ids == answer([1, 2], 5)


@pytest.mark.usefixtures("_interrupts_raise")
def test_one_interrupt_lets_the_step_on_the_device_end(quick):
    _, runner = parts_of(quick._engine)
    runner.before_step = lambda plan: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        quick.generate([[1, 2]], lasting(5), use_tqdm=False)
    stats = quick.stats()
    assert (stats.steps, stats.output_tokens) == (1, 1)


@pytest.mark.usefixtures("_interrupts_raise")
def test_an_interrupt_in_the_step_that_ends_the_last_answer_leaves_nothing_held_by_its_row_in_vain(quick, monkeypatch):
    tokens = answer([1, 2, 3], 40)
    stop = next(place for place in range(5, 40) if tokens.index(tokens[place]) == place)

    real = quick._engine._end

    def end(request: object) -> None:
        signal.raise_signal(signal.SIGINT)
        real(request)

    monkeypatch.setattr(quick._engine, "_end", end)
    with pytest.raises(KeyboardInterrupt):
        quick.generate([[1, 2, 3]], lasting(40, stop_token_ids=[tokens[stop]]), use_tqdm=False)
    stats = quick.stats()
    assert (stats.finished_requests, stats.running, stats.blocks_used, stats.slots_used) == (1, 0, 0, 0)


# What the last item leaves behind.


def test_a_reader_who_stops_at_the_last_item_leaves_nothing_held_and_the_next_turn_a_checkpoint(quick):
    prompt = list(range(1, 23))
    for item in quick.stream(prompt, lasting(3)):  # 24 tokens have run when it ends: a closing row folds the last
        if item.finished:
            break
    stats = quick.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)
    (output,) = quick.generate([[*prompt, *answer(prompt, 3), 5]], lasting(2), use_tqdm=False)
    assert output.num_cached_tokens == 24


def test_a_call_refused_half_way_counts_nobody_as_having_left(quick):
    ran: list[object] = []
    _, runner = parts_of(quick._engine)
    runner.before_step = ran.append
    with pytest.raises(PromptTooLongError):
        quick.generate([[1, 2], [1] * 250], lasting(20), use_tqdm=False)
    stats = quick.stats()
    assert (stats.aborted_requests, stats.waiting, ran) == (0, 0, [])
    assert not runner.known
    assert not quick._live
