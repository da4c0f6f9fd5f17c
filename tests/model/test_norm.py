"""The zero-centred RMS norm against NumPy float64 and the golden values."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from gdn_jax.norm import RMSNorm, rms_norm


def in_float64(x, weight, eps):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (1.0 + weight)


def test_norm_is_zero_centred_over_the_last_axis():
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 40), (40,)))
    got = rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-2)
    np.testing.assert_allclose(got, in_float64(x, weight, 1e-2), rtol=1e-6, atol=1e-6)  # float32 throughout


@pytest.mark.parametrize(("dtype", "rounding"), [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)])
def test_half_precision_is_rounded_once_and_squares_do_not_overflow(dtype, rounding):
    rng = np.random.default_rng(0)
    x = jnp.asarray(1000.0 * rng.normal(size=(3, 40)), dtype)  # squares pass float16's 65504
    weight = jnp.asarray(0.1 * rng.normal(size=40), dtype)
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), in_float64(x, weight, 1e-6), rtol=rounding)


def test_a_new_norm_has_weight_zero_and_so_gain_one():
    layer = RMSNorm(8, eps=1e-6, dtype=jnp.dtype("bfloat16"))
    assert layer.weight.dtype == jnp.bfloat16
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), jnp.float32)
    np.testing.assert_allclose(layer(x), in_float64(x, np.zeros(8), 1e-6), rtol=1e-6)


def test_norm_matches_the_golden_values(golden_folder):
    with safe_open(golden_folder / "kernels.safetensors", "np") as golden:
        x, weight, expected = (golden.get_tensor(f"rms.{name}") for name in "xwy")
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-6), expected, rtol=1e-5)
