"""The step after the one in flight: when it can be planned, what its rows are, and what becomes of rows run in vain."""

import pytest
from oracles.core_rig import STOP_TOKEN, CoreRig

from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.serving.core.plan import NEWEST, Phase
from gdn_jax.serving.core.request import FinishReason, RequestId, Status

PROMPT = [3, 1, 4, 1, 5, 9]


def make_rig(**sizes) -> CoreRig:
    return CoreRig(**{"vocabulary": 50, "num_slots": 16, "num_blocks": 60, "plans_ahead": True, **sizes})


def decoding(rig: CoreRig, *prompts: list[int], max_tokens: int = 20, **options) -> None:
    """Bring requests a, b, ... to where all of them decode, with nothing in flight."""
    for name, prompt in zip("abcdef", prompts, strict=False):
        rig.add(name, prompt, max_tokens=max_tokens, **options)
    rig.plans_ahead = False
    rig.step()
    rig.run_until(lambda: all(request.has_pending for request in rig.scheduler.running()))
    rig.plans_ahead = True


def test_rows_that_decode_go_on_where_the_one_in_flight_ends_with_the_token_that_it_emits() -> None:
    rig = make_rig(interval=4)
    decoding(rig, PROMPT, [7, *PROMPT])
    rig.run_until(lambda: rig.scheduler.get(RequestId("a")).computed == 7)
    now, ahead = rig.scheduler.plan(), rig.scheduler.plan_ahead()
    assert ahead.index == now.index + 1
    for row, then in zip(now.rows, ahead.rows, strict=True):
        assert (then.request_id, then.lane, then.phase) == (row.request_id, row.lane, Phase.DECODE)
        assert (then.tokens, then.start, then.num_replay, then.emits) == ((NEWEST,), row.end, 1, True)
        assert (then.read_anchor, then.write_anchor) == (row.write_anchor, row.write_anchor)
        assert [export.boundary for export in then.exports] == ([then.start] if then.start % 4 == 0 else [])


def test_answers_and_saves_are_those_of_an_engine_that_never_plans_ahead() -> None:
    found = []
    for plans_ahead in (False, True):
        rig = make_rig(plans_ahead=plans_ahead, interval=4)
        for name, length in zip("abc", (3, 9, 17), strict=True):
            rig.add(name, (PROMPT * 3)[:length], max_tokens=11)
        rig.finish()
        found.append((rig.outputs, set(rig.scheduler.holdings.checkpoints.names()), rig.scheduler.counts.saves))
        assert any(row.tokens == (NEWEST,) for plan in rig.plans for row in plan.rows) is plans_ahead
    assert found[0] == found[1]


def test_a_state_that_the_step_in_flight_saves_is_not_saved_again_by_a_twin_that_is_one_step_behind() -> None:
    exports = []
    for plans_ahead in (False, True):
        rig = make_rig(plans_ahead=plans_ahead, budget=4, interval=64)
        rig.add("a", PROMPT[:4], max_tokens=30)
        rig.add("b", PROMPT[:4], max_tokens=30)  # starts a step later, and ends each block one step after the other
        rig.finish()
        exports.append([row.exports[0].boundary for plan in rig.plans for row in plan.rows if row.exports])
    assert exports[0] == exports[1] == list(range(4, 36, 4))


def test_a_request_has_no_row_after_the_one_that_emits_its_last_token() -> None:
    rig = make_rig()
    decoding(rig, PROMPT, max_tokens=2)
    assert rig.scheduler.plan() is not None
    assert rig.scheduler.plan_ahead() is None


def test_a_request_that_ends_early_keeps_what_it_holds_until_its_row_in_vain_has_run_and_leaves_its_turn_end() -> None:
    rig = make_rig(vocabulary=2, interval=8)
    rig.add("a", [0, 1, 0, 0, 1], max_tokens=40, stops=True)
    while RequestId("a") not in rig.ended:
        rig.step()
    (request,) = rig.scheduler.running()
    assert request.finish is FinishReason.STOP
    assert request.tokens[-1] == STOP_TOKEN
    in_vain = rig.launched is not None
    assert in_vain
    assert request.status is Status.CLOSING
    rig.finish()
    assert rig.serve("b", rig.text("a")).num_cached == (len(rig.text("a")) - 1) // 4 * 4


@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_next_turn_hits_up_to_the_token_that_stopped_the_last_or_includes_it_where_it_ran_in_vain(
    seed: int, *, plans_ahead: bool
) -> None:
    rig = make_rig(vocabulary=2, plans_ahead=plans_ahead)
    rig.add("a", [int(bit) for bit in f"{seed + 16:b}"], max_tokens=40, stops=True)
    rig.finish()
    text = rig.text("a")
    in_vain = any(NEWEST in row.tokens and row.start == len(text) - 1 for plan in rig.plans for row in plan.rows)
    assert rig.serve("b", [*text, 0]).num_cached == (len(text) - 1 + in_vain) // 4 * 4


def test_an_abort_with_two_rows_in_flight_frees_everything_at_the_second_commit() -> None:
    rig = make_rig()
    decoding(rig, PROMPT, [7, *PROMPT])
    rig.step(abort="a")
    assert [request.request_id for request in rig.scheduler.running()] == ["a", "b"]
    rig.step()
    assert [request.request_id for request in rig.scheduler.running()] == ["b"]
    rig.finish()
    assert rig.scheduler.abort(RequestId("a")) is False


def test_a_closing_row_goes_with_those_planned_ahead() -> None:
    rig = make_rig()
    rig.add("a", [7, *PROMPT], max_tokens=20)
    rig.add("b", [*PROMPT, 2], max_tokens=2)  # when it ends, 8 tokens have run and its state holds 7
    rig.finish()
    (plan,) = [plan for plan in rig.plans if any(not row.tokens for row in plan.rows)]
    assert [(row.request_id, row.tokens) for row in plan.rows] == [("a", (NEWEST,)), ("b", ())]


def test_nothing_is_planned_ahead_of_a_prompt_or_for_an_engine_that_drafts() -> None:
    rig = make_rig(budget=4)
    rig.add("a", PROMPT)
    assert rig.scheduler.plan().rows[0].phase is Phase.PREFILL
    assert rig.scheduler.plan_ahead() is None
    rig = make_rig(num_drafts=2)
    decoding(rig, PROMPT)
    assert rig.scheduler.plan() is not None
    assert rig.scheduler.plan_ahead() is None


def test_one_who_may_be_admitted_is_not_passed_over_and_one_who_may_not_holds_nobody_up() -> None:
    rig = make_rig(num_lanes=2)
    decoding(rig, PROMPT)
    plan = rig.scheduler.plan()
    rig.add("late", [5, *PROMPT])
    assert rig.scheduler.plan_ahead() is None  # the next plan() admits it
    rig.scheduler.fail(plan, ends_rows=False)
    rig.make_runner()
    rig.add("third", [6, *PROMPT], max_tokens=20)
    rig.scheduler.get(RequestId("late")).max_tokens = 20
    decoding(rig)
    assert rig.scheduler.num_waiting == 1  # no lane is left
    assert rig.scheduler.plan() is not None
    assert rig.scheduler.plan_ahead() is not None


def test_a_block_that_only_a_preemption_would_bring_is_not_taken_ahead() -> None:
    rig = make_rig(num_blocks=6, num_lanes=2)
    decoding(rig, [1, 2, 3, 4], [4, 5, 6, 7], max_tokens=12)
    rig.run_until(
        lambda: rig.scheduler.holdings.blocks.num_idle == 1 and rig.scheduler.get(RequestId("a")).computed == 6
    )
    rig.plans_ahead = False
    rig.step()
    assert rig.scheduler.plan() is not None  # both decode their 7th token; each needs a third block for the 8th
    books = rig.books()
    assert rig.scheduler.plan_ahead() is None
    assert rig.books() == books


def test_a_step_that_fails_takes_the_one_ahead_of_it_along() -> None:
    rig = make_rig()
    decoding(rig, PROMPT, [7, *PROMPT])
    rig.step()
    assert rig.launched is not None
    ended = rig.fail_step(ends_rows=False)
    assert ended == []
    assert rig.scheduler.num_waiting == 2
    rig.finish()


def test_only_one_step_is_planned_ahead_and_commits_go_in_order() -> None:
    rig = make_rig()
    with pytest.raises(InvariantError, match="0 plans in flight"):
        rig.scheduler.plan_ahead()
    decoding(rig, PROMPT)
    now, ahead = rig.scheduler.plan(), rig.scheduler.plan_ahead()
    with pytest.raises(InvariantError, match="2 plans in flight"):
        rig.scheduler.plan_ahead()
    with pytest.raises(InvariantError, match="before the previous plan"):
        rig.scheduler.plan()
    with pytest.raises(InvariantError, match="comes next"):
        rig.scheduler.commit(ahead, rig.runner.run(now), [])
