"""State slots: one state each at any time; what is evicted, in what order, and what never is."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gdn_jax.serving.core.blocks import BlockHash
from gdn_jax.serving.core.checkpoints import NULL_SLOT, CheckpointStore, Retention, SlotId
from gdn_jax.serving.core.errors import InvariantError

NAMES = [BlockHash(name) for name in (b"a", b"b", b"c", b"d", b"e")]
A, B, C, D, E = NAMES
INTERVAL, ROLLING, PLACED = Retention.INTERVAL, Retention.ROLLING, Retention.PLACED


def publish(store: CheckpointStore, name: BlockHash, retention: Retention) -> SlotId:
    slot = store.try_reserve(placed=retention is not INTERVAL)
    assert slot is not None
    store.publish(slot, name, retention)
    return slot


def eviction_order(store: CheckpointStore) -> list[BlockHash]:
    """Take slots until none is left, and say whose names ended, in order."""
    order: list[BlockHash] = []
    before = store.names()
    while store.try_take() is not None:
        order += before.keys() - store.names().keys()
        before = store.names()
    return order


def test_a_store_needs_a_slot_beside_the_null_slot() -> None:
    with pytest.raises(ValueError, match="at least 2, as slot 0 is reserved; got 1"):
        CheckpointStore(1)


def test_the_null_slot_is_never_lent_and_no_slot_is_lent_twice() -> None:
    store = CheckpointStore(4)
    slots = [store.try_take(), store.try_reserve(placed=True), store.try_take()]
    assert sorted(slot or 0 for slot in slots) == [1, 2, 3]
    assert store.try_take() is None
    assert store.try_reserve(placed=True) is None
    assert NULL_SLOT == 0
    assert store.num_usable == 3


def test_a_slot_stays_with_its_owner_while_others_come_and_go() -> None:
    store = CheckpointStore(3)
    kept = store.try_take()
    for _ in range(5):
        slot = store.try_take()
        assert slot not in (kept, None)
        store.release(slot)


def test_eviction_takes_interval_checkpoints_first_then_placed_ones_each_least_recently_used_first() -> None:
    store = CheckpointStore(6)
    for name, retention in ((A, PLACED), (B, INTERVAL), (C, PLACED), (D, INTERVAL), (E, PLACED)):
        publish(store, name, retention)
    store.touch(B)  # used again: behind D, but before every placed one
    store.touch(A)
    assert eviction_order(store) == [D, B, C, E, A]
    assert store.num_evicted == 5


def test_a_hit_refreshes_only_itself() -> None:
    store = CheckpointStore(5)
    for name in (A, B, C, D):
        publish(store, name, PLACED)
    store.touch(C)
    assert eviction_order(store) == [A, B, D, C]


def test_a_superseded_rolling_checkpoint_is_the_first_to_go() -> None:
    store = CheckpointStore(5)
    for name, retention in ((A, INTERVAL), (B, ROLLING), (C, INTERVAL), (D, ROLLING)):
        publish(store, name, retention)
    store.supersede(B)
    assert eviction_order(store) == [B, A, C, D]


def test_a_rolling_checkpoint_on_the_interval_becomes_as_good_as_any_such() -> None:
    store = CheckpointStore(5)
    for name, retention in ((A, ROLLING), (B, INTERVAL), (C, PLACED)):
        publish(store, name, retention)
    store.demote(A)
    assert eviction_order(store) == [B, A, C]


def test_a_rolling_checkpoint_that_somebody_wants_placed_is_superseded_no_more() -> None:
    store = CheckpointStore(4)
    for name, retention in ((A, ROLLING), (B, PLACED), (C, ROLLING)):
        publish(store, name, retention)
    store.place(A)
    store.supersede(A)
    store.demote(A)
    store.supersede(B)
    store.demote(B)
    assert store.is_placed(A)
    assert eviction_order(store) == [A, B, C]


def test_an_interval_save_never_evicts_a_placed_checkpoint() -> None:
    store = CheckpointStore(3)
    publish(store, A, PLACED)
    publish(store, B, ROLLING)
    assert store.try_reserve(placed=False) is None
    assert store.num_published == 2
    store.supersede(B)
    assert store.try_reserve(placed=False) is not None
    assert store.names().keys() == {A}


def test_a_pinned_checkpoint_is_never_evicted() -> None:
    store = CheckpointStore(3)
    pinned = publish(store, A, INTERVAL)
    publish(store, B, PLACED)
    store.pin(pinned)
    assert store.try_take() is not None
    assert store.names() == {A: pinned}
    assert not store.can_take()
    assert store.try_take() is None
    store.unpin(pinned)
    assert store.can_take()
    assert not store.can_take(keep=pinned)
    assert store.try_take() == pinned


def test_a_name_that_ends_while_it_is_pinned_frees_its_slot_with_the_last_pin() -> None:
    store = CheckpointStore(2)
    slot = publish(store, A, PLACED)
    store.pin(slot)
    store.pin(slot)
    store.drop(A)
    assert store.lookup(A) is None
    assert store.try_take() is None
    assert store.num_owned == 1
    store.unpin(slot)
    assert store.try_take() is None
    store.unpin(slot)
    assert store.num_owned == 0
    assert store.try_take() == slot
    store.check()


def test_a_name_already_known_frees_the_newcomer() -> None:
    store = CheckpointStore(3)
    first = publish(store, A, INTERVAL)
    second = store.try_take()
    assert second is not None
    store.publish(second, A, PLACED)
    assert store.names() == {A: first}
    assert store.is_placed(A)
    assert store.num_owned == 0
    assert store.try_take() == second


def test_a_rolling_newcomer_of_a_known_name_leaves_its_class_alone() -> None:
    store = CheckpointStore(3)
    publish(store, A, INTERVAL)
    publish(store, A, ROLLING)
    assert not store.is_placed(A)
    store.check()


def test_taking_over_unpublishes_a_checkpoint_and_keeps_its_slot() -> None:
    store = CheckpointStore(2)
    slot = publish(store, A, PLACED)
    assert store.can_take_over(slot)
    store.take_over(slot)
    assert store.lookup(A) is None
    assert not store.can_take_over(slot)
    assert store.num_owned == 1
    store.release(slot)
    assert store.num_owned == 0


def test_a_pinned_checkpoint_cannot_be_taken_over() -> None:
    store = CheckpointStore(2)
    slot = publish(store, A, PLACED)
    store.pin(slot)
    assert not store.can_take_over(slot)
    with pytest.raises(InvariantError, match="cannot be taken over"):
        store.take_over(slot)
    assert store.lookup(A) == slot


def test_dropping_everything_spares_only_what_is_pinned_until_its_pin_goes() -> None:
    store = CheckpointStore(4)
    slots = [publish(store, name, retention) for name, retention in ((A, PLACED), (B, ROLLING), (C, INTERVAL))]
    store.pin(slots[1])
    store.drop_all()
    store.drop_all()
    assert store.num_published == 0
    assert store.num_owned == 1
    assert store.num_evicted == 0
    store.unpin(slots[1])
    store.check()
    assert [store.try_take() is not None for _ in range(4)] == [True, True, True, False]


def test_what_an_eviction_of_blocks_cuts_off_counts_as_evicted_once() -> None:
    store = CheckpointStore(3)
    publish(store, A, PLACED)
    store.evict(A)
    store.evict(A)
    assert store.num_evicted == 1


@pytest.mark.parametrize(
    ("slip", "message"),
    [
        (lambda store: store.release(SlotId(1)), "neither running nor reserved"),
        (lambda store: store.release(publish(store, A, PLACED)), "neither running nor reserved"),
        (lambda store: store.publish(SlotId(1), A, PLACED), "neither running nor reserved"),
        (lambda store: store.pin(SlotId(1)), "holds no checkpoint"),
        (lambda store: store.pin(store.try_take()), "holds no checkpoint"),
        (lambda store: store.unpin(publish(store, A, PLACED)), "unpinned more often than pinned"),
        (lambda store: store.take_over(SlotId(1)), "cannot be taken over"),
    ],
)
def test_a_slip_of_the_caller_is_refused(slip, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        slip(CheckpointStore(3))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda store: store._free.append(SlotId(1)), "in no state or in two"),
        (lambda store: store._running.clear(), "in no state or in two"),
        (lambda store: store._slot_of.update({B: SlotId(1)}), "tables disagree"),
        (lambda store: store._interval.update({A: None}), "in no retention class or in two"),
        (lambda store: store._pins.update([SlotId(3)]), "a pin on a slot without checkpoint"),
        (lambda store: store._pins.update({store.lookup(A): -1}), "not positive"),
        (lambda store: store._rolling.add(E), "not in the placed class"),
    ],
)
def test_the_check_sees_books_that_are_wrong(break_it, message: str) -> None:
    store = CheckpointStore(5)
    publish(store, A, PLACED)
    store.try_take()
    store.check()
    break_it(store)
    with pytest.raises(InvariantError, match=message):
        store.check()


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ({"running": []}, "are running"),
        ({"running": [3, 3]}, "are running"),
        ({"reserved": [2, 4]}, "are reserved"),
        ({"pins": []}, "pins are"),
        ({"pins": [4]}, "pins are"),
    ],
)
def test_owners_that_are_not_the_books_are_seen(owners: dict, message: str) -> None:
    store = CheckpointStore(5)
    pinned = publish(store, A, PLACED)
    running, reserved = store.try_take(), store.try_reserve(placed=True)
    store.pin(pinned)
    store.pin(pinned)
    right = {"running": [running], "reserved": [reserved], "pins": [pinned, pinned]}
    store.check_owners(**right)
    with pytest.raises(InvariantError, match=message):
        store.check_owners(**{**right, **owners})


# A machine against a model made of plain dictionaries and lists.


class CheckpointMachine(RuleBasedStateMachine):
    """The model keeps one list per retention class, next victim first, and a set of free slots."""

    def __init__(self) -> None:
        super().__init__()
        self.store = CheckpointStore(6)
        self.free = {SlotId(number) for number in range(1, 6)}
        self.running: set[SlotId] = set()
        self.reserved: set[SlotId] = set()
        self.slots: dict[BlockHash, SlotId] = {}
        self.interval: list[BlockHash] = []
        self.placed: list[BlockHash] = []
        self.rolling: set[BlockHash] = set()
        self.pins: Counter[SlotId] = Counter()
        self.doomed: set[SlotId] = set()

    def _end(self, name: BlockHash) -> None:
        slot = self.slots.pop(name)
        for retained in (self.interval, self.placed):
            if name in retained:
                retained.remove(name)
        self.rolling.discard(name)
        (self.doomed if self.pins[slot] else self.free).add(slot)

    def _expect(self, slot: SlotId | None, *, placed: bool) -> None:
        """Find the slot that a taker must have got, as the model has it."""
        if not self.free:
            victims = [*self.interval, *(self.placed if placed else [])]
            unpinned = [name for name in victims if not self.pins[self.slots[name]]]
            if not unpinned:
                assert slot is None
                return
            self._end(unpinned[0])
            assert slot in self.free
        assert slot in self.free
        self.free.remove(slot)

    @rule()
    def take(self) -> None:
        can = self.store.can_take()
        slot = self.store.try_take()
        assert can == (slot is not None)
        self._expect(slot, placed=True)
        if slot is not None:
            self.running.add(slot)

    @rule(placed=st.booleans())
    def reserve(self, placed: bool) -> None:
        slot = self.store.try_reserve(placed=placed)
        self._expect(slot, placed=placed)
        if slot is not None:
            self.reserved.add(slot)

    def _draw_owned(self, data: st.DataObject) -> SlotId | None:
        owned = sorted(self.running | self.reserved)
        if not owned:
            return None
        slot = data.draw(st.sampled_from(owned))
        self.running.discard(slot)
        self.reserved.discard(slot)
        return slot

    @rule(data=st.data(), name=st.sampled_from(NAMES), retention=st.sampled_from(list(Retention)))
    def publish(self, data: st.DataObject, name: BlockHash, retention: Retention) -> None:
        if (slot := self._draw_owned(data)) is None:
            return
        self.store.publish(slot, name, retention)
        if name in self.slots:
            self.free.add(slot)
            if retention is PLACED:
                self._place(name)
            return
        self.slots[name] = slot
        (self.interval if retention is INTERVAL else self.placed).append(name)
        if retention is ROLLING:
            self.rolling.add(name)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if (slot := self._draw_owned(data)) is not None:
            self.store.release(slot)
            self.free.add(slot)

    def _place(self, name: BlockHash) -> None:
        self.rolling.discard(name)
        if name in self.interval:
            self.interval.remove(name)
            self.placed.append(name)

    @rule(name=st.sampled_from(NAMES), what=st.sampled_from(["touch", "place", "demote", "supersede", "drop", "evict"]))
    def change(self, name: BlockHash, what: str) -> None:
        getattr(self.store, what)(name)
        if name not in self.slots:
            return
        if what == "touch":
            retained = self.interval if name in self.interval else self.placed
            retained.remove(name)
            retained.append(name)
        elif what == "place":
            self._place(name)
        elif what in ("demote", "supersede") and name in self.rolling:
            self.rolling.remove(name)
            self.placed.remove(name)
            self.interval.insert(len(self.interval) if what == "demote" else 0, name)
        elif what in ("drop", "evict"):
            self._end(name)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = self.slots[data.draw(st.sampled_from(sorted(self.slots)))]
        self.store.pin(slot)
        self.pins[slot] += 1

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(+self.pins)))
        self.store.unpin(slot)
        self.pins[slot] -= 1
        if not self.pins[slot] and slot in self.doomed:
            self.doomed.remove(slot)
            self.free.add(slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.slots)))
        slot = self.slots[name]
        assert self.store.can_take_over(slot) == (not self.pins[slot])
        if not self.pins[slot]:
            self.store.take_over(slot)
            self._end(name)
            self.free.remove(slot)
            self.running.add(slot)

    @rule()
    def drop_all(self) -> None:
        self.store.drop_all()
        for name in list(self.slots):
            self._end(name)

    @invariant()
    def books_agree(self) -> None:
        self.store.check()
        self.store.check_owners(
            running=list(self.running), reserved=list(self.reserved), pins=list(self.pins.elements())
        )
        assert self.store.names() == self.slots
        assert [self.store.lookup(name) for name in NAMES] == [self.slots.get(name) for name in NAMES]
        assert list(self.store._interval) == self.interval
        assert list(self.store._placed) == self.placed
        assert self.store.num_owned == len(self.running) + len(self.reserved) + len(+self.pins)
        for slot in self.slots.values():
            others = [s for s in self.slots.values() if s != slot and not self.pins[s]]
            assert self.store.can_take(keep=slot) == bool(self.free or others)


CheckpointMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestCheckpointMachine = CheckpointMachine.TestCase
