"""A fake device that remembers: the tell-tale runner.

A state slot holds the very tokens it has absorbed, a page the tokens written to it, and the next token is a hash of the
prefix. Every read asserts that state and pages agree with the plan and with each other, so a slip in the books fails at
once, without JAX. A step in which one row writes a slot or a page that another reads or writes is refused, whatever is
written. What a plan lends anew holds nothing, whoever had it before. `audit` compares every published block and
checkpoint with its name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from gdn_jax.serving.core.plan import NEWEST, Phase, RowPlan, RowResult, StepPlan, StepResult
from gdn_jax.serving.core.scheduler import Scheduler


class TellTaleError(AssertionError):
    """The plan made the device read something that is not what it should be."""


def next_token(prefix: tuple[int, ...], vocabulary: int) -> int:
    """The model: the token after a prefix is a hash of it."""
    digest = sha256(bytes(str(prefix), "ascii")).digest()
    return digest[0] % vocabulary


@dataclass
class TellTaleRunner:
    """Runs plans on slots that hold token tuples and pages that hold tokens.

    Attributes:
        block_size: tokens per page.
        vocabulary: tokens are 0..vocabulary - 1.
        num_drafts: drafts made per step, k.
        draft: makes drafts from a prefix; by default a third of the guesses are wrong.
    """

    block_size: int
    vocabulary: int
    num_drafts: int = 0
    draft: Callable[[tuple[int, ...], int], list[int]] | None = None
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pages: dict[int, dict[int, int]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    windows: dict[int, list[int]] = field(default_factory=dict)  # replay windows by lane
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by lane
    newest: dict[int, int] = field(default_factory=dict)  # by lane, the token that a row of it emitted last
    salts: tuple[bytes, ...] = (b"",)  # cache salts in use, for the audit
    num_accepted: int = 0
    audited: dict[bytes, object] = field(default_factory=dict)  # content last found right, by name

    def run(self, plan: StepPlan, *, broken: str | None = None) -> StepResult:
        """Run a plan as the device does: all rows read the state from before the step.

        Args:
            plan: what to run.
            broken: the request whose row's numbers go wrong: all that it writes means nothing.
        """
        tables = [self._extend_table(row) for row in plan.rows]
        self._refuse_slot_races(plan)
        self._refuse_page_races(plan, tables)
        self._empty_what_is_lent_anew(plan, tables)
        before = dict(self.slots)
        writes: dict[int, tuple[int, ...]] = {}
        results: list[RowResult] = []
        for row, table in zip(plan.rows, tables, strict=True):
            results.append(self._row(row, table, before, writes))
            if row.request_id == broken:
                results[-1] = results[-1]._replace(finite=False)
                self._break(row, table, writes)
        self.slots.update(writes)
        return StepResult(rows=tuple(results))

    def _refuse_slot_races(self, plan: StepPlan) -> None:
        writes = [row.write_anchor for row in plan.rows] + [e.slot for row in plan.rows for e in row.exports]
        if len(set(writes)) != len(writes) or 0 in writes:
            raise TellTaleError(f"two writes to one slot, or one to the null slot: {plan}")
        for row in plan.rows:
            others = [other for other in plan.rows if other is not row]
            touched = {other.write_anchor for other in others} | {e.slot for o in plan.rows for e in o.exports}
            touched |= {export.slot for export in row.exports}
            if row.read_anchor in touched:
                raise TellTaleError(f"{row.request_id} reads a slot that something else writes: {plan}")
        lanes = [row.lane for row in plan.rows]
        if len(set(lanes)) != len(lanes):
            raise TellTaleError(f"two rows share a lane: {plan}")

    def _refuse_page_races(self, plan: StepPlan, tables: list[list[int]]) -> None:
        """A page that a row writes is no other row's, neither to read nor to write, were it the same tokens."""
        size = self.block_size
        writer: dict[int, RowPlan] = {}
        for row, table in zip(plan.rows, tables, strict=True):
            for page in {table[at // size] for at in range(row.start, row.end)}:
                if page in writer:
                    raise TellTaleError(f"{row.request_id} writes a page that another row writes: {plan}")
                writer[page] = row
        for row, table in zip(plan.rows, tables, strict=True):
            for page in {table[at // size] for at in range(row.end if row.tokens else 0)}:
                if writer.get(page, row) is not row:
                    raise TellTaleError(f"{row.request_id} reads a page that another row writes: {plan}")

    def _empty_what_is_lent_anew(self, plan: StepPlan, tables: list[list[int]]) -> None:
        """Forget what new pages and slots held: with few distinct tokens, stale content may be right by chance.

        A row's new blocks are lent anew, but for those at its admission (the table starts at 0) that its hit came with.
        """
        for row, table in zip(plan.rows, tables, strict=True):
            first = row.table_start or -(-row.start // self.block_size)
            for page in table[first:]:
                self.pages.pop(page, None)
            if row.table_start == 0 and row.new_blocks and row.write_anchor != row.read_anchor:
                self.slots.pop(row.write_anchor, None)
            for export in row.exports:
                self.slots.pop(export.slot, None)

    def _break(self, row: RowPlan, table: list[int], writes: dict[int, tuple[int, ...]]) -> None:
        """Make everything that a row wrote mean nothing."""
        for slot in (row.write_anchor, *(export.slot for export in row.exports)):
            writes[slot] = tuple(-1 for _ in writes[slot])
        for at in range(row.start, row.end):
            self.pages[table[at // self.block_size]][at % self.block_size] = -1

    def _row(
        self, row: RowPlan, table: list[int], before: dict[int, tuple[int, ...]], writes: dict[int, tuple[int, ...]]
    ) -> RowResult:
        folded = row.start - row.num_replay
        if row.read_anchor == 0:
            state: tuple[int, ...] = ()
        elif row.read_anchor in before:
            state = before[row.read_anchor]
        else:
            raise TellTaleError(f"{row.request_id} reads slot {row.read_anchor}, which was never written")
        if len(state) != folded:
            raise TellTaleError(f"{row.request_id} expects {folded} tokens in its state, found {len(state)}")
        if row.phase is Phase.PREFILL:
            return self._prefill(row, table, state, writes)
        if row.tokens == (NEWEST,) and state and min(state) < 0:
            return self._run_in_vain(row, table, writes)
        return self._advance(row, table, state, writes)

    def _extend_table(self, row: RowPlan) -> list[int]:
        table = self.tables.setdefault(row.lane, [])
        if row.table_start == 0:
            table.clear()
            self.windows[row.lane], self.drafts[row.lane] = [], []
            self.newest.pop(row.lane, None)
        if row.table_start != len(table):
            raise TellTaleError(f"{row.request_id}: new blocks start at {row.table_start}, the table has {len(table)}")
        table.extend(row.new_blocks)
        if 0 in table:
            raise TellTaleError(f"{row.request_id} owns the null block")
        if row.tokens and len(table) * self.block_size <= row.end:
            raise TellTaleError(f"{row.request_id}: no block for the position beyond {row.end}")
        return table

    def _prefill(
        self, row: RowPlan, table: list[int], state: tuple[int, ...], writes: dict[int, tuple[int, ...]]
    ) -> RowResult:
        if row.num_replay or row.num_drafts:
            raise TellTaleError(f"{row.request_id}: a prefill row with a replay window or drafts")
        after = (*state, *row.tokens)
        self._write(table, row.start, row.tokens)
        self._read(row, table, after)
        saved: list[int] = []
        for export in row.exports:
            if not row.start < export.boundary <= row.end:
                raise TellTaleError(f"{row.request_id}: boundary {export.boundary} is outside its span")
            writes[export.slot] = after[: export.boundary]
            saved.append(export.boundary)
        writes[row.write_anchor] = after
        tokens = (next_token(after, self.vocabulary),) if row.emits else ()
        if tokens:  # a drafter makes its own entry of the token here, and needs it from then on
            self.newest[row.lane] = tokens[0]
        drafts = self._make_drafts(row, (*after, *tokens)) if tokens else 0
        return RowResult(tokens=tokens, saved=tuple(saved), num_drafts=drafts)

    def _advance(
        self, row: RowPlan, table: list[int], state: tuple[int, ...], writes: dict[int, tuple[int, ...]]
    ) -> RowResult:
        window = self.windows.get(row.lane, [])
        if row.num_replay > len(window):
            raise TellTaleError(f"{row.request_id} replays {row.num_replay} of a window of {len(window)}")
        if len(row.exports) > 1:
            raise TellTaleError(f"{row.request_id}: a fold can save one state, not {len(row.exports)}")
        folded = (*state, *window[: row.num_replay])
        saved: list[int] = []
        for export in row.exports:
            if not len(state) < export.boundary <= len(folded):
                raise TellTaleError(f"{row.request_id}: boundary {export.boundary} is outside its fold")
            writes[export.slot] = folded[: export.boundary]
            saved.append(export.boundary)
        writes[row.write_anchor] = folded
        if not row.tokens:
            return RowResult(tokens=(), saved=tuple(saved))
        if row.lane not in self.newest:
            raise TellTaleError(f"{row.request_id} decodes a token that no row of its lane emitted")
        drafts = self.drafts[row.lane][: row.num_drafts]
        if len(drafts) < row.num_drafts:
            raise TellTaleError(f"{row.request_id} verifies {row.num_drafts} drafts, {len(drafts)} are at hand")
        span = (self.newest[row.lane] if row.tokens == (NEWEST,) else row.tokens[0], *drafts)
        self._write(table, row.start, span)
        self.windows[row.lane] = list(span)
        emitted: list[int] = []
        for count in range(1, len(span) + 1):
            seen = (*folded, *span[:count])
            self._read(row, table, seen)
            emitted.append(next_token(seen, self.vocabulary))
            if count == len(span) or emitted[-1] != span[count]:
                break
            self.num_accepted += 1
        self.newest[row.lane] = emitted[-1]
        made = self._make_drafts(row, (*folded, span[0], *emitted))
        return RowResult(tokens=tuple(emitted), saved=tuple(saved), num_drafts=made)

    def _run_in_vain(self, row: RowPlan, table: list[int], writes: dict[int, tuple[int, ...]]) -> RowResult:
        """Run a row planned ahead whose request's numbers went wrong in the step before: they stay wrong."""
        for slot, length in ((row.write_anchor, row.start), *((one.slot, one.boundary) for one in row.exports)):
            writes[slot] = (-1,) * length
        self._write(table, row.start, (-1,))
        return RowResult(tokens=(0,), saved=tuple(export.boundary for export in row.exports), finite=False)

    def _make_drafts(self, row: RowPlan, known: tuple[int, ...]) -> int:
        if self.num_drafts == 0:
            return 0
        make = self.draft or self._default_draft
        self.drafts[row.lane] = make(known, self.num_drafts)
        return len(self.drafts[row.lane])

    def _default_draft(self, known: tuple[int, ...], count: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(count):
            true = next_token((*known, *drafts), self.vocabulary)
            wrong = sha256(bytes(str((known, len(drafts))), "ascii")).digest()[1] % 3 == 0
            drafts.append((true + wrong) % self.vocabulary)
        return drafts

    def _write(self, table: list[int], start: int, tokens: tuple[int, ...]) -> None:
        for position, token in enumerate(tokens, start):
            page = self.pages.setdefault(table[position // self.block_size], {})
            page[position % self.block_size] = token

    def _read(self, row: RowPlan, table: list[int], expected: tuple[int, ...]) -> None:
        """Attention over the pages must see exactly the tokens that the state has absorbed."""
        size = self.block_size
        seen = tuple(self.pages.get(table[at // size], {}).get(at % size) for at in range(len(expected)))
        if seen != expected:
            raise TellTaleError(f"{row.request_id}: pages hold {seen}, the state {expected}")

    def audit(self, scheduler: Scheduler) -> None:
        """Compare every published checkpoint and block with its name, worked out here from its content."""
        pools = scheduler.holdings
        for name, slot in pools.checkpoints.names().items():
            state = self.slots.get(slot, ())
            if self.audited.get(b"state" + name) is state:
                continue
            if (
                not state
                or min(state) < 0
                or len(state) % self.block_size
                or not any(self._chain_end(state, s) == name for s in self.salts)
            ):
                raise TellTaleError(f"slot {slot} is published under a name that is not its content's: {state}")
            self.audited[b"state" + name] = state
        for name, block in pools.blocks.names().items():
            page = self.pages.get(block, {})
            content = tuple(page[i] for i in range(self.block_size) if i in page)
            parent = pools.blocks.parent_of(name)
            if self.audited.get(name) == (parent, content):
                continue
            whole = len(content) == self.block_size and min(content) >= 0
            if not whole or not any(_link(parent, content, s) == name for s in self.salts):
                raise TellTaleError(f"block {block} is published under a name that is not its content's: {content}")
            self.audited[name] = (parent, content)

    def _chain_end(self, tokens: tuple[int, ...], salt: bytes) -> bytes | None:
        name: bytes | None = None
        for start in range(0, len(tokens), self.block_size):
            name = _link(name, tokens[start : start + self.block_size], salt)
        return name


def _link(parent: bytes | None, content: tuple[int, ...], salt: bytes) -> bytes:
    """Name a block from its parent's name and its tokens, independently of HashChain; the cache key is empty here."""
    root = sha256(bytes(4) + salt).digest()
    return sha256((parent or root) + b"".join(token.to_bytes(4, "little") for token in content)).digest()
