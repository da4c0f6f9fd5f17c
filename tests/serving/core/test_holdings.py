"""What moves between the books: admission all or none, take-over, pins, saves, and what a finished request leaves."""

import pytest
from oracles.core_rig import CoreRig

from gdn_jax.serving.core import holdings
from gdn_jax.serving.core.blocks import BlockId, BlockPool
from gdn_jax.serving.core.checkpoints import CheckpointStore, Retention, SlotId
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.serving.core.holdings import Save
from gdn_jax.serving.core.placement import CacheMode
from gdn_jax.serving.core.prefix_cache import lookup
from gdn_jax.serving.core.request import Request, RequestId

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]  # two full blocks of four and two tokens more
OTHER = [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]


def make_rig(**sizes) -> CoreRig:
    return CoreRig(**{"vocabulary": 50, "mode": CacheMode.ALIGN, "num_slots": 12, "budget": 64, **sizes})


def waiting(rig: CoreRig, prompt: list[int], **options) -> Request:
    """Queue a request without planning it."""
    return rig.add(f"w{len(rig.outputs)}", prompt, **options)


def saved(rig: CoreRig) -> set[int]:
    """Return the token counts of the published states."""
    return {len(rig.runner.slots[slot]) for slot in rig.scheduler.holdings.checkpoints.names().values()}


# Admission.


def cached_and(busy: dict, **sizes) -> tuple[CoreRig, Request]:
    """Cache PROMPT, keep another request running, and queue a request that would hit."""
    rig = make_rig(**sizes)
    rig.serve("first", PROMPT, max_tokens=1)
    rig.add("busy", OTHER, **busy)
    rig.step()
    return rig, waiting(rig, [*PROMPT, 7, 7, 7])


def without_blocks() -> tuple[CoreRig, Request]:
    rig, request = cached_and({"max_tokens": 2}, num_blocks=7)
    assert rig.scheduler.holdings.blocks.num_idle == 3  # two of them the hit's own; two more than that are needed
    return rig, request


def without_slots() -> tuple[CoreRig, Request]:
    rig, request = cached_and({"max_tokens": 9}, num_slots=2)
    assert rig.scheduler.holdings.checkpoints.num_published == 0
    return rig, request


def with_the_only_slot_pinned() -> tuple[CoreRig, Request]:
    rig = make_rig(num_slots=3)
    rig.serve("first", PROMPT, max_tokens=1)
    assert rig.scheduler.holdings.try_admit(waiting(rig, [*PROMPT, 7]), rig.scheduler.counts)
    return rig, waiting(rig, [*PROMPT, 8])


def without_lanes() -> tuple[CoreRig, Request]:
    return cached_and({"max_tokens": 9}, num_lanes=1)


@pytest.mark.parametrize("lack", [without_blocks, without_slots, with_the_only_slot_pinned, without_lanes])
def test_a_request_that_cannot_be_admitted_changes_nothing(lack) -> None:
    rig, request = lack()
    before, counts = rig.books(), vars(rig.scheduler.counts).copy()
    assert not rig.scheduler.holdings.try_admit(request, rig.scheduler.counts)
    assert rig.books() == before
    assert vars(rig.scheduler.counts) == counts


def test_an_admitted_request_holds_blocks_for_all_it_knows_and_one_position_more() -> None:
    for length, blocks in ((1, 1), (3, 1), (4, 2), (7, 2), (8, 3), (10, 3)):
        rig = make_rig()
        request = rig.add("r", PROMPT[:length])
        assert rig.scheduler.holdings.try_admit(request, rig.scheduler.counts)
        assert len(request.blocks) == blocks == rig.scheduler.holdings.blocks_for(length)
        assert (request.lane, request.read_anchor) == (0, 0)
        assert request.slot != 0


def test_the_hit_is_held_before_anything_is_evicted() -> None:
    rig = make_rig(num_blocks=8)
    rig.serve("first", PROMPT, max_tokens=1)
    rig.serve("other", OTHER, max_tokens=1)
    request = waiting(rig, [*PROMPT, *[7] * 14], max_tokens=2)
    hit = rig.scheduler.holdings.lookup(request)
    assert hit.length == 8
    rig.step()  # takes every block there is: those of the other prompt go, though they were used later
    assert request.blocks[:2] == list(hit.blocks)
    assert len(set(request.blocks)) == 7
    rig.finish()
    assert request.num_cached == 8


def test_a_pin_ends_with_the_commit_of_the_step_that_read_it() -> None:
    rig = make_rig(budget=8)
    rig.serve("first", PROMPT, max_tokens=1)
    store = rig.scheduler.holdings.checkpoints
    request = rig.add("next", [*PROMPT, *OTHER, *OTHER])
    plan = rig.scheduler.plan()
    assert plan is not None
    (row,) = plan.rows
    assert request.pinned == row.read_anchor != row.write_anchor
    assert not store.can_take_over(row.read_anchor)
    result = rig.runner.run(plan)
    assert request.pinned is not None
    rig.scheduler.commit(plan, result, [rig._cut(row.request_id, result.rows[0])])
    assert request.pinned is None
    assert request.read_anchor == request.slot
    assert store.can_take_over(row.read_anchor)


def test_the_hit_is_taken_over_when_it_lies_in_the_only_slot() -> None:
    rig = make_rig(num_slots=2)
    rig.serve("first", PROMPT[:8], max_tokens=1)
    assert saved(rig) == {8}
    request = rig.add("longer", PROMPT, max_tokens=6)
    plan = rig.step()
    assert plan is not None
    (row,) = plan.rows
    assert row.read_anchor == row.write_anchor == 1
    assert row.start == 8
    assert request.num_cached == 8
    assert rig.scheduler.holdings.checkpoints.num_published == 0
    rig.run()
    rig.check_answer(request)
    rig.idle()


def test_the_hit_is_not_taken_over_while_another_slot_can_be_had() -> None:
    rig = make_rig(num_slots=3)
    rig.serve("first", PROMPT, max_tokens=1)
    rig.serve("other", OTHER, max_tokens=1)
    plan = (rig.add("again", PROMPT), rig.step())[1]
    assert plan is not None
    assert plan.rows[0].read_anchor != plan.rows[0].write_anchor
    assert 8 in saved(rig)


def test_a_state_that_lost_its_slot_means_recomputing_from_an_earlier_one() -> None:
    rig = make_rig(num_slots=2, num_blocks=40)
    rig.serve("first", PROMPT[:8], max_tokens=1)
    rig.serve("other", OTHER, max_tokens=1)  # evicts the only state; the blocks stay
    request = rig.serve("again", PROMPT, max_tokens=3)
    assert request.num_cached == 0
    assert rig.scheduler.counts.gap_tokens == 8


def test_a_state_whose_blocks_are_gone_is_gone_too() -> None:
    rig = make_rig(num_blocks=8)
    rig.serve("first", PROMPT, max_tokens=1)
    rig.serve("big", [*OTHER, *OTHER, *OTHER[:6]], max_tokens=1)  # takes every block
    assert saved(rig) == {24}
    again = rig.serve("again", PROMPT, max_tokens=4)
    assert again.num_cached == 0


def test_a_chain_that_an_eviction_broke_is_made_whole_before_the_next_checkpoint() -> None:
    rig = make_rig(num_blocks=10)
    rig.add("a", PROMPT, max_tokens=1)
    rig.add("twin", PROMPT, max_tokens=11)  # has blocks of the same content, but the names are the other's
    rig.step()
    rig.add("big", [*OTHER, *OTHER], max_tokens=1)  # takes the blocks of a, and with them the names
    rig.step()
    pool, twin = rig.scheduler.holdings.blocks, rig.scheduler.get(RequestId("twin"))
    names = twin.chain.upto(twin.tokens, 8)
    assert [pool.lookup([name]) for name in names] == [[twin.blocks[0]], [twin.blocks[1]]]
    rig.run_until(lambda: 12 in saved(rig))
    assert pool.lookup(twin.chain.upto(twin.tokens, 12)) == twin.blocks[:3]
    rig.finish()
    assert rig.serve("next", rig.text("twin"), max_tokens=1).num_cached == 20


def test_a_checkpoint_cut_off_by_the_blocks_taken_leaves_the_slot_that_is_needed() -> None:
    rig = make_rig(num_slots=4, num_blocks=8)
    rig.serve("old", PROMPT, max_tokens=1)
    rig.serve("new", OTHER, max_tokens=1)
    store, chain = rig.scheduler.holdings.checkpoints, waiting(rig, OTHER).chain
    store.try_take()  # the last free one
    store.touch(rig.ended["old"].chain.name(PROMPT, 8))
    request = waiting(rig, [8] * 13)  # needs four blocks: the three nameless ones, and the end of the oldest chain
    assert rig.scheduler.holdings.try_admit(request, rig.scheduler.counts)
    assert store.num_evicted == 1
    assert store.names().keys() == {chain.name(OTHER, 8)}


def test_a_hit_refreshes_its_own_checkpoint_and_no_other() -> None:
    rig = make_rig()
    rig.serve("first", PROMPT, max_tokens=7)  # leaves states at 8, 12 and 16, of which 12 is superseded
    rig.serve("other", OTHER, max_tokens=1)
    store, text = rig.scheduler.holdings.checkpoints, rig.text("first")
    name = {boundary: rig.ended["first"].chain.name(text, boundary) for boundary in (8, 12, 16)}
    other = rig.ended["other"].chain.name(OTHER, 8)
    assert list(store._placed) == [name[8], name[16], other]
    assert rig.serve("next", text, max_tokens=1).num_cached == 16
    assert list(store._placed) == [name[8], other, name[16]]
    assert rig.serve("again", PROMPT, max_tokens=1).num_cached == 8
    assert list(store._placed) == [other, name[16], name[8]]


def test_a_request_that_does_not_use_the_cache_is_not_looked_up_but_shares_what_it_computes() -> None:
    rig = make_rig()
    rig.serve("first", PROMPT, max_tokens=1)
    assert rig.serve("fresh", PROMPT, max_tokens=1, use_cache=False).num_cached == 0
    assert rig.scheduler.counts.queried_tokens == len(PROMPT)
    other = rig.serve("other", OTHER, max_tokens=1, use_cache=False)
    assert other.num_cached == 0
    assert rig.serve("after", OTHER, max_tokens=1).num_cached == 8


def test_a_pool_that_lends_less_than_it_promised_is_our_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (BlockPool, CheckpointStore):
        rig = make_rig()
        rig.add("r", PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr(owner, "try_take", lambda self, count=1: None)
            with pytest.raises(InvariantError, match="without what was counted for it"):
                rig.scheduler.plan()


# Saves.


def save(request: Request, boundary: int, retention: Retention = Retention.PLACED) -> Save:
    return Save(request=request, boundary=boundary, retention=retention)


def test_placed_saves_get_their_slots_before_interval_ones_and_deep_ones_first() -> None:
    rig = make_rig(num_slots=5)
    request = waiting(rig, list(range(30)))
    wanted = [save(request, 4, Retention.INTERVAL), save(request, 8), save(request, 24, Retention.INTERVAL)]
    wanted += [save(request, 16), save(request, 20, Retention.ROLLING), save(request, 12, Retention.INTERVAL)]
    reserved = rig.scheduler.holdings.reserve(wanted, rig.scheduler.counts)
    assert [export.boundary for _, export in reserved] == [20, 16, 8, 24]
    assert rig.scheduler.counts.saves_skipped == 2


def test_no_slot_is_reserved_for_a_name_that_is_known_or_reserved_already() -> None:
    rig = make_rig()
    rig.serve("first", PROMPT, max_tokens=1)
    twins = [waiting(rig, [*PROMPT, 7, 7, 7]) for _ in range(2)]
    wanted = [save(twin, boundary, Retention.INTERVAL) for twin in twins for boundary in (8, 12)]
    (only,) = rig.scheduler.holdings.reserve(wanted, rig.scheduler.counts)
    assert only[0].request is twins[0]
    assert only[1].boundary == 12
    assert rig.scheduler.counts.saves_skipped == 0


def test_an_interval_checkpoint_that_is_wanted_placed_is_placed() -> None:
    rig = make_rig(mode=CacheMode.ALL, interval=4)
    rig.serve("long", [*PROMPT, *OTHER], max_tokens=1)
    store, chain = rig.scheduler.holdings.checkpoints, rig.ended["long"].chain
    names = [chain.name(PROMPT, boundary) for boundary in (4, 8)]
    assert [store.is_placed(name) for name in names] == [False, False]
    rig.serve("short", PROMPT[:8], max_tokens=1)  # starts from the first, and ends in the second
    assert [store.is_placed(name) for name in names] == [True, True]


def test_saves_without_a_slot_are_skipped_and_counted_and_nobody_waits() -> None:
    rig = make_rig(num_slots=2, mode=CacheMode.ALL, interval=4)
    request = rig.serve("only", list(range(18)), max_tokens=8)
    assert rig.scheduler.counts.saves_skipped > 4
    assert request.num_output == 8
    assert saved(rig) == {24}  # the running slot itself, at the end


def test_a_state_that_the_step_did_not_store_is_not_published() -> None:
    rig = make_rig()
    rig.add("r", PROMPT, max_tokens=3)
    plan = rig.scheduler.plan()
    assert plan is not None
    result = rig.runner.run(plan)
    assert result.rows[0].saved == (8,)
    unsaved = result.rows[0]._replace(saved=())
    rig.scheduler.commit(plan, type(result)(rows=(unsaved,)), [rig._cut(plan.rows[0].request_id, unsaved)])
    rig.scheduler.check()
    assert saved(rig) == set()
    assert rig.scheduler.counts.saves == 0


# What a finished request leaves.


def last_row_closes(rig: CoreRig) -> bool:
    (row,) = rig.plans[-1].rows
    return not row.tokens


def test_the_turn_end_is_the_rolling_save_when_the_fold_has_passed_it() -> None:
    rig = make_rig()
    rig.serve("r", PROMPT, max_tokens=5)  # 14 tokens computed, 13 folded: the fold passed 12
    assert not last_row_closes(rig)
    assert saved(rig) == {8, 12}


def test_the_turn_end_is_a_closing_row_when_the_fold_stops_short_of_it() -> None:
    rig = make_rig()
    rig.serve("r", PROMPT, max_tokens=7)  # 16 tokens computed, 15 folded
    assert last_row_closes(rig)
    (row,) = rig.plans[-1].rows
    assert (row.start, row.num_replay, row.read_anchor) == (16, 1, row.write_anchor)
    assert saved(rig) == {8, 12, 16}


def test_the_turn_end_is_the_running_slot_when_it_stands_there_and_no_save_was_made() -> None:
    rig = make_rig(num_slots=2)
    rig.serve("r", PROMPT, max_tokens=8)  # 17 computed, 16 folded, and never a slot to save to
    assert not last_row_closes(rig)
    assert saved(rig) == {16}
    assert list(rig.scheduler.holdings.checkpoints.names().values()) == [SlotId(1)]


def test_a_turn_end_that_is_known_already_is_kept_and_the_rolling_one_let_go() -> None:
    rig = make_rig(mode=CacheMode.ALL, interval=16)
    text = [*PROMPT, *rig.expected(PROMPT, 14)]
    rig.add("r", PROMPT, max_tokens=7)  # ends with 16 tokens computed
    rig.run_until(lambda: any(row.start == 14 for row in rig.plans[-1].rows) if rig.plans else False)
    rig.add("ahead", text, max_tokens=1, priority=-1, use_cache=False)  # saves 16 in the step that ends r, before it
    rig.step()
    store, chain = rig.scheduler.holdings.checkpoints, rig.ended["r"].chain
    assert not rig.scheduler.has_work  # no closing row: the state is there
    assert store.is_placed(chain.name(text, 16))
    assert list(store._interval) == [chain.name(text, 12)]


def test_the_next_rolling_save_moves_the_last_one_to_the_front_of_eviction() -> None:
    rig = make_rig()
    rig.add("r", PROMPT, max_tokens=20)
    rig.run_until(lambda: saved(rig) == {8, 12, 16, 20})
    store, request = rig.scheduler.holdings.checkpoints, rig.scheduler.running()[0]
    names = {boundary: request.chain.name(request.tokens, boundary) for boundary in (8, 12, 16, 20)}
    assert list(store._interval) == [names[16], names[12]]
    assert list(store._placed) == [names[8], names[20]]


def test_a_rolling_save_on_the_interval_stays_as_an_interval_checkpoint() -> None:
    rig = make_rig(mode=CacheMode.ALL, interval=16)
    rig.add("r", PROMPT, max_tokens=20)
    rig.run_until(lambda: 24 in saved(rig))
    store, request = rig.scheduler.holdings.checkpoints, rig.scheduler.running()[0]
    names = {boundary: request.chain.name(request.tokens, boundary) for boundary in (12, 16, 20)}
    assert list(store._interval) == [names[20], names[12], names[16]]


def test_a_rolling_save_is_let_go_even_across_a_preemption() -> None:
    rig = make_rig()
    rig.add("r", PROMPT, max_tokens=20)
    rig.run_until(lambda: 12 in saved(rig))
    request = rig.scheduler.running()[0]
    rig.scheduler._preempt(request)
    rig.run_until(lambda: 16 in saved(rig))
    store = rig.scheduler.holdings.checkpoints
    assert request.chain.name(request.tokens, 12) in store._interval
    rig.run()
    rig.check_answer(request)


def test_a_rolling_save_that_another_prompt_ends_in_is_kept_for_it() -> None:
    rig = make_rig()
    rig.add("r", PROMPT, max_tokens=20)
    rig.run_until(lambda: 12 in saved(rig))
    request = rig.scheduler.running()[0]
    name = request.chain.name(request.tokens, 12)
    rig.add("fork", [*request.tokens[:12], 7], max_tokens=1)
    rig.run_until(lambda: 16 in saved(rig))
    assert rig.scheduler.holdings.checkpoints.is_placed(name)


def test_twins_that_write_the_same_text_leave_one_rolling_checkpoint_in_its_class() -> None:
    rig = make_rig(num_blocks=40)
    rig.add("a", PROMPT, max_tokens=14)
    rig.add("b", PROMPT, max_tokens=18)
    rig.run()
    store, chain = rig.scheduler.holdings.checkpoints, rig.ended["b"].chain
    tokens = rig.text("b")
    placed = {boundary for boundary in (8, 12, 16, 20, 24) if store.is_placed(chain.name(tokens, boundary))}
    assert placed == {8, 20, 24}  # the prompt's, and one turn end each


def test_what_is_released_is_gone_from_the_request_too() -> None:
    rig = make_rig()
    rig.add("r", PROMPT, max_tokens=9)
    for _ in range(4):
        rig.step()
    request = rig.scheduler.running()[0]
    rig.scheduler.holdings.release(request)
    assert (request.lane, request.slot, request.read_anchor, request.pinned) == (-1, 0, 0, None)
    assert (request.blocks, request.num_sent_blocks, request.folded, request.num_replay) == ([], 0, 0, 0)
    assert rig.scheduler.holdings.blocks.num_held() == 0
    assert rig.scheduler.holdings.checkpoints.num_owned == 0


def test_nothing_is_looked_up_while_every_lane_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(num_lanes=1)
    rig.add("busy", PROMPT, max_tokens=9)
    rig.add("waits", PROMPT, max_tokens=1)
    lookups: list[int] = []

    def count(chain, cap, **pools):
        lookups.append(cap)
        return lookup(chain, cap, **pools)

    monkeypatch.setattr(holdings, "lookup", count)
    for _ in range(8):
        rig.step()
    assert lookups == [len(PROMPT) - 1]  # that of the admission
    rig.finish()
    assert rig.ended["waits"].num_cached == 8


# The check.


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda rig: rig.scheduler.holdings._lanes.pop(), "lanes are lost or shared"),
        (lambda rig: rig.scheduler.holdings._lanes.append(rig.scheduler.running()[0].lane), "lost or shared"),
        (lambda rig: rig.scheduler.holdings.blocks.hold(rig.scheduler.running()[0].blocks), "references are"),
        (lambda rig: rig.scheduler.running()[0].blocks.append(BlockId(20)), "references are"),
        (lambda rig: rig.scheduler.holdings.checkpoints.try_reserve(placed=True), "are reserved"),
        (lambda rig: rig.scheduler.holdings.checkpoints.try_take(), "are running"),
        (lambda rig: rig.scheduler.holdings.blocks.forget_all(), "block chain is broken"),
        (lambda rig: rig.scheduler._queues._waiting.append(rig.scheduler.running()[0]), "in no queue or in two"),
    ],
)
def test_the_check_sees_books_that_do_not_agree_with_the_holders(break_it, message: str) -> None:
    rig = make_rig()
    rig.add("r", PROMPT, max_tokens=9)
    rig.step()
    rig.scheduler.check()
    break_it(rig)
    with pytest.raises(InvariantError, match=message):
        rig.scheduler.check()
