"""Admission, token budget, preemption: `plan()` takes resources, `commit()` publishes and frees. Nothing else does.

There are no phases here, only tokens still to compute: a request whose known tokens are all computed but the newest
decodes, any other prefills. Requests are planned in (priority, arrival) order, victims of preemption come from the end,
so the first always advances. Shortage is an answer, not an error: a request that cannot be admitted waits, unchanged.

The idea of planning tokens rather than phases is vLLM's; the rules of states are this project's (docs/architecture.md).
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gdn_jax.serving.core.blocks import HashChain
from gdn_jax.serving.core.checkpoints import Retention
from gdn_jax.serving.core.errors import (
    DuplicateRequestError,
    InvalidParameterError,
    InvalidPromptError,
    InvariantError,
    PromptTooLongError,
)
from gdn_jax.serving.core.holdings import Counts, Holdings, Save
from gdn_jax.serving.core.placement import Placement
from gdn_jax.serving.core.plan import Export, Phase, RowCut, RowPlan, RowResult, StepPlan, StepResult
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


class Scheduler:
    """Owns the queues and every request's progress; `holdings` owns the resources."""

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
        self._admitting = True  # while a plan is made: whether those still waiting may be admitted
        self._num_arrived = 0
        self._num_steps = 0
        self._plan: StepPlan | None = None
        self.holdings = self._make_holdings()

    def _make_holdings(self) -> Holdings:
        return Holdings(
            num_blocks=self.limits.num_blocks,
            num_slots=self.limits.num_slots,
            num_lanes=self.limits.num_lanes,
            placement=self.placement,
        )

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
            InvalidPromptError: the prompt is empty.
            InvalidParameterError: `max_tokens` is not positive.
            PromptTooLongError: it could never run to its end here; the message has the numbers.
        """
        if request_id in self._requests:
            raise DuplicateRequestError(f"request id {request_id!r} is in use; choose another")
        if not prompt:
            raise InvalidPromptError("a prompt must hold at least one token; got none")
        if max_tokens < 1:
            raise InvalidParameterError(f"max_tokens must be at least 1; got {max_tokens}", parameter="max_tokens")
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
        insort(self._waiting, request, key=lambda waiting: waiting.order)
        self._requests[request_id] = request
        return request

    def _refuse_what_cannot_fit(self, num_prompt: int, max_tokens: int) -> None:
        total = num_prompt + max_tokens
        if total > self.limits.max_model_len:
            raise PromptTooLongError(
                f"prompt + max_tokens must be at most max_model_len ({self.limits.max_model_len}); got {num_prompt} + "
                f"{max_tokens}; shorten the prompt or lower max_tokens"
            )
        needed = self.holdings.blocks_for(total - 1)
        if needed > self.holdings.blocks.num_usable:
            raise PromptTooLongError(
                f"prompt + max_tokens ({num_prompt} + {max_tokens}) must fit the KV pool: it needs {needed} blocks of "
                f"{self._block_size} tokens, and there are {self.holdings.blocks.num_usable}; lower max_tokens or give "
                "the pool more memory"
            )

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request for good; return whether it was there. One in the plan in flight goes at its commit."""
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

    def running(self) -> list[Request]:
        """Return a copy of the list of requests that hold something, in order, for audits."""
        return list(self._running)

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
        self.holdings.reset_cache()
        for request in self._requests.values():
            request.rolling = None
            request.publishes = False  # a waiting request starts afresh at its admission

    # Plan.

    def plan(self) -> StepPlan | None:
        """Take resources for one step; None when no row can run (then nothing is held by a plan).

        Raises:
            InvariantError: the previous plan was neither committed nor failed.
        """
        if self._plan is not None:
            raise InvariantError("plan() called before the previous plan was committed")
        budget, rows, saves = self.limits.budget, list[RowPlan](), list[Save]()
        self._admitting = True
        for request in self._in_order():
            if request.status is Status.WAITING:
                if budget < self._block_size or not self._try_admit(request):
                    self._admitting = False  # later ones must not overtake it
                    continue
                if request.status is Status.WAITING:
                    continue  # not ready: those behind it may go first
            row = self._plan_row(request, budget, saves)
            if row is None:
                continue
            rows.append(row)
            if row.phase is Phase.PREFILL:
                budget -= len(row.tokens)
        if not rows:
            return None
        if saves:
            rows = self._with_exports(rows, saves)
        self._plan = StepPlan(index=self._num_steps, rows=tuple(rows))
        self._num_steps += 1
        return self._plan

    def _in_order(self) -> Iterator[Request]:
        """Walk waiting and running requests in order, while admission and preemption move them between the lists.

        A request is seen at most once: what is preempted during the walk waits for the next one.
        """
        waiting, running = iter(tuple(self._waiting)), self._running  # the live list: positions shift, orders do not
        candidate, position, last = next(waiting, None), 0, None
        while True:
            while position < len(running) and last is not None and running[position].order <= last:
                position += 1
            request = running[position] if position < len(running) else None
            if candidate is not None and self._admitting and (request is None or candidate.order < request.order):
                request, candidate = candidate, next(waiting, None)
            if request is None:
                return
            last = request.order
            yield request

    def _with_exports(self, rows: Sequence[RowPlan], saves: Sequence[Save]) -> list[RowPlan]:
        """Reserve slots for saves, now that every row has its own resources; return the rows with their exports."""
        exports: dict[RequestId, list[Export]] = {}
        for save, export in self.holdings.reserve(saves, self.counts):
            exports.setdefault(save.request.request_id, []).append(export)
        return [
            row._replace(exports=tuple(sorted(exports[row.request_id], key=lambda export: export.boundary)))
            if row.request_id in exports
            else row
            for row in rows
        ]

    def _try_admit(self, request: Request) -> bool:
        """Admit a waiting request if it can be; False means that those behind it must wait too."""
        if self._awaits_leader(request):
            return True  # and nobody behind it need wait for that
        if not self.holdings.try_admit(request, self.counts):
            return False
        request.status = Status.RUNNING
        self._waiting.remove(request)
        insort(self._running, request, key=lambda running: running.order)
        return True

    def _awaits_leader(self, request: Request) -> bool:
        """Return whether a sibling's leader is about to leave the checkpoint that the sibling would start from.

        A leader goes before its siblings, so nobody waits in a circle.
        """
        leader = self._requests.get(request.leader) if request.leader is not None else None
        if leader is None or leader.finish is not None or leader.order >= request.order:
            return False
        if not (self.placement.caches and request.use_cache):
            return False
        return leader.computed < (request.num_prompt - 1) // self._block_size * self._block_size

    def _plan_row(self, request: Request, budget: int, saves: list[Save]) -> RowPlan | None:
        """Plan a row for a running request and add the saves it wants; None if it gets no row in this step."""
        if request.status is Status.CLOSING:
            return self._row(request, Phase.DECODE, start=request.close_at, tokens=())
        if request.num_replay == 0 and (request.num_output == 0 or request.folded < request.num_known - 1):
            return self._plan_prefill(request, budget, saves)
        return self._plan_decode(request, saves)

    def _plan_prefill(self, request: Request, budget: int, saves: list[Save]) -> RowPlan | None:
        start, known = request.folded, request.num_known
        end = min(start + budget, known)
        if end < known:
            end = end // self._block_size * self._block_size
        if end <= start:
            return None  # the budget is spent: it keeps what it has and goes on in a later step
        for boundary, is_placed in self.placement.in_span(start, end, request.placed) if request.publishes else ():
            retention = Retention.PLACED if is_placed else Retention.INTERVAL
            saves.append(Save(request=request, boundary=boundary, retention=retention))
        tokens = tuple(request.tokens[start:end])
        return self._row(request, Phase.PREFILL, start=start, tokens=tokens, emits=end == known)

    def _plan_decode(self, request: Request, saves: list[Save]) -> RowPlan | None:
        start, covered = request.computed, len(request.blocks) * self._block_size
        num_drafts = min(request.num_drafts, request.max_tokens - request.num_output - 1)
        if start + 1 + num_drafts >= covered:  # the row needs a block for the position beyond its last
            missing = self.holdings.blocks_for(start + 1 + num_drafts) - len(request.blocks)
            if num_drafts and missing > self.holdings.blocks.num_idle:  # drafts are the first to go
                num_drafts = min(num_drafts, max(covered - start - 2, 0))
                missing = self.holdings.blocks_for(start + 1 + num_drafts) - len(request.blocks)
            if missing > 0 and not self._take_blocks(request, missing):
                return None
        if request.publishes and (boundary := self.placement.in_fold(request.folded, request.num_replay)) is not None:
            saves.append(Save(request=request, boundary=boundary, retention=Retention.ROLLING))
        phase = Phase.VERIFY if num_drafts else Phase.DECODE
        return self._row(request, phase, start=start, tokens=(request.tokens[-1],), num_drafts=num_drafts, emits=True)

    def _take_blocks(self, request: Request, missing: int) -> bool:
        """Take blocks for a running request, preempting from the end of the order; False if it was itself preempted.

        Rows are planned in order, so no victim has a row in the plan being made.
        """
        while (taken := self.holdings.blocks.try_take(missing)) is None:
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
        self._admitting = False  # nobody behind it is to take what it gave back
        self._running.remove(request)
        self.holdings.release(request)
        request.status = Status.WAITING
        insort(self._waiting, request, key=lambda waiting: waiting.order)

    def _row(
        self,
        request: Request,
        phase: Phase,
        *,
        start: int,
        tokens: tuple[int, ...],
        num_drafts: int = 0,
        emits: bool = False,
    ) -> RowPlan:
        """Make a row, as yet without exports. It will run: no request planned later can preempt it."""
        first, request.num_sent_blocks = request.num_sent_blocks, len(request.blocks)
        return RowPlan(
            request_id=request.request_id,
            phase=phase,
            tokens=tokens,
            num_drafts=num_drafts,
            emits=emits,
            start=start,
            num_replay=start - request.folded,
            lane=request.lane,
            table_start=first,
            new_blocks=tuple(request.blocks[first:]),
            read_anchor=request.read_anchor,
            write_anchor=request.slot,
            exports=(),
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
        holdings = self.holdings
        holdings.unpin(request)
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
        if cut.finish is FinishReason.ERROR:
            request.publishes = False  # nothing a failed row wrote may be found
        holdings.publish_blocks(request)
        for export in row.exports:
            holdings.commit_export(request, export, self.counts, stored=export.boundary in result.saved)
        if request.status is Status.CLOSING:
            holdings.publish_slot(request, self.counts)
            self._drop(request)
        elif request.finish is not None:
            self._end(request)

    def _end(self, request: Request) -> None:
        """Save the turn end, now or in a closing row, and free the rest."""
        if request.finish in (FinishReason.STOP, FinishReason.LENGTH):
            boundary = self.holdings.turn_end(request)
            if boundary is not None and not self.holdings.keep_known(request, boundary):
                if boundary > request.folded:
                    request.status, request.close_at, request.num_drafts = Status.CLOSING, boundary, 0
                    return
                self.holdings.publish_slot(request, self.counts)
        self._drop(request)

    def fail(self, plan: StepPlan, *, ends_rows: bool = True) -> list[Request]:
        """Give up a step that raised: its rows end, other requests go back to waiting, pools and cache start afresh.

        The device state was donated to the step and is lost with it; the caller rebuilds it.

        Args:
            plan: the plan in flight.
            ends_rows: False for a step that was only interrupted: its rows go back to waiting too.

        Returns:
            The requests that ended: those of the plan's rows, if they do.
        """
        self._claim(plan)
        rows = {row.request_id for row in plan.rows if ends_rows}
        running, self._running = self._running, []
        self.holdings = self._make_holdings()
        ended: list[Request] = []
        for request in running:
            request.forget_holdings()
            request.rolling = None
            if request.status is not Status.CLOSING and request.request_id in rows:
                request.finish = request.finish or FinishReason.ERROR
                ended.append(request)
            if request.finish is not None:
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
            self._running.remove(request)
            self.holdings.release(request)
        request.status = Status.GONE
        del self._requests[request.request_id]

    def check(self) -> None:
        """Raise InvariantError unless the books agree with what the requests hold."""
        rows = self._plan.rows if self._plan is not None else ()
        self.holdings.check(self._running, [export for row in rows for export in row.exports])
        if len(self._waiting) + len(self._running) != len(self._requests):
            raise InvariantError("a live request is in no queue")
