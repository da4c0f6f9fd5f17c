"""Buckets: few padded sizes, each request served by one of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from released_configs import RELEASED

from gdn_jax.config import ModelConfig
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.runner.buckets import MAX_PREFILL_ROWS, Buckets, fit, ladder, make_buckets


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


@pytest.mark.parametrize("budget", [1024, 1500, 2048, 3000, 4000, 8192, 100_000])
def test_where_time_goes_with_tokens_half_of_a_call_and_a_block_are_padding_at_most(budget: int) -> None:
    buckets = make_buckets(budget=budget, max_num_seqs=1, max_model_len=8192, block_size=64, deterministic=False)
    for num_tokens in (*range(512, budget, 61), budget):
        tokens, _ = buckets.prefill_size(num_tokens, 1)
        assert tokens <= max(2 * 512, 2 * num_tokens + 64)


def test_nothing_fits_beyond_the_largest() -> None:
    with pytest.raises(ValueError, match="at most 8; got 9"):
        fit((1, 4, 8), 9)


@given(st.integers(64, 5000), st.integers(1, 300), st.integers(1, 40_000), st.booleans())
def test_every_step_the_settings_allow_has_a_bucket(budget: int, seqs: int, length: int, deterministic: bool) -> None:
    buckets = make_buckets(
        budget=budget, max_num_seqs=seqs, max_model_len=length, block_size=64, deterministic=deterministic
    )
    rows = min(MAX_PREFILL_ROWS, seqs)
    assert all(tokens % 64 == 0 for tokens, _ in buckets.prefill)
    for wanted in ((1, 1), (budget, 1), (rows, rows), (budget, rows)):
        tokens, found = buckets.prefill_size(*wanted)
        assert (tokens >= wanted[0], found >= wanted[1]) == (True, True)
    assert buckets.prefill[-1] == (-(-budget // 64) * 64, rows)
    assert buckets.advance_rows[-1] == seqs
    assert fit(buckets.table_blocks, 1 + max(length - 2, 0) // 64)  # the last token is never run


@given(st.integers(1, 2048), st.integers(1, 8))
def test_a_prefill_call_is_the_smallest_that_holds_its_rows(num_tokens: int, num_rows: int) -> None:
    buckets = make_buckets(budget=2048, max_num_seqs=16, max_model_len=8192, block_size=64, deterministic=False)
    tokens, rows = buckets.prefill_size(num_tokens, num_rows)
    holding = [size for size in buckets.prefill if size[0] >= num_tokens and size[1] >= num_rows]
    assert (tokens, rows) == min(holding)
    assert tokens <= max(64, 8 * num_tokens) or num_rows > 1


def test_nothing_fits_beyond_the_largest_call() -> None:
    buckets = make_buckets(budget=64, max_num_seqs=2, max_model_len=512, block_size=64, deterministic=False)
    for wanted in ((65, 1), (1, 3)):
        with pytest.raises(ValueError, match=r"must be at most \(64, 2\); got"):
            buckets.prefill_size(*wanted)


def num_steps(buckets: Buckets) -> int:
    return len([*buckets.prefill_shapes(), *buckets.advance_shapes()])


def test_a_deterministic_engine_has_one_size_of_each_kind() -> None:
    buckets = make_buckets(budget=2048, max_num_seqs=64, max_model_len=8192, block_size=64, deterministic=True)
    assert num_steps(buckets) == 2


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_start_up_compiles_twenty_steps_for_a_released_model_with_all_of_its_context(name: str) -> None:
    """A bound on every first start: each step takes seconds to compile."""
    length = ModelConfig.from_dict(RELEASED[name]).context_length
    defaults = EngineConfig(model=name)
    sizes = {
        seqs: num_steps(
            make_buckets(
                budget=defaults.max_num_batched_tokens,
                max_num_seqs=seqs,
                max_model_len=length,
                block_size=defaults.block_size,
                deterministic=False,
            )
        )
        for seqs in (defaults.max_num_seqs, 64)
    }
    assert sizes == {16: 20, 64: 22}


def test_a_model_of_short_context_compiles_half_of_that() -> None:
    buckets = make_buckets(budget=2048, max_num_seqs=16, max_model_len=8192, block_size=64, deterministic=False)
    assert num_steps(buckets) == 10


def test_shapes_are_buckets_of_one_size_and_every_size_is_among_them() -> None:
    buckets = make_buckets(budget=2048, max_num_seqs=64, max_model_len=262_144, block_size=64, deterministic=False)
    prefill = [(*shape.prefill, *shape.table_blocks) for shape in buckets.prefill_shapes()]
    assert prefill == [(size, width) for width in buckets.table_blocks for size in buckets.prefill]
    advance = [(*shape.advance_rows, *shape.table_blocks) for shape in buckets.advance_shapes()]
    assert advance == [(rows, width) for width in buckets.table_blocks for rows in buckets.advance_rows]
