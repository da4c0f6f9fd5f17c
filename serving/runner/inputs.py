"""From a plan's rows to padded arrays: integers in, NumPy out. Padding points at the null block and the null slot.

Block tables and sampling parameters follow a request, not a row: they are kept per lane, and a row gathers its lane's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.serving.core.plan import RowPlan
from gdn_jax.serving.runner.buckets import Buckets, fit
from gdn_jax.state import AdvanceBatch, PrefillBatch


class BlockTables:
    """Each lane's block ids in position order, updated by the new blocks that plans carry."""

    def __init__(self, num_lanes: int, num_blocks: int) -> None:
        """Create empty tables.

        Args:
            num_lanes: lanes.
            num_blocks: blocks that the longest sequence may own.
        """
        self._table = np.zeros((num_lanes, num_blocks), np.int32)
        self._length = np.zeros((num_lanes,), np.int32)

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

    def gather(self, rows: Sequence[RowPlan], num_rows: int, widths: Sequence[int]) -> np.ndarray:
        """Return `[num_rows, width]` for the smallest width that holds every row's table."""
        lanes = np.asarray([row.lane for row in rows], np.int32)
        width = fit(widths, int(self._length[lanes].max(initial=1)))
        tables = np.zeros((num_rows, width), np.int32)
        tables[: len(rows)] = self._table[lanes, :width]
        return tables


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
        block_tables=_leaf(tables.gather(rows, num_rows, buckets.table_blocks)),
    )


def build_advance(
    rows: Sequence[RowPlan], tables: BlockTables, buckets: Buckets, *, window: int, num_lanes: int
) -> AdvanceBatch:
    """Put decode, verify and closing rows into one batch of windows; drafts are filled in on the device."""
    num_rows = fit(buckets.advance_rows, len(rows))
    lane = np.full((num_rows,), num_lanes, np.int32)  # past the end: a padding row stores nothing
    lane[: len(rows)] = [row.lane for row in rows]
    padding = (0,) * window
    token_ids = np.zeros((num_rows, window), np.int32)
    fields = np.zeros((len(_ADVANCE_FIELDS), num_rows), np.int32)
    if rows:  # one array from many numbers at once: an assignment per row costs a microsecond each
        token_ids[: len(rows)] = [(row.tokens + padding)[:window] for row in rows]
        fields[:, : len(rows)] = np.asarray([_advance_fields(row) for row in rows], np.int32).T
    return AdvanceBatch(
        token_ids=_leaf(token_ids),
        rows=AdvanceRows(**dict(zip(_ADVANCE_FIELDS, map(_leaf, fields), strict=True))),
        lane=_leaf(lane),
        block_tables=_leaf(tables.gather(rows, num_rows, buckets.table_blocks)),
    )


_ADVANCE_FIELDS = ("read_slot", "write_slot", "save_slot", "save_at", "folded", "num_replay", "num_new")


def _advance_fields(row: RowPlan) -> tuple[int, ...]:
    slot, boundary = (row.exports[0].slot, row.exports[0].boundary) if row.exports else (0, 0)
    counts = (row.start - row.num_replay, row.num_replay, len(row.tokens) + row.num_drafts)
    return row.read_anchor, row.write_anchor, slot, boundary, *counts


def _leaf(array: np.ndarray) -> Any:
    """Let a NumPy array stand in a pytree that kernels read: the jit boundary makes a device array of it."""
    return array
