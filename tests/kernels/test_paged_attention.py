"""Paged attention against dense attention in NumPy float64; what no sequence owns is NaN throughout."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.paged_sequences import (
    NUM_PAGES,
    TABLE,
    advance_rows,
    dense_attention,
    prefill_rows,
    queries,
    sequences,
    span_of,
)

from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention import paged_attention_advance, paged_attention_prefill, token_slots, write_pages

# Sums of up to 2040 float32 terms of size 1 in another order: a few 1e-6; 1e-5 leaves room and catches any wrong key.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
# bfloat16 keeps 8 bits: queries, softmax weights and the output are rounded, 2^-9 relative each.
BFLOAT16 = {"rtol": 1e-2, "atol": 1e-2}

NUM_TOKENS = 344  # one compiled shape for most tests
SPANS = ((0, 130), (600, 1), (64, 63), (3, 64), (0, 0), (511, 65))  # (start, length) of each row

STATIC = ("first_key", "implementation")
PREFILL = jax.jit(paged_attention_prefill, static_argnames=STATIC)
ADVANCE = jax.jit(paged_attention_advance, static_argnames=STATIC)


def run(function, q, held, rows, *, tables=None, first_key=1, implementation=Implementation.JAX):
    tables = held.tables if tables is None else tables
    static = {"first_key": first_key, "implementation": implementation}
    return np.asarray(function(*map(jnp.asarray, (q, held.k_pages, held.v_pages, tables)), rows, **static))


@pytest.mark.parametrize("implementation", [Implementation.REFERENCE, Implementation.JAX])
def test_prefill_is_dense_attention_over_prefix_and_span(implementation):
    held = sequences([start + length for start, length in SPANS])
    q, rows = queries(NUM_TOKENS, 4, 16), prefill_rows(SPANS)
    expected = np.zeros(q.shape)
    for row, (start, length) in enumerate(SPANS):
        span, position = span_of(rows, row), np.arange(start, start + length)
        expected[span] = dense_attention(q[span], held.k[row], held.v[row], position, first_key=1)
    got = run(PREFILL, q, held, rows, implementation=implementation)
    np.testing.assert_allclose(got, expected, **FLOAT32)
    assert not np.any(got[span_of(rows, 0)][0])  # position 0 sees no key from position 1 on
    unowned = np.ones(NUM_TOKENS, bool)
    for row in range(len(SPANS)):
        unowned[span_of(rows, row)] = False
    assert unowned.sum() == NUM_TOKENS - 323
    assert not np.any(got[unowned])


def test_a_row_has_the_same_bits_whatever_stands_beside_it():
    held = sequences([start + length for start, length in SPANS])
    q, rows = queries(NUM_TOKENS, 4, 16), prefill_rows(SPANS)
    together = run(PREFILL, q, held, rows)
    for row in (2, 5):
        order = [row, *(other for other in range(len(SPANS)) if other != row)]
        alone = prefill_rows([SPANS[row], (9, 100), *((0, 0),) * 4])
        moved = queries(NUM_TOKENS, 4, 16, seed=5)
        moved[span_of(alone, 0)] = q[span_of(rows, row)]
        got = run(PREFILL, moved, held, alone, tables=held.tables[order])
        np.testing.assert_array_equal(got[span_of(alone, 0)], together[span_of(rows, row)])


@pytest.mark.parametrize("cuts", [(64,), (1, 2), (70, 71, 128)])
def test_a_span_cut_anywhere_has_the_bits_of_the_whole(cuts):
    start, length = 500, 200
    held = sequences([start + length])
    q = queries(length, 4, 16)

    def attend(spans):
        rows = prefill_rows([*spans, *((0, 0),) * (6 - len(spans))])
        packed = np.zeros((NUM_TOKENS, 4, 16), np.float32)
        for row, (first, count) in enumerate(spans):
            packed[span_of(rows, row)] = q[first - start :][:count]
        out = run(PREFILL, packed, held, rows, tables=np.repeat(held.tables, 6, axis=0))
        return np.concatenate([out[span_of(rows, row)] for row in range(len(spans))])

    pieces = [(start + a, b - a) for a, b in pairwise([0, *cuts, length])]
    np.testing.assert_array_equal(attend(pieces), attend([(start, length)]))


def test_every_row_may_straddle_two_tiles():
    held = sequences([65] * 6)
    q, rows = queries(NUM_TOKENS, 4, 16), prefill_rows([(63, 2)] * 6)
    got = run(PREFILL, q, held, rows)
    for row in range(6):
        span = span_of(rows, row)
        expected = dense_attention(q[span], held.k[row], held.v[row], (63, 64), first_key=1)
        np.testing.assert_allclose(got[span], expected, **FLOAT32)


def test_a_wider_block_table_changes_no_bit():
    held = sequences([start + length for start, length in SPANS])
    q, rows = queries(NUM_TOKENS, 4, 16), prefill_rows(SPANS)
    wide = run(PREFILL, q, held, rows, tables=np.pad(held.tables, ((0, 0), (0, 9))))
    np.testing.assert_array_equal(wide, run(PREFILL, q, held, rows))


def test_bfloat16_rounds_operands_and_result_only():
    held = sequences([start + length for start, length in SPANS])
    half = replace(held, k_pages=held.k_pages.astype(jnp.bfloat16), v_pages=held.v_pages.astype(jnp.bfloat16))
    q, rows = queries(NUM_TOKENS, 4, 16).astype(jnp.bfloat16), prefill_rows(SPANS)
    got = run(PREFILL, q, half, rows, first_key=0)
    assert got.dtype == jnp.bfloat16
    for row, (start, length) in enumerate(SPANS):
        k, v = (side[row].astype(jnp.bfloat16) for side in (held.k, held.v))
        span = span_of(rows, row)
        expected = dense_attention(q[span], k, v, np.arange(start, start + length))
        np.testing.assert_allclose(got[span].astype(np.float32), expected, **BFLOAT16)


def test_gradients_are_those_of_the_dense_version_without_holding_all_scores():
    spans, tokens, blocks = ((1600, 440), (0, 5)), 512, 32
    held = sequences([start + length for start, length in spans], table=blocks)
    q, rows, aim = queries(tokens, 4, 16), prefill_rows(spans), queries(tokens, 4, 16, seed=2)
    arrays = [jnp.asarray(array) for array in (q, held.k_pages, held.v_pages)]

    def gradients(implementation):
        def loss(q, k_pages, v_pages):
            static = {"first_key": 1, "implementation": implementation}
            return (PREFILL(q, k_pages, v_pages, jnp.asarray(held.tables), rows, **static) * aim).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()

    compiled = gradients(Implementation.JAX)
    got, expected = compiled(*arrays), gradients(Implementation.REFERENCE)(*arrays)
    for one, other in zip(got, expected, strict=True):
        assert np.any(one)
        np.testing.assert_allclose(one, other, **FLOAT32)
    unowned = sorted(set(range(NUM_PAGES)) - set(held.tables.ravel().tolist()) | {0})
    assert not np.any(np.asarray(got[1])[unowned])
    # One array of all scores, of 4 query heads; keeping what every tile made would take several.
    all_scores = tokens * blocks * CHUNK * 4 * np.dtype(np.float32).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < all_scores


@pytest.mark.parametrize(
    ("implementation", "window", "query_heads", "kv_heads"),
    [
        (Implementation.REFERENCE, 4, 6, 2),
        (Implementation.JAX, 1, 2, 2),
        (Implementation.JAX, 4, 6, 2),
        (Implementation.JAX, 9, 8, 1),
    ],
)
def test_advance_is_dense_attention_over_everything_before(implementation, window, query_heads, kv_heads):
    starts, num_new = (0, 62, 700, 0), (min(window, 2), window, min(window, 3), 0)
    held = sequences([a + n for a, n in zip(starts, num_new, strict=True)], heads=kv_heads)
    q, rows = queries(4, window, query_heads, 16), advance_rows(starts, num_new)
    expected = np.zeros(q.shape)
    for row, (start, count) in enumerate(zip(starts, num_new, strict=True)):
        position = np.arange(start, start + count)
        expected[row, :count] = dense_attention(q[row, :count], held.k[row], held.v[row], position, first_key=1)
    got = run(ADVANCE, q, held, rows, implementation=implementation)
    np.testing.assert_allclose(got, expected, **FLOAT32)
    assert not np.any(got[0, 0])  # position 0 sees no key from position 1 on
    assert not np.any(got[3])


def test_an_advance_row_has_the_same_bits_whatever_stands_beside_and_after_it():
    starts, num_new = (0, 62, 600, 0), (2, 4, 3, 0)
    held = sequences([a + n for a, n in zip(starts, num_new, strict=True)])
    q = queries(4, 4, 6, 16)
    together = run(ADVANCE, q, held, advance_rows(starts, num_new))
    # First instead of third, one new token less, other rows empty or elsewhere.
    other = queries(4, 4, 6, 16, seed=5)
    other[0, :2] = q[2, :2]
    rows = advance_rows((600, 0, 9, 20), (2, 0, 1, 4))
    got = run(ADVANCE, other, held, rows, tables=held.tables[[2, 0, 1, 1]])
    np.testing.assert_array_equal(got[0, :2], together[2, :2])


@pytest.mark.parametrize("implementation", [Implementation.REFERENCE, Implementation.JAX])
def test_a_query_past_the_pages_its_row_owns_reads_only_owned_keys(implementation):
    held = sequences([CHUNK, TABLE * CHUNK, 0, 0])
    q = queries(4, 4, 6, 16)
    rows = advance_rows((CHUNK, TABLE * CHUNK, 0, 0), (2, 2, 0, 0))  # past the table's entries; past its width
    got = run(ADVANCE, q, held, rows, implementation=implementation)
    for row in range(2):
        last = np.full(2, len(held.k[row]) - 1)
        expected = dense_attention(q[row, :2], held.k[row], held.v[row], last, first_key=1)
        np.testing.assert_allclose(got[row, :2], expected, **FLOAT32)


def test_token_slots_follow_the_block_table_and_fall_on_the_null_page_elsewhere():
    tables = jnp.array([[5, 3], [7, 0]], jnp.int32)
    row = jnp.array([0, 0, 1, 0, 0], jnp.int32)
    position = jnp.array([0, CHUNK + 2, 1, 2 * CHUNK, 1], jnp.int32)
    valid = jnp.array([True, True, True, True, False])
    slot = np.asarray(token_slots(tables, row, position, valid))
    np.testing.assert_array_equal(slot[:3], [5 * CHUNK, 3 * CHUNK + 2, 7 * CHUNK + 1])
    assert np.all(slot[3:] // CHUNK == 0)


def test_write_pages_stores_each_vector_at_its_slot_and_never_on_the_null_page():
    pages = jnp.full((3, CHUNK, 2, 4), 9.0, jnp.bfloat16)
    values = queries(2, 2, 2, 4)
    slot = jnp.array([[CHUNK, 2 * CHUNK + 5], [3, 2 * CHUNK - 1]], jnp.int32)
    got = write_pages(pages, jnp.asarray(values), slot)
    expected = np.full((3 * CHUNK, 2, 4), 9.0, np.float32)
    for index, at in (((0, 0), CHUNK), ((0, 1), 2 * CHUNK + 5), ((1, 1), 2 * CHUNK - 1)):
        expected[at] = values[index].astype(jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32).reshape(-1, 2, 4), expected)
