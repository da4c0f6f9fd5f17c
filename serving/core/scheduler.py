"""Admission, token budget, preemption, saves: `plan()` takes resources, `commit()` publishes and frees. Nothing else does.

There are no phases here, only tokens still to compute: a request whose known tokens are all computed but the newest decodes,
any other prefills. Requests are planned in (priority, arrival) order, victims of preemption come from the end, so the
first always advances. Shortage is an answer, not an error: a request that cannot be admitted waits, unchanged.

The idea of planning tokens rather than phases is vLLM's; the rules of states are this project's (docs/architecture.md).
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gdn_jax.serving.core.blocks import BlockPool, HashChain
from gdn_jax.serving.core.checkpoints import NULL_SLOT, CheckpointStore
from gdn_jax.serving.core.errors import DuplicateRequestError, InvariantError, PromptTooLongError
from gdn_jax.serving.core.placement import Placement
from gdn_jax.serving.core.plan import Export, Phase, RowCut, RowPlan, RowResult, StepPlan, StepResult
from gdn_jax.serving.core.prefix_cache import MISS, PrefixHit, lookup
from gdn_jax.serving.core.request import FinishReason, Request, RequestId, Status


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes the scheduler works within; `serving/config.py` checks what a user may ask for.

    Attributes:
        num_blocks: KV blocks, the null block included.
        num_slots: state slots, the null slot included.
        num_lanes: most requests that run at once.
        budget: most prefill tokens in one step; at least one block.
        max_model_len: most tokens of one sequence.
        num_drafts: most drafts per step, k.
        cache_key: opens every hash chain: whatever changes it (weights, dtypes) separates caches.
    """

    num_blocks: int
    num_slots: int
    num_lanes: int
    budget: int
    max_model_len: int
    num_drafts: int = 0
    cache_key: bytes = b""

    def check(self, block_size: int) -> None:
        """Raise ValueError unless the sizes can serve any request."""
        if self.budget < block_size:
            raise ValueError(f"max_num_batched_tokens must be at least one block ({block_size}); got {self.budget}")
        if 1 + self.num_drafts > block_size:
            raise ValueError(f"1 + num_drafts must be at most one block ({block_size}); got {1 + self.num_drafts}")
        if self.num_lanes < 1:
            raise ValueError(f"max_num_seqs must be at least 1; got {self.num_lanes}")


@dataclass(kw_only=True)
class Counts:
    """What happened so far, in tokens and events."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    gap_tokens: int = 0
    prefilled_tokens: int = 0
    saves: int = 0
    saves_skipped: int = 0
    preemptions: int = 0
    admissions: int = 0


@dataclass(kw_only=True)
class _Draft:
    """A row being planned: the saves are added once every row has its own resources."""

    request: Request
    phase: Phase
    tokens: tuple[int, ...]
    emits: bool
    start: int
    num_drafts: int = 0
    wanted: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    exports: list[Export] = field(default_factory=list[Export])


class Scheduler:
    """Owns the queues and every request's progress; the pools own their books."""

    def __init__(self, limits: Limits, placement: Placement) -> None:
        """Create a scheduler with empty queues and pools.

        Args:
            limits: the sizes.
            placement: the cache mode's rule.
        """
        limits.check(placement.block_size)
        self.limits, self.placement, self.counts = limits, placement, Counts()
        self._block_size = placement.block_size
        self._requests: dict[RequestId, Request] = {}
        self._waiting: list[Request] = []  # both sorted by order
        self._running: list[Request] = []
        self._num_arrived = 0
        self._num_steps = 0
        self._plan: StepPlan | None = None
        self._make_pools()

    def _make_pools(self) -> None:
        self.checkpoints = CheckpointStore(self.limits.num_slots)
        self.blocks = BlockPool(self.limits.num_blocks, on_evict=self.checkpoints.drop)
        self._lanes = list(range(self.limits.num_lanes - 1, -1, -1))

    # Requests come and go.

    def add(
        self,
        request_id: RequestId,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        seed: int = 0,
        priority: int = 0,
        turn_borders: tuple[int, ...] = (),
        cache_salt: bytes = b"",
        use_cache: bool = True,
        leader: RequestId | None = None,
    ) -> Request:
        """Queue a request, or refuse it at once.

        Args:
            request_id: not in use.
            prompt: token ids, at least one.
            max_tokens: at least 1.
            seed: of its sampling noise.
            priority: lower goes first.
            turn_borders: as `Request.turn_borders`.
            cache_salt: shares prefixes only with requests of the same salt.
            use_cache: whether the prefix may come from the cache.
            leader: as `Request.leader`.

        Raises:
            DuplicateRequestError: the id is in use.
            PromptTooLongError: it could never run to its end here; the message has the numbers.
        """
        if request_id in self._requests:
            raise DuplicateRequestError(f"request id {request_id!r} is in use; choose another")
        self._refuse_what_cannot_fit(len(prompt), max_tokens)
        self._num_arrived += 1
        salt = len(self.limits.cache_key).to_bytes(4, "little") + self.limits.cache_key + cache_salt
        request = Request(
            request_id=request_id,
            tokens=list(prompt),
            num_prompt=len(prompt),
            max_tokens=max_tokens,
            seed=seed,
            priority=priority,
            arrival=self._num_arrived,
            turn_borders=turn_borders,
            chain=HashChain(salt, self._block_size),
            use_cache=use_cache,
            leader=leader,
        )
        self._requests[request_id] = request
        insort(self._waiting, request, key=lambda waiting: waiting.order)
        return request

    def _refuse_what_cannot_fit(self, num_prompt: int, max_tokens: int) -> None:
        total = num_prompt + max_tokens
        if total > self.limits.max_model_len:
            raise PromptTooLongError(
                f"prompt + max_tokens must be at most max_model_len ({self.limits.max_model_len}); got {num_prompt} + "
                f"{max_tokens}; shorten the prompt or lower max_tokens"
            )
        needed = self._num_blocks(total - 1)
        if needed > self.blocks.num_usable:
            raise PromptTooLongError(
                f"prompt + max_tokens ({num_prompt} + {max_tokens}) must fit the KV pool: it needs {needed} blocks of "
                f"{self._block_size} tokens, and there are {self.blocks.num_usable}; lower max_tokens or give the "
                "pool more memory"
            )

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request for good; returns whether it was there. One that is in the plan in flight goes at its commit."""
        request = self._requests.get(request_id)
        if request is None or request.finish is not None:
            return False
        request.finish = FinishReason.ABORT
        if self._in_flight(request):
            return True
        self._drop(request)
        return True

    def get(self, request_id: RequestId) -> Request:
        """Return a live request."""
        return self._requests[request_id]

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a lane."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, now or later."""
        return bool(self._requests)

    def reset_prefix_cache(self) -> None:
        """Forget every block name and checkpoint; what a step is reading goes at its commit.

        Requests that are running now compute on but publish nothing more, since their states belong to the old cache.
        """
        self.blocks.forget_all()
        self.checkpoints.drop_all()
        for request in self._running:
            request.publishes = False

    # Plan.

    def plan(self) -> StepPlan | None:
        """Take resources for one step; None when no row can run (then nothing is held by a plan).

        Raises:
            InvariantError: the previous plan was neither committed nor failed.
        """
        if self._plan is not None:
            raise InvariantError("plan() called before the previous plan was committed")
        budget, drafts, admitting = self.limits.budget, list[_Draft](), True
        for request in self._in_order():
            if request.status is Status.WAITING:
                if not admitting or budget < self._block_size or not self._is_ready(request):
                    admitting = admitting and not (budget < self._block_size)
                    continue
                if not self._try_admit(request):
                    admitting = False  # later ones must not overtake it
                    continue
            draft = self._plan_row(request, budget)
            if draft is None:
                continue
            drafts.append(draft)
            if draft.phase is Phase.PREFILL:
                budget -= len(draft.tokens)
        if not drafts:
            return None
        self._reserve_saves(drafts)
        self._plan = StepPlan(index=self._num_steps, rows=tuple(self._finish_row(draft) for draft in drafts))
        self._num_steps += 1
        return self._plan

    def _in_order(self) -> Iterator[Request]:
        """Walk running and waiting requests by order, while preemption takes from the end and admission moves requests."""
        waiting = iter(list(self._waiting))
        candidate = next(waiting, None)
        last = (-(2**63), 0)
        position = 0
        while True:
            while position < len(self._running) and self._running[position].order <= last:
                position += 1
            running = self._running[position] if position < len(self._running) else None
            if candidate is not None and (running is None or candidate.order < running.order):
                chosen, candidate = candidate, next(waiting, None)
            elif running is not None:
                chosen = running
            else:
                return
            last = chosen.order
            yield chosen

    def _is_ready(self, request: Request) -> bool:
        leader = self._requests.get(request.leader) if request.leader is not None else None
        return leader is None or leader.computed >= leader.num_prompt or leader.finish is not None

    def _num_blocks(self, computed: int) -> int:
        """Return how many blocks cover `computed` tokens and one position beyond."""
        return computed // self._block_size + 1

    def _try_admit(self, request: Request) -> bool:
        """Give a waiting request blocks for its known tokens, a slot and a lane; or change nothing and return False."""
        known = request.num_known
        hit = self._lookup(request)
        needed = self._num_blocks(known) - len(hit.blocks)
        if not self._lanes or self.blocks.num_idle - self.blocks.count_idle(hit.blocks) < needed:
            return False
        keep = hit.slot if hit.length else None
        take_over = keep is not None and not self.checkpoints.can_take(keep)
        if take_over and not self.checkpoints.can_take_over(hit.slot):
            return False
        if keep is None and not self.checkpoints.can_take():
            return False
        self._admit(request, hit, needed, take_over=take_over)
        return True

    def _lookup(self, request: Request) -> PrefixHit:
        if not (self.placement.caches and request.use_cache):
            return MISS
        chain = request.chain.upto(request.tokens, request.num_known)
        return lookup(
            chain,
            request.num_known - 1,
            blocks=self.blocks,
            checkpoints=self.checkpoints,
            block_size=self._block_size,
        )

    def _admit(self, request: Request, hit: PrefixHit, needed: int, *, take_over: bool) -> None:
        self.blocks.hold(hit.blocks)
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
        request.placed = self.placement.placed(
            num_prompt=request.num_prompt,
            num_known=request.num_known,
            turn_borders=request.turn_borders,
            junction=hit.junction,
        )
        if request.num_cached is None:
            request.num_cached = hit.length
        request.status, request.publishes = Status.RUNNING, True
        self._waiting.remove(request)
        insort(self._running, request, key=lambda running: running.order)
        counts = self.counts
        counts.admissions += 1
        if self.placement.caches and request.use_cache:
            counts.queried_tokens += request.num_known
            counts.hit_tokens += hit.length
            counts.gap_tokens += max(hit.junction - hit.length, 0)

    def _plan_row(self, request: Request, budget: int) -> _Draft | None:
        if request.status is Status.CLOSING:
            return _Draft(request=request, phase=Phase.DECODE, tokens=(), emits=False, start=request.close_at)
        if request.num_replay == 0 and (request.num_output == 0 or request.folded < request.num_known - 1):
            return self._plan_prefill(request, budget)
        return self._plan_decode(request)

    def _plan_prefill(self, request: Request, budget: int) -> _Draft | None:
        start, known = request.folded, request.num_known
        end = min(start + budget, known)
        if end < known:
            end = end // self._block_size * self._block_size
        if end <= start:
            return None  # the budget is spent: it keeps what it has and goes on in a later step
        return _Draft(
            request=request,
            phase=Phase.PREFILL,
            tokens=tuple(request.tokens[start:end]),
            emits=end == known,
            start=start,
            wanted=self.placement.in_span(start, end, request.placed),
        )

    def _plan_decode(self, request: Request) -> _Draft | None:
        start = request.computed
        num_drafts = min(request.num_drafts, request.max_tokens - request.num_output - 1)
        missing = self._num_blocks(start + 1 + num_drafts) - len(request.blocks)
        if missing > self.blocks.num_idle and num_drafts:
            num_drafts = min(num_drafts, max(len(request.blocks) * self._block_size - start - 2, 0))
            missing = self._num_blocks(start + 1 + num_drafts) - len(request.blocks)
        if missing > 0 and not self._take_blocks(request, missing):
            return None
        boundary = self.placement.in_fold(request.folded, request.num_replay) if request.publishes else None
        return _Draft(
            request=request,
            phase=Phase.VERIFY if num_drafts else Phase.DECODE,
            tokens=(request.tokens[-1],),
            emits=True,
            start=start,
            num_drafts=num_drafts,
            wanted=[] if boundary is None else [(boundary, True)],
        )

    def _take_blocks(self, request: Request, missing: int) -> bool:
        """Take blocks for a running request, preempting from the end of the order; False if it was itself preempted."""
        while (taken := self.blocks.try_take(missing)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks.extend(taken)
        return True

    def _preempt(self, request: Request) -> None:
        """Take everything back; tokens are kept, and the request waits at its place in the order."""
        if request.status is Status.CLOSING:
            self._drop(request)  # its answer is out already: only a checkpoint is lost
            return
        self.counts.preemptions += 1
        self._release(request)
        request.status = Status.WAITING
        insort(self._waiting, request, key=lambda waiting: waiting.order)

    # Saves: only once every row has its place.

    def _reserve_saves(self, drafts: Sequence[_Draft]) -> None:
        """Reserve slots for the wanted boundaries: placed before interval ones, deepest first, none for a known name."""
        wanted = [
            (not placed, -boundary, index)
            for index, draft in enumerate(drafts)
            if draft.request.publishes
            for boundary, placed in draft.wanted
        ]
        reserved = set[bytes]()
        for not_placed, negative, index in sorted(wanted):
            draft, boundary, placed = drafts[index], -negative, not not_placed
            request = draft.request
            name = request.chain.name(request.tokens, boundary)
            if name in reserved:
                continue
            if self.checkpoints.lookup(name) is not None:
                if placed and draft.phase is Phase.PREFILL:
                    self.checkpoints.lift(name)
                continue
            slot = self.checkpoints.try_reserve(placed=placed)
            if slot is None:
                self.counts.saves_skipped += 1
                continue
            reserved.add(name)
            rolling = draft.phase is not Phase.PREFILL
            draft.exports.append(Export(boundary=boundary, slot=slot, placed=placed, rolling=rolling))

    def _finish_row(self, draft: _Draft) -> RowPlan:
        request = draft.request
        first, request.num_sent_blocks = request.num_sent_blocks, len(request.blocks)
        prefill = draft.phase is Phase.PREFILL
        return RowPlan(
            request_id=request.request_id,
            phase=draft.phase,
            tokens=draft.tokens,
            num_drafts=draft.num_drafts,
            emits=draft.emits,
            start=draft.start,
            num_replay=0 if prefill else draft.start - request.folded,
            lane=request.lane,
            table_start=first,
            new_blocks=tuple(request.blocks[first:]),
            read_anchor=request.read_anchor,
            write_anchor=request.slot,
            exports=tuple(sorted(draft.exports, key=lambda export: export.boundary)),
            seed=request.seed,
        )

    # Commit.

    def commit(self, plan: StepPlan, result: StepResult, cuts: Sequence[RowCut]) -> list[Request]:
        """Make a step's results part of its requests; publish what committed tokens cover; free what finished.

        Args:
            plan: the plan in flight.
            result: what the device said, row by row.
            cuts: where each row ends.

        Returns:
            The requests that ended for their clients in this step, aborted ones included.
        """
        self._claim(plan)
        ended: list[Request] = []
        for row, row_result, cut in zip(plan.rows, result.rows, cuts, strict=True):
            request = self._requests[row.request_id]
            was_closing = request.status is Status.CLOSING
            self._commit_row(request, row, row_result, cut)
            if request.finish is not None and not was_closing:
                ended.append(request)
        return ended

    def _claim(self, plan: StepPlan) -> None:
        if plan is not self._plan:
            raise InvariantError("the plan is not the one in flight")
        self._plan = None

    def _in_flight(self, request: Request) -> bool:
        return self._plan is not None and any(row.request_id == request.request_id for row in self._plan.rows)

    def _commit_row(self, request: Request, row: RowPlan, result: RowResult, cut: RowCut) -> None:
        if request.pinned is not None:
            self.checkpoints.unpin(request.pinned)
            request.pinned = None
        request.read_anchor = request.slot
        if row.phase is Phase.PREFILL:
            request.folded, request.num_replay = row.end, 0
            self.counts.prefilled_tokens += len(row.tokens)
        else:
            request.folded = row.start
            request.num_replay = len(result.tokens)  # the pending token and the accepted drafts
        request.num_drafts = result.num_drafts
        request.tokens.extend(result.tokens[: cut.num_kept])
        if request.finish is None:  # else it was aborted while the step ran
            request.finish = cut.finish
        self._publish_blocks(request)
        for export in row.exports:
            self._commit_export(request, export, stored=export.boundary in result.saved)
        if request.status is Status.CLOSING:
            self._publish_slot(request)
            self._drop(request)
        elif request.finish is not None:
            self._end(request)

    def _publish_blocks(self, request: Request) -> None:
        """Publish every own block that committed, computed tokens cover and whose name is unknown."""
        if not (self.placement.caches and request.publishes):
            return
        chain = request.chain.upto(request.tokens, min(request.computed, request.num_known))
        first = len(chain)
        while first and not self.blocks.is_known(chain[first - 1]):
            first -= 1
        for index in range(first, len(chain)):
            self.blocks.publish(request.blocks[index], chain[index], chain[index - 1] if index else None)

    def _commit_export(self, request: Request, export: Export, *, stored: bool) -> None:
        if not (stored and request.publishes):
            self.checkpoints.release(export.slot)
            return
        name = request.chain.name(request.tokens, export.boundary)
        newcomer = self.checkpoints.lookup(name) is None
        self.checkpoints.publish(export.slot, name, placed=export.placed)
        self.counts.saves += newcomer
        if export.rolling:
            self._supersede_rolling(request)
            if newcomer:
                request.rolling, request.rolling_at = name, export.boundary

    def _supersede_rolling(self, request: Request) -> None:
        if request.rolling is None:
            return
        if self.placement.on_interval(request.rolling_at):
            self.checkpoints.demote(request.rolling)
        else:
            self.checkpoints.supersede(request.rolling)
        request.rolling = None

    def _end(self, request: Request) -> None:
        """Save the turn end, now or in a closing row, and free the rest."""
        if request.finish in (FinishReason.STOP, FinishReason.LENGTH) and self.placement.caches and request.publishes:
            boundary = min(request.computed, request.num_known) // self._block_size * self._block_size
            missing = boundary > 0 and self.checkpoints.lookup(request.chain.name(request.tokens, boundary)) is None
            if missing and boundary == request.folded:
                self._publish_slot(request)
            elif missing and boundary > request.folded:
                request.status, request.close_at, request.num_drafts = Status.CLOSING, boundary, 0
                return
        self._drop(request)

    def _publish_slot(self, request: Request) -> None:
        """Publish the running slot itself, under the boundary it holds."""
        if not request.publishes:
            return
        self._publish_blocks(request)
        name = request.chain.name(request.tokens, request.folded)
        self.counts.saves += self.checkpoints.lookup(name) is None
        self.checkpoints.publish(request.slot, name, placed=True)
        request.slot = NULL_SLOT
        if request.rolling != name:
            self._supersede_rolling(request)

    def fail(self, plan: StepPlan) -> list[Request]:
        """Give up a step that raised: its rows end, other requests go back to waiting, pools and cache start afresh.

        The device state was donated to the step and is lost with it; the caller rebuilds it.

        Returns:
            The requests that ended: those of the plan's rows.
        """
        self._claim(plan)
        rows = {row.request_id for row in plan.rows}
        running, self._running = self._running, []
        self._make_pools()
        ended: list[Request] = []
        for request in running:
            self._forget_holdings(request)
            if request.request_id in rows or request.status is Status.CLOSING or request.finish is not None:
                if request.status is not Status.CLOSING:
                    request.finish = request.finish or FinishReason.ERROR
                    ended.append(request)
                request.status = Status.GONE
                del self._requests[request.request_id]
            else:
                request.status = Status.WAITING
                insort(self._waiting, request, key=lambda waiting: waiting.order)
        return ended

    def _drop(self, request: Request) -> None:
        """Free what a request holds and forget it."""
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        else:
            self._release(request)
        request.status = Status.GONE
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        if request.pinned is not None:
            self.checkpoints.unpin(request.pinned)
        if request.slot != NULL_SLOT:
            self.checkpoints.release(request.slot)
        self.blocks.release(request.blocks)
        self._lanes.append(request.lane)
        self._forget_holdings(request)

    @staticmethod
    def _forget_holdings(request: Request) -> None:
        request.lane, request.slot, request.read_anchor, request.pinned = -1, NULL_SLOT, NULL_SLOT, None
        request.blocks, request.num_sent_blocks = [], 0
        request.folded, request.num_replay, request.num_drafts = 0, 0, 0
        request.rolling = None

    def check(self) -> None:
        """Raise InvariantError unless the pools' books agree with what the requests hold."""
        self.blocks.check()
        self.checkpoints.check()
        held = {block for request in self._running for block in request.blocks}
        if self.blocks.num_held() != len(held):
            raise InvariantError(f"{self.blocks.num_held()} blocks are held, and requests hold {len(held)}")
        lanes = [*self._lanes, *(request.lane for request in self._running)]
        if sorted(lanes) != list(range(self.limits.num_lanes)):
            raise InvariantError(f"lanes are lost or shared: {sorted(lanes)}")
        for name in self.checkpoints.names():
            if not self.blocks.is_known(name):
                raise InvariantError("a checkpoint's block chain is broken")
        if len(self._waiting) + len(self._running) != len(self._requests):
            raise InvariantError("a live request is in no queue")
