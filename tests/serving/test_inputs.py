"""From rows to padded arrays: each row where it belongs, and padding that touches nothing."""

import numpy as np
import pytest
from oracles.runner_rig import blocks, export, row

from gdn_jax.serving.core.plan import Phase, RowPlan
from gdn_jax.serving.runner.buckets import Buckets
from gdn_jax.serving.runner.inputs import BlockTables, build_advance, build_prefill, prefill_groups

BUCKETS = Buckets(prefill=((64, 1), (256, 3)), advance_rows=(1, 4), table_blocks=(2, 8))
LANES = 5


def tables_of(*rows: RowPlan) -> BlockTables:
    tables = BlockTables(LANES, 8)
    for each in rows:
        tables.extend(each)
    return tables


def fields_of(batch: object, *names: str) -> list[list[int]]:
    return [np.asarray(getattr(batch, name)).tolist() for name in names]


def decode(name: str, lane: int, **changes: object) -> RowPlan:
    return row(name, phase=Phase.DECODE, lane=lane, **changes)


def test_prefill_rows_stand_in_order_and_padding_has_no_tokens_no_slots_and_no_blocks() -> None:
    first = row("a", tokens=(5, 6, 7), start=64, lane=3, new_blocks=blocks(4, 5), read_anchor=6, write_anchor=2)
    second = row("b", tokens=tuple(range(70)), lane=1, new_blocks=blocks(7, 8), write_anchor=3)
    batch = build_prefill([first, second], tables_of(first, second), BUCKETS, 64)
    assert fields_of(batch.rows, "offset", "length", "start", "read_slot", "write_slot") == [
        [0, 3, 73],
        [3, 70, 0],
        [64, 0, 0],
        [6, 0, 0],
        [2, 3, 0],
    ]
    assert batch.token_ids.tolist() == [5, 6, 7, *range(70), *[0] * 183]
    assert batch.block_tables.tolist() == [[4, 5], [7, 8], [0, 0]]
    assert batch.rows.export_slot.tolist() == [[0] * 4] * 3
    assert {array.dtype for array in (batch.token_ids, batch.block_tables, *vars(batch.rows).values())} == {
        np.dtype("int32")
    }


def test_exports_stand_at_their_boundary_counted_from_the_row() -> None:
    """Entry j is the boundary (start // 64 + 1 + j) * 64, also where the span starts off the grid."""
    aligned = row("a", tokens=(1,) * 128, start=128, exports=(export(192, 4), export(256, 5)))
    askew = row("b", tokens=(1,) * 60, start=70, exports=(export(128, 6),))
    batch = build_prefill([aligned, askew], tables_of(aligned, askew), BUCKETS, 64)
    assert batch.rows.export_slot.tolist() == [[4, 5, 0, 0], [6, 0, 0, 0], [0] * 4]


def test_a_prefill_of_padding_alone_touches_nothing() -> None:
    batch = build_prefill([], BlockTables(LANES, 8), BUCKETS, 64)
    assert not any(np.any(array) for array in (batch.token_ids, batch.block_tables, *vars(batch.rows).values()))


def test_rows_are_parted_into_calls_by_rows_and_by_tokens_in_order() -> None:
    rows = [row(str(index), tokens=(1,) * length) for index, length in enumerate((64, 64, 128, 200, 10, 10, 10))]
    groups = prefill_groups(rows, BUCKETS)
    assert [[len(each.tokens) for each in group] for group in groups] == [[64, 64, 128], [200, 10, 10], [10]]
    assert prefill_groups([], BUCKETS) == []


def test_advance_rows_stand_in_order_and_a_padding_row_has_null_slots_no_tokens_and_no_lane() -> None:
    plain = decode("a", 4, tokens=(9,), start=70, num_replay=1, read_anchor=3, write_anchor=5, new_blocks=blocks(2, 3))
    saving = decode(
        "b", 0, tokens=(8,), start=65, num_replay=2, read_anchor=6, write_anchor=6, exports=(export(64, 7),)
    )
    closing = decode("c", 2, start=64, num_replay=1, read_anchor=1, write_anchor=1)
    batch = build_advance([plain, saving, closing], tables_of(plain), BUCKETS, window=2)
    assert batch.token_ids.tolist() == [[9, 0], [8, 0], [0, 0], [0, 0]]
    assert batch.lane.tolist() == [4, 0, 2, LANES]
    assert fields_of(batch.rows, "read_slot", "write_slot", "save_slot", "save_at") == [
        [3, 6, 1, 0],
        [5, 6, 1, 0],
        [0, 7, 0, 0],
        [0, 64, 0, 0],
    ]
    assert fields_of(batch.rows, "folded", "num_replay", "num_new") == [[69, 63, 63, 0], [1, 2, 1, 0], [1, 1, 0, 0]]
    assert batch.block_tables.tolist() == [[2, 3], [0, 0], [0, 0], [0, 0]]
    assert {array.dtype for array in (batch.token_ids, batch.lane, *vars(batch.rows).values())} == {np.dtype("int32")}


def test_drafts_count_as_new_tokens_and_are_left_to_the_device() -> None:
    verify = row("a", phase=Phase.VERIFY, tokens=(9,), num_drafts=3, start=70, num_replay=2)
    batch = build_advance([verify], BlockTables(LANES, 8), BUCKETS, window=4)
    assert batch.token_ids.tolist() == [[9, 0, 0, 0]]
    assert fields_of(batch.rows, "folded", "num_replay", "num_new") == [[68], [2], [4]]


def test_an_advance_of_padding_alone_touches_nothing() -> None:
    batch = build_advance([], BlockTables(LANES, 8), BUCKETS, window=1)
    assert batch.lane.tolist() == [LANES]
    assert not any(np.any(array) for array in (batch.token_ids, batch.block_tables, *vars(batch.rows).values()))


def test_tables_grow_by_new_blocks_and_start_anew_at_zero() -> None:
    tables = tables_of(row("a", lane=1, new_blocks=blocks(3, 4, 5)), row("a", lane=1, table_start=3))
    at_lane = np.asarray([1])
    assert tables.gather(at_lane, (8,)).tolist() == [[3, 4, 5, 0, 0, 0, 0, 0]]
    tables.extend(row("a", lane=1, table_start=3, new_blocks=blocks(6)))
    assert tables.gather(at_lane, (8,)).tolist() == [[3, 4, 5, 6, 0, 0, 0, 0]]
    tables.extend(row("b", lane=1, new_blocks=blocks(7)))  # the lane's next owner sees nothing of the first
    assert tables.gather(at_lane, (8,)).tolist() == [[7, 0, 0, 0, 0, 0, 0, 0]]


def test_a_table_is_as_wide_as_its_rows_need_and_not_as_other_lanes_do() -> None:
    wide, narrow = row("a", lane=0, new_blocks=blocks(1, 2, 3)), row("b", lane=1, new_blocks=blocks(4))
    tables = tables_of(wide, narrow)
    assert tables.gather(np.asarray([1, LANES]), (2, 8)).tolist() == [[4, 0], [0, 0]]
    assert tables.gather(np.asarray([1, 0]), (2, 8)).shape == (2, 8)


def test_a_batch_keeps_its_numbers_when_the_next_step_changes_the_tables() -> None:
    """The device may read an array after the host has gone on."""
    first = row("a", lane=0, new_blocks=blocks(1))
    tables = tables_of(first)
    batch = build_advance([first], tables, BUCKETS, window=1)
    tables.extend(row("b", lane=0, new_blocks=blocks(2, 3)))
    assert batch.block_tables.tolist() == [[1, 0]]


def test_more_rows_than_the_largest_bucket_are_an_error() -> None:
    rows = [decode(str(lane), lane, tokens=(1,)) for lane in range(5)]
    with pytest.raises(ValueError, match="at most 4; got 5"):
        build_advance(rows, BlockTables(LANES, 8), BUCKETS, window=1)
