"""Aborts at any moment, resets, failed steps: nothing leaks, nothing wrong is found later, nobody else minds."""

import pytest
from oracles.core_rig import CoreRig

from gdn_jax.serving.core.placement import CacheMode
from gdn_jax.serving.core.plan import StepPlan
from gdn_jax.serving.core.request import FinishReason, RequestId, Status

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
OTHER = [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]
LONG = [number * 7 % 50 for number in range(40)]


def make_rig(**sizes) -> CoreRig:
    return CoreRig(**{"vocabulary": 50, "num_slots": 16, "num_blocks": 60, "budget": 64, "num_lanes": 4, **sizes})


def ids(plan: StepPlan | None) -> list[str]:
    assert plan is not None
    return [row.request_id for row in plan.rows]


def running(rig: CoreRig) -> list[str]:
    return [request.request_id for request in rig.scheduler.running()]


# Aborts.


def test_an_abort_of_a_waiting_request_takes_it_out_of_the_queue() -> None:
    rig = make_rig(num_lanes=1)
    rig.add("a", PROMPT, max_tokens=3)
    rig.add("b", OTHER, max_tokens=3)
    rig.step()
    assert rig.scheduler.abort(RequestId("b"))
    assert not rig.scheduler.abort(RequestId("b"))
    assert rig.scheduler.num_waiting == 0
    rig.finish()
    assert list(rig.ended) == ["a"]


def test_an_abort_between_steps_frees_everything_at_once() -> None:
    rig = make_rig(budget=8)
    rig.add("a", LONG[:30], max_tokens=3)
    rig.step()
    assert rig.scheduler.abort(RequestId("a"))
    rig.idle()
    assert rig.ended == {}


@pytest.mark.parametrize("steps", range(7))
def test_an_abort_while_the_step_runs_takes_effect_at_its_commit(steps: int) -> None:
    rig = make_rig(budget=8)
    rig.add("a", LONG[:18], max_tokens=9)
    rig.add("b", OTHER, max_tokens=9)
    for _ in range(steps):
        rig.step()
    plan = rig.step(abort="a")
    assert "a" in ids(plan)
    assert rig.ended[RequestId("a")].finish is FinishReason.ABORT
    assert running(rig) in (["b"], [])
    rig.finish()


def test_an_abort_during_the_step_that_would_finish_it_is_an_abort_and_leaves_no_closing_row() -> None:
    rig = make_rig()
    rig.add("a", PROMPT, max_tokens=7)
    rig.run_until(lambda: rig.scheduler.get(RequestId("a")).num_output == 6)
    rig.step(abort="a")
    assert rig.ended[RequestId("a")].finish is FinishReason.ABORT
    rig.idle()


def test_a_finished_request_that_is_closing_cannot_be_aborted_and_ends_once() -> None:
    rig = make_rig()
    rig.add("a", PROMPT, max_tokens=7)
    rig.run_until(lambda: RequestId("a") in rig.ended)
    assert rig.scheduler.get(RequestId("a")).status is Status.CLOSING
    assert not rig.scheduler.abort(RequestId("a"))
    rig.finish()
    assert rig.ended[RequestId("a")].finish is FinishReason.LENGTH


def test_an_abort_of_nobody_is_no_error() -> None:
    assert not make_rig().scheduler.abort(RequestId("nobody"))


@pytest.mark.parametrize("mode", [CacheMode.ALIGN, CacheMode.ALL])
def test_a_prompt_aborted_in_mid_prefill_and_sent_again_answers_as_if_cold(mode: CacheMode) -> None:
    for steps in range(1, 6):
        rig = make_rig(budget=8, mode=mode)
        rig.add("a", LONG[:38], max_tokens=4)
        for _ in range(steps - 1):
            rig.step()
        rig.step(abort="a")
        again = rig.serve("again", LONG[:38], max_tokens=4)
        assert again.num_cached == (8 * steps if mode is CacheMode.ALL and steps < 5 else 36 if steps == 5 else 0)


def test_requests_aborted_while_they_wait_for_a_hit_leak_nothing() -> None:
    rig = make_rig(num_lanes=1)
    rig.serve("first", PROMPT, max_tokens=1)
    idle = rig.scheduler.holdings.blocks.num_idle
    rig.add("busy", OTHER, max_tokens=9)
    for number in range(100):
        rig.add(f"w{number}", [*PROMPT, number % 50], max_tokens=2)
        if number % 3 == 0:
            rig.step()
        rig.scheduler.abort(RequestId(f"w{number}"))
    rig.run()
    rig.idle()
    assert rig.scheduler.holdings.blocks.num_idle == idle


def test_requests_that_end_in_their_first_step_leave_nothing_behind() -> None:
    rig = make_rig(num_lanes=3)
    rig.add("long", PROMPT, max_tokens=40)
    for number in range(60):
        rig.add(f"r{number}", [number % 50, 1, 2, 3, 4], max_tokens=1)
    rig.finish()


@pytest.mark.parametrize("mode", list(CacheMode))
def test_no_book_is_longer_than_its_pool_after_many_requests(mode: CacheMode) -> None:
    rig = make_rig(mode=mode, num_slots=6, num_blocks=12, interval=4)
    for number in range(400):
        rig.add(f"r{number}", [number % 50, number // 50, *PROMPT[: number % 9]], max_tokens=1 + number % 2)
        if number % 2:
            rig.run()
    scheduler, holdings = rig.scheduler, rig.scheduler.holdings
    assert (holdings.checkpoints.num_evicted > 0) == (mode is not CacheMode.NONE)
    longest = {scheduler: 0, scheduler._queues: 0, holdings: 4, holdings.blocks: 12, holdings.checkpoints: 6}
    for owner, most in longest.items():
        books = {name: len(book) for name, book in vars(owner).items() if hasattr(book, "__len__")}
        assert max(books.values(), default=0) <= most, books


# Reset.


def test_a_reset_ends_every_hit_for_the_requests_that_come_after() -> None:
    rig = make_rig()
    rig.serve("a", PROMPT, max_tokens=5)
    rig.scheduler.reset_prefix_cache()
    assert rig.scheduler.holdings.checkpoints.num_published == 0
    assert rig.scheduler.holdings.blocks.names() == {}
    assert rig.serve("b", PROMPT, max_tokens=5).num_cached == 0
    assert rig.serve("c", PROMPT, max_tokens=5).num_cached == 8


def test_what_runs_during_a_reset_answers_right_and_publishes_nothing() -> None:
    rig = make_rig()
    rig.serve("first", PROMPT, max_tokens=1)
    rig.add("a", [*PROMPT, *LONG[:20]], max_tokens=9)
    rig.add("b", OTHER, max_tokens=9)
    plan = rig.step(reset=True)
    assert plan.rows[0].read_anchor != 0  # it was reading a checkpoint that the reset ended
    assert rig.scheduler.holdings.checkpoints.num_owned == 2
    rig.run_until(lambda: len(rig.ended) == 3)
    rig.finish()
    assert rig.scheduler.holdings.checkpoints.num_published == 0
    assert rig.serve("again", OTHER, max_tokens=9).num_cached == 0


def test_a_request_preempted_after_a_reset_publishes_what_it_computes_anew() -> None:
    rig = make_rig()
    rig.add("a", PROMPT, max_tokens=20)
    for _ in range(4):
        rig.step()
    rig.scheduler.reset_prefix_cache()
    rig.step()
    rig.scheduler._preempt(rig.scheduler.running()[0])
    rig.finish()
    assert rig.serve("again", PROMPT, max_tokens=1).num_cached == 8


def test_a_waiting_request_looks_up_again_after_a_reset() -> None:
    rig = make_rig(num_lanes=1)
    rig.serve("first", PROMPT, max_tokens=1)
    rig.add("busy", OTHER, max_tokens=3)
    request = rig.add("waits", PROMPT, max_tokens=2)
    rig.step()
    rig.scheduler.reset_prefix_cache()
    rig.finish()
    assert request.num_cached == 0


# Failed steps.


def test_a_failed_step_ends_its_rows_and_requeues_the_others_with_their_tokens() -> None:
    rig = make_rig(budget=4, num_lanes=2)
    rig.add("a", LONG[:12], max_tokens=4)
    rig.add("out", PROMPT, max_tokens=4, priority=1)
    rig.add("waits", OTHER, max_tokens=4, priority=2)
    rig.run_until(lambda: rig.scheduler.get(RequestId("a")).num_output == 1)
    rig.run_until(lambda: rig.scheduler.get(RequestId("out")).folded == 4)
    rig.add("urgent", LONG[20:32], max_tokens=4, priority=-1)
    rig.scheduler.abort(RequestId("a"))
    rig.step()  # urgent takes the budget; out is running without a row
    ended = rig.fail_step()
    assert [request.request_id for request in ended] == ["urgent"]
    assert rig.ended[RequestId("urgent")].finish is FinishReason.ERROR
    assert rig.scheduler.num_running == 0
    assert rig.scheduler.num_waiting == 2
    assert rig.scheduler.holdings.blocks.names() == {}
    rig.finish()
    assert {"out", "waits"} <= set(rig.ended)


def test_an_interrupted_step_ends_nobody_and_its_rows_wait_again() -> None:
    rig = make_rig()
    rig.add("a", PROMPT, max_tokens=4)
    rig.add("b", OTHER, max_tokens=4)
    rig.step()
    assert rig.fail_step(ends_rows=False) == []
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (0, 2)
    assert rig.scheduler.holdings.blocks.names() == {}
    rig.finish()
    assert [len(output) for output in rig.outputs.values()] == [4, 4]


def test_tokens_survive_a_failed_step_of_others() -> None:
    rig = make_rig(budget=4, num_lanes=2)
    rig.add("a", LONG[:12], max_tokens=9)
    rig.run_until(lambda: rig.scheduler.get(RequestId("a")).num_output == 4)
    rig.scheduler._preempt(rig.scheduler.running()[0])
    rig.add("bad", OTHER, max_tokens=4, priority=-1)
    assert [request.request_id for request in rig.fail_step()] == ["bad"]
    rig.finish()
    assert len(rig.outputs[RequestId("a")]) == 9


def test_a_failed_closing_row_loses_only_a_checkpoint() -> None:
    rig = make_rig()
    rig.add("a", PROMPT, max_tokens=7)
    rig.run_until(lambda: RequestId("a") in rig.ended)
    assert rig.fail_step() == []
    assert rig.ended[RequestId("a")].finish is FinishReason.LENGTH
    rig.idle()


def test_a_request_aborted_in_the_step_that_failed_ends_as_aborted() -> None:
    rig = make_rig()
    rig.add("a", PROMPT)
    plan = rig.scheduler.plan()
    rig.scheduler.abort(RequestId("a"))
    (ended,) = rig.scheduler.fail(plan)
    assert ended.finish is FinishReason.ABORT
    rig.idle()


# Numbers that go wrong.


def test_a_prompt_whose_numbers_go_wrong_ends_alone_and_leaves_nothing_to_find() -> None:
    rig = make_rig(interval=4)
    rig.add("bad", PROMPT, max_tokens=4)
    rig.add("good", OTHER, max_tokens=4)
    plan = rig.step(broken="bad")
    assert len(plan.rows[0].exports) == 2
    assert (rig.ended["bad"].finish, rig.ended["bad"].num_output) == (FinishReason.ERROR, 0)
    assert running(rig) == ["good"]
    assert rig.scheduler.holdings.checkpoints.num_published == len(rig.scheduler.holdings.blocks.names()) == 2
    assert rig.scheduler.holdings.checkpoints.num_owned == 1
    rig.finish()
    assert rig.serve("again", PROMPT, max_tokens=1).num_cached == 0
    assert rig.serve("other", OTHER, max_tokens=1).num_cached == 8


def test_a_span_that_emits_nothing_ends_its_request_too_when_its_numbers_go_wrong() -> None:
    rig = make_rig(interval=4, budget=8)
    rig.add("bad", LONG[:20], max_tokens=4)
    rig.step()
    plan = rig.step(broken="bad")
    assert not plan.rows[0].emits
    assert rig.ended["bad"].finish is FinishReason.ERROR
    rig.idle()
    assert rig.serve("again", LONG[:20], max_tokens=4).num_cached == 8  # what an earlier step had computed


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_an_answer_whose_numbers_go_wrong_keeps_what_it_had_and_saves_nothing_more(
    num_drafts: int,
) -> None:
    for steps in range(1, 9):
        rig = make_rig(num_drafts=num_drafts)
        request = rig.add("bad", PROMPT, max_tokens=30)
        for _ in range(steps):
            rig.step()
        known, saves = list(request.tokens), rig.scheduler.counts.saves
        blocks = rig.scheduler.holdings.blocks.names()
        rig.step(broken="bad")
        assert (request.finish, request.tokens) == (FinishReason.ERROR, known)
        assert (rig.scheduler.counts.saves, rig.scheduler.holdings.blocks.names()) == (saves, blocks)
        rig.idle()  # at once: there is no closing row
        rig.serve("again", known, max_tokens=3)


def test_numbers_that_go_wrong_in_an_aborted_row_are_not_published_either() -> None:
    rig = make_rig(interval=4)
    rig.add("bad", PROMPT, max_tokens=4)
    rig.step(abort="bad", broken="bad")
    assert rig.ended["bad"].finish is FinishReason.ABORT
    rig.idle()
    assert rig.scheduler.holdings.blocks.names() == {}
    assert rig.scheduler.holdings.checkpoints.num_published == 0
