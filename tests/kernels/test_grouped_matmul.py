"""Grouped product against one NumPy product per row, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.grouped_matmul import grouped_matmul
from gdn_jax.kernels.grouped_matmul.plain import MAX_TILE_ROWS, MIN_TILE_ROWS, tile_rows

GROUPED = jax.jit(grouped_matmul, static_argnames="implementation")
# Sums of 24 float32 terms of size 1 in another order: about 1e-6.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
# The result is rounded once to 8 bits.
BFLOAT16 = {"rtol": 4e-3, "atol": 1e-5}

SIZES = {
    "even": [10, 10, 10, 10],
    "empty groups": [0, 17, 0, 23],
    "one group": [0, 0, 40, 0],
    "rows past the last group": [3, 0, 9, 1],
    "no row at all": [0, 0, 0, 0],
}


def operands(num_rows, num_groups, *, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 24)).astype(np.float32)
    return x, rng.normal(size=(num_groups, 20, 24)).astype(np.float32)


def one_by_one(x, weight, sizes):
    out = np.zeros((len(x), weight.shape[1]))
    for row, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        out[row] = weight[group].astype(np.float64) @ x[row].astype(np.float64)
    return out


def run(x, weight, sizes, **static):
    return np.asarray(GROUPED(jnp.asarray(x), jnp.asarray(weight), jnp.array(sizes, jnp.int32), **static))


@pytest.mark.parametrize("implementation", [Implementation.REFERENCE, Implementation.JAX])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_each_row_is_multiplied_with_its_groups_matrix(implementation, sizes):
    x, weight = operands(40, 4)
    x[sum(sizes) :] = np.nan  # rows of no group must not show
    got = run(x, weight, sizes, implementation=implementation)
    np.testing.assert_allclose(got, one_by_one(x, weight, sizes), **FLOAT32)


def test_bfloat16_is_summed_in_float32_and_rounded_once():
    x, weight = (array.astype(jnp.bfloat16) for array in operands(40, 4))
    got = run(x, weight, SIZES["even"])
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), one_by_one(x, weight, SIZES["even"]), **BFLOAT16)


@pytest.mark.parametrize("num_rows", [1, 80, 700])
def test_many_groups_of_few_rows_are_right(num_rows):
    x, weight = operands(num_rows, 512)
    sizes = np.bincount(np.random.default_rng(1).integers(0, 512, num_rows), minlength=512)
    np.testing.assert_allclose(run(x, weight, sizes), one_by_one(x, weight, sizes), **FLOAT32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_rows", [8, 40, 1000])  # tiles of 8, 16 and 128 rows
def test_a_row_has_the_same_bits_wherever_it_stands(num_rows, dtype):
    x, weight = (array.astype(dtype) for array in operands(num_rows, 4))
    alone = run(x, weight, [0, num_rows, 0, 0])
    for before in (1, 5):
        moved = np.roll(x, before, axis=0)  # `before` rows of group 0, then x's first rows, of group 1
        got = run(moved, weight, [before, num_rows - before - 1, 1, 0])
        np.testing.assert_array_equal(got[before : num_rows - 1], alone[: num_rows - before - 1])


def test_gradients_are_those_of_the_product_per_group():
    x, weight = operands(40, 4)
    x[13:] = np.nan
    aim = np.random.default_rng(3).normal(size=(40, 20)).astype(np.float32)
    sizes = jnp.array(SIZES["rows past the last group"], jnp.int32)
    loss = jax.jit(lambda x, weight: (grouped_matmul(x, weight, sizes) * aim).sum())
    dx, dweight = jax.grad(loss, (0, 1))(jnp.asarray(x), jnp.asarray(weight))
    expected_dx, expected_dweight = np.zeros(x.shape), np.zeros(weight.shape)
    for row, group in enumerate(np.repeat(np.arange(4), np.asarray(sizes))):
        expected_dx[row] = weight[group].astype(np.float64).T @ aim[row]
        expected_dweight[group] += np.outer(aim[row], x[row].astype(np.float64))
    np.testing.assert_allclose(dx, expected_dx, **FLOAT32)
    np.testing.assert_allclose(dweight, expected_dweight, **FLOAT32)


def test_gradients_of_bfloat16_have_its_dtype():
    x, weight = (jnp.asarray(array, jnp.bfloat16) for array in operands(8, 2))
    sizes = jnp.array([5, 3], jnp.int32)
    loss = jax.jit(lambda x, weight: grouped_matmul(x, weight, sizes).astype(jnp.float32).sum())
    gradients = jax.grad(loss, (0, 1))(x, weight)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.bfloat16]
    np.testing.assert_allclose(
        np.asarray(gradients[1][0], np.float32), np.tile(np.asarray(x[:5], np.float32).sum(axis=0), (20, 1)), **BFLOAT16
    )


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "rows"),
    [(8, 256, MIN_TILE_ROWS), (80, 4, 32), (64, 4, 16), (10**6, 8, MAX_TILE_ROWS)],
)
def test_a_tile_holds_the_mean_group_within_bounds(num_rows, num_groups, rows):
    assert tile_rows(num_rows, num_groups) == rows
