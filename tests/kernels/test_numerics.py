"""Products: float32 sums of 16-bit operands, rounded where that is asked for, and gradients but for rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.kernels.numerics import einsum, project

SPECS = pytest.mark.parametrize("spec", ["bik,bjk->bij", "bij,bjk->bik"])
RNG = np.random.RandomState(0)
LEFT, RIGHT, WEIGHT = (jnp.asarray(RNG.normal(size=(3, 8, 8)), jnp.bfloat16) for _ in range(3))


def gradients(spec: str, dtype: str, through) -> tuple[jax.Array, ...]:
    def loss(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.sum(WEIGHT.astype(jnp.float32) * through(lambda *x: einsum(spec, *x))(left, right))

    return jax.grad(loss, argnums=(0, 1))(LEFT.astype(dtype), RIGHT.astype(dtype))


@SPECS
@pytest.mark.parametrize("through", [lambda product: product, jax.vmap], ids=["plain", "vmap"])
def test_gradients_of_16_bit_products_are_the_exact_ones_rounded(spec, through):
    spec = spec if through is not jax.vmap else spec.replace("b", "")
    got, want = gradients(spec, "bfloat16", through), gradients(spec, "float32", through)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        # The weights are bfloat16 already, so what is rounded is the result: half of 2^-7, relative.
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2**-8, atol=1e-6)


@SPECS
def test_results_are_float32_whatever_the_operands(spec):
    exact = einsum(spec, LEFT.astype(jnp.float32), RIGHT.astype(jnp.float32))
    product = einsum(spec, LEFT, RIGHT)
    assert product.dtype == exact.dtype == jnp.float32
    np.testing.assert_allclose(product, exact, rtol=1e-5, atol=1e-5)


@SPECS
def test_the_backward_pass_multiplies_16_bit_operands(spec):
    program = str(jax.make_jaxpr(lambda x: gradients(spec, "bfloat16", lambda f: f))(0.0))
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert len(products) >= 3
    assert sum(":f32" in line.partition("=")[0] for line in products) == 1  # the forward pass's


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_tokens", [1, 2, 64])
def test_a_16_bit_projection_is_summed_in_float32_and_rounded_once(num_tokens: int, dtype: str) -> None:
    """The width is that of a released model: sums that were kept in 16 bits, even in two halves, would show."""
    rng = np.random.default_rng(num_tokens)
    x = jnp.asarray(rng.normal(size=(num_tokens, 2560)), dtype)
    weight = jnp.asarray(rng.normal(size=(96, 2560)) / 50, dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    got = np.asarray(jax.jit(project)(x, weight), np.float64)
    rounded = np.asarray(jnp.asarray(exact, dtype), np.float64)
    # Float32 sums of 2560 products err by 1e-6, which moves few of them over the border between two numbers.
    assert (got != rounded).mean() < 0.02
    step = float(jnp.finfo(dtype).eps) * np.abs(exact).max()
    np.testing.assert_allclose(got, rounded, rtol=0, atol=step)


def test_a_float32_projection_is_ieee_float32() -> None:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=(8, 512)), jnp.float32) for _ in range(2))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(jax.jit(project)(x, weight), exact, rtol=0, atol=1e-6 * np.abs(exact).max())
