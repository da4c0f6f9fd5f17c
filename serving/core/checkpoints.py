"""State slots and the checkpoints published in them.

A state slot holds one recurrent state of every GDN layer (`kernels/anchors.py`). Slots and
checkpoints have one owner, since a slot is at any time exactly one of:

    free        nobody's
    running     a live request's own
    reserved    promised to a save of the plan in flight
    checkpoint  published: immutable, findable by name; pinned while a step may read it, else evictable
    doomed      a checkpoint whose name ended while it was pinned; free when the last pin goes

Two classes of checkpoints, each least recently used: `interval` ones (and superseded rolling ones) are evicted first;
`placed` ones only when no interval one is left, and never for an interval save. A rolling checkpoint is placed for as
long as its request has made no newer one; once anything else wants it placed, it stays so.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from enum import StrEnum
from typing import NewType

from gdn_jax.serving.core.blocks import BlockHash
from gdn_jax.serving.core.errors import InvariantError

SlotId = NewType("SlotId", int)
NULL_SLOT = SlotId(0)


class Retention(StrEnum):
    """Why a checkpoint is kept, and so how long."""

    INTERVAL = "interval"  # it lies on a grid, and nobody is known to look for it
    ROLLING = "rolling"  # the turn end of a live request, if that should end here
    PLACED = "placed"  # a later request is expected to look for it


class CheckpointStore:
    """Owns every state slot but the null slot, and the names of the published ones."""

    def __init__(self, num_slots: int) -> None:
        """Create a store in which every slot is free.

        Args:
            num_slots: ids 0..num_slots - 1, the null slot included.
        """
        if num_slots < 2:
            raise ValueError(f"num_slots must be at least 2, as slot 0 is reserved; got {num_slots}")
        self._num_slots = num_slots
        self._free = [SlotId(i) for i in range(num_slots - 1, 0, -1)]
        self._running: set[SlotId] = set()
        self._reserved: set[SlotId] = set()
        self._slot_of: dict[BlockHash, SlotId] = {}
        self._name_of: dict[SlotId, BlockHash] = {}
        self._interval: OrderedDict[BlockHash, None] = OrderedDict()  # next victim first; pinned ones stay listed
        self._placed: OrderedDict[BlockHash, None] = OrderedDict()
        self._rolling: set[BlockHash] = set()  # of the placed ones
        self._pins: Counter[SlotId] = Counter()
        self._doomed: set[SlotId] = set()
        self.num_evicted = 0

    @property
    def num_usable(self) -> int:
        """Slots that a request may ever own."""
        return self._num_slots - 1

    @property
    def num_published(self) -> int:
        """Checkpoints that can be found."""
        return len(self._slot_of)

    @property
    def num_owned(self) -> int:
        """Slots that are running, reserved, pinned or doomed: zero when no request is alive."""
        return len(self._running) + len(self._reserved) + len(self._pins)

    def lookup(self, name: BlockHash) -> SlotId | None:
        """Return the slot published under `name`; changes nothing."""
        return self._slot_of.get(name)

    def can_take(self, keep: SlotId | None = None) -> bool:
        """Return whether `try_take` would succeed without evicting the checkpoint in `keep`."""
        if self._free:
            return True
        return self._victim(placed=True, keep=keep) is not None

    def try_take(self) -> SlotId | None:
        """Lend a slot to a request, evicting if it must; None, and no change, if every slot is owned or pinned."""
        slot = self._obtain(placed=True)
        if slot is not None:
            self._running.add(slot)
        return slot

    def try_reserve(self, *, placed: bool) -> SlotId | None:
        """Promise a slot to a save of the plan in flight; None if none may be had.

        Args:
            placed: whether the save may evict a placed checkpoint; an interval save never does.
        """
        slot = self._obtain(placed=placed)
        if slot is not None:
            self._reserved.add(slot)
        return slot

    def publish(self, slot: SlotId, name: BlockHash, retention: Retention) -> None:
        """Turn a running or reserved slot into a checkpoint; a name already known frees the newcomer.

        A placed newcomer places the known checkpoint of its name.
        """
        self._take_back(slot)
        if name in self._slot_of:
            self._free.append(slot)
            if retention is Retention.PLACED:
                self.place(name)
            return
        self._slot_of[name], self._name_of[slot] = slot, name
        (self._interval if retention is Retention.INTERVAL else self._placed)[name] = None
        if retention is Retention.ROLLING:
            self._rolling.add(name)

    def release(self, slot: SlotId) -> None:
        """Give back a running or reserved slot."""
        self._take_back(slot)
        self._free.append(slot)

    def touch(self, name: BlockHash) -> None:
        """Make a checkpoint the most recently used of its class: a hit refreshes only itself."""
        for retained in (self._interval, self._placed):
            if name in retained:
                retained.move_to_end(name)

    def place(self, name: BlockHash) -> None:
        """Turn an interval or rolling checkpoint, if it is there, into a placed one."""
        self._rolling.discard(name)
        if name in self._interval:
            del self._interval[name]
            self._placed[name] = None

    def demote(self, name: BlockHash) -> None:
        """Turn a rolling checkpoint, if it is still one, into an interval one."""
        if name in self._rolling:
            self._rolling.remove(name)
            del self._placed[name]
            self._interval[name] = None

    def supersede(self, name: BlockHash) -> None:
        """Move a rolling checkpoint, if it is still one, to the front of eviction."""
        if name in self._rolling:
            self.demote(name)
            self._interval.move_to_end(name, last=False)

    def pin(self, slot: SlotId) -> None:
        """Forbid the eviction of a checkpoint while a step may read it."""
        if slot not in self._name_of:
            raise InvariantError(f"slot {slot} is pinned but holds no checkpoint")
        self._pins[slot] += 1

    def unpin(self, slot: SlotId) -> None:
        """Take one pin back; a doomed slot without pins becomes free."""
        if self._pins[slot] == 0:
            raise InvariantError(f"slot {slot} is unpinned more often than pinned")
        self._pins[slot] -= 1
        if self._pins[slot] == 0:
            del self._pins[slot]
            if slot in self._doomed:
                self._doomed.remove(slot)
                self._free.append(slot)

    def can_take_over(self, slot: SlotId) -> bool:
        """Return whether a checkpoint has no pin, so that a request may turn it into its running slot."""
        return slot in self._name_of and self._pins[slot] == 0

    def take_over(self, slot: SlotId) -> None:
        """Unpublish a checkpoint nobody pins and make it a running slot, content kept."""
        if not self.can_take_over(slot):
            raise InvariantError(f"slot {slot} cannot be taken over: it is pinned or holds no checkpoint")
        self._unpublish(self._name_of[slot])
        self._running.add(slot)

    def drop(self, name: BlockHash) -> None:
        """End a name, if it is there: its slot is free now, or when its last pin goes."""
        if name not in self._slot_of:
            return
        slot = self._unpublish(name)
        if self._pins[slot]:
            self._doomed.add(slot)
        else:
            self._free.append(slot)

    def evict(self, name: BlockHash) -> None:
        """Drop a checkpoint, if it is there, to make room or because its block chain broke."""
        if name in self._slot_of:
            self.drop(name)
            self.num_evicted += 1

    def drop_all(self) -> None:
        """End every name."""
        for name in list(self._slot_of):
            self.drop(name)

    def names(self) -> dict[BlockHash, SlotId]:
        """Return a copy of the published names, for audits."""
        return dict(self._slot_of)

    def is_placed(self, name: BlockHash) -> bool:
        """Return whether a checkpoint of the placed class has this name."""
        return name in self._placed

    def _obtain(self, *, placed: bool) -> SlotId | None:
        if not self._free:
            victim = self._victim(placed=placed, keep=None)
            if victim is None:
                return None
            self.evict(victim)
        return self._free.pop()

    def _victim(self, *, placed: bool, keep: SlotId | None) -> BlockHash | None:
        for retained in (self._interval, self._placed) if placed else (self._interval,):
            for name in retained:
                slot = self._slot_of[name]
                if slot != keep and slot not in self._pins:
                    return name
        return None

    def _unpublish(self, name: BlockHash) -> SlotId:
        slot = self._slot_of.pop(name)
        del self._name_of[slot]
        self._interval.pop(name, None)
        self._placed.pop(name, None)
        self._rolling.discard(name)
        return slot

    def _take_back(self, slot: SlotId) -> None:
        if slot in self._running:
            self._running.remove(slot)
        elif slot in self._reserved:
            self._reserved.remove(slot)
        else:
            raise InvariantError(f"slot {slot} is neither running nor reserved")

    def check(self) -> None:
        """Raise InvariantError unless each slot is in exactly one state and the tables mirror."""
        states = [*self._free, *self._running, *self._reserved, *self._name_of, *self._doomed]
        if sorted(states) != list(range(1, self._num_slots)):
            raise InvariantError(f"slots are in no state or in two: {sorted(states)}")
        if {slot: name for name, slot in self._slot_of.items()} != self._name_of:
            raise InvariantError("name-to-slot and slot-to-name tables disagree")
        if sorted([*self._interval, *self._placed]) != sorted(self._slot_of):
            raise InvariantError("a checkpoint is in no retention class or in two")
        if not set(self._pins) <= {*self._name_of, *self._doomed} or not self._doomed <= set(self._pins):
            raise InvariantError("a pin on a slot without checkpoint, or a doomed slot without pin")
        if not self._rolling <= set(self._placed):
            raise InvariantError("a rolling checkpoint is not in the placed class")
        if any(count <= 0 for count in self._pins.values()):
            raise InvariantError("a pin count is not positive")

    def check_owners(self, *, running: Sequence[SlotId], reserved: Sequence[SlotId], pins: Sequence[SlotId]) -> None:
        """Raise InvariantError unless exactly these slots, each once, are running and reserved, and these pins set."""
        if sorted(running) != sorted(self._running):
            raise InvariantError(f"slots {sorted(self._running)} are running, and requests own {sorted(running)}")
        if sorted(reserved) != sorted(self._reserved):
            raise InvariantError(
                f"slots {sorted(self._reserved)} are reserved, and the plan saves to {sorted(reserved)}"
            )
        if Counter(pins) != self._pins:
            raise InvariantError(f"pins are {self._pins}, and requests start from {sorted(pins)}")
