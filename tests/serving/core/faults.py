"""Deliberate faults: slips that a bookkeeper of blocks, slots and drafts could make, each with what must catch it.

Testing the tests: `test_faults.py` switches each one on and demands that the check named here fails. A fault that
nothing catches means that the suite must grow. Most are caught by a few dozen random sessions on the tell-tale runner;
what only costs hits, fairness or memory is caught by the test that pins the behaviour.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import random_sessions
import test_blocks
import test_checkpoints
import test_drafts
import test_endings
import test_hit_lengths
import test_holdings
import test_plan_ahead
import test_scheduler
from oracles.core_rig import CoreRig
from oracles.tell_tale import TellTaleRunner

from gdn_jax.serving.core import holdings as holdings_module
from gdn_jax.serving.core.blocks import BlockPool, HashChain
from gdn_jax.serving.core.checkpoints import CheckpointStore, Retention
from gdn_jax.serving.core.holdings import Counts, Holdings
from gdn_jax.serving.core.open_plan import OpenPlan
from gdn_jax.serving.core.placement import CacheMode, Placement
from gdn_jax.serving.core.plan import Phase, RowResult
from gdn_jax.serving.core.prefix_cache import lookup
from gdn_jax.serving.core.queues import Queues
from gdn_jax.serving.core.request import FinishReason, Request, Status
from gdn_jax.serving.core.scheduler import Scheduler

Patch = pytest.MonkeyPatch
Check = Callable[[], object]


@dataclass(frozen=True)
class Fault:
    """A slip and its catcher; the name says what goes wrong."""

    name: str
    apply: Callable[[Patch], None]
    caught_by: Check


FAULTS: list[Fault] = []


def sessions() -> None:
    """Play random sessions, the same every time."""
    random_sessions.play(range(30))


def fault(caught_by: Check) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Add a fault to the list."""

    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS.append(Fault(apply.__name__, apply, caught_by))
        return apply

    return add


def around(patch: Patch, owner: type, name: str, change: Callable) -> None:
    """Replace a method by `change(original, self, ...)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **options: change(original, self, *args, **options))


# Holding, pinning, freeing.


@fault(sessions)
def no_hold_on_a_hit(patch: Patch) -> None:
    patch.setattr(BlockPool, "hold", lambda self, blocks: None)


@fault(test_holdings.test_the_hit_is_held_before_anything_is_evicted)
def the_hit_is_held_after_blocks_are_taken(patch: Patch) -> None:
    def admit(original, self, request, hit, needed, *, take_over):
        own = self.blocks.try_take(needed)
        self.blocks.release(own or [])  # what they evicted is gone, and the hit may have been among it
        original(self, request, hit, needed, take_over=take_over)

    around(patch, Holdings, "_admit", admit)


@fault(sessions)
def the_pin_is_dropped_before_the_step_that_reads(patch: Patch) -> None:
    def admit(original, self, request, *args, **options):
        original(self, request, *args, **options)
        self.unpin(request)

    around(patch, Holdings, "_admit", admit)


@fault(sessions)
def a_pin_is_never_dropped(patch: Patch) -> None:
    def unpin(original, self, request):
        request.pinned = None

    around(patch, Holdings, "unpin", unpin)


@fault(
    lambda: test_holdings.test_a_request_that_cannot_be_admitted_changes_nothing(
        test_holdings.with_the_only_slot_pinned
    )
)
def a_pinned_slot_is_taken_over(patch: Patch) -> None:
    patch.setattr(CheckpointStore, "can_take_over", lambda self, slot: slot in self._name_of)


@fault(sessions)
def an_abort_while_the_step_runs_leaks_blocks(patch: Patch) -> None:
    def release(original, self, request):
        if request.finish is FinishReason.ABORT:
            request.blocks = []
        original(self, request)

    around(patch, Holdings, "release", release)


@fault(lambda: test_endings.test_an_abort_while_the_step_runs_takes_effect_at_its_commit(0))
def a_reserved_slot_is_not_freed_on_an_abort(patch: Patch) -> None:
    def commit_export(original, self, request, *args, **options):
        if request.finish is not FinishReason.ABORT:
            original(self, request, *args, **options)

    around(patch, Holdings, "commit_export", commit_export)


@fault(sessions)
def blocks_of_a_finished_request_are_freed_twice(patch: Patch) -> None:
    def release(original, self, request):
        blocks = list(request.blocks)
        original(self, request)
        if request.finish is FinishReason.LENGTH:
            self.blocks.release([block for block in blocks if self.blocks.references()[block]])

    around(patch, Holdings, "release", release)


@fault(sessions)
def two_rows_share_a_lane(patch: Patch) -> None:
    def admit(original, self, request, *args, **options):
        original(self, request, *args, **options)
        self._lanes.append(request.lane)
        request.lane = self._lanes.pop(0)
        self._lanes.insert(0, request.lane)

    around(patch, Holdings, "_admit", admit)


@fault(test_scheduler.test_the_youngest_gives_way_and_returns_with_its_tokens)
def a_preemption_forgets_to_reset_folded(patch: Patch) -> None:
    def forget(original, self):
        folded = self.folded
        original(self)
        self.folded = folded

    around(patch, Request, "forget_holdings", forget)


@fault(lambda: test_holdings.test_a_request_that_cannot_be_admitted_changes_nothing(test_holdings.without_blocks))
def a_refused_admission_has_touched_its_hit(patch: Patch) -> None:
    def try_admit(original, self, request, counts):
        if (name := self.lookup(request).name) is not None:
            self.blocks.hold(self.lookup(request).blocks)
            self.blocks.release(self.lookup(request).blocks)
            self.checkpoints.touch(name)
        return original(self, request, counts)

    around(patch, Holdings, "try_admit", try_admit)


# Publishing.


@fault(sessions)
def states_are_published_when_they_are_planned(patch: Patch) -> None:
    def prefill(original, self, request):
        others, self._saves = self._saves, []
        row = original(self, request)
        mine, self._saves = self._saves, others
        if row is None:
            return None
        folded, request.folded = request.folded, row.end
        self._holdings.publish_blocks(request)
        request.folded = folded
        reserved = self._holdings.reserve(mine, Counts())
        for save, export in reserved:
            name = request.chain.name(request.tokens, save.boundary)
            self._holdings.checkpoints.publish(export.slot, name, save.retention)
        return row._replace(exports=tuple(export for _, export in sorted(reserved, key=lambda pair: pair[1].boundary)))

    around(patch, OpenPlan, "_prefill", prefill)
    patch.setattr(Holdings, "commit_export", lambda *args, **options: None)
    patch.setattr(CheckpointStore, "check_owners", lambda *args, **options: None)  # only reading it shall tell


@fault(sessions)
def a_block_is_published_before_it_is_full(patch: Patch) -> None:
    def publish_blocks(original, self, request):
        original(self, request)
        size = self.placement.block_size
        computed = min(request.computed, request.num_known)
        if request.publishes and self.placement.caches and computed % size and computed > size:
            parent = request.chain.name(request.tokens, computed)
            block = request.blocks[computed // size]
            if block not in self.blocks._hash_of:
                self.blocks.publish(block, HashChain(parent, size).name([0] * size, size), parent)

    around(patch, Holdings, "publish_blocks", publish_blocks)


@fault(sessions)
def the_block_of_the_pending_token_is_published(patch: Patch) -> None:
    def publish_blocks(original, self, request):
        replayed = request.num_replay
        request.num_replay = request.num_known - request.folded
        original(self, request)
        request.num_replay = replayed

    around(patch, Holdings, "publish_blocks", publish_blocks)


@fault(test_holdings.test_a_state_that_the_step_did_not_store_is_not_published)
def a_save_is_published_without_being_stored(patch: Patch) -> None:
    def commit_export(original, self, request, export, counts, *, stored):
        original(self, request, export, counts, stored=True)

    around(patch, Holdings, "commit_export", commit_export)


@fault(sessions)
def the_state_after_the_whole_window_is_saved_under_the_boundary(patch: Patch) -> None:
    def end(original, self, request):
        if request.finish in (FinishReason.STOP, FinishReason.LENGTH):
            boundary = self.holdings.turn_end(request)
            if boundary is not None and boundary > request.folded:
                request.folded, request.num_replay = boundary, 0
        original(self, request)

    around(patch, Scheduler, "_end", end)


@fault(sessions)
def a_fold_saves_at_the_boundary_after_it(patch: Patch) -> None:
    def in_fold(original, self, folded, num_replay):
        return original(self, folded, num_replay + 1)

    around(patch, Placement, "in_fold", in_fold)


@fault(test_drafts.test_what_follows_a_stop_token_in_an_accepted_window_is_nowhere)
def the_turn_end_is_where_the_last_window_ended_not_the_answer(patch: Patch) -> None:
    def turn_end(original, self, request):
        boundary = request.computed // self.placement.block_size * self.placement.block_size
        return boundary if original(self, request) is not None and boundary > 0 else None

    around(patch, Holdings, "turn_end", turn_end)


@fault(test_endings.test_a_prompt_whose_numbers_go_wrong_ends_alone_and_leaves_nothing_to_find)
def a_row_with_broken_numbers_is_published(patch: Patch) -> None:
    def commit_row(original, self, request, row, result, cut):
        if not result.finite:
            request.finish = FinishReason.ERROR
        original(self, request, row, result._replace(finite=True), cut)

    around(patch, Scheduler, "_commit_row", commit_row)


@fault(test_endings.test_a_span_that_emits_nothing_ends_its_request_too_when_its_numbers_go_wrong)
def broken_numbers_are_only_noticed_in_rows_that_emit(patch: Patch) -> None:
    def commit_row(original, self, request, row, result, cut):
        original(self, request, row, result if row.emits else result._replace(finite=True), cut)

    around(patch, Scheduler, "_commit_row", commit_row)
    patch.setattr(CoreRig, "_cut", cut_rows_that_emit(CoreRig._cut))


def cut_rows_that_emit(cut: Callable) -> Callable:
    return lambda self, request_id, result: cut(self, request_id, result if result.tokens else RowResult((), ()))


@fault(sessions)
def the_blocks_of_broken_numbers_are_published(patch: Patch) -> None:
    def commit_row(original, self, request, row, result, cut):
        if not result.finite:
            request.folded = row.end
            self.holdings.publish_blocks(request)
        original(self, request, row, result, cut)

    around(patch, Scheduler, "_commit_row", commit_row)


@fault(lambda: test_endings.test_an_answer_whose_numbers_go_wrong_keeps_what_it_had_and_saves_nothing_more(0))
def broken_numbers_leave_a_turn_end(patch: Patch) -> None:
    def end(original, self, request):
        if request.finish is FinishReason.ERROR:
            request.finish, request.publishes = FinishReason.LENGTH, True
        original(self, request)

    around(patch, Scheduler, "_end", end)


# Names.


@fault(sessions)
def a_hash_does_not_cover_its_parent(patch: Patch) -> None:
    def grow(original, self, tokens, num_tokens):
        size = self._block_size
        for start in range(len(self._hashes) * size, num_tokens - size + 1, size):
            alone = HashChain(b"", size)
            alone._root = self._root
            self._hashes += original(alone, tokens[start : start + size], size) or alone._hashes

    around(patch, HashChain, "_grow", grow)


@fault(test_hit_lengths.test_another_salt_never_shares_and_the_same_salt_does)
def the_salt_is_ignored(patch: Patch) -> None:
    def add(original, self, *args, **options):
        return original(self, *args, **{**options, "cache_salt": b""})

    around(patch, Scheduler, "add", add)


@fault(sessions)
def an_eviction_leaves_the_checkpoint_of_its_chain(patch: Patch) -> None:
    def init(original, self, num_blocks, on_evict=None):
        original(self, num_blocks)

    around(patch, BlockPool, "__init__", init)


@fault(sessions)
def an_eviction_leaves_the_extensions_of_its_block(patch: Patch) -> None:
    def forget(original, self, name):
        self._children.pop(name, None)
        original(self, name)

    around(patch, BlockPool, "_forget", forget)


@fault(test_blocks.test_a_name_that_is_known_keeps_its_block)
def a_known_name_moves_to_the_newcomers_block(patch: Patch) -> None:
    def publish(original, self, block, name, parent):
        original(self, block, name, parent)
        if block not in self._hash_of:
            self._by_hash[name] = block

    around(patch, BlockPool, "publish", publish)


# Looking up.


@fault(sessions)
def a_hit_may_hold_the_last_token(patch: Patch) -> None:
    patch.setattr(holdings_module, "lookup", lambda chain, cap, **pools: lookup(chain, cap + 1, **pools))


@fault(test_hit_lengths.test_the_gap_is_computed_again_into_own_blocks_and_is_not_counted_as_cached)
def a_hit_is_as_long_as_its_blocks_whatever_its_state(patch: Patch) -> None:
    def longer(chain, cap, *, blocks, checkpoints, block_size):
        hit = lookup(chain, cap, blocks=blocks, checkpoints=checkpoints, block_size=block_size)
        run = tuple(blocks.lookup(chain[: cap // block_size]))
        return replace(hit, length=len(run) * block_size, blocks=run) if hit.length else hit

    patch.setattr(holdings_module, "lookup", longer)


@fault(test_holdings.test_a_state_whose_blocks_are_gone_is_gone_too)
def a_state_counts_though_its_blocks_are_gone(patch: Patch) -> None:
    an_eviction_leaves_the_checkpoint_of_its_chain(patch)
    patch.setattr(Holdings, "check", lambda *args: None)  # only reading it shall tell

    def blind(chain, cap, *, blocks, checkpoints, block_size):
        hit = lookup(chain, cap, blocks=blocks, checkpoints=checkpoints, block_size=block_size)
        for count in range(cap // block_size, hit.length // block_size, -1):
            if (slot := checkpoints.lookup(chain[count - 1])) is not None:
                return replace(hit, length=count * block_size, slot=slot, name=chain[count - 1])
        return hit

    patch.setattr(holdings_module, "lookup", blind)


@fault(test_hit_lengths.test_the_second_prompt_that_shares_a_prefix_saves_where_they_part_and_the_third_hits_it)
def a_junction_is_not_saved(patch: Patch) -> None:
    def placed(original, self, **counts):
        return original(self, **{**counts, "junction": 0})

    around(patch, Placement, "placed", placed)


@fault(lambda: test_hit_lengths.test_resend_sibling_and_next_turn_hit_what_the_oracle_says(CacheMode.ALIGN, 8, 0))
def a_prompt_that_ends_on_a_boundary_is_saved_only_before_it(patch: Patch) -> None:
    def placed(original, self, **counts):
        return original(self, **counts) - {counts["num_prompt"]}

    around(patch, Placement, "placed", placed)


@fault(lambda: test_hit_lengths.test_resend_sibling_and_next_turn_hit_what_the_oracle_says(CacheMode.ALIGN, 8, 0))
def a_prompt_that_ends_on_a_boundary_is_saved_only_there(patch: Patch) -> None:
    def placed(original, self, **counts):
        prompt, size = counts["num_prompt"], self.block_size
        return original(self, **counts) - ({prompt - size} if prompt % size == 0 else set())

    around(patch, Placement, "placed", placed)


@fault(
    lambda: test_hit_lengths.test_the_boundary_before_a_turn_border_is_hit_when_the_next_turn_rewrites_what_follows(
        CacheMode.ALIGN
    )
)
def turn_borders_are_ignored(patch: Patch) -> None:
    def placed(original, self, **counts):
        return original(self, **{**counts, "turn_borders": ()})

    around(patch, Placement, "placed", placed)


# Keeping and evicting.


@fault(test_checkpoints.test_eviction_takes_interval_checkpoints_first_then_placed_ones_each_least_recently_used_first)
def eviction_ignores_the_class(patch: Patch) -> None:
    def publish(original, self, slot, name, retention):
        original(self, slot, name, Retention.PLACED)

    around(patch, CheckpointStore, "publish", publish)


@fault(test_checkpoints.test_an_interval_save_never_evicts_a_placed_checkpoint)
def an_interval_save_evicts_a_placed_checkpoint(patch: Patch) -> None:
    def try_reserve(original, self, *, placed):
        return original(self, placed=True)

    around(patch, CheckpointStore, "try_reserve", try_reserve)


@fault(test_holdings.test_a_hit_refreshes_its_own_checkpoint_and_no_other)
def a_hit_refreshes_nothing(patch: Patch) -> None:
    patch.setattr(CheckpointStore, "touch", lambda self, name: None)


@fault(test_holdings.test_a_hit_refreshes_its_own_checkpoint_and_no_other)
def a_hit_refreshes_all_it_extends(patch: Patch) -> None:
    def admit(original, self, request, hit, *args, **options):
        for name in request.chain.upto(request.tokens, hit.length):
            self.checkpoints.touch(name)
        original(self, request, hit, *args, **options)

    around(patch, Holdings, "_admit", admit)


@fault(test_holdings.test_the_next_rolling_save_moves_the_last_one_to_the_front_of_eviction)
def a_rolling_save_is_never_superseded(patch: Patch) -> None:
    patch.setattr(Holdings, "_supersede_rolling", lambda self, request, *, by: None)


@fault(lambda: test_hit_lengths.test_a_long_answer_retires_neither_the_prompt_nor_the_turn(0))
def a_rolling_save_evicts_a_prompts_checkpoint_before_its_predecessor(patch: Patch) -> None:
    def try_reserve(original, self, save, name):
        return self.checkpoints.try_reserve(placed=save.retention is not Retention.INTERVAL)

    around(patch, Holdings, "_try_reserve", try_reserve)


@fault(test_holdings.test_placed_saves_get_their_slots_before_interval_ones_and_deep_ones_first)
def saves_get_their_slots_in_the_order_of_rows(patch: Patch) -> None:
    patch.setattr(holdings_module, "sorted", lambda saves, key: saves, raising=False)


@fault(test_blocks.test_a_released_tail_is_evicted_before_its_prefix)
def a_prefix_is_evicted_before_its_tail(patch: Patch) -> None:
    def release(original, self, blocks):
        original(self, list(reversed(blocks)))

    around(patch, BlockPool, "release", release)


@fault(test_blocks.test_eviction_takes_nameless_blocks_first_then_the_longest_unused_tails_first)
def named_blocks_are_evicted_while_nameless_ones_are_idle(patch: Patch) -> None:
    def release(original, self, blocks):
        original(self, blocks)
        for block in blocks:
            if block in self._idle:
                self._idle.move_to_end(block)

    around(patch, BlockPool, "release", release)


# Rows.


@fault(sessions)
def the_read_anchor_is_derived_from_the_length(patch: Patch) -> None:
    def row(original, self, request, phase, *, start, **options):
        made = original(self, request, phase, start=start, **options)
        return made._replace(read_anchor=made.write_anchor if start > 0 else 0)

    around(patch, OpenPlan, "_row", row)


@fault(sessions)
def the_replay_window_counts_rejected_drafts(patch: Patch) -> None:
    def commit_row(original, self, request, row, result, cut):
        original(self, request, row, result, cut)
        if request.status is Status.RUNNING and row.num_drafts:
            request.num_replay = 1 + row.num_drafts

    around(patch, Scheduler, "_commit_row", commit_row)


@fault(sessions)
def what_stands_after_the_cut_is_committed(patch: Patch) -> None:
    def commit_row(original, self, request, row, result, cut):
        original(self, request, row, result, cut._replace(num_kept=len(result.tokens)))

    around(patch, Scheduler, "_commit_row", commit_row)


@fault(sessions)
def a_closing_row_is_skipped_and_the_slot_published_all_the_same(patch: Patch) -> None:
    def end(original, self, request):
        if request.finish in (FinishReason.STOP, FinishReason.LENGTH):
            boundary = self.holdings.turn_end(request)
            if boundary is not None and boundary > request.folded:
                self.holdings.publish_slot(request, self.counts)
                self._drop(request)
                return
        original(self, request)

    around(patch, Scheduler, "_end", end)


@fault(sessions)
def the_table_covers_no_position_beyond_the_last(patch: Patch) -> None:
    patch.setattr(Holdings, "blocks_for", lambda self, computed: max(-(-computed // self.placement.block_size), 1))


@fault(sessions)
def drafts_run_past_the_last_token(patch: Patch) -> None:
    def decode(original, self, request):
        request.max_tokens += 9
        row = original(self, request)
        request.max_tokens -= 9
        return row

    around(patch, OpenPlan, "_decode", decode)


@fault(sessions)
def a_span_ends_off_the_grid(patch: Patch) -> None:
    def prefill(original, self, request):
        size, self._block_size = self._block_size, 1
        row = original(self, request)
        self._block_size = size
        return row

    around(patch, OpenPlan, "_prefill", prefill)


@fault(sessions)
def new_blocks_are_not_sent(patch: Patch) -> None:
    def row(original, self, request, phase, **options):
        made = original(self, request, phase, **options)
        return made._replace(new_blocks=made.new_blocks[:-1] if made.table_start else made.new_blocks)

    around(patch, OpenPlan, "_row", row)


@fault(test_drafts.test_drafts_are_cut_before_anybody_is_preempted)
def somebody_is_preempted_for_drafts(patch: Patch) -> None:
    def decode(original, self, request):
        missing = self._holdings.blocks_for(request.computed + 1 + request.num_drafts) - len(request.blocks)
        if missing > 0 and not self._take_blocks(request, missing):
            return None
        return original(self, request)

    around(patch, OpenPlan, "_decode", decode)


@fault(lambda: test_scheduler.test_requests_of_one_step_that_share_a_prefix_all_answer_right(CacheMode.ALL, 2))
def a_row_is_given_the_pages_that_its_twin_is_just_writing(patch: Patch) -> None:
    """The books are right, and both rows would write the same: only the race itself can tell."""

    def plan(original, self):
        made = original(self)
        if made is None or len(made.rows) < 2 or made.rows[0].phase is not Phase.PREFILL:
            return made
        first, second, *others = made.rows
        shared = (*first.new_blocks[:3], *second.new_blocks[3:])
        self._plans[-1] = replace(made, rows=(first, second._replace(new_blocks=shared), *others))
        return self._plans[-1]

    around(patch, Scheduler, "plan", plan)


# Steps planned ahead.


@fault(sessions)
def what_a_request_holds_is_freed_under_its_row_in_vain(patch: Patch) -> None:
    patch.setattr(Scheduler, "_in_flight", lambda self, request: False)


@fault(sessions)
def a_row_ahead_begins_where_the_one_in_flight_does(patch: Patch) -> None:
    def add_after(original, self, row, request):
        original(self, row._replace(start=row.start - 1), request)

    around(patch, OpenPlan, "add_after", add_after)


@fault(sessions)
def a_row_ahead_runs_the_newest_token_that_the_host_knows(patch: Patch) -> None:
    def add_after(original, self, row, request):
        original(self, row, request)
        self._rows[-1] = self._rows[-1]._replace(tokens=(request.tokens[-1],))

    around(patch, OpenPlan, "add_after", add_after)


@fault(test_plan_ahead.test_one_who_may_be_admitted_is_not_passed_over_and_one_who_may_not_holds_nobody_up)
def who_waits_is_passed_over_by_what_is_planned_ahead(patch: Patch) -> None:
    def plan_ahead(original, self):
        self._may_admit = False
        return original(self)

    around(patch, Scheduler, "plan_ahead", plan_ahead)


@fault(test_plan_ahead.test_a_request_has_no_row_after_the_one_that_emits_its_last_token)
def a_request_whose_last_token_is_in_flight_is_planned_ahead(patch: Patch) -> None:
    def plan_ahead(original, self):
        for request in self._queues.running():
            request.max_tokens += 1
        try:
            return original(self)
        finally:
            for request in self._queues.running():
                request.max_tokens -= 1

    around(patch, Scheduler, "plan_ahead", plan_ahead)


@fault(test_plan_ahead.test_a_state_that_the_step_in_flight_saves_is_not_saved_again_by_a_twin_that_is_one_step_behind)
def what_the_step_in_flight_saves_is_saved_again(patch: Patch) -> None:
    patch.setattr(Scheduler, "_promised", lambda self: [])


# What the fake device could let pass.


@fault(sessions)
def what_a_new_page_holds_by_chance_is_not_written_again(patch: Patch) -> None:
    """Stale content of a block that is lent anew is right by chance: with two tokens, quite often."""

    def write(original, self, table, start, tokens):
        for position, token in enumerate(tokens, start):
            page = self.stale.get(table[position // self.block_size], {})
            if page.get(position % self.block_size) != token:
                original(self, table, position, (token,))

    remember_stale(patch)
    around(patch, TellTaleRunner, "_write", write)


@fault(sessions)
def a_state_that_a_new_slot_holds_by_chance_is_not_written_again(patch: Patch) -> None:
    def prefill(original, self, row, table, state, writes):
        result = original(self, row, table, state, writes)
        for slot in (row.write_anchor, *(export.slot for export in row.exports)):
            if self.stale_slots.get(slot) == writes[slot]:
                del writes[slot]
        return result

    remember_stale(patch)
    around(patch, TellTaleRunner, "_prefill", prefill)


def remember_stale(patch: Patch) -> None:
    """Let the fake device keep a copy of what it is about to forget."""

    def empty(original, self, plan, tables):
        pages, slots = {page: dict(content) for page, content in self.pages.items()}, dict(self.slots)
        original(self, plan, tables)
        self.stale = {page: content for page, content in pages.items() if page not in self.pages}
        self.stale_slots = {slot: state for slot, state in slots.items() if slot not in self.slots}

    around(patch, TellTaleRunner, "_empty_what_is_lent_anew", empty)


# Order and endings.


@fault(sessions)
def the_oldest_is_preempted(patch: Patch) -> None:
    def take_blocks(original, self, request, missing):
        while (taken := self.holdings.blocks.try_take(missing)) is None:
            victim = self._queues.running()[0]
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks.extend(taken)
        return True

    around(patch, Scheduler, "_take_blocks", take_blocks)


@fault(test_scheduler.test_nobody_younger_is_admitted_to_the_blocks_that_a_victim_gave_back)
def a_younger_request_gets_what_a_victim_gave_back(patch: Patch) -> None:
    def preempt(original, self, request):
        original(self, request)
        self._admitting = True
        waiting = self._queues._waiting
        waiting.append(waiting.pop(waiting.index(request)))  # the victim waits behind everybody

    around(patch, Scheduler, "_preempt", preempt)


@fault(test_scheduler.test_requests_are_admitted_in_order_of_arrival_and_not_overtaken)
def a_small_request_overtakes_one_that_must_wait(patch: Patch) -> None:
    def try_admit(original, self, request):
        original(self, request)
        return True

    around(patch, Scheduler, "_try_admit", try_admit)


@fault(test_scheduler.test_siblings_wait_for_their_leaders_prompt_checkpoint_and_hit_it)
def siblings_do_not_wait(patch: Patch) -> None:
    patch.setattr(Scheduler, "_awaits_leader", lambda self, request: False)


@fault(test_endings.test_what_runs_during_a_reset_answers_right_and_publishes_nothing)
def a_request_publishes_after_a_reset(patch: Patch) -> None:
    def reset(original, self):
        original(self)
        for request in self._queues.running():
            request.publishes = True

    around(patch, Scheduler, "reset_prefix_cache", reset)


@fault(sessions)
def a_failed_step_leaves_the_cache(patch: Patch) -> None:
    def fail(original, self, plan, **options):
        for request in self._queues.running():
            request.publishes = False
        blocks, checkpoints = self.holdings.blocks.names(), self.holdings.checkpoints.names()
        old = self.holdings
        ended = original(self, plan, **options)
        if blocks and checkpoints:
            for request in [*ended, *self._queues.live()]:
                request.forget_holdings()
            self.holdings = old
            old._lanes = list(range(old._num_lanes - 1, -1, -1))
            old.blocks.release(list(old.blocks.references().elements()))
            for slot in [*old.checkpoints._running, *old.checkpoints._reserved]:
                old.checkpoints.release(slot)
            for slot in list(old.checkpoints._pins.elements()):
                old.checkpoints.unpin(slot)
        return ended

    around(patch, Scheduler, "fail", fail)


@fault(sessions)
def a_preempted_request_waits_behind_everybody(patch: Patch) -> None:
    def stop(original, self, request):
        original(self, request)
        self._waiting.append(self._waiting.pop(self._waiting.index(request)))

    around(patch, Queues, "stop", stop)


@fault(sessions)
def an_abort_takes_effect_while_the_step_runs(patch: Patch) -> None:
    patch.setattr(Scheduler, "_in_flight", lambda self, request: False)
