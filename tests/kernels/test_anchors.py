"""Row descriptions and slot access: where tokens stand, what the null slot means, how one vector per token moves."""

import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.kernels.anchors import (
    AdvanceRows,
    PrefillRows,
    carry_last_advance,
    carry_last_prefill,
    load_slots,
    store_slots,
)


def int32(values: list) -> jnp.ndarray:
    return jnp.asarray(values, jnp.int32)


def prefill_rows(**changes: list) -> PrefillRows:
    """Three rows on a packed axis of 9: 3 tokens from position 62, none from 5, 4 from 0; then padding."""
    fields = {
        "offset": [0, 3, 3, 7],
        "length": [3, 0, 4, 0],
        "start": [62, 5, 0, 0],
        "read_slot": [1, 2, 0, 0],
        "write_slot": [1, 4, 5, 0],
        "export_slot": [[6, 7], [8, 0], [8, 0], [0, 0]],
    }
    return PrefillRows(**{name: int32(value) for name, value in (fields | changes).items()})


def advance_rows(**changes: list) -> AdvanceRows:
    fields = {
        "read_slot": [1, 2, 0, 0],
        "write_slot": [1, 3, 4, 0],
        "save_slot": [5, 6, 0, 0],
        "save_at": [64, 64, 0, 0],
        "folded": [62, 64, 0, 0],
        "num_replay": [3, 1, 2, 0],
        "num_new": [2, 0, 1, 0],
    }
    return AdvanceRows(**{name: int32(value) for name, value in (fields | changes).items()})


class TestPrefillRows:
    def test_each_packed_token_knows_its_row_and_padding_is_unowned(self) -> None:
        row, owned = prefill_rows().row_of(9)
        assert owned.tolist() == [True] * 7 + [False] * 2
        assert row.tolist()[:7] == [0, 0, 0, 2, 2, 2, 2]
        assert all(0 <= r < 4 for r in row.tolist())

    def test_positions_count_from_each_rows_start(self) -> None:
        assert prefill_rows().positions(9).tolist() == [62, 63, 64, 0, 1, 2, 3, 0, 0]

    def test_last_token_of_an_empty_row_stays_in_range(self) -> None:
        assert prefill_rows().last_token().tolist()[0::2] == [2, 6]
        assert prefill_rows(offset=[0, 0, 0, 0], length=[0, 0, 0, 0]).last_token().tolist() == [0, 0, 0, 0]

    def test_boundaries_lie_on_the_absolute_grid_and_end_with_the_row(self) -> None:
        count, slot = prefill_rows().boundaries()
        assert count.tolist() == [[64, 128], [64, 128], [64, 128], [64, 128]]
        assert slot.tolist() == [[6, 0], [0, 0], [0, 0], [0, 0]]

    def test_a_start_on_the_grid_is_not_its_own_boundary(self) -> None:
        count, slot = prefill_rows(start=[64, 0, 0, 0], length=[64, 0, 4, 0]).boundaries()
        assert count[0].tolist() == [128, 192]
        assert slot[0].tolist() == [6, 0]


class TestAdvanceRows:
    def test_a_save_happens_only_for_a_count_that_this_fold_reaches(self) -> None:
        assert advance_rows().saves().tolist() == [True, False, False, False]

    def test_a_save_at_the_last_folded_token_happens(self) -> None:
        assert advance_rows(save_at=[65, 65, 0, 0]).saves().tolist() == [True, True, False, False]

    def test_a_save_beyond_the_fold_or_without_a_slot_does_not_happen(self) -> None:
        assert advance_rows(save_at=[66, 65, 1, 0], save_slot=[5, 0, 0, 0]).saves().tolist() == [False] * 4

    def test_new_tokens_stand_after_the_folded_and_replayed_ones(self) -> None:
        assert advance_rows().positions(2).tolist() == [[65, 66], [65, 66], [2, 3], [0, 1]]

    def test_only_counted_tokens_of_the_window_are_new(self) -> None:
        assert advance_rows().is_new(2).tolist() == [[True, True], [False, False], [True, False], [False, False]]


class TestSlots:
    def test_the_null_slot_loads_zeros_whatever_it_holds(self) -> None:
        pool = jnp.asarray([[jnp.nan, jnp.nan], [1.0, 2.0]])
        assert load_slots(pool, int32([0, 1, 0])).tolist() == [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
        assert load_slots(pool, int32(0)).tolist() == [0.0, 0.0]

    def test_a_store_to_the_null_slot_is_skipped(self) -> None:
        pool = store_slots(jnp.asarray([[7.0], [1.0], [2.0]]), int32([0, 2]), jnp.asarray([[9.0], [8.0]]))
        assert pool.tolist() == [[7.0], [1.0], [8.0]]

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_a_stored_value_is_rounded_to_the_pools_dtype_only(self, dtype: str) -> None:
        value = jnp.asarray([1.0 + 2.0**-12])
        pool = store_slots(jnp.zeros((2, 1), dtype), int32([1]), value[None])
        assert pool.dtype == dtype
        assert pool[1].tolist() == value.astype(dtype).tolist()


class TestCarryLast:
    def test_prefill_stores_the_vector_of_the_last_token_at_write_and_export_slots(self) -> None:
        vectors = jnp.arange(9.0)[:, None] + jnp.asarray([[10.0, 20.0]])
        pool = jnp.full((9, 2), jnp.nan).at[2].set(3.0)
        after = np.asarray(carry_last_prefill(vectors, prefill_rows(), pool))
        assert after[1].tolist() == [12.0, 22.0]
        assert after[6].tolist() == [11.0, 21.0]  # position 63 is the newest of 64 tokens
        assert after[4].tolist() == [3.0, 3.0]  # the empty row moves what it read
        assert after[5].tolist() == [16.0, 26.0]
        assert np.isnan(after[[0, 3, 7, 8]]).all()

    def test_advance_stores_the_vector_of_the_newest_folded_token(self) -> None:
        replay = jnp.arange(12.0).reshape(4, 3, 1)
        pool = jnp.full((7, 1), jnp.nan).at[1].set(100.0).at[2].set(200.0)
        after = np.asarray(carry_last_advance(replay, advance_rows(), pool))[:, 0]
        assert after[[1, 5, 3, 4]].tolist() == [2.0, 1.0, 3.0, 7.0]
        assert after[2] == 200.0
        assert np.isnan(after[[0, 6]]).all()

    def test_advance_without_a_fold_keeps_the_vector(self) -> None:
        pool = jnp.full((7, 1), jnp.nan).at[1].set(100.0).at[2].set(200.0)
        rows = advance_rows(num_replay=[0, 0, 0, 0])
        after = np.asarray(carry_last_advance(jnp.full((4, 3, 1), jnp.nan), rows, pool))[:, 0]
        assert after[[1, 2, 3, 4]].tolist() == [100.0, 200.0, 200.0, 0.0]
        assert np.isnan(after[[0, 5, 6]]).all()
