"""The gated RMS norm against NumPy and recorded values: to 1e-5 in float32, to one rounding in bfloat16."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.golden_kernels import golden_arrays

from gdn_jax.kernels.gated_rms_norm import gated_rms_norm


def float64_norm(x: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x, z, weight = (np.asarray(array, np.float64) for array in (x, z, weight))
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight * z / (1 + np.exp(-z))


def draw(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((3, 2, 24), (3, 2, 24), (24,))
    x, z, weight = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    return x, z, 1 + weight


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_equals_the_float64_formula(eps: float) -> None:
    x, z, weight = draw()
    got = np.asarray(gated_rms_norm(*map(jnp.asarray, (x, z, weight)), eps=eps), np.float64)
    want = float64_norm(x, z, weight, eps)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_recorded_values(golden_folder: Path) -> None:
    case = golden_arrays(golden_folder, "gated_rms.")
    got = gated_rms_norm(*(jnp.asarray(case[name]) for name in ("x", "z", "w")), eps=1e-6)
    assert np.abs(np.asarray(got, np.float64) - case["y"]).max() <= 1e-5 * np.abs(case["y"]).max()


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    x, z = (jnp.asarray(array).astype(jnp.bfloat16) for array in draw()[:2])
    weight = jnp.asarray(draw()[2])
    got = gated_rms_norm(x, z, weight, eps=1e-6)
    whole = gated_rms_norm(x.astype(jnp.float32), z.astype(jnp.float32), weight, eps=1e-6)
    assert got.dtype == jnp.bfloat16
    assert got.tolist() == whole.astype(jnp.bfloat16).tolist()


def test_the_gate_comes_after_the_norm_and_each_head_is_normed_alone() -> None:
    x, z, weight = map(jnp.asarray, draw())
    scaled = x.at[:, 0].mul(1000.0)  # a head's scale is normed away; a gate inside the norm would not be
    base, other = gated_rms_norm(x, z, weight, eps=0.0), gated_rms_norm(scaled, z, weight, eps=0.0)
    assert np.allclose(base, other, rtol=1e-5, atol=0)
    doubled = gated_rms_norm(x, z.at[:, 1].mul(2.0), weight, eps=0.0)
    assert np.allclose(base[:, 0], doubled[:, 0], rtol=1e-6, atol=0)
    assert not np.allclose(base[:, 1], doubled[:, 1], rtol=1e-2, atol=0)
