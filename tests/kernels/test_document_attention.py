"""Attention of packed documents against a loop in float64: documents, lags, missing keys, keys of one's own."""

import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.kernels.document_attention import KeyValues, document_attention, visible_keys

ROWS, TOKENS, HEADS, GROUP, WIDTH = 2, 9, 2, 3, 8
DOCUMENT = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)


def draw(seed: int, heads: int) -> np.ndarray:
    return np.random.RandomState(seed).normal(size=(ROWS, TOKENS, heads, WIDTH)).astype(np.float32)


def pair(seed: int) -> KeyValues:
    return KeyValues(k=jnp.asarray(draw(seed, HEADS)), v=jnp.asarray(draw(seed + 1, HEADS)))


def expected(q: np.ndarray, keys: KeyValues, has_key: np.ndarray, lag: int, own: tuple[KeyValues, ...]) -> np.ndarray:
    """Attend query by query; NaN where a query has no key."""
    out = np.full(q.shape, np.nan)
    for row, token, head in np.ndindex(q.shape[:3]):
        places = [
            (keys, at)
            for at in range(token - lag + 1)
            if DOCUMENT[row, at] == DOCUMENT[row, token] and has_key[row, at]
        ] + [(one, token) for one in own]
        if places:
            k, v = (np.stack([getattr(one, side)[row, at, head // GROUP] for one, at in places]) for side in "kv")
            score = np.exp(k.astype(np.float64) @ q[row, token, head] / WIDTH**0.5)
            out[row, token, head] = score @ v / score.sum()
    return out


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("num_own", [0, 2])
def test_equals_a_loop_over_queries_and_the_keys_they_see(lag: int, num_own: int) -> None:
    q, keys = draw(0, HEADS * GROUP), pair(1)
    own = tuple(pair(3 + 2 * index) for index in range(num_own))
    has_key = np.random.RandomState(9).random((ROWS, TOKENS)) > 0.2
    visible = visible_keys(jnp.asarray(DOCUMENT), jnp.asarray(has_key), lag=lag)
    got = np.asarray(document_attention(jnp.asarray(q), keys, visible, own))
    want = expected(q, keys, has_key, lag, own)
    assert np.all(np.isfinite(got))  # also where a query sees nothing
    known = np.isfinite(want)
    assert known.mean() > 0.25
    np.testing.assert_allclose(got[known], want[known], atol=1e-6)


def test_shifted_moves_to_later_tokens() -> None:
    keys = pair(1)
    np.testing.assert_array_equal(keys.shifted(2).k[:, 2:], keys.k[:, :-2])
    assert not np.any(keys.shifted(2).v[:, :2])
