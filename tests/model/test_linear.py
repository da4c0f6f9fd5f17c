"""Linear layers and embeddings against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gdn_jax.linear import Embedding, Linear

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def linear(in_features, out_features, dtype=FLOAT32, seed=0):
    return Linear(in_features, out_features, dtype=dtype, rngs=nnx.Rngs(seed))


def test_linear_multiplies_with_the_transposed_stored_weight():
    layer = linear(7, 5)
    x = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(np.float32)
    expected = x.astype(np.float64) @ np.asarray(layer.weight[...], np.float64).T
    assert layer.weight.shape == (5, 7)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)  # sums of 7 terms of size 1


def test_bfloat16_sums_are_float32_and_rounded_once():
    layer = linear(1000, 3, BFLOAT16)
    layer.weight[...] = jnp.ones((3, 1000), jnp.bfloat16)
    x = jnp.ones((1, 1000), jnp.bfloat16)
    got = layer(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), 1000.0)  # a bfloat16 running sum stops at 256
    exact = layer.in_float32(x.at[0, 0].set(1.0078125))
    assert exact.dtype == jnp.float32
    np.testing.assert_array_equal(exact, 1000.0078125)  # bfloat16 would round it


def test_weights_follow_the_seed_and_keep_the_scale_of_their_input():
    one, same, other = (linear(400, 300, seed=seed).weight[...] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert np.any(one != other)
    assert np.std(one) == pytest.approx(400**-0.5, rel=0.02)  # 120000 draws: deviation known to 0.2 %


def test_modules_can_be_made_without_memory():
    abstract = nnx.eval_shape(lambda: linear(2**20, 2**20, BFLOAT16))
    assert isinstance(abstract.weight.get_value(), jax.ShapeDtypeStruct)
    assert abstract.weight.dtype == jnp.bfloat16


def test_embedding_returns_rows_and_nan_out_of_range():
    table = Embedding(10, 4, dtype=FLOAT32, rngs=nnx.Rngs(0))
    got = table(jnp.array([[3, 0], [9, 10]], jnp.int32))
    weight = np.asarray(table.weight[...])
    np.testing.assert_array_equal(got, [[weight[3], weight[0]], [weight[9], np.full(4, np.nan)]])
