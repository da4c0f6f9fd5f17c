"""Rotation and its frequencies against complex multiplication in NumPy float64, and the golden values."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from gdn_jax.config import ModelConfig, YarnConfig
from gdn_jax.rope import inverse_frequencies, rotate

CONFIG = ModelConfig.from_dict({"model_type": "qwen3_next", "rope_theta": 1e7})  # 64 of 256 channels rotate
YARN = YarnConfig(factor=4.0, original_max_position=262144, attention_factor=0.1 * np.log(4.0) + 1.0)


def turned(x, position, inv_freq, scale):
    """Return the rotation of x [tokens, heads, D] in float64, as complex numbers a + ib."""
    half = len(inv_freq)
    pairs = x[..., :half].astype(np.float64) + 1j * x[..., half : 2 * half]
    pairs *= scale * np.exp(1j * np.outer(position, inv_freq))[:, None]
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


def rotated(x, position, inv_freq, scale):
    """Return `rotate` as NumPy, compiled in one piece."""
    return np.asarray(jax.jit(lambda x, position: rotate(x, position, inv_freq, scale))(x, position))


def heads(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_frequencies_are_powers_of_the_base_over_the_rotated_width():
    inv_freq, scale = inverse_frequencies(CONFIG)
    assert inv_freq.dtype == np.float32
    assert scale == 1.0
    np.testing.assert_allclose(inv_freq, 1e7 ** (-2.0 * np.arange(32) / 64), rtol=1e-7)


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_ramps_between():
    plain, _ = inverse_frequencies(CONFIG)
    inv_freq, scale = inverse_frequencies(replace(CONFIG, yarn=YARN))
    assert scale == pytest.approx(1.1386294)
    turns = 262144 * plain / (2 * np.pi)  # over the original context
    fast, slow = turns > 32 * 1.7, turns < 1 / 1.7  # a pair is 1.65 times as fast as the next: clear of the ramp's ends
    np.testing.assert_array_equal(inv_freq[fast], plain[fast])
    np.testing.assert_allclose(inv_freq[slow], plain[slow] / 4.0, rtol=1e-7)
    between = plain[~fast & ~slow] / inv_freq[~fast & ~slow]
    assert len(between) > 6
    assert np.all(np.diff(between) >= 0)
    assert 1.0 <= between[0] < between[-1] <= 4.0
    np.testing.assert_allclose(np.diff(1.0 / between[1:-1], n=2), 0.0, atol=1e-6)  # the blend is linear in the pair


def test_rotation_is_complex_multiplication_and_passes_the_rest_through():
    x, position = heads(5, 3, 24), np.array([0, 1, 5, 70, 900], np.int32)
    inv_freq = (50.0 ** (-np.arange(4) / 4)).astype(np.float32)
    got = rotated(x, position, inv_freq, 1.25)
    # Float32 angles up to 900 are off by up to 3e-5.
    np.testing.assert_allclose(got, turned(x, position, inv_freq, 1.25), rtol=0, atol=2e-4)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    np.testing.assert_allclose(got[0, :, :8], 1.25 * x[0, :, :8], rtol=1e-6)


def test_positions_of_any_shape_turn_each_token_alike():
    x, inv_freq = heads(2, 3, 4, 16), np.array([1.0, 0.1], np.float32)
    position = np.array([[0, 3, 9], [4, 4, 1]], np.int32)
    got = rotated(x, position, inv_freq, 1.0)
    flat = rotated(x.reshape(6, 4, 16), position.reshape(6), inv_freq, 1.0)
    np.testing.assert_array_equal(got.reshape(6, 4, 16), flat)


def test_bfloat16_is_rotated_in_float32_and_rounded_once():
    x = jnp.asarray(heads(1, 2, 8), jnp.bfloat16)
    inv_freq, position = np.array([0.001, 0.0001], np.float32), np.array([4095], np.int32)
    got = rotated(x, position, inv_freq, 1.0)
    assert got.dtype == jnp.bfloat16
    expected = turned(np.asarray(x, np.float32), position, inv_freq, 1.0)
    # A bfloat16 angle of 4.095 would be off by 0.008; the result's own rounding is 2^-9 of its size, here up to 2.
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=0, atol=2**-8)


def test_rotation_matches_the_golden_values(golden_folder):
    with safe_open(golden_folder / "kernels.safetensors", "np") as golden:
        position, x, expected, inv_freq = (golden.get_tensor(f"rope.{name}") for name in ("pos", "x", "y", "inv_freq"))
        text_x, text_y, text_position = (golden.get_tensor(f"mrope.{name}") for name in ("x", "y", "pos"))
    ours, scale = inverse_frequencies(CONFIG)
    np.testing.assert_allclose(ours, inv_freq, rtol=1e-6)
    got = rotated(x, position, ours, scale)
    np.testing.assert_allclose(got[:3], expected[:3], rtol=1e-5, atol=1e-6)
    # A float32 angle is off by up to 6e-8 of the position: 6e-5 at 1000, 0.016 at 262143; times components up to 4.
    np.testing.assert_allclose(got[3:5], expected[3:5], rtol=0, atol=3e-4)
    np.testing.assert_allclose(got[5:], expected[5:], rtol=0, atol=6e-2)
    text = (text_position == text_position[:1]).all(axis=0)
    assert text.any()
    one_axis = rotated(text_x[text], text_position[0, text], ours, scale)
    np.testing.assert_allclose(one_axis, text_y[text], rtol=1e-5, atol=1e-5)


def test_yarn_matches_the_golden_values(golden_folder):
    with safe_open(golden_folder / "kernels.safetensors", "np") as golden:
        expected, expected_scale = (golden.get_tensor(f"rope.{name}") for name in ("yarn_inv_freq", "yarn_scale"))
    inv_freq, scale = inverse_frequencies(replace(CONFIG, yarn=YARN))
    np.testing.assert_allclose(inv_freq, expected, rtol=1e-6)
    np.testing.assert_allclose(scale, expected_scale[0], rtol=1e-6)
