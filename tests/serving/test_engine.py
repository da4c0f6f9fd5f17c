"""The engine's loop: what a step that goes wrong leaves behind, and what it counts."""

from collections import Counter
from collections.abc import Callable

import pytest
from oracles.quick_engine import add_request, answer, audit, make_parts, parts_of, run_out

from gdn_jax import SamplingParams
from gdn_jax.serving.core.errors import DeviceError, InvalidParameterError
from gdn_jax.serving.core.plan import Phase, RowPlan
from gdn_jax.serving.core.request import FinishReason, RequestId
from gdn_jax.serving.engine import Engine
from gdn_jax.serving.engine_types import EngineRequest

LONG = list(range(1, 23))  # 22 tokens: three prefill steps at a budget of 8
OTHER = [50, 51, 52]


@pytest.fixture
def engine() -> Engine:
    return make_parts().engine


def test_min_tokens_with_every_token_ending_the_answer_is_refused(engine: Engine) -> None:
    tokenizer = engine._tokenizer
    assert tokenizer is not None

    def asked(count: int) -> EngineRequest:
        params = SamplingParams(min_tokens=2, stop_token_ids=list(range(count)), ignore_eos=True)
        return EngineRequest(request_id=str(count), prompt=OTHER, params=params, seed=0, max_tokens=8)

    engine.add(asked(tokenizer.num_tokens - 1))
    with pytest.raises(InvalidParameterError, match="must leave a token to draw") as caught:
        engine.add(asked(tokenizer.num_tokens))
    assert caught.value.parameter == "stop_token_ids"


def test_bad_words_that_might_ban_every_token_are_refused_whatever_stands_before_their_ends(engine: Engine) -> None:
    tokenizer = engine._tokenizer
    assert tokenizer is not None

    def asked(count: int) -> EngineRequest:
        words = tuple((5, token_id) for token_id in range(count))
        params = SamplingParams(bad_words=["x"], min_tokens=2, stop_token_ids=[tokenizer.num_tokens - 1])
        return EngineRequest(request_id=str(count), prompt=OTHER, params=params, seed=0, max_tokens=8, bad_words=words)

    engine.add(asked(tokenizer.num_tokens - 2))
    with pytest.raises(InvalidParameterError, match="must leave a token to draw; got all") as caught:
        engine.add(asked(tokenizer.num_tokens - 1))
    assert caught.value.parameter == "bad_words"


@pytest.mark.parametrize(
    "spoilt",
    [
        pytest.param(lambda row: row.phase is Phase.PREFILL and row.start == 0, id="first prompt chunk"),
        pytest.param(lambda row: row.phase is Phase.PREFILL and row.start == 8, id="middle prompt chunk"),
        pytest.param(lambda row: row.phase is Phase.PREFILL and row.emits, id="last prompt chunk"),
        pytest.param(lambda row: row.phase is Phase.DECODE and row.start > 25, id="decode"),
    ],
)
def test_a_non_finite_row_ends_its_request_alone_and_publishes_nothing_of_that_step(
    engine: Engine, spoilt: Callable[[RowPlan], bool]
) -> None:
    scheduler, runner = parts_of(engine)
    add_request(engine, "bad", LONG, 12)
    add_request(engine, "good", OTHER, 12)
    seen: list[int] = []

    def is_finite(row: RowPlan) -> bool:
        """Spoil one step of the bad request, and note how much of it was published before."""
        if row.request_id == "bad" and spoilt(row):
            seen.append(row.start)
            return False
        return True

    runner.is_finite = is_finite
    done = run_out(engine)
    assert seen[1:] in ([], [seen[0] + 1])  # it ends with the first such row; one planned ahead has run in vain
    assert done["bad"][1] == "error"
    assert done["bad"][0] == answer(LONG, 12)[: len(done["bad"][0])]
    assert done["good"] == (answer(OTHER, 12), "length")
    runner.is_finite = lambda row: True
    add_request(engine, "again", [*LONG, *answer(LONG, 12)], 2)
    while engine.has_work:
        for output in engine.step():
            assert output.num_cached_tokens <= seen[0]
    assert engine.stats().failed_requests == 1
    assert scheduler.holdings.blocks.num_held() == 0


@pytest.mark.parametrize(("finite", "published"), [(True, True), (False, False)])
def test_a_closing_row_publishes_its_state_only_if_it_is_finite(
    engine: Engine, *, finite: bool, published: bool
) -> None:
    scheduler, runner = parts_of(engine)
    runner.is_finite = lambda row: bool(row.tokens) or finite
    add_request(
        engine, "a", LONG, 3
    )  # 24 tokens have run when it ends, 23 are in its state: a closing row folds the last
    assert run_out(engine)["a"][1] == "length"
    lengths = [len(runner.tell_tale.slots[slot]) for slot in scheduler.holdings.checkpoints.names().values()]
    assert (24 in lengths) is published


def test_a_failed_step_fails_its_rows_and_requeues_the_others(engine: Engine) -> None:
    _, runner = parts_of(engine)
    add_request(engine, "in", LONG)
    add_request(engine, "out", OTHER)
    engine.step()  # the budget is spent on the first
    runner.step_error = RuntimeError("the device is gone")
    done = run_out(engine)
    assert done["in"] == ([], "error")
    assert done["out"] == (answer(OTHER, 8), "length")
    assert engine.stats().failed_requests == 1


def test_an_engine_whose_pools_cannot_be_rebuilt_says_so_and_takes_nothing_more(engine: Engine) -> None:
    scheduler, runner = parts_of(engine)
    add_request(engine, "a", LONG)
    add_request(engine, "b", OTHER)
    engine.step()
    runner.step_error, runner.reset_error = RuntimeError("lost"), MemoryError("no room for the pools")
    with pytest.raises(DeviceError, match="no room for the pools"):
        engine.step()
    scheduler.check()
    assert scheduler.get(RequestId("a")).finish is None  # the books are as they were before the step
    runner.reset_error = None
    with pytest.raises(DeviceError, match="start another"):
        engine.step()
    with pytest.raises(DeviceError, match="start another"):
        add_request(engine, "c", OTHER)
    assert engine.abort("a")


def test_what_a_request_brings_wrong_leaves_nothing_queued(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    _, runner = parts_of(engine)

    def refuse(*anything: object) -> None:
        raise OverflowError("no such number")

    monkeypatch.setattr(engine, "_sampling", refuse)
    with pytest.raises(OverflowError):
        add_request(engine, "a", OTHER)
    monkeypatch.undo()
    assert not engine.has_work
    add_request(engine, "a", OTHER)
    assert run_out(engine)["a"][1] == "length"
    assert not runner.known


def test_ended_requests_are_counted_by_how_they_ended(engine: Engine) -> None:
    for name in "abcde":
        add_request(engine, name, OTHER, 3)
    engine.step()
    assert engine.abort("b")
    assert engine.abort("e")
    assert not engine.abort("e")
    run_out(engine)
    stats = engine.stats()
    assert (stats.finished_requests, stats.aborted_requests, stats.failed_requests) == (3, 2, 0)
    assert (stats.waiting, stats.running) == (0, 0)


def test_nothing_grows_with_the_number_of_requests_that_have_ended(engine: Engine) -> None:
    scheduler, runner = parts_of(engine)
    for index in range(300):
        add_request(engine, str(index), [7, 8, 9], 1)
        run_out(engine)
    held = [engine.__dict__, scheduler.__dict__, runner.__dict__]
    sizes = {
        name: len(value)
        for books in held
        for name, value in books.items()
        if isinstance(value, dict | list | set | tuple)
    }
    assert {name: size for name, size in sizes.items() if size > 4} == {}


# Drafts.


def test_drafts_are_counted_by_request_and_by_place_and_change_no_token() -> None:
    plain, drafting = make_parts().engine, make_parts(num_drafts=3).engine
    for engine in (plain, drafting):
        add_request(engine, "a", LONG, 25)
        add_request(engine, "b", OTHER, 25)
    accepted, rejected = Counter[str](), Counter[str]()
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while drafting.has_work:
        for given in drafting.step():
            tokens[given.request_id] += given.output.token_ids
            accepted[given.request_id] += given.output.num_accepted
            rejected[given.request_id] += given.output.num_rejected
        audit(drafting)
    assert {name: (found, FinishReason.LENGTH) for name, found in tokens.items()} == run_out(plain)
    stats = drafting.stats()
    assert stats.accepted_tokens == sum(accepted.values()) == sum(stats.accepted_by_position) > 10
    assert stats.drafted_tokens == sum(accepted.values()) + sum(rejected.values())
    assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)
    assert stats.tokens_per_verify == 1 + stats.accepted_tokens / stats.verified_rows > 1.3
    assert stats.steps < plain.stats().steps
    none = plain.stats()
    assert (none.verified_rows, none.drafted_tokens, none.accepted_by_position, none.tokens_per_verify) == (0, 0, (), 0)


@pytest.mark.parametrize("stop_at", range(4, 12))
def test_drafts_that_stood_past_a_stop_count_as_rejected(stop_at: int) -> None:
    engine = make_parts(num_drafts=3).engine
    parts_of(engine)[1].tell_tale.draft = lambda known, count: answer(list(known), count)
    expected = answer(OTHER, 20)[:stop_at]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[expected[-1]])
    length = 1 + expected.index(expected[-1])
    engine.add(EngineRequest(request_id="a", prompt=OTHER, params=params, seed=0, max_tokens=20))
    outputs = [given.output for _ in range(20) for given in engine.step()]
    assert [token for output in outputs for token in output.token_ids] == expected[:length]
    # The first token comes of the prompt; then windows of a token and three drafts, all of which are right.
    assert sum(output.num_accepted for output in outputs) == length - 1 - (length - 1) // 4
    assert sum(output.num_accepted + output.num_rejected for output in outputs) == engine.stats().drafted_tokens
