"""What requests hold, and every change to it: blocks, a state slot, a lane, a pin; and what they publish.

Holdings composes the pools. The scheduler decides *when* a request is admitted, preempted or ended; here is *what* then
moves between the books. Admission is all or none; publishing happens only in commit, for tokens that are committed and
computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gdn_jax.serving.core.blocks import BlockPool
from gdn_jax.serving.core.checkpoints import NULL_SLOT, CheckpointStore
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
        placed: retention class.
        rolling: made by a fold.
    """

    request: Request
    boundary: int
    placed: bool
    rolling: bool


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
        self.blocks = BlockPool(num_blocks, on_evict=self.checkpoints.drop)
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
        hit = self.lookup(request)
        needed = self.blocks_for(request.num_known) - len(hit.blocks)
        if not self._lanes or self.blocks.num_idle - self.blocks.count_idle(hit.blocks) < needed:
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
            slot = hit.slot
        else:
            if hit.length:
                self.checkpoints.pin(hit.slot)
                request.pinned = hit.slot
            slot = self.checkpoints.try_take()
        own = self.blocks.try_take(needed)
        if slot is None or own is None:
            raise InvariantError(f"request {request.request_id} was admitted without what was counted for it")
        request.slot, request.read_anchor, request.lane = slot, hit.slot, self._lanes.pop()
        request.blocks, request.num_sent_blocks = [*hit.blocks, *own], 0
        request.folded, request.num_replay, request.num_drafts = hit.length, 0, 0
        request.publishes = True
        request.placed = self.placement.placed(
            num_prompt=request.num_prompt,
            num_known=request.num_known,
            turn_borders=request.turn_borders,
            junction=hit.junction,
        )
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

    def reserve(self, saves: Sequence[Save], counts: Counts) -> list[tuple[Save, Export]]:
        """Reserve slots for a plan's saves: placed before interval ones, deepest first, none for a known name.

        A save that gets no slot is skipped and counted, never waited for.
        """
        reserved: list[tuple[Save, Export]] = []
        names = set[bytes]()
        for save in sorted(saves, key=lambda save: (not save.placed, -save.boundary)):
            name = save.request.chain.name(save.request.tokens, save.boundary)
            if name in names:
                continue
            if self.checkpoints.lookup(name) is not None:
                if save.placed:
                    self.checkpoints.lift(name)
                continue
            slot = self.checkpoints.try_reserve(placed=save.placed)
            if slot is None:
                counts.saves_skipped += 1
                continue
            names.add(name)
            export = Export(boundary=save.boundary, slot=slot, placed=save.placed, rolling=save.rolling)
            reserved.append((save, export))
        return reserved

    def commit_export(self, request: Request, export: Export, counts: Counts, *, stored: bool) -> None:
        """Publish the state a row stored in a reserved slot, or free the slot."""
        if not (stored and request.publishes):
            self.checkpoints.release(export.slot)
            return
        name = request.chain.name(request.tokens, export.boundary)
        newcomer = self.checkpoints.lookup(name) is None
        self.checkpoints.publish(export.slot, name, placed=export.placed)
        counts.saves += newcomer
        if export.rolling:
            self._supersede_rolling(request)
            if newcomer:
                request.rolling, request.rolling_at = name, export.boundary

    def publish_blocks(self, request: Request) -> None:
        """Publish every own block that committed, computed tokens cover and whose name is unknown."""
        if not (self.placement.caches and request.publishes):
            return
        chain = request.chain.upto(request.tokens, min(request.computed, request.num_known))
        first = len(chain)
        while first and not self.blocks.is_known(chain[first - 1]):
            first -= 1
        for index in range(first, len(chain)):
            self.blocks.publish(request.blocks[index], chain[index], chain[index - 1] if index else None)

    def turn_end(self, request: Request) -> int | None:
        """Return the boundary a finished request should leave a checkpoint at; None if there is none to make."""
        if not (self.placement.caches and request.publishes):
            return None
        size = self.placement.block_size
        boundary = min(request.computed, request.num_known) // size * size
        if boundary == 0 or boundary < request.folded:
            return None  # the rolling save, if there is one, stands
        known = self.checkpoints.lookup(request.chain.name(request.tokens, boundary)) is not None
        return None if known else boundary

    def publish_slot(self, request: Request, counts: Counts) -> None:
        """Publish a finished request's running slot itself, under the boundary it holds."""
        if not request.publishes:
            return
        self.publish_blocks(request)
        name = request.chain.name(request.tokens, request.folded)
        counts.saves += self.checkpoints.lookup(name) is None
        self.checkpoints.publish(request.slot, name, placed=True)
        request.slot = NULL_SLOT
        if request.rolling != name:
            self._supersede_rolling(request)

    def _supersede_rolling(self, request: Request) -> None:
        if request.rolling is None:
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

    def check(self, holders: Sequence[Request]) -> None:
        """Raise InvariantError unless the pools' books agree with what the holders hold."""
        self.blocks.check()
        self.checkpoints.check()
        held = {block for request in holders for block in request.blocks}
        if self.blocks.num_held() != len(held):
            raise InvariantError(f"{self.blocks.num_held()} blocks are held, and requests hold {len(held)}")
        lanes = [*self._lanes, *(request.lane for request in holders)]
        if sorted(lanes) != list(range(self._num_lanes)):
            raise InvariantError(f"lanes are lost or shared: {sorted(lanes)}")
        for name in self.checkpoints.names():
            if not self.blocks.is_known(name):
                raise InvariantError("a checkpoint's block chain is broken")
