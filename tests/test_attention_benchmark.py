"""The benchmark of decode attention has no time for a kernel that is wrong, in any of the rows that it would time."""

from collections.abc import Callable
from dataclasses import replace

import jax
import pytest

from benchmarks.kernels import attention as benchmark
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.paged_attention import paged_attention_advance

CASE = benchmark.Case(num_rows=5, context=128, window=2, query_heads=4, kv_heads=2, width=32)


def check(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., jax.Array]) -> float:
    monkeypatch.setattr(benchmark, "paged_attention_advance", kernel)
    monkeypatch.setattr(benchmark, "_CHECKED_KEYS", 2 * CASE.context)
    return benchmark.check(CASE, Implementation.JAX)


def wrong_with_as_many_rows_as_are_timed(q, *others, implementation: Implementation) -> jax.Array:
    out = paged_attention_advance(q, *others, implementation=implementation)
    return out.at[-1].set(0) if q.shape[0] == CASE.num_rows else out


def test_the_right_kernel_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, paged_attention_advance) < 2.0**-7


def test_a_kernel_that_is_wrong_with_as_many_rows_as_are_timed_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="attention must be right within"):
        check(monkeypatch, wrong_with_as_many_rows_as_are_timed)


def test_calls_read_pages_of_their_own_until_no_cache_holds_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, num_rows=3)
    monkeypatch.setattr(benchmark, "_LEAST_BYTES", 3 * case.kv_bytes - 1)
    (_, k_pages, _), sets = benchmark.draw(case)
    pages = [set(tables.ravel().tolist()) for tables, _ in sets]
    assert len(sets) == 3
    assert all(len(own) == 3 * 2 for own in pages)
    assert set.union(*pages) == set(range(1, k_pages.shape[0])), "every page but the null one, each in one set"
    monkeypatch.setattr(benchmark, "_LEAST_BYTES", case.kv_bytes)
    assert case.num_sets == 1
