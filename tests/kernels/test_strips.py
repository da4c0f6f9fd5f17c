"""How packed rows are cut into strips, against a loop over tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.paged_sequences import prefill_rows

from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.strips import (
    BEGIN,
    END,
    KEYS,
    PAGES,
    POSITION,
    ROW,
    TOKEN,
    longest_first,
    strips_of,
)

BLOCKS = 12


def cut(spans, num_tokens: int, strip_tokens: int, *, gap: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return the strips, and how many blocks each row owns: one too few for the last row."""
    needed = [-(-(start + length) // CHUNK) for start, length in spans]
    needed[-1] = max(needed[-1] - 1, 0)
    tables = (np.arange(BLOCKS)[None] < np.array(needed)[:, None]).astype(np.int32)
    rows = prefill_rows(spans, gap=gap)
    strips = strips_of(rows, jnp.asarray(tables), num_tokens=num_tokens, strip_tokens=strip_tokens)
    return np.asarray(strips), np.array(needed)


@pytest.mark.parametrize("strip_tokens", [16, 32, 128])
@pytest.mark.parametrize("gap", [0, 3, 40])
@pytest.mark.parametrize(
    "spans", [((0, 64),), ((0, 130), (600, 1), (64, 63), (3, 64), (0, 0), (511, 65)), ((0, 0), (7, 1), (0, 0), (9, 2))]
)
def test_every_token_of_a_row_is_in_one_strip_that_sees_its_keys(spans, gap: int, strip_tokens: int) -> None:
    num_tokens = 640
    strips, blocks = cut(spans, num_tokens, strip_tokens, gap=gap)
    rows = prefill_rows(spans, gap=gap)
    offset = np.asarray(rows.offset)
    seen = np.zeros(num_tokens, int)
    for strip in strips[strips[:, PAGES] > 0]:
        row = strip[ROW]
        start, length = spans[row]
        assert strip[TOKEN] % strip_tokens == 0
        assert strip[TOKEN] <= strip[BEGIN] < strip[END] <= strip[TOKEN] + strip_tokens
        assert offset[row] <= strip[BEGIN] < strip[END] <= offset[row] + length
        assert strip[POSITION] == start + strip[TOKEN] - offset[row]
        assert strip[KEYS] == min(start + length, blocks[row] * CHUNK)
        last = start + strip[END] - 1 - offset[row]
        assert strip[PAGES] == max(min(last // CHUNK + 1, blocks[row]), 1)  # if none is the row's, the null page
        seen[strip[BEGIN] : strip[END]] += 1
    expected = np.zeros(num_tokens, int)
    for row, (_, length) in enumerate(spans):
        expected[offset[row] : offset[row] + length] = 1
    np.testing.assert_array_equal(seen, expected)


def test_the_strips_with_most_pages_come_first() -> None:
    strips, _ = cut(((0, 200), (600, 100), (0, 0)), 320, 32)
    ordered = np.asarray(longest_first(jnp.asarray(strips)))
    assert np.all(np.diff(ordered[:, PAGES]) <= 0)
    np.testing.assert_array_equal(sorted(map(tuple, ordered)), sorted(map(tuple, strips)))
