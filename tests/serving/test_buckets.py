"""Buckets: few padded sizes, each request served by one of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_jax.serving.runner.buckets import MAX_PREFILL_ROWS, fit, ladder, make_buckets


@given(st.integers(1, 64), st.integers(0, 5000), st.sampled_from([2, 4, 8]))
def test_a_ladder_climbs_from_its_first_step_to_exactly_the_largest(smallest: int, more: int, factor: int) -> None:
    largest = smallest + more
    sizes = ladder(smallest, largest, factor)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    assert all(size == smallest * factor**index for index, size in enumerate(sizes[:-1]))
    assert all(2 * size <= largest for size in sizes[:-1])


@given(st.integers(1, 4000), st.data())
def test_a_size_that_fits_is_the_smallest_that_does(largest: int, data: st.DataObject) -> None:
    sizes = ladder(1, largest, 4)
    wanted = data.draw(st.integers(0, largest))
    found = fit(sizes, wanted)
    assert found >= wanted
    assert not any(wanted <= size < found for size in sizes)


def test_nothing_fits_beyond_the_largest() -> None:
    with pytest.raises(ValueError, match="at most 8; got 9"):
        fit((1, 4, 8), 9)


@given(st.integers(64, 5000), st.integers(1, 300), st.integers(1, 40_000), st.booleans())
def test_every_step_the_settings_allow_has_a_bucket(budget: int, seqs: int, length: int, deterministic: bool) -> None:
    buckets = make_buckets(
        budget=budget, max_num_seqs=seqs, max_model_len=length, block_size=64, deterministic=deterministic
    )
    assert fit(buckets.prefill_tokens, budget) >= budget
    assert all(size % 64 == 0 for size in buckets.prefill_tokens)
    assert buckets.prefill_rows[-1] == min(MAX_PREFILL_ROWS, seqs)
    assert buckets.advance_rows[-1] == seqs
    assert fit(buckets.table_blocks, 1 + max(length - 2, 0) // 64)  # the last token is never run


def test_a_deterministic_engine_has_one_size_of_each_kind() -> None:
    buckets = make_buckets(budget=2048, max_num_seqs=64, max_model_len=8192, block_size=64, deterministic=True)
    assert [len(sizes) for sizes in vars(buckets).values()] == [1, 1, 1, 1]


def test_start_up_compiles_few_steps_for_common_settings() -> None:
    buckets = make_buckets(budget=2048, max_num_seqs=64, max_model_len=8192, block_size=64, deterministic=False)
    per_width = len(buckets.prefill_tokens) * len(buckets.prefill_rows) + len(buckets.advance_rows)
    assert per_width * len(buckets.table_blocks) <= 30
