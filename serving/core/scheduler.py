"""Admission, token budget, preemption: `plan()` takes resources, `commit()` publishes and frees. Nothing else does.

Requests are planned in (priority, arrival) order, victims of preemption come from the end, so the first always
advances. Shortage is an answer, not an error: a request that cannot be admitted waits, unchanged. What a row of a
running request looks like is the business of `open_plan.py`.

The idea of planning tokens rather than phases is vLLM's; the rules of states are this project's (docs/architecture.md).
"""

from collections.abc import Sequence

from gdn_jax.serving.core.blocks import BlockHash, HashChain
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.serving.core.holdings import Counts, Holdings
from gdn_jax.serving.core.limits import Limits
from gdn_jax.serving.core.open_plan import OpenPlan
from gdn_jax.serving.core.placement import Placement
from gdn_jax.serving.core.plan import Phase, RowCut, RowPlan, RowResult, StepPlan, StepResult
from gdn_jax.serving.core.queues import Queues
from gdn_jax.serving.core.request import FinishReason, Request, RequestId, Status


class Scheduler:
    """Owns every request's progress; `Queues` owns who waits and who runs, `holdings` the resources."""

    def __init__(self, limits: Limits, placement: Placement) -> None:
        """Create a scheduler with empty queues and pools.

        Args:
            limits: the sizes.
            placement: the cache mode's rule.
        """
        limits.check(placement.block_size)
        self.limits, self.placement, self.counts = limits, placement, Counts()
        self._block_size = placement.block_size
        self._queues = Queues()
        self._admitting = True  # while a plan is made: whether those still waiting may be admitted
        self._may_admit = True  # whether something came or was freed since a plan could not admit who waits
        self._num_steps = 0
        self._plans: list[StepPlan] = []  # in flight: the one to commit next, and perhaps the one after it
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
        needs_history: bool = False,
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
            needs_history: as `Request.needs_history`.

        Raises:
            DuplicateRequestError: the id is in use.
            InvalidPromptError: the prompt is empty.
            InvalidParameterError: `max_tokens` is not positive.
            PromptTooLongError: it could never run to its end here; the message has the numbers.
        """
        self.limits.admit(num_prompt=len(prompt), max_tokens=max_tokens, block_size=self._block_size)
        arrival = self._queues.next_arrival(request_id)
        salt = len(self.limits.cache_key).to_bytes(4, "little") + self.limits.cache_key + cache_salt
        request = Request(
            request_id=request_id,
            tokens=list(prompt),
            num_prompt=len(prompt),
            max_tokens=max_tokens,
            seed=seed,
            priority=priority,
            arrival=arrival,
            turn_borders=turn_borders,
            chain=HashChain(salt, self._block_size),
            use_cache=use_cache,
            leader=leader,
            needs_history=needs_history,
        )
        self._queues.add(request)
        self._may_admit = True
        return request

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request for good; return whether it was there. One in a plan in flight goes at its commit."""
        request = self._queues.get(request_id)
        if request is None or request.finish is not None:
            return False
        request.finish = FinishReason.ABORT
        if self._in_flight(request):
            return True
        self._drop(request)
        return True

    def get(self, request_id: RequestId) -> Request:
        """Return a live request."""
        request = self._queues.get(request_id)
        if request is None:
            raise InvariantError(f"request {request_id!r} is not live")
        return request

    def running(self) -> list[Request]:
        """Return a copy of the list of requests that hold something, in order, for audits."""
        return self._queues.running()

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet."""
        return self._queues.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that hold a lane."""
        return self._queues.num_running

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, now or later."""
        return self.num_waiting + self.num_running > 0

    def reset_prefix_cache(self) -> None:
        """Forget every block name and checkpoint; what a step is reading goes at its commit.

        Requests that are running now compute on but publish nothing more, since their states belong to the old cache.
        """
        self.holdings.reset_cache()
        self._may_admit = True
        for request in self._queues.live():
            request.rolling = None
            request.publishes = False  # a waiting request starts afresh at its admission

    # Plan.

    def plan(self) -> StepPlan | None:
        """Take resources for one step; None when no row can run (then nothing is held by a plan).

        Raises:
            InvariantError: a previous plan was neither committed nor failed.
        """
        if self._plans:
            raise InvariantError("plan() called before the previous plan was committed")
        plan = OpenPlan(self.holdings, self.limits.budget, self._take_blocks)
        self._admitting, self._may_admit = True, False
        for request in self._queues.walk(lambda: self._admitting):
            if request.status is Status.WAITING:
                if not (plan.admits and self._try_admit(request)):
                    self._admitting = False  # later ones must not overtake it
                    continue
                if request.status is Status.WAITING:
                    continue  # not ready: those behind it may go first
            plan.add(request)
        self._may_admit |= self._admitting or not plan.admits  # else what is there was too little for who waits
        return self._close(plan)

    def plan_ahead(self) -> StepPlan | None:
        """Plan the step after the one in flight, whose tokens are not known yet; None where that takes knowing them.

        It can be told where all that runs decodes one token each, as most steps of an engine without drafts do: a row
        then begins where the one in flight ends, and reads its token on the device (`NEWEST`). What might change that
        is left to `plan()`: somebody who may be admitted, a span, a request to preempt. A request that the step in
        flight ends after all has run in vain; it is held until the commit of this step, which keeps nothing of it.

        Raises:
            InvariantError: no step is in flight, or two are.
        """
        if len(self._plans) != 1:
            raise InvariantError(f"plan_ahead() called with {len(self._plans)} plans in flight instead of one")
        if self.limits.num_drafts or (self.num_waiting and self._may_admit):
            return None
        rows = {row.request_id: row for row in self._plans[0].rows}
        plan, num_missing = OpenPlan(self.holdings, 0, self._take_blocks), 0
        following: list[tuple[Request, RowPlan | None]] = []
        for request in self._queues.running():
            row = rows.get(request.request_id)
            if row is None and request.status is Status.CLOSING:
                following.append((request, None))
            elif row is None or row.phase is not Phase.DECODE:
                return None
            elif row.emits and request.finish is None and request.num_output + 1 < request.max_tokens:
                following.append((request, row))
                num_missing += plan.missing_after(row, request)
        if num_missing > self.holdings.blocks.num_idle:
            return None
        for request, row in following:
            if row is None:
                plan.add(request)
            else:
                plan.add_after(row, request)
        return self._close(plan)

    def _close(self, plan: OpenPlan) -> StepPlan | None:
        closed = plan.close(self._num_steps, self.counts, self._promised())
        if closed is not None:
            self._num_steps += 1
            self._plans.append(closed)
        return closed

    def _promised(self) -> list[BlockHash]:
        """Return the names that a step in flight saves; they are known once it is committed."""
        names: list[BlockHash] = []
        for row in [row for plan in self._plans for row in plan.rows if row.exports]:
            request = self.get(row.request_id)
            names += [request.chain.name(request.tokens, export.boundary) for export in row.exports]
        return names

    def _try_admit(self, request: Request) -> bool:
        """Admit a waiting request if it can be; False means that those behind it must wait too."""
        if self._awaits_leader(request):
            return True  # and nobody behind it need wait for that
        if not self.holdings.try_admit(request, self.counts):
            return False
        self._queues.start(request)
        return True

    def _awaits_leader(self, request: Request) -> bool:
        """Return whether a sibling's leader is about to leave the checkpoint that the sibling would start from.

        A leader goes before its siblings, so nobody waits in a circle.
        """
        leader = self._queues.get(request.leader) if request.leader is not None else None
        if leader is None or leader.finish is not None or leader.order >= request.order:
            return False
        if not (self.placement.caches and request.use_cache):
            return False
        return leader.computed < (request.num_prompt - 1) // self._block_size * self._block_size

    def _take_blocks(self, request: Request, missing: int) -> bool:
        """Take blocks for a running request, preempting from the end of the order; False if it was itself preempted.

        Rows are planned in order, so no victim has a row in the plan being made.
        """
        while (taken := self.holdings.blocks.try_take(missing)) is None:
            victim = self._queues.last_running()
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
        self._may_admit = True
        self._admitting = False  # nobody behind it is to take what it gave back
        self.holdings.release(request)
        self._queues.stop(request)

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
            request = self.get(row.request_id)
            was_closing = request.status is Status.CLOSING
            self._commit_row(request, row, row_result, cut)
            if request.finish is not None and not was_closing:
                ended.append(request)
        return ended

    def _claim(self, plan: StepPlan) -> None:
        if not self._plans or plan is not self._plans[0]:
            raise InvariantError("the plan is not the one in flight that comes next")
        self._plans.pop(0)

    def _in_flight(self, request: Request) -> bool:
        return any(row.request_id == request.request_id for plan in self._plans for row in plan.rows)

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
        if result.tokens:
            request.has_pending = True
            request.use_cache = True  # every position of the prompt has been computed once
        request.tokens.extend(result.tokens[: cut.num_kept])
        if request.finish is None:  # else it was aborted while the step ran
            request.finish = cut.finish if result.finite else FinishReason.ERROR
        if not result.finite:
            request.publishes = False  # nothing that this row wrote may be found
        holdings.publish_blocks(request)
        for export in row.exports:
            holdings.commit_export(request, export, self.counts, stored=export.boundary in result.saved)
        if request.finish is None:
            return
        if self._in_flight(request):  # one more row of it runs already, in vain: it ends when that does
            request.status = Status.CLOSING
        elif row.tokens:
            self._end(request)
        else:
            holdings.publish_slot(request, self.counts)
            self._drop(request)

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

        A step planned ahead of it is given up too; its rows are the same requests'.

        The device state was donated to the step and is lost with it; the caller rebuilds it.

        Args:
            plan: the plan in flight.
            ends_rows: False for a step that was only interrupted: its rows go back to waiting too.

        Returns:
            The requests that ended: those of the plan's rows, if they do.
        """
        self._claim(plan)
        self._plans.clear()
        self._may_admit = True
        rows = {row.request_id for row in plan.rows if ends_rows}
        self.holdings = self._make_holdings()
        for request in self._queues.live():
            request.rolling = None  # a name of the old store, also where its request was preempted
        ended: list[Request] = []
        for request in self._queues.running():
            request.forget_holdings()
            if request.status is not Status.CLOSING and request.request_id in rows:
                request.finish = request.finish or FinishReason.ERROR
                ended.append(request)
            if request.finish is not None:
                self._queues.drop(request)
            else:
                self._queues.stop(request)
        return ended

    def _drop(self, request: Request) -> None:
        """Free what a request holds and forget it."""
        if request.status is not Status.WAITING:
            self.holdings.release(request)
        self._queues.drop(request)
        self._may_admit = True

    def check(self) -> None:
        """Raise InvariantError unless the books agree with what the requests hold."""
        rows = [row for plan in self._plans for row in plan.rows]
        self.holdings.check(self.running(), [export for row in rows for export in row.exports])
        self._queues.check()
