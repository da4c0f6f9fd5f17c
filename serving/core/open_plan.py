"""A plan while it is being made: its rows so far, what is left of the budget, and the saves that its rows want.

A request decodes once a row of its lane has emitted its newest token, and prefills until then. How many tokens are left
to compute does not tell: one that comes back from preemption to all tokens but the newest prefills that one, since the
device has made nothing of it, the MTP head's entry neither. Slots for saves are reserved last, when every row has its
own resources.
"""

from collections.abc import Callable, Collection

from gdn_jax.serving.core.blocks import BlockHash
from gdn_jax.serving.core.checkpoints import Retention
from gdn_jax.serving.core.holdings import Counts, Holdings, Save
from gdn_jax.serving.core.plan import NEWEST, Export, Phase, RowPlan, StepPlan
from gdn_jax.serving.core.request import Request, RequestId, Status


class OpenPlan:
    """Owns what one plan has taken so far. Requests are added in order; each must hold a lane."""

    def __init__(self, holdings: Holdings, budget: int, take_blocks: Callable[[Request, int], bool]) -> None:
        """Open a plan without rows.

        Args:
            holdings: what the requests hold.
            budget: most prefill tokens.
            take_blocks: takes so many more blocks for a running request, at the cost of those after it in order;
                False if it lost its own instead.
        """
        self.budget = budget
        self._holdings, self._placement = holdings, holdings.placement
        self._block_size = holdings.placement.block_size
        self._take_blocks = take_blocks
        self._rows: list[RowPlan] = []
        self._saves: list[Save] = []

    @property
    def admits(self) -> bool:
        """Whether the budget has room for a further prompt: a short one, or the end of one, fits in any rest."""
        return self.budget > 0

    def add(self, request: Request) -> None:
        """Plan a row for a running request, if it gets one in this step."""
        if request.status is Status.CLOSING:
            row = self._row(request, Phase.DECODE, start=request.close_at, tokens=())
        elif request.has_pending:
            row = self._decode(request)
        else:
            row = self._prefill(request)
        if row is not None:
            self._rows.append(row)

    def add_after(self, row: RowPlan, request: Request) -> None:
        """Plan the row after one that is in flight and decodes a token, without preempting anybody for it.

        The caller has seen to it that there is a block, should the row need one.
        """
        start = row.end
        if missing := self.missing_after(row, request):
            self._take_blocks(request, missing)
        self._save_fold(request, row.start, start - row.start)
        self._rows.append(self._row(request, Phase.DECODE, start=start, folded=row.start, tokens=(NEWEST,), emits=True))

    def missing_after(self, row: RowPlan, request: Request) -> int:
        """Return how many blocks the row after one in flight needs beyond those that its request has."""
        return max(self._holdings.blocks_for(row.end + 1) - len(request.blocks), 0)

    def close(self, index: int, counts: Counts, promised: Collection[BlockHash] = ()) -> StepPlan | None:
        """Reserve slots for the saves, but for those promised, and return the plan; None if no row can run."""
        if not self._rows:
            return None
        return StepPlan(index=index, rows=tuple(self._with_exports(counts, promised) if self._saves else self._rows))

    def _prefill(self, request: Request) -> RowPlan | None:
        start, known = request.folded, request.num_known
        end = min(start + self.budget, known)
        if end < known:
            end = end // self._block_size * self._block_size
        if end <= start:
            return None  # the budget is spent: it keeps what it has and goes on in a later step
        self.budget -= end - start
        for boundary, is_placed in self._placement.in_span(start, end, request.placed) if request.publishes else ():
            retention = Retention.PLACED if is_placed else Retention.INTERVAL
            self._saves.append(Save(request=request, boundary=boundary, retention=retention))
        tokens = tuple(request.tokens[start:end])
        return self._row(request, Phase.PREFILL, start=start, tokens=tokens, emits=end == known)

    def _decode(self, request: Request) -> RowPlan | None:
        holdings = self._holdings
        start, covered = request.computed, len(request.blocks) * self._block_size
        num_drafts = min(request.num_drafts, request.max_tokens - request.num_output - 1)
        if start + 1 + num_drafts >= covered:  # the row needs a block for the position beyond its last
            missing = holdings.blocks_for(start + 1 + num_drafts) - len(request.blocks)
            if num_drafts and missing > holdings.blocks.num_idle:  # drafts are the first to go
                num_drafts = min(num_drafts, max(covered - start - 2, 0))
                missing = holdings.blocks_for(start + 1 + num_drafts) - len(request.blocks)
            if missing > 0 and not self._take_blocks(request, missing):
                return None
        self._save_fold(request, request.folded, request.num_replay)
        phase = Phase.VERIFY if num_drafts else Phase.DECODE
        return self._row(request, phase, start=start, tokens=(request.tokens[-1],), num_drafts=num_drafts, emits=True)

    def _save_fold(self, request: Request, folded: int, num_replay: int) -> None:
        if request.publishes and (boundary := self._placement.in_fold(folded, num_replay)) is not None:
            self._saves.append(Save(request=request, boundary=boundary, retention=Retention.ROLLING))

    def _row(
        self,
        request: Request,
        phase: Phase,
        *,
        start: int,
        tokens: tuple[int, ...],
        folded: int | None = None,
        num_drafts: int = 0,
        emits: bool = False,
    ) -> RowPlan:
        """Make a row, as yet without exports. It will run: no request planned later can preempt it.

        `folded` is what its state will hold by then, if that is not what it holds now.
        """
        first, request.num_sent_blocks = request.num_sent_blocks, len(request.blocks)
        return RowPlan(
            request_id=request.request_id,
            phase=phase,
            tokens=tokens,
            num_drafts=num_drafts,
            emits=emits,
            start=start,
            num_replay=start - (request.folded if folded is None else folded),
            lane=request.lane,
            table_start=first,
            new_blocks=tuple(request.blocks[first:]),
            read_anchor=request.read_anchor,
            write_anchor=request.slot,
            exports=(),
            seed=request.seed,
            history=tuple(request.tokens) if first == 0 and request.needs_history else (),
        )

    def _with_exports(self, counts: Counts, promised: Collection[BlockHash]) -> list[RowPlan]:
        """Reserve slots for the saves; return the rows with their exports."""
        exports: dict[RequestId, list[Export]] = {}
        for save, export in self._holdings.reserve(self._saves, counts, promised):
            exports.setdefault(save.request.request_id, []).append(export)
        return [
            row._replace(exports=tuple(sorted(exports[row.request_id], key=lambda export: export.boundary)))
            if row.request_id in exports
            else row
            for row in self._rows
        ]
