"""A plan in the making: what each kind of row takes, and that saves get their slots last."""

from oracles.core_rig import CoreRig

from gdn_jax.serving.core.open_plan import OpenPlan
from gdn_jax.serving.core.plan import Phase
from gdn_jax.serving.core.request import Request, Status

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def admitted(rig: CoreRig, name: str, prompt: list[int], **options) -> Request:
    request = rig.add(name, prompt, **options)
    assert rig.scheduler.holdings.try_admit(request, rig.scheduler.counts)
    return request


def open_plan(rig: CoreRig, budget: int) -> OpenPlan:
    def take(request: Request, missing: int) -> bool:
        taken = rig.scheduler.holdings.blocks.try_take(missing)
        request.blocks += taken or []
        return taken is not None

    return OpenPlan(rig.scheduler.holdings, budget, take)


def make_rig(**sizes) -> CoreRig:
    return CoreRig(**{"vocabulary": 50, "num_slots": 16, "num_blocks": 60, **sizes})


def test_a_plan_without_rows_is_none() -> None:
    rig = make_rig()
    assert open_plan(rig, 8).close(0, rig.scheduler.counts) is None


def test_spans_use_the_budget_up_and_a_further_one_gets_no_row() -> None:
    rig = make_rig()
    plan = open_plan(rig, 11)
    first, second, third = (admitted(rig, name, [ord(name) % 50, *PROMPT]) for name in "abc")
    plan.add(first)
    assert (plan.budget, plan.admits) == (0, False)
    plan.add(second)
    made = plan.close(7, rig.scheduler.counts)
    assert (made.index, [row.request_id for row in made.rows]) == (7, ["a"])
    assert third.folded == 0


def test_a_pending_token_and_a_closing_row_take_no_budget() -> None:
    rig = make_rig()
    pending, closing = admitted(rig, "a", PROMPT), admitted(rig, "b", [7, *PROMPT])
    for request in (pending, closing):
        request.folded, request.num_replay, request.has_pending = len(request.tokens) - 1, 1, True
        request.tokens.append(5)
    closing.status, closing.close_at = Status.CLOSING, 11
    plan = open_plan(rig, 4)
    plan.add(pending)
    plan.add(closing)
    rows = plan.close(0, rig.scheduler.counts).rows
    assert plan.budget == 4
    assert [(row.phase, row.start, row.tokens, row.emits) for row in rows] == [
        (Phase.DECODE, 10, (5,), True),
        (Phase.DECODE, 11, (), False),
    ]


def test_a_pending_token_without_a_block_to_run_in_gets_no_row() -> None:
    rig = make_rig(num_blocks=4)
    request = admitted(rig, "a", PROMPT, max_tokens=2)
    request.tokens += [5, 5]
    request.max_tokens = 9
    request.folded, request.num_replay, request.has_pending = 11, 0, True
    plan = open_plan(rig, 4)
    plan.add(request)
    assert plan.close(0, rig.scheduler.counts) is None


def test_saves_get_their_slots_when_every_row_has_its_own() -> None:
    rig = make_rig(num_slots=4, interval=4)
    plan = open_plan(rig, 40)
    for name in "ab":
        plan.add(admitted(rig, name, [ord(name) % 50, *PROMPT]))
    rows = plan.close(0, rig.scheduler.counts).rows
    assert [[export.boundary for export in row.exports] for row in rows] == [[8], []]
    assert rig.scheduler.counts.saves_skipped == 3
