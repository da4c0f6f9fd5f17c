"""Step outputs come through one array of words as they were, bit by bit."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.serving.runner.outputs import (
    StepOutputs,
    describe_first_tokens,
    describe_token,
    pack,
    pack_logprobs,
    unpack,
    unpack_logprobs,
)
from gdn_jax.serving.runner.sampling import LogprobArrays

TINY_FLOAT = np.float32(1e-42)  # subnormal: as an integer a small one
FLOATS = [[-0.25, -1.0], [-jnp.inf, -2.0], [TINY_FLOAT, -3.0]]
# Three rows of windows of two tokens, with two alternatives to each token.
OUTPUTS = StepOutputs(
    tokens=jnp.asarray([[7, 8], [2**31 - 1, 9], [0, 1]], jnp.int32),
    num_tokens=jnp.asarray([2, 1, 0], jnp.int32),
    finite=jnp.asarray([True, False, True]),
    stored=jnp.asarray([[True, False, False, True], [False] * 4, [True] * 4]),
    logprobs=LogprobArrays(
        logprob=jnp.asarray(FLOATS, jnp.float32),
        rank=jnp.asarray([[1, 3], [250_000, 4], [2, 5]], jnp.int32),
        top_ids=jnp.arange(12, dtype=jnp.int32).reshape(3, 2, 2),
        top_logprobs=jnp.asarray([[[-0.5, -1.5], [jnp.nan, -0.0]]] * 3, jnp.float32),
    ),
)


def test_what_is_packed_comes_out_again_to_the_bit() -> None:
    words = np.asarray(pack(OUTPUTS))
    assert (words.shape, words.dtype) == ((3, 2 + 2 * (1 + 1 + 1 + 2 + 2) + 4), np.int32)
    found = unpack(words, window=2, num_top=2)
    for name in ("tokens", "num_tokens", "finite", "stored"):
        np.testing.assert_array_equal(getattr(found, name), getattr(OUTPUTS, name))
    for name, expected in vars(OUTPUTS.logprobs).items():
        array = getattr(found.logprobs, name)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array.view(np.int32), np.asarray(expected).view(np.int32))


def test_nothing_to_list_and_nothing_to_store_are_no_special_cases() -> None:
    none = LogprobArrays(
        logprob=OUTPUTS.logprobs.logprob,
        rank=OUTPUTS.logprobs.rank,
        top_ids=jnp.zeros((3, 2, 0), jnp.int32),
        top_logprobs=jnp.zeros((3, 2, 0), jnp.float32),
    )
    bare = replace(OUTPUTS, stored=jnp.zeros((3, 0), jnp.bool), logprobs=none)
    found = unpack(np.asarray(pack(bare)), window=2, num_top=0)
    assert found.stored.shape == (3, 0)
    assert found.logprobs.top_ids.shape == (3, 2, 0)
    assert found.tokens.tolist() == OUTPUTS.tokens.tolist()


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_a_token_is_described_with_as_many_alternatives_as_are_asked_for(num_top: int) -> None:
    found = unpack(np.asarray(pack(OUTPUTS)), window=2, num_top=2)
    first, second = (describe_token(found, 0, place, num_top) for place in range(2))
    assert (first.chosen, first.rank, second.chosen, second.rank) == (-0.25, 1, -1.0, 3)
    assert (first.top_ids, second.top_ids) == ((0, 1)[:num_top], (2, 3)[:num_top])
    assert first.top == (-0.5, -1.5)[:num_top]


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_first_tokens_described_at_once_are_as_described_one_by_one(num_top: int) -> None:
    whole = unpack(np.asarray(pack(OUTPUTS)), window=2, num_top=2)
    alone = tuple(describe_token(whole, row, 0, num_top) for row in range(3))
    words = np.asarray(pack_logprobs(OUTPUTS.logprobs))
    assert (words.shape, words.dtype) == ((3, 2 * (1 + 1 + 2 + 2)), np.int32)
    assert describe_first_tokens(unpack_logprobs(words, window=2, num_top=2), num_top) == alone
