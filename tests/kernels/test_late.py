"""Late buffers: zeros whatever they wait for, the same results and gradients as a scan, and not one early zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.kernels.late import late_zeros, scan_late


@pytest.mark.parametrize("value", [0.0, -1.5, np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_zeros_whatever_they_wait_for(value: float, dtype: str) -> None:
    make = jax.jit(lambda x: late_zeros((3, 2), jnp.dtype(dtype), x))
    zeros = make(jnp.full((4, 5), value))
    assert (zeros.shape, zeros.dtype) == ((3, 2), dtype)
    np.testing.assert_array_equal(zeros.astype(jnp.float32), 0.0)


def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    carry = carry + jnp.sin(x)
    return carry, carry * x


def test_carry_outputs_and_gradients_are_those_of_a_scan() -> None:
    xs, start = jnp.arange(10.0).reshape(5, 2), jnp.ones((2,))

    def loss(run, start, xs):
        carry, outputs = run(start, xs)
        return (carry * jnp.asarray([1.0, 2.0])).sum() + (outputs**2).sum()

    def late(start, xs):
        return scan_late(body, start, xs, after=start)

    def plain(start, xs):
        return jax.lax.scan(body, start, xs)

    for ours, theirs in zip(late(start, xs), plain(start, xs), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    gradients = [jax.grad(loss, argnums=(1, 2))(run, start, xs) for run in (late, plain)]
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)  # sums of five terms in another order


def temporary_bytes(layers: int, *, late: bool) -> int:
    """Memory that a chain of loops needs while it runs, each with an output of 1 MiB."""

    def layer(x):
        def step(carry, row):
            return carry, row * 2.0

        _, out = scan_late(step, (), x, after=x) if late else jax.lax.scan(step, (), x)
        return out.reshape(64, 64, 64).sum(axis=2).repeat(64, axis=1).reshape(64, 4096)

    def chain(x):
        for _ in range(layers):
            x = layer(x)
        return x

    compiled = jax.jit(chain).lower(jax.ShapeDtypeStruct((64, 4096), jnp.float32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_a_chain_of_loops_needs_no_more_memory_the_longer_it_is() -> None:
    """A plain scan does; if that ends, so does the reason for late buffers."""
    few, many = (temporary_bytes(layers, late=True) for layers in (3, 12))
    assert many <= few + 2**20
    assert temporary_bytes(12, late=False) >= temporary_bytes(3, late=False) + 8 * 2**20
