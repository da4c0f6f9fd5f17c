"""Who runs when: admission, order, budget, preemption; and how requests end, are dropped, or are refused."""

import pytest
from oracles.core_rig import CoreRig

from gdn_jax.serving.core.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    InvalidPromptError,
    InvariantError,
    PromptTooLongError,
)
from gdn_jax.serving.core.limits import Limits
from gdn_jax.serving.core.placement import CacheMode, Placement
from gdn_jax.serving.core.plan import Phase, RowCut, RowResult, StepPlan, StepResult
from gdn_jax.serving.core.request import RequestId, Status
from gdn_jax.serving.core.scheduler import Scheduler

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


# Refusals.


def limits(**sizes) -> Limits:
    return Limits(**{"num_blocks": 9, "num_slots": 4, "num_lanes": 2, "budget": 64, "max_model_len": 500, **sizes})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"budget": 63}, r"max_num_batched_tokens must be at least one block \(64\); got 63"),
        ({"num_drafts": 64}, r"1 \+ num_drafts must be at most one block \(64\); got 65"),
        ({"num_lanes": 0}, "max_num_seqs must be at least 1; got 0"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"num_slots": 1}, "num_slots must be at least 2"),
    ],
)
def test_sizes_that_could_serve_nobody_are_refused_at_start_up(sizes: dict, message: str) -> None:
    placement = Placement(mode=CacheMode.ALL, block_size=64, state_interval=512)
    with pytest.raises(ValueError, match=message):
        Scheduler(limits(**sizes), placement)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (60, 5, r"max_model_len \(64\); got 60 \+ 5"),
        (40, 5, r"40 \+ 5.*needs 12 blocks of 4 tokens, and there are 11"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_the_numbers(num_prompt, max_tokens, message) -> None:
    rig = make_rig(num_blocks=12)
    before = rig.books()
    with pytest.raises(PromptTooLongError, match=message):
        rig.add("r", [1] * num_prompt, max_tokens=max_tokens)
    assert rig.books() == before
    rig.add("r", [1] * 40, max_tokens=4)  # one token less fits, and so does the id
    rig.finish()


def test_a_request_that_just_fits_every_limit_runs_alone_and_with_drafts() -> None:
    for num_drafts in range(4):
        rig = make_rig(num_blocks=17, num_slots=2, num_lanes=1, budget=4, max_model_len=64, num_drafts=num_drafts)
        rig.add("r", LONG[:34], max_tokens=30)
        rig.finish()
        assert len(rig.outputs[RequestId("r")]) == 30


def test_an_empty_prompt_and_a_request_for_no_tokens_are_refused() -> None:
    rig = make_rig()
    with pytest.raises(InvalidPromptError, match="at least one token"):
        rig.add("r", [])
    with pytest.raises(InvalidParameterError, match="max_tokens must be at least 1; got 0"):
        rig.add("r", PROMPT, max_tokens=0)
    assert not rig.scheduler.has_work


def test_an_id_in_use_is_refused_and_can_be_used_again_afterwards() -> None:
    rig = make_rig()
    rig.add("r", PROMPT)
    for _ in range(2):
        with pytest.raises(DuplicateRequestError, match="'r' is in use"):
            rig.add("r", OTHER)
        rig.step()
    rig.scheduler.abort(RequestId("r"))
    rig.add("r", OTHER, max_tokens=3)
    rig.finish()
    assert rig.text("r")[:10] == OTHER


def test_a_plan_must_be_committed_before_the_next() -> None:
    rig = make_rig()
    rig.add("r", PROMPT)
    plan = rig.scheduler.plan()
    assert plan is not None
    with pytest.raises(InvariantError, match="before the previous plan was committed"):
        rig.scheduler.plan()
    result = StepResult(rows=(RowResult(tokens=(1,), saved=()),))
    with pytest.raises(InvariantError, match="not the one in flight"):
        rig.scheduler.commit(StepPlan(index=0, rows=plan.rows), result, [RowCut(num_kept=1)])
    rig.scheduler.commit(plan, result, [RowCut(num_kept=1)])
    with pytest.raises(InvariantError, match="not the one in flight"):
        rig.scheduler.fail(plan)


def test_without_requests_there_is_no_plan() -> None:
    rig = make_rig()
    assert rig.scheduler.plan() is None
    assert rig.step() is None
    assert (rig.scheduler.has_work, rig.scheduler.num_waiting, rig.scheduler.num_running) == (False, 0, 0)


# The budget and the grid.


def spans(rig: CoreRig) -> list[tuple[int, int]]:
    return [(row.start, row.end) for plan in rig.plans for row in plan.rows if row.phase is Phase.PREFILL]


@pytest.mark.parametrize(
    ("budget", "num_prompt", "expected"),
    [
        (32_010, 40_000, [(0, 32_000), (32_000, 40_000)]),  # cut back to the grid
        (32_000, 40_000, [(0, 32_000), (32_000, 40_000)]),  # on it already
        (100, 300, [(0, 64), (64, 128), (128, 192), (192, 256), (256, 300)]),  # starts stay on it
        (100, 164, [(0, 64), (64, 164)]),  # a span that ends the prompt need not end on it
        (64, 64, [(0, 64)]),
        (127, 127, [(0, 127)]),
    ],
)
def test_spans_start_on_the_grid_and_end_on_it_unless_they_end_the_prompt(budget, num_prompt, expected) -> None:
    rig = CoreRig(
        block_size=64, interval=512, budget=budget, num_blocks=700, max_model_len=50_000, vocabulary=7, num_slots=4
    )
    rig.add("r", [number % 7 for number in range(num_prompt)], max_tokens=1)
    while rig.scheduler.has_work:  # the plans only: a tell-tale state of 40,000 tokens would be slow to hash
        plan = rig.scheduler.plan()
        assert plan is not None
        rig.plans.append(plan)
        (row,) = plan.rows
        saved = tuple(export.boundary for export in row.exports)
        result = StepResult(rows=(RowResult(tokens=(1,) if row.emits else (), saved=saved),))
        rig.scheduler.commit(plan, result, [rig._cut(row.request_id, result.rows[0])])
    assert spans(rig) == expected


def test_what_is_left_of_the_budget_goes_to_the_next_request_if_it_is_a_block() -> None:
    rig = make_rig(budget=11)
    rig.add("a", LONG[:6], max_tokens=1)
    rig.add("b", LONG[10:30], max_tokens=1)
    rig.add("c", LONG[30:33], max_tokens=1)
    assert ids(rig.step()) == ["a", "b"]
    assert spans(rig) == [(0, 6), (0, 4)]  # five tokens were left, and a block is four
    rig.finish()


def test_a_short_request_behind_long_ones_runs_in_what_their_spans_leave_of_a_step() -> None:
    rig = make_rig(budget=12)
    rig.add("a", LONG[:25], max_tokens=2)
    rig.add("b", LONG[5:30], max_tokens=2)
    rig.add("c", LONG[9:12], max_tokens=2)
    rig.finish()
    prefills = [
        [(row.request_id, row.start, row.end) for row in plan.rows if row.phase is Phase.PREFILL] for plan in rig.plans
    ]
    assert [prefill for prefill in prefills if prefill] == [
        [("a", 0, 12)],
        [("a", 12, 24)],
        [
            ("a", 24, 25),
            ("b", 0, 8),
            ("c", 0, 3),
        ],  # b's span ends on the grid, and c takes the rest
        [("b", 8, 20)],
        [("b", 20, 25)],
    ]


def test_two_long_prompts_at_once_both_get_on_with_a_budget_just_below_two_blocks() -> None:
    rig = make_rig(budget=7)
    rig.add("a", LONG, max_tokens=3)
    rig.add("b", [*OTHER, *LONG[:30]], max_tokens=3)
    rig.finish()


def test_decode_rows_do_not_use_the_budget() -> None:
    rig = make_rig(budget=4)
    for number in range(3):
        rig.add(f"r{number}", [number, 1, 2], max_tokens=20)
    rig.run_until(lambda: all(r.num_output for r in rig.scheduler.running()) and rig.scheduler.num_running == 3)
    rig.add("new", OTHER, max_tokens=1)
    plan = rig.step()
    assert ids(plan) == ["r0", "r1", "r2", "new"]
    assert [row.phase for row in plan.rows] == [Phase.DECODE] * 3 + [Phase.PREFILL]
    rig.finish()


def test_a_request_left_out_of_a_step_keeps_what_it_has() -> None:
    rig = make_rig(budget=6)
    rig.add("first", LONG[:30], max_tokens=1, priority=1)
    rig.step()
    held = (rig.scheduler.running()[0].slot, list(rig.scheduler.running()[0].blocks))
    rig.add("urgent", OTHER[:6], max_tokens=2)
    assert ids(rig.step()) == ["urgent"]
    first = rig.scheduler.get(RequestId("first"))
    assert (first.slot, first.blocks, first.folded) == (*held, 4)
    rig.finish()


def test_a_plan_carries_only_the_blocks_that_are_new() -> None:
    rig = make_rig(budget=8)
    rig.add("r", LONG[:14], max_tokens=6)
    rig.finish()
    rows = [plan.rows[0] for plan in rig.plans]
    assert [(row.table_start, len(row.new_blocks)) for row in rows] == [
        (0, 4),  # the prompt's and one position beyond
        (4, 0),
        (4, 0),
        (4, 1),
        (5, 0),
        (5, 0),
        (5, 0),
    ]


# Order.


def test_requests_are_admitted_in_order_of_arrival_and_not_overtaken() -> None:
    rig = make_rig(num_blocks=9)
    rig.add("a", LONG[:14], max_tokens=4)
    rig.add("big", OTHER * 2, max_tokens=2)
    rig.add("small", [1, 2], max_tokens=1)
    assert ids(rig.step()) == ["a"]
    assert rig.scheduler.num_waiting == 2
    rig.finish()
    order = [row.request_id for plan in rig.plans for row in plan.rows]
    assert order.index("big") < order.index("small")


def test_a_lower_number_goes_first_and_arrival_decides_among_equals() -> None:
    rig = make_rig(num_lanes=1)
    for name, priority in (("late", 5), ("a", 0), ("b", 0), ("urgent", -1)):
        rig.add(name, PROMPT, max_tokens=1, priority=priority)
    rig.finish()
    assert list(rig.ended) == ["urgent", "a", "b", "late"]


def test_rows_stand_in_order_whenever_their_requests_came() -> None:
    rig = make_rig()
    rig.add("b", PROMPT, max_tokens=9, priority=1)
    rig.step()
    rig.add("a", OTHER, max_tokens=9)
    assert ids(rig.step()) == ["a", "b"]
    rig.add("c", LONG[:5], max_tokens=9, priority=2)
    assert ids(rig.step()) == ["a", "b", "c"]
    rig.finish()


# Siblings.


def test_siblings_wait_for_their_leaders_prompt_checkpoint_and_hit_it() -> None:
    rig = make_rig()
    rig.add("a", PROMPT, max_tokens=3)
    rig.add("b", PROMPT, max_tokens=3, leader=RequestId("a"))
    rig.add("behind", [1, 2, 3], max_tokens=2)
    assert ids(rig.step()) == ["a", "behind"]
    assert ids(rig.step()) == ["a", "b", "behind"]
    rig.finish()
    assert rig.ended[RequestId("b")].num_cached == 8


def test_a_sibling_waits_no_longer_than_for_that_checkpoint() -> None:
    rig = make_rig(budget=8)
    rig.add("a", LONG[:20], max_tokens=3)
    rig.add("b", LONG[:20], max_tokens=3, leader=RequestId("a"))
    assert [ids(rig.step()) for _ in range(3)] == [["a"], ["a"], ["a", "b"]]
    assert rig.scheduler.get(RequestId("b")).num_cached == 16
    rig.finish()


def test_a_sibling_stops_waiting_when_its_leader_is_gone() -> None:
    rig = make_rig(budget=4)
    rig.add("a", LONG[:22], max_tokens=3)
    rig.add("b", LONG[:22], max_tokens=3, leader=RequestId("a"))
    rig.step(abort="a")
    assert ids(rig.step()) == ["b"]
    rig.finish()


@pytest.mark.parametrize(
    ("prompt", "sizes", "options"),
    [
        (LONG[:22], {"mode": CacheMode.NONE}, {}),
        (LONG[:22], {}, {"use_cache": False}),
        (LONG[:4], {}, {}),
    ],
)
def test_a_sibling_does_not_wait_for_a_checkpoint_that_it_could_not_use(prompt, sizes, options) -> None:
    rig = make_rig(**sizes)
    rig.add("a", prompt, max_tokens=3)
    rig.add("b", prompt, max_tokens=3, leader=RequestId("a"), **options)
    assert ids(rig.step()) == ["a", "b"]
    rig.finish()


def test_siblings_of_a_prompt_that_is_not_looked_up_start_from_the_checkpoint_it_leaves() -> None:
    rig = make_rig()
    rig.serve("before", LONG[:22], max_tokens=1)  # every block is there already
    rig.add("a", LONG[:22], max_tokens=3, use_cache=False)
    rig.add("b", LONG[:22], max_tokens=3, leader=RequestId("a"))
    rig.finish()
    assert [rig.ended[name].num_cached for name in ("a", "b")] == [0, 20]


def test_nobody_waits_for_itself_or_in_a_circle() -> None:
    rig = make_rig(num_lanes=1)
    rig.add("self", PROMPT, max_tokens=2, leader=RequestId("self"))
    rig.add("a", PROMPT, max_tokens=2, leader=RequestId("b"))
    rig.add("b", PROMPT, max_tokens=2, leader=RequestId("a"))
    rig.add("orphan", PROMPT, max_tokens=2, leader=RequestId("nobody"))
    rig.finish()
    assert list(rig.ended) == ["self", "a", "b", "orphan"]


def test_a_sibling_of_an_urgent_prompt_does_not_wait_for_one_that_goes_later() -> None:
    rig = make_rig()
    rig.add("slow", PROMPT, max_tokens=2, priority=1)
    rig.add("fast", PROMPT, max_tokens=2, leader=RequestId("slow"))
    assert ids(rig.step()) == ["fast", "slow"]
    rig.finish()


# Twins in one step.


@pytest.mark.parametrize("mode", list(CacheMode))
@pytest.mark.parametrize("num_twins", [2, 4])
def test_requests_of_one_step_that_share_a_prefix_all_answer_right(mode: CacheMode, num_twins: int) -> None:
    rig = make_rig(mode=mode, interval=4)
    for number in range(num_twins):
        rig.add(f"r{number}", [*LONG[:12], number, 7], max_tokens=6)
    plan = rig.step()
    assert len(ids(plan)) == num_twins
    assert {row.read_anchor for row in plan.rows} == {0}  # nobody reads what this step writes
    assert [request.num_cached for request in rig.scheduler.running()] == [0] * num_twins
    rig.finish()
    late = rig.serve("late", [*LONG[:12], 9, 9], max_tokens=2)
    assert late.num_cached == {CacheMode.NONE: 0, CacheMode.ALIGN: 12, CacheMode.ALL: 12}[mode]


# Preemption.


def crowd(num_blocks: int, **sizes) -> CoreRig:
    """Start three requests that will want more blocks than there are."""
    rig = make_rig(num_blocks=num_blocks, **sizes)
    for name in ("a", "b", "c"):
        rig.add(name, [ord(name) % 50, *PROMPT[:6]], max_tokens=14)
    rig.step()
    assert running(rig) == ["a", "b", "c"]
    return rig


def test_the_youngest_gives_way_and_returns_with_its_tokens() -> None:
    rig = crowd(num_blocks=10)
    rig.run_until(lambda: rig.scheduler.counts.preemptions == 1)
    assert running(rig) == ["a", "b"]
    victim = rig.scheduler.get(RequestId("c"))
    assert victim.status is Status.WAITING
    assert (victim.blocks, victim.slot, victim.lane, victim.folded, victim.num_replay) == ([], 0, -1, 0, 0)
    assert victim.num_output > 1
    kept = list(victim.tokens)
    rig.finish()
    assert rig.text("c")[: len(kept)] == kept
    assert next(iter(rig.ended)) == "a"


def test_a_preempted_request_returns_to_the_state_it_left() -> None:
    rig = crowd(num_blocks=10)
    rig.run_until(lambda: rig.scheduler.counts.preemptions == 1)
    victim = rig.scheduler.get(RequestId("c"))
    hits = rig.scheduler.counts.hit_tokens
    rig.run_until(lambda: victim.status is Status.RUNNING)
    assert rig.scheduler.counts.hit_tokens - hits >= 4
    assert victim.num_cached == 0  # of its first admission
    rig.finish()


def test_the_lowest_priority_gives_way_whoever_came_first() -> None:
    rig = make_rig(num_blocks=10)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        rig.add(name, [ord(name) % 50, *PROMPT[:6]], max_tokens=14, priority=priority)
    rig.run_until(lambda: rig.scheduler.counts.preemptions == 1)
    assert running(rig) == ["b", "c"]
    rig.finish()


def test_nobody_younger_is_admitted_to_the_blocks_that_a_victim_gave_back() -> None:
    rig = crowd(num_blocks=10)
    rig.add("young", [1], max_tokens=1)
    while rig.scheduler.counts.preemptions == 0:
        plan = rig.step()
        assert "young" not in ids(plan)
    assert rig.scheduler.holdings.blocks.num_idle > 0
    rig.finish()


def test_the_oldest_request_advances_in_every_step() -> None:
    rig = crowd(num_blocks=8)
    for _ in range(12):
        before = rig.scheduler.running()[0]
        assert ids(rig.step())[0] == before.request_id == "a"
    rig.finish()


def test_a_closing_row_gives_way_before_anybody_loses_work() -> None:
    rig = make_rig(num_blocks=9, mode=CacheMode.ALIGN)
    rig.add("a", LONG[:11], max_tokens=9)
    rig.add("b", OTHER[:8], max_tokens=5)  # ends with 12 tokens computed and 11 folded
    rig.run_until(lambda: rig.scheduler.get(RequestId("b")).status is Status.CLOSING)
    assert list(rig.ended) == ["b"]
    assert rig.scheduler.holdings.blocks.num_idle == 0
    assert rig.scheduler.running()[0].num_known == 16  # the next row needs a block
    assert ids(rig.step()) == ["a"]
    assert running(rig) == ["a"]
    assert rig.scheduler.counts.preemptions == 0
    rig.finish()


def test_a_preempted_request_prefills_its_own_output_on_the_grid() -> None:
    rig = make_rig(budget=8, mode=CacheMode.NONE)
    rig.add("r", PROMPT, max_tokens=20)
    rig.run_until(lambda: rig.scheduler.get(RequestId("r")).num_known == 27)
    rig.scheduler._preempt(rig.scheduler.running()[0])
    rig.plans.clear()
    rig.finish()
    assert spans(rig) == [(0, 8), (8, 16), (16, 24), (24, 27)]


def test_a_preempted_request_whose_state_is_all_there_prefills_its_newest_token() -> None:
    """Its state needs no more than a decode row; but a drafter's entry of that token is on no device yet."""
    rig = make_rig(num_lanes=1)
    rig.add("r", PROMPT[:8], max_tokens=20)
    rig.run_until(lambda: rig.scheduler.get(RequestId("r")).num_known == 17)  # 15 folded and one to replay
    rig.scheduler._preempt(rig.scheduler.running()[0])
    text = list(rig.scheduler.get(RequestId("r")).tokens)
    rig.add("save", text[:16], max_tokens=1, priority=-1)
    rig.step()
    (row,) = rig.step().rows
    assert row.request_id == "r"
    assert (row.phase, row.start, row.emits, row.tokens) == (Phase.PREFILL, 16, True, (text[16],))
    rig.finish()
