"""Drafts in the books: a rejected one never reaches a state, a page with a name, or an answer.

The tell-tale runner's slot is one index for all that a layer remembers, so whatever is said here of the state holds of
the convolution window too. Drafts are made to order: a script says how many of each window are right.
"""

import random
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise, product

import pytest
from oracles.core_rig import STOP_TOKEN, CoreRig
from oracles.tell_tale import next_token

from gdn_jax.serving.core.placement import CacheMode
from gdn_jax.serving.core.plan import Phase, RowPlan, StepPlan, StepResult
from gdn_jax.serving.core.request import FinishReason, RequestId

VOCABULARY = 50
PROMPT = [3, 1, 4, 1, 5]


def scripted(num_right: Sequence[int], num_made: Sequence[int] = ()) -> Callable[[tuple[int, ...], int], list[int]]:
    """Make drafts of which the first few are right: per window, as the scripts say over and over."""
    right, made = cycle(num_right), cycle(num_made or [-1])

    def draft(known: tuple[int, ...], count: int) -> list[int]:
        limit, correct = next(made), next(right)
        drafts: list[int] = []
        for index in range(count if limit < 0 else min(limit, count)):
            token = next_token((*known, *drafts), VOCABULARY)
            drafts.append(token if index < correct else (token + 1) % VOCABULARY)
        return drafts

    return draft


def make_rig(**sizes) -> CoreRig:
    plain = {"vocabulary": VOCABULARY, "num_drafts": 3, "num_slots": 30, "num_blocks": 60, "mode": CacheMode.ALIGN}
    return CoreRig(**{**plain, **sizes})


def rows_of(rig: CoreRig, name: str = "r") -> list[RowPlan]:
    return [row for plan in rig.plans for row in plan.rows if row.request_id == name]


def saved(rig: CoreRig) -> set[tuple[int, ...]]:
    return {rig.runner.slots[slot] for slot in rig.scheduler.holdings.checkpoints.names().values()}


# The worked example: block 8, three drafts, five tokens in the state; the window 5..8 crosses the boundary at 8.


@pytest.mark.parametrize("num_right", range(4))
def test_a_rejection_that_pulls_a_row_back_over_a_boundary_reads_the_state_it_left(num_right: int) -> None:
    rig = make_rig(block_size=8, interval=8, draft=scripted([num_right]))
    rig.add("r", PROMPT, max_tokens=12)
    rig.finish()
    prefill, first, second = rows_of(rig)[:3]
    assert (prefill.start, prefill.end) == (0, 5)
    assert (first.phase, first.start, first.end, first.num_replay) == (Phase.VERIFY, 5, 9, 0)
    assert (second.start, second.num_replay) == (6 + num_right, 1 + num_right)
    assert first.read_anchor == first.write_anchor == second.read_anchor == second.write_anchor


@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize("length", range(1, 9))
def test_every_state_saved_in_decode_is_the_one_at_its_boundary(length: int, num_right: int) -> None:
    rig = make_rig(block_size=8, interval=8, draft=scripted([num_right]), max_model_len=80)
    prompt = [*PROMPT, 9, 2, 6][:length]
    rig.add("r", prompt, max_tokens=40)
    rig.finish()
    text = rig.text("r")
    boundaries = {len(state): list(state) for state in saved(rig)}
    assert boundaries.keys() >= {16, 24, 32, 40}  # none is missing, whatever was rejected around it
    assert all(state == text[:boundary] for boundary, state in boundaries.items())


def test_a_full_window_that_ends_on_a_boundary_leaves_the_exact_state_there() -> None:
    rig = make_rig(block_size=8, interval=8, draft=scripted([3]))
    rig.add("r", PROMPT[:4], max_tokens=16)
    rig.finish()
    window = rows_of(rig)[1]
    assert (window.start, window.end) == (4, 8)
    fold = rows_of(rig)[2]
    assert [(export.boundary, fold.start, fold.num_replay) for export in fold.exports] == [(8, 8, 4)]
    assert tuple(rig.text("r")[:8]) in saved(rig)
    follow_up = rig.serve("next", rig.text("r")[:11], max_tokens=2)
    assert follow_up.num_cached == 8


def test_a_boundary_in_the_middle_of_a_fold_is_saved_on_the_way() -> None:
    rig = make_rig(draft=scripted([3]), block_size=8, interval=8)
    rig.add("r", PROMPT, max_tokens=9)
    rig.finish()
    (fold,) = [row for row in rows_of(rig) if row.exports]
    assert (fold.start - fold.num_replay, fold.exports[0].boundary, fold.start) == (5, 8, 9)


# Windows of every kind.


@pytest.mark.parametrize("mode", list(CacheMode))
@pytest.mark.parametrize(("num_made", "num_right"), [((3, 0), (3,)), ((0, 1, 2, 3), (1, 3)), ((2, 0, 0), (0, 3))])
def test_steps_without_drafts_after_steps_that_accepted_some_answer_right(mode, num_made, num_right) -> None:
    rig = make_rig(mode=mode, draft=scripted(num_right, num_made))
    rig.add("r", PROMPT, max_tokens=40)
    rig.finish()
    phases = [row.phase for row in rows_of(rig)]
    assert {Phase.DECODE, Phase.VERIFY} <= set(phases)


def test_a_drafter_that_is_always_wrong_costs_nothing_but_time() -> None:
    rig = make_rig(draft=scripted([0]), num_blocks=80, max_model_len=120)
    rig.add("r", PROMPT, max_tokens=100)
    rig.finish()
    assert rig.runner.num_accepted == 0
    assert all(row.num_replay <= 1 for row in rows_of(rig))


def test_a_drafter_that_is_always_right_emits_full_windows() -> None:
    rig = make_rig(draft=scripted([3]), max_model_len=120)
    rig.add("r", PROMPT, max_tokens=33)
    rig.finish()
    assert len([row for row in rows_of(rig) if row.tokens]) == 1 + 8


def test_every_pattern_of_three_windows_answers_right_and_can_be_continued() -> None:
    for pattern in product(range(4), repeat=3):
        rig = make_rig(draft=scripted(pattern))
        rig.add("r", PROMPT, max_tokens=14)
        rig.finish()
        text = rig.text("r")
        assert rig.serve("next", [*text, 7], max_tokens=5).num_cached == (len(text) - 1) // 4 * 4


def test_counts_of_accepted_drafts_stay_with_their_request_when_rows_move() -> None:
    rig = make_rig(draft=scripted([3, 0, 1, 2]), num_lanes=4, budget=12)
    for number in range(8):
        rig.add(f"r{number}", [number, *PROMPT], max_tokens=3 + 4 * (number % 4))
    rig.finish()
    lanes: dict[int, set[str]] = {}
    for row in (row for plan in rig.plans for row in plan.rows):
        lanes.setdefault(row.lane, set()).add(row.request_id)
    assert any(len(users) > 1 for users in lanes.values())


@pytest.mark.parametrize("mode", [CacheMode.ALIGN, CacheMode.ALL])
def test_a_long_conversation_with_drafts_and_replays_of_old_prompts_never_goes_wrong(mode: CacheMode) -> None:
    dice = random.Random(3)
    rig = make_rig(mode=mode, num_blocks=120, num_slots=12, max_model_len=200, draft=scripted([3, 0, 2, 1, 3]))
    text = list(PROMPT)
    cached = 0
    for turn in range(15):
        text += [40 + turn % 9, 41]
        request = rig.serve(f"turn{turn}", text, max_tokens=dice.randint(2, 9))
        assert turn == 0 or (request.num_cached or 0) > 0
        cached += request.num_cached or 0
        rig.serve(f"replay{turn}", PROMPT, max_tokens=6)
        text = list(request.tokens)
    assert cached > 200


# Ends.


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_no_draft_is_run_past_the_last_token_that_may_be_emitted(max_tokens: int) -> None:
    rig = make_rig(draft=scripted([3]), max_model_len=len(PROMPT) + max_tokens)
    rig.add("r", PROMPT, max_tokens=max_tokens)
    rig.finish()
    assert len(rig.outputs[RequestId("r")]) == max_tokens
    assert max(row.end for row in rows_of(rig)) == len(PROMPT) + max_tokens - 1


def test_what_follows_a_stop_token_in_an_accepted_window_is_nowhere() -> None:
    def exact(known: tuple[int, ...], count: int) -> list[int]:
        drafts: list[int] = []
        while len(drafts) < count:
            drafts.append(next_token((*known, *drafts), 2))
        return drafts

    cut_short = 0
    for number in range(64):
        prompt = [int(letter) for letter in f"{number:06b}"][number % 4 :]
        rig = make_rig(vocabulary=2, draft=exact)
        request = rig.add("r", prompt, max_tokens=30, stops=True)
        rig.finish()
        assert request.finish is FinishReason.STOP
        assert request.tokens.index(STOP_TOKEN, len(prompt)) == request.num_known - 1
        last = [row for row in rows_of(rig) if row.tokens][-1]
        cut_short += last.end > request.num_known
        blocks = rig.scheduler.holdings.blocks.names()
        assert len(blocks) <= request.num_known // 4
    assert cut_short > 10


def test_a_row_that_verifies_at_an_abort_leaves_its_drafts_nowhere() -> None:
    for steps in range(1, 6):
        rig = make_rig(draft=scripted([2]))
        rig.add("r", PROMPT, max_tokens=30)
        for _ in range(steps):
            rig.step()
        rig.step(abort="r")
        rig.idle()
        rig.serve("again", PROMPT, max_tokens=30)


# Shortage.


def test_drafts_are_cut_before_anybody_is_preempted() -> None:
    rig = make_rig(num_blocks=5, draft=scripted([3]))
    rig.add("a", PROMPT[:2], max_tokens=8)
    rig.add("b", [7, *PROMPT], max_tokens=6)
    rig.step()
    assert rig.scheduler.holdings.blocks.num_idle == 1
    plan = rig.step()
    assert plan is not None
    assert [(row.start, row.num_drafts) for row in plan.rows] == [
        (2, 3),  # takes the last block, for the position beyond its last
        (6, 0),  # covers 6 and 7, and has nothing left for a draft
    ]
    assert rig.scheduler.counts.preemptions == 0
    rig.finish()


def test_only_as_many_drafts_are_cut_as_the_blocks_at_hand_ask_for() -> None:
    rig = make_rig(num_blocks=5, draft=scripted([3]))
    rig.add("a", PROMPT[:2], max_tokens=8)
    rig.add("b", PROMPT, max_tokens=6)
    rig.step()
    plan = rig.step()
    assert plan is not None
    assert [(row.start, row.num_drafts) for row in plan.rows] == [(2, 3), (5, 1)]
    rig.finish()


def test_preempted_requests_drop_their_drafts_and_go_on_without() -> None:
    rig = make_rig(num_blocks=10, draft=scripted([3, 1]), num_lanes=3)
    for number in range(3):
        rig.add(f"r{number}", [number, *PROMPT], max_tokens=16)
    rig.run_until(lambda: rig.scheduler.counts.preemptions > 0)
    victims = [r for r in rig.scheduler._queues.live() if r.num_output and not r.blocks]
    assert victims
    assert all(victim.num_drafts == 0 for victim in victims)
    rig.finish()


@pytest.mark.parametrize("spoilt", range(1, 5))
def test_a_window_that_stands_for_nothing_runs_again_without_drafts(spoilt: int) -> None:
    """What its drafts spoilt on the device is written again; nothing is lost, counted or published twice."""
    rig = make_rig(block_size=8, interval=8, draft=scripted([2]))
    rig.add("r", PROMPT, max_tokens=30)
    run, seen = rig.runner.run, list[Phase]()

    def spoil(plan: StepPlan, **options: object) -> StepResult:
        result = run(plan, **options)  # pyright: ignore[reportArgumentType]
        seen.append(plan.rows[0].phase)
        if seen.count(Phase.VERIFY) == spoilt and seen[-1] is Phase.VERIFY:
            result = StepResult(rows=(result.rows[0]._replace(tokens=(), num_drafts=0),))
        return result

    rig.runner.run = spoil  # type: ignore[method-assign]
    rig.finish()
    rows = rows_of(rig)
    again = [index for index, (row, after) in enumerate(pairwise(rows)) if row.tokens and row.start == after.start]
    assert len(again) == 1
    assert (rows[again[0] + 1].phase, rows[again[0] + 1].num_replay) == (Phase.DECODE, 0)
    assert len(saved(rig)) >= 3
