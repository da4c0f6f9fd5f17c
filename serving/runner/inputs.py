"""From a plan's rows to padded arrays: integers in, NumPy out. Padding points at the null block and the null slot.

Block tables and sampling parameters follow a request, not a row: they are kept per lane, and a row gathers its lane's.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.serving.core.plan import RowPlan
from gdn_jax.serving.runner.buckets import Buckets, fit
from gdn_jax.state import AdvanceBatch, PrefillBatch


class BlockTables:
    """Each lane's block ids in position order, updated by the new blocks that plans carry.

    One more lane behind the others stands for padding: its table is empty for good.
    """

    def __init__(self, num_lanes: int, num_blocks: int) -> None:
        """Create empty tables.

        Args:
            num_lanes: lanes.
            num_blocks: blocks that the longest sequence may own.
        """
        self.num_lanes = num_lanes
        self._table = np.zeros((num_lanes + 1, num_blocks), np.int32)
        self._length = np.ones((num_lanes + 1,), np.int32)  # no table is narrower than one block

    def extend(self, row: RowPlan) -> None:
        """Take over a row's new blocks; a start of 0 replaces the table."""
        if not row.new_blocks:
            return
        end = row.table_start + len(row.new_blocks)
        table = self._table[row.lane]
        table[row.table_start : end] = row.new_blocks
        if row.table_start == 0:
            table[end:] = 0
        self._length[row.lane] = end

    def gather(self, lane: np.ndarray, widths: Sequence[int]) -> np.ndarray:
        """Return a copy `[rows, width]` of the lanes' tables, for the smallest width that holds each of them."""
        width = fit(widths, int(self._length[lane].max()))
        return self._table[:, :width].take(lane, axis=0)


def padded_lanes(rows: Sequence[RowPlan], num_rows: int, num_lanes: int) -> np.ndarray:
    """Return the rows' lanes, padded with the one past the end, which stores nothing."""
    lane = np.full((num_rows,), num_lanes, np.int32)
    lane[: len(rows)] = [row.lane for row in rows]
    return lane


def prefill_groups(rows: Sequence[RowPlan], buckets: Buckets) -> list[list[RowPlan]]:
    """Part prefill rows into calls: at most the largest bucket of rows and of tokens each, in order."""
    most_tokens, most_rows = buckets.prefill[-1]
    groups: list[list[RowPlan]] = []
    tokens = 0
    for row in rows:
        full = groups and (len(groups[-1]) == most_rows or tokens + len(row.tokens) > most_tokens)
        if not groups or full:
            groups.append([])
            tokens = 0
        groups[-1].append(row)
        tokens += len(row.tokens)
    return groups


def build_prefill(rows: Sequence[RowPlan], tables: BlockTables, buckets: Buckets, block_size: int) -> PrefillBatch:
    """Pack prefill rows into one batch."""
    num_tokens, num_rows = buckets.prefill_size(sum(len(row.tokens) for row in rows), len(rows))
    token_ids = np.zeros((num_tokens,), np.int32)
    fields = np.zeros((5, num_rows), np.int32)  # offset, length, start, read slot, write slot
    exports = np.zeros((num_rows, num_tokens // block_size), np.int32)
    offset = 0
    for index, row in enumerate(rows):
        length = len(row.tokens)
        token_ids[offset : offset + length] = row.tokens
        fields[:, index] = offset, length, row.start, row.read_anchor, row.write_anchor
        for export in row.exports:
            exports[index, export.boundary // block_size - row.start // block_size - 1] = export.slot
        offset += length
    fields[0, len(rows) :] = offset
    return PrefillBatch(
        token_ids=_leaf(token_ids),
        rows=PrefillRows(
            offset=_leaf(fields[0]),
            length=_leaf(fields[1]),
            start=_leaf(fields[2]),
            read_slot=_leaf(fields[3]),
            write_slot=_leaf(fields[4]),
            export_slot=_leaf(exports),
        ),
        block_tables=_leaf(tables.gather(padded_lanes(rows, num_rows, tables.num_lanes), buckets.table_blocks)),
    )


def build_advance(rows: Sequence[RowPlan], tables: BlockTables, buckets: Buckets, *, window: int) -> AdvanceBatch:
    """Put decode, verify and closing rows into one batch of windows; drafts are filled in on the device."""
    num_rows = fit(buckets.advance_rows, len(rows))
    token_ids = np.zeros((num_rows, window), np.int32)
    fields = np.zeros((len(_ADVANCE_FIELDS), num_rows), np.int32)
    # All numbers at once: an assignment per row and field would take most of a step's host time.
    numbers = [
        (
            row.read_anchor,
            row.write_anchor,
            row.start - row.num_replay,
            row.num_replay,
            len(row.tokens) + row.num_drafts,
            row.tokens[0] if row.tokens else 0,
        )
        for row in rows
    ]
    by_field = np.fromiter(chain.from_iterable(numbers), np.int32).reshape(len(rows), 6).T
    fields[:5, : len(rows)] = by_field[:5]
    token_ids[: len(rows), 0] = by_field[5]
    for index, row in enumerate(rows):
        if row.exports:
            fields[5:, index] = row.exports[0].slot, row.exports[0].boundary
    lane = padded_lanes(rows, num_rows, tables.num_lanes)
    return AdvanceBatch(
        token_ids=_leaf(token_ids),
        rows=AdvanceRows(**dict(zip(_ADVANCE_FIELDS, map(_leaf, fields), strict=True))),
        lane=_leaf(lane),
        block_tables=_leaf(tables.gather(lane, buckets.table_blocks)),
    )


_ADVANCE_FIELDS = ("read_slot", "write_slot", "folded", "num_replay", "num_new", "save_slot", "save_at")


def _leaf(array: np.ndarray) -> Any:
    """Let a NumPy array stand in a pytree that kernels read: the jit boundary makes a device array of it."""
    return array
