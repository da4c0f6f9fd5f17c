"""Steps handed to the device ahead of the results of the one before: same answers, and the device never waits."""

from typing import Any

import pytest
from oracles.engine_rig import (
    ask,
    cached,
    greedy,
    idle,
    make_llm,
    random_ids,
    record_plans,
    runner_of,
    step,
    tokens_of,
)
from oracles.quick_engine import add_request, answer, make_parts, parts_of, run_out
from oracles.runner_rig import make_runner, pending, run, span

from gdn_jax import SamplingParams
from gdn_jax.serving.core.plan import NEWEST, StepPlan
from gdn_jax.serving.engine import Engine
from gdn_jax.serving.engine_types import EngineRequest
from gdn_jax.serving.runner.runner import Runner

ASKED: list[SamplingParams] = [
    greedy(30),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(
        temperature=0.7, seed=1, max_tokens=25, frequency_penalty=1.0, repetition_penalty=1.3, ignore_eos=True
    ),
    SamplingParams(temperature=1.0, seed=5, max_tokens=60, stop_token_ids=list(range(60)), bad_words=["a"]),
    SamplingParams(temperature=1.0, seed=7, max_tokens=60, stop=["e", "t"]),
    SamplingParams(temperature=0, max_tokens=1),
]
PROMPTS = [random_ids(seed, length) for seed, length in enumerate((1, 63, 64, 65, 100, 130))]


def is_ahead(plan: StepPlan) -> bool:
    return any(NEWEST in row.tokens for row in plan.rows)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"prefix_cache": "all", "state_interval": 64, "audit": True}, id="all"),
        pytest.param({"prefix_cache": "align"}, id="align"),
        pytest.param({"prefix_cache": "none", "num_blocks": 8}, id="few blocks"),
    ],
)
def test_answers_of_every_kind_are_those_of_an_engine_that_waits(settings: dict[str, Any]) -> None:
    found = []
    for async_scheduling in (False, True):
        llm = make_llm(async_scheduling=async_scheduling, **settings)
        plans = record_plans(llm)
        first = ask(llm, PROMPTS, *ASKED)
        longer = [[*prompt, *tokens, 9] for prompt, tokens in zip(PROMPTS, tokens_of(first), strict=True)]
        again = ask(llm, longer, greedy(12))
        assert idle(llm.stats())
        assert any(map(is_ahead, plans)) is async_scheduling
        found.append([output.outputs for output in (*first, *again)])
    assert found[0] == found[1]


def test_most_steps_of_a_long_answer_are_handed_over_ahead() -> None:
    llm = make_llm()
    plans = record_plans(llm)
    ask(llm, PROMPTS[:3], greedy(40))
    assert sum(map(is_ahead, plans)) >= 36


# What needs no model runs on one that answers at once.


def engine_and_calls() -> tuple[Engine, list[tuple[str, int]]]:
    """An engine, and what it asks of the device from now on: calls with the numbers of their steps."""
    engine = make_parts().engine
    _, runner = parts_of(engine)
    calls: list[tuple[str, int]] = []
    launch, collect = runner.launch, runner.collect

    def launched(plan: StepPlan) -> Any:
        calls.append(("launch", plan.index))
        return launch(plan)

    def collected(step: Any) -> Any:
        calls.append(("collect", step.plan.index))
        return collect(step)

    runner.launch, runner.collect = launched, collected  # type: ignore[method-assign]
    return engine, calls


def test_the_device_has_the_next_step_before_the_last_is_waited_for() -> None:
    engine, calls = engine_and_calls()
    add_request(engine, "a", [1, 2, 3], 5)
    assert run_out(engine) == {"a": (answer([1, 2, 3], 5), "length")}
    steps = [("launch", 0), ("collect", 0), ("launch", 1)]  # the prompt is computed, then its first token decoded
    for index in range(1, 4):
        steps += [("launch", index + 1), ("collect", index)]
    assert calls == [*steps, ("collect", 4)]


def test_one_who_comes_while_a_step_is_in_flight_is_admitted_with_the_next_plan() -> None:
    engine, calls = engine_and_calls()
    add_request(engine, "a", [1, 2, 3], 20)
    for _ in range(3):
        engine.step()
    calls.clear()
    add_request(engine, "b", [4, 5, 6], 3)
    engine.step()  # the step in flight, and none ahead of it
    engine.step()
    assert calls == [("collect", 3), ("launch", 4), ("collect", 4)]
    assert run_out(engine)["b"][0][-1] == answer([4, 5, 6], 3)[-1]


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["launch", "collect"])
def test_a_step_that_fails_takes_the_one_ahead_along_and_what_comes_later_is_right(
    at: str, error: BaseException
) -> None:
    engine, _ = engine_and_calls()
    _, runner = parts_of(engine)
    add_request(engine, "a", [1, 2, 3], 20)
    for _ in range(3):
        engine.step()
    assert engine.has_step_in_flight
    real = getattr(runner, at)

    def fail(*anything: Any) -> Any:
        setattr(runner, at, real)
        raise error

    setattr(runner, at, fail)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        rest, _ = run_out(engine)["a"]
        assert rest == answer([1, 2, 3], 20)[-len(rest) :]
    else:
        outputs = engine.step()
        assert [output.output.finish_reason for output in outputs] == [None, "error"][at == "collect" :]
    assert not engine.has_step_in_flight
    assert engine.stats().blocks_used == 0
    add_request(engine, "b", [4, 5, 6], 6)
    assert run_out(engine) == {"b": (answer([4, 5, 6], 6), "length")}


def test_a_step_ahead_that_cannot_be_launched_ends_its_own_requests_after_what_the_step_before_it_brings() -> None:
    engine, _ = engine_and_calls()
    _, runner = parts_of(engine)
    add_request(engine, "a", [1, 2, 3], 4)
    add_request(engine, "b", [4, 5, 6], 20)
    real = runner.launch

    def fail_alone(plan: StepPlan) -> Any:
        if len(plan.rows) == 1:
            raise RuntimeError("no memory for a call of this size")
        return real(plan)

    runner.launch = fail_alone  # type: ignore[method-assign]
    told: dict[str, list[int]] = {"a": [], "b": []}
    ends: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step():
            told[output.request_id] += output.output.token_ids
            if output.output.finish_reason is not None:
                ends[output.request_id] = output.output.finish_reason
    assert told == {"a": answer([1, 2, 3], 4), "b": answer([4, 5, 6], 4)}
    assert ends == {"a": "length", "b": "error"}
    assert (engine.stats().failed_steps, engine.stats().blocks_used) == (1, 0)
    runner.launch = real  # type: ignore[method-assign]
    add_request(engine, "c", [4, 5, 6], 6)
    assert run_out(engine) == {"c": (answer([4, 5, 6], 6), "length")}


def test_a_stop_is_told_at_once_and_its_row_in_vain_brings_nothing() -> None:
    engine, calls = engine_and_calls()
    tokens = answer([1, 2, 3], 20)
    stop = tokens.index(tokens[7])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[tokens[stop]])
    engine.add(EngineRequest(request_id="a", prompt=[1, 2, 3], params=params, seed=0, max_tokens=20))
    outputs = [output for _ in range(stop + 1) for output in engine.step()]
    assert outputs[-1].output.finish_reason == "stop"
    assert engine.has_step_in_flight
    assert engine.has_closing_rows
    assert engine.step() == []
    assert engine.stats().output_tokens == stop + 1
    assert run_out(engine) == {}
    assert calls[-1][0] == "collect"


# The device's part.


def prefilled() -> tuple[Runner, list[int]]:
    """A runner of three lanes that each hold a prompt, and the token that each emitted."""
    runner = make_runner()
    rows = [span(name, lane, range(10 * lane, 10 * lane + 20), emits=True) for lane, name in enumerate("abc")]
    return runner, [result.tokens[0] for result in run(runner, *rows)]


def test_a_row_reads_the_token_that_its_lane_emitted_last_whatever_the_others_did() -> None:
    told, newest = prefilled()
    asked, _ = prefilled()
    for start, lanes in ((20, (0, 1, 2)), (21, (1,)), (22, (1,)), (21, (2, 0))):
        replay = {} if start == 20 else {"num_replay": 1}
        want = run(told, *(pending("abc"[lane], lane, newest[lane], start, **replay) for lane in lanes))
        got = run(asked, *(pending("abc"[lane], lane, NEWEST, start, **replay) for lane in lanes))
        assert got == want
        for lane, result in zip(lanes, want, strict=True):
            newest[lane] = result.tokens[0]


def test_a_row_that_emits_nothing_leaves_its_lanes_newest_token() -> None:
    runner, newest = prefilled()
    run(runner, pending("a", 0, NEWEST, 20))
    after = run(runner, pending("a", 0, 0, 21, tokens=(), emits=False, num_replay=1), pending("b", 1, NEWEST, 20))
    assert after[0].tokens == ()
    again, _ = prefilled()
    assert after[1].tokens == run(again, pending("b", 1, newest[1], 20))[0].tokens


def test_two_steps_are_launched_before_the_first_is_collected() -> None:
    runner, newest = prefilled()
    first = runner.launch(StepPlan(index=0, rows=(pending("a", 0, newest[0], 20),)))
    second = runner.launch(StepPlan(index=1, rows=(pending("a", 0, NEWEST, 21, num_replay=1),)))
    found = [runner.collect(launched).rows[0].tokens for launched in (first, second)]
    other, _ = prefilled()
    want = [run(other, pending("a", 0, newest[0], 20))[0].tokens]
    want.append(run(other, pending("a", 0, want[0][0], 21, num_replay=1))[0].tokens)
    assert found == want


def test_an_engine_left_alone_holds_nothing_though_a_step_was_in_flight() -> None:
    llm = make_llm()
    stream = llm.stream(PROMPTS[2], greedy(30))
    step(llm, 4)
    assert llm._engine.has_step_in_flight
    stream.close()
    assert idle(llm.stats())
    assert not llm._engine.has_step_in_flight
    assert runner_of(llm)._owners == {}
    assert cached(ask(llm, [[*PROMPTS[2], 5]], greedy(2))) == [64]
