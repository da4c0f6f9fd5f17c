"""Normalised queries and keys, and gates: against NumPy and recorded values, to 1e-5 of the largest value."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.golden_kernels import golden_arrays

from gdn_jax.kernels.gated_delta.inputs import delta_inputs, gates, l2_normalize


def assert_close(got: object, want: np.ndarray) -> None:
    assert np.abs(np.asarray(got, np.float64) - want).max() <= 1e-5 * np.abs(want).max()


def float64_gates(a: np.ndarray, b: np.ndarray, a_log: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b, a_log, bias = (np.asarray(x, np.float64) for x in (a, b, a_log, bias))
    return -np.exp(a_log) * np.logaddexp(0.0, a + bias), 1 / (1 + np.exp(-b))


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def test_gates_equal_recorded_values(golden_folder: Path) -> None:
    case = golden_arrays(golden_folder, "gates.")
    g, beta = gates(*(jnp.asarray(case[name]) for name in ("a", "b", "A_log", "dt_bias")))
    assert_close(g, case["g"])
    assert_close(beta, case["beta"])


@pytest.mark.parametrize("a", [-200.0, -20.0, 0.0, 20.0, 200.0])
def test_gates_are_finite_and_right_far_from_zero(a: float) -> None:
    arguments = (np.full((1, 4), a, np.float32), np.full((1, 4), a, np.float32), draw(4), draw(4, seed=1))
    g, beta = gates(*map(jnp.asarray, arguments))
    want_g, want_beta = float64_gates(*arguments)
    assert np.isfinite(g).all()
    assert (np.asarray(g) <= 0).all()
    assert np.allclose(g, want_g, rtol=1e-5, atol=1e-30)
    assert np.allclose(beta, want_beta, rtol=1e-5, atol=1e-30)


def test_bfloat16_gate_inputs_are_widened_before_any_arithmetic() -> None:
    a, b = jnp.asarray(draw(5, 4)).astype(jnp.bfloat16), jnp.asarray(draw(5, 4, seed=1)).astype(jnp.bfloat16)
    a_log, bias = jnp.asarray(draw(4, seed=2)), jnp.asarray(draw(4, seed=3))
    g, beta = gates(a, b, a_log, bias)
    assert g.dtype == beta.dtype == jnp.float32
    want_g, want_beta = float64_gates(*(np.asarray(x.astype(jnp.float32)) for x in (a, b, a_log, bias)))
    assert_close(g, want_g)
    assert_close(beta, want_beta)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_l2_normalize_adds_its_epsilon_to_the_sum_of_squares(scale: float) -> None:
    x = draw(3, 2, 16) * np.float32(scale)
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt((x64**2).sum(-1, keepdims=True) + 1e-6)
    assert_close(l2_normalize(jnp.asarray(x)), want)
    assert_close(l2_normalize(jnp.asarray(x), 0.25), 0.25 * want)


def test_a_zero_vector_stays_zero() -> None:
    assert not l2_normalize(jnp.zeros((1, 1, 8))).any()


def test_l2_normalize_rounds_once_at_the_end() -> None:
    x = jnp.asarray(draw(4, 2, 16)).astype(jnp.bfloat16)
    got = l2_normalize(x, 0.3)
    assert got.dtype == jnp.bfloat16
    assert got.tolist() == l2_normalize(x.astype(jnp.float32), 0.3).astype(jnp.bfloat16).tolist()


def test_delta_inputs_splits_the_convolution_output_into_queries_keys_and_values() -> None:
    num_keys, key_dim, num_values, value_dim = 2, 8, 4, 6
    q, k, v = draw(5, 2, 8), draw(5, 2, 8, seed=1), draw(5, 4, 6, seed=2)
    packed = np.concatenate([x.reshape(5, -1) for x in (q, k, v)], axis=-1)
    a, b, a_log, bias = draw(5, 4, seed=3), draw(5, 4, seed=4), draw(4, seed=5), draw(4, seed=6)
    arguments = map(jnp.asarray, (packed, a, b, a_log, bias))
    queries, inputs = delta_inputs(*arguments, num_key_heads=num_keys, key_dim=key_dim)
    assert queries.shape == inputs.k.shape == (5, num_keys, key_dim)
    assert inputs.v.shape == (5, num_values, value_dim)
    assert_close(queries, q / np.sqrt((q.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6) / np.sqrt(8))
    assert_close(inputs.k, k / np.sqrt((k.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6))
    assert inputs.v.tolist() == v.tolist()
    want_g, want_beta = float64_gates(a, b, a_log, bias)
    assert_close(inputs.g, want_g)
    assert_close(inputs.beta, want_beta)
