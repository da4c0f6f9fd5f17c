"""The inverse of unit lower triangular matrices, on matrices that break less careful methods."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.kernels.gated_delta.triangular import unit_lower_inverse

SIZE = 64


def repeated_key(beta: float) -> np.ndarray:
    """A of a key that repeats for a whole chunk without decay: beta below the diagonal."""
    return np.tril(np.full((SIZE, SIZE), beta, np.float32), -1)


def random_matrix(scale: float) -> np.ndarray:
    return np.tril(np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32) * scale, -1)


@pytest.mark.parametrize(
    "lower",
    [np.zeros((SIZE, SIZE), np.float32), repeated_key(1.0), repeated_key(0.9), random_matrix(0.1), random_matrix(0.3)],
    ids=["zero", "same-key", "same-key-0.9", "random-0.1", "random-0.3"],
)
def test_inverse_equals_float64(lower: np.ndarray) -> None:
    got = np.asarray(unit_lower_inverse(jnp.asarray(lower)[None, None])[0, 0])
    want = np.linalg.inv(np.eye(SIZE) + lower.astype(np.float64))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()  # 64 float32 steps, no cancellation
    assert (np.triu(got, 1) == 0).all()


@pytest.mark.parametrize("size", [16, 32])
def test_any_power_of_two_times_the_block_works(size: int) -> None:
    lower = np.tril(np.random.default_rng(1).standard_normal((3, size, size)).astype(np.float32) * 0.1, -1)
    want = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    assert np.abs(np.asarray(unit_lower_inverse(jnp.asarray(lower))) - want).max() <= 1e-5 * np.abs(want).max()


def test_derivative_equals_that_of_a_dense_inverse() -> None:
    lower, weight = jnp.asarray(random_matrix(0.1)), jnp.asarray(np.random.default_rng(2).standard_normal((SIZE, SIZE)))
    weight = weight.astype(jnp.float32)

    def loss(a: jax.Array) -> jax.Array:
        return jnp.sum(weight * unit_lower_inverse(a))

    inverse = np.linalg.inv(np.eye(SIZE) + np.asarray(lower, np.float64))
    want = -inverse.T @ np.asarray(weight, np.float64) @ inverse.T
    got = np.asarray(jax.grad(loss)(lower))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
