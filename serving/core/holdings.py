"""What requests hold, and every change to it: blocks, a state slot, a lane, a pin; and what they publish.

Holdings composes the pools. The scheduler decides *when* a request is admitted, preempted or ended; here is *what* then
moves between the books. Admission is all or none; publishing happens only in commit, for tokens that are committed and
computed.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gdn_jax.serving.core.blocks import BlockHash, BlockPool
from gdn_jax.serving.core.checkpoints import NULL_SLOT, CheckpointStore, Retention, SlotId
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.serving.core.placement import Placement
from gdn_jax.serving.core.plan import Export
from gdn_jax.serving.core.prefix_cache import MISS, PrefixHit, lookup
from gdn_jax.serving.core.request import Request


@dataclass(kw_only=True)
class Counts:
    """What happened so far, in tokens and events."""

    queried_tokens: int = 0  # known tokens of the requests that were looked up at admission
    hit_tokens: int = 0  # those of them that came with a checkpoint
    gap_tokens: int = 0  # known blocks computed again, for their state
    prefilled_tokens: int = 0
    saves: int = 0
    saves_skipped: int = 0
    preemptions: int = 0
    admissions: int = 0


@dataclass(frozen=True, kw_only=True)
class Save:
    """A boundary of a row that deserves a checkpoint.

    Attributes:
        request: whose state.
        boundary: absolute token count.
        retention: why it is kept.
    """

    request: Request
    boundary: int
    retention: Retention


class Holdings:
    """The pools and the lanes, with the moves between them."""

    def __init__(self, *, num_blocks: int, num_slots: int, num_lanes: int, placement: Placement) -> None:
        """Create pools in which nobody holds anything.

        Args:
            num_blocks: KV blocks, the null block included.
            num_slots: state slots, the null slot included.
            num_lanes: most requests that hold something at once.
            placement: the cache mode's rule.
        """
        self.checkpoints = CheckpointStore(num_slots)
        self.blocks = BlockPool(num_blocks, on_evict=self.checkpoints.evict)
        self.placement = placement
        self._num_lanes = num_lanes
        self._lanes = list(range(num_lanes - 1, -1, -1))

    def blocks_for(self, computed: int) -> int:
        """Return how many blocks cover `computed` tokens and one position beyond."""
        return computed // self.placement.block_size + 1

    def lookup(self, request: Request) -> PrefixHit:
        """Return the longest usable hit of a request's known tokens; changes nothing."""
        if not (self.placement.caches and request.use_cache):
            return MISS
        return lookup(
            request.chain.upto(request.tokens, request.num_known),
            request.num_known - 1,
            blocks=self.blocks,
            checkpoints=self.checkpoints,
            block_size=self.placement.block_size,
        )

    def try_admit(self, request: Request, counts: Counts) -> bool:
        """Give a request blocks for its known tokens, a slot and a lane; or change nothing and return False.

        When no slot but the hit's own can be had and nobody else pins it, the request takes that checkpoint over.
        """
        if not self._lanes:  # before anything is looked up: as long as all lanes are taken, this is asked at every step
            return False
        hit = self.lookup(request)
        needed = self.blocks_for(request.num_known) - len(hit.blocks)
        if self.blocks.num_idle - self.blocks.count_idle(hit.blocks) < needed:
            return False
        keep = hit.slot if hit.length else None
        take_over = keep is not None and not self.checkpoints.can_take(keep)
        if take_over and not self.checkpoints.can_take_over(hit.slot):
            return False
        if keep is None and not self.checkpoints.can_take():
            return False
        self._admit(request, hit, needed, take_over=take_over)
        counts.admissions += 1
        if self.placement.caches and request.use_cache:
            counts.queried_tokens += request.num_known
            counts.hit_tokens += hit.length
            counts.gap_tokens += max(hit.junction - hit.length, 0)
        return True

    def _admit(self, request: Request, hit: PrefixHit, needed: int, *, take_over: bool) -> None:
        self.blocks.hold(hit.blocks)  # before anything is evicted
        if hit.name is not None:
            self.checkpoints.touch(hit.name)
        if take_over:
            self.checkpoints.take_over(hit.slot)
        elif hit.length:
            self.checkpoints.pin(hit.slot)
            request.pinned = hit.slot
        own = self.blocks.try_take(needed)  # before the slot: a checkpoint it cuts off leaves one free
        slot = hit.slot if take_over else self.checkpoints.try_take()
        if slot is None or own is None:
            raise InvariantError(f"request {request.request_id} was admitted without what was counted for it")
        request.slot, request.read_anchor, request.lane = slot, hit.slot, self._lanes.pop()
        request.blocks, request.num_sent_blocks = [*hit.blocks, *own], 0
        request.folded, request.num_replay, request.num_drafts, request.has_pending = hit.length, 0, 0, False
        request.publishes = True
        request.placed = self.placement.placed(
            num_prompt=request.num_prompt,
            num_known=request.num_known,
            turn_borders=request.turn_borders,
            junction=hit.junction,
        )
        if hit.name is not None and hit.length in request.placed and hit.name != request.rolling:
            self.checkpoints.place(hit.name)
        if request.num_cached is None:
            request.num_cached = hit.length

    def unpin(self, request: Request) -> None:
        """Let go of the checkpoint a request started from: its state is in its own slot now."""
        if request.pinned is not None:
            self.checkpoints.unpin(request.pinned)
            request.pinned = None

    def release(self, request: Request) -> None:
        """Take back everything a request holds."""
        self.unpin(request)
        if request.slot != NULL_SLOT:
            self.checkpoints.release(request.slot)
        self.blocks.release(request.blocks)
        self._lanes.append(request.lane)
        request.forget_holdings()

    # Saves: reserved by a plan, published or freed by its commit.

    def reserve(
        self, saves: Sequence[Save], counts: Counts, promised: Collection[BlockHash] = ()
    ) -> list[tuple[Save, Export]]:
        """Reserve slots for a plan's saves: placed before interval ones, deepest first, none for a known name.

        A save that gets no slot is skipped and counted, never waited for. A known name that is wanted placed is placed.

        Args:
            saves: what the plan's rows want.
            counts: where saves that are skipped are counted.
            promised: names that a step in flight saves, for which nothing is reserved either.
        """
        reserved: list[tuple[Save, Export]] = []
        names = set(promised)
        for save in sorted(saves, key=lambda save: (save.retention is Retention.INTERVAL, -save.boundary)):
            name = save.request.chain.name(save.request.tokens, save.boundary)
            if name in names:
                continue
            if self.checkpoints.lookup(name) is not None:
                if save.retention is Retention.ROLLING:
                    self._supersede_rolling(save.request, by=name)
                elif save.retention is Retention.PLACED:
                    self.checkpoints.place(name)
                continue
            slot = self._try_reserve(save, name)
            if slot is None:
                counts.saves_skipped += 1
                continue
            names.add(name)
            reserved.append((save, Export(boundary=save.boundary, slot=slot, retention=save.retention)))
        return reserved

    def _try_reserve(self, save: Save, name: BlockHash) -> SlotId | None:
        """Reserve a slot for a save; a rolling one rather replaces its predecessor than evicts a placed one."""
        if save.retention is Retention.ROLLING:
            slot = self.checkpoints.try_reserve(placed=False)
            if slot is None:
                self._supersede_rolling(save.request, by=name)
                slot = self.checkpoints.try_reserve(placed=False)
            if slot is not None:
                return slot
        return self.checkpoints.try_reserve(placed=save.retention is not Retention.INTERVAL)

    def commit_export(self, request: Request, export: Export, counts: Counts, *, stored: bool) -> None:
        """Publish the state a row stored in a reserved slot, or free the slot."""
        if not (stored and request.publishes):
            self.checkpoints.release(export.slot)
            return
        name = request.chain.name(request.tokens, export.boundary)
        newcomer = self.checkpoints.lookup(name) is None
        self.checkpoints.publish(export.slot, name, export.retention)
        counts.saves += newcomer
        if export.retention is Retention.ROLLING:
            self._supersede_rolling(request, by=name)
            if newcomer:
                request.rolling, request.rolling_at = name, export.boundary

    def publish_blocks(self, request: Request) -> None:
        """Publish every own block that committed, computed tokens cover and whose name is unknown."""
        if not (self.placement.caches and request.publishes):
            return
        size, chain, tokens = self.placement.block_size, request.chain, request.tokens
        count = min(request.computed, request.num_known) // size
        if count == 0 or self.blocks.is_known(chain.name(tokens, count * size)):
            return  # nothing new, as at most steps
        first = count - 1
        while first and not self.blocks.is_known(chain.name(tokens, first * size)):
            first -= 1
        parent = chain.name(tokens, first * size) if first else None
        for index in range(first, count):
            name = chain.name(tokens, (index + 1) * size)
            self.blocks.publish(request.blocks[index], name, parent)
            parent = name

    def turn_end(self, request: Request) -> int | None:
        """Return the boundary a finished request should leave a checkpoint at; None if its state is past it."""
        if not (self.placement.caches and request.publishes):
            return None
        size = self.placement.block_size
        boundary = min(request.computed, request.num_known) // size * size
        if boundary == 0 or boundary < request.folded:
            return None  # the rolling save, if there is one, stands
        return boundary

    def keep_known(self, request: Request, boundary: int) -> bool:
        """Place the checkpoint that a finished request's turn end has already; False if there is none."""
        name = request.chain.name(request.tokens, boundary)
        if self.checkpoints.lookup(name) is None:
            return False
        self.checkpoints.place(name)
        self._supersede_rolling(request, by=name)
        return True

    def publish_slot(self, request: Request, counts: Counts) -> None:
        """Publish a finished request's running slot itself, under the boundary it holds."""
        if not request.publishes:
            return
        self.publish_blocks(request)
        name = request.chain.name(request.tokens, request.folded)
        counts.saves += self.checkpoints.lookup(name) is None
        self.checkpoints.publish(request.slot, name, Retention.PLACED)
        request.slot = NULL_SLOT
        self._supersede_rolling(request, by=name)

    def _supersede_rolling(self, request: Request, *, by: BlockHash) -> None:
        """Let a request's rolling checkpoint go, unless it is the one named `by`: a newer one stands for its turn end.

        One that lies on the interval is worth as much as any such; any other is worth least of all.
        """
        if request.rolling is None or request.rolling == by:
            return
        if self.placement.on_interval(request.rolling_at):
            self.checkpoints.demote(request.rolling)
        else:
            self.checkpoints.supersede(request.rolling)
        request.rolling = None

    def reset_cache(self) -> None:
        """End every name; a checkpoint that a step is reading goes when its pin does."""
        self.blocks.forget_all()
        self.checkpoints.drop_all()

    def check(self, holders: Sequence[Request], exports: Sequence[Export]) -> None:
        """Raise InvariantError unless the pools' books agree with what the holders and the plan in flight hold."""
        self.blocks.check()
        self.checkpoints.check()
        held = Counter(block for request in holders for block in request.blocks)
        if self.blocks.references() != held:
            raise InvariantError(f"references are {self.blocks.references()}, and requests hold {held}")
        self.checkpoints.check_owners(
            running=[request.slot for request in holders],
            reserved=[export.slot for export in exports],
            pins=[request.pinned for request in holders if request.pinned is not None],
        )
        lanes = [*self._lanes, *(request.lane for request in holders)]
        if sorted(lanes) != list(range(self._num_lanes)):
            raise InvariantError(f"lanes are lost or shared: {sorted(lanes)}")
        for name in self.checkpoints.names():
            if not self.blocks.is_known(name):
                raise InvariantError("a checkpoint's block chain is broken")
