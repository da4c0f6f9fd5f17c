"""What only the plain-JAX delta rule promises: gradients equal to the reference's, and a pool updated in place."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import DeltaInputs, gdn_prefill
from gdn_jax.kernels.gated_delta.cases import Heads, PrefillCase, Span, make_prefill

# Training: whole sequences, null slots, a pool of the null slot alone. Two rows, of which one crosses two boundaries.
TRAINING = PrefillCase(
    name="training",
    heads=Heads(num_key=1, num_value=2, key_dim=8, value_dim=6),
    spans=(Span(0, 130), Span(0, 20)),
    num_tokens=150,
    num_rows=2,
)
ARGS = make_prefill(TRAINING)
POOL = jnp.zeros((1, 2, 6, 8))
WEIGHT = jnp.asarray(np.random.default_rng(5).standard_normal((150, 2, 6)), jnp.float32)


def loss(q: jax.Array, inputs: DeltaInputs, implementation: Implementation) -> jax.Array:
    zero = jnp.zeros(2, jnp.int32)
    rows = PrefillRows(**vars(ARGS.rows) | {"read_slot": zero, "write_slot": zero, "export_slot": zero[:, None]})
    outputs, _ = gdn_prefill(q, inputs, rows, POOL, implementation=implementation)
    return jnp.sum(WEIGHT * outputs)


gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)


@pytest.mark.parametrize("g", [None, -0.01, -3.0], ids=["drawn", "slow", "fast"])
def test_gradients_equal_those_of_the_reference(g: float | None) -> None:
    inputs = ARGS.inputs if g is None else replace(ARGS.inputs, g=jnp.full_like(ARGS.inputs.g, g))
    got = gradient(ARGS.q, inputs, Implementation.JAX)
    want = gradient(ARGS.q, inputs, Implementation.REFERENCE)
    for name, a, b in zip(("q", "k", "v", "g", "beta"), leaves(got), leaves(want), strict=True):
        assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max(), name  # both are float32 sums over 130 tokens


def leaves(gradients: tuple[jax.Array, DeltaInputs]) -> list[np.ndarray]:
    q, inputs = gradients
    return [np.asarray(x) for x in (q, inputs.k, inputs.v, inputs.g, inputs.beta)]


@pytest.mark.parametrize(("g", "key_scale"), [(-1e4, 1.0), (-1e4, 0.0), (0.0, 0.0), (0.0, 1.0)], ids=str)
def test_gradients_stay_finite_for_strong_decay_and_for_zero_or_repeated_keys(g: float, key_scale: float) -> None:
    keys = jnp.broadcast_to(key_scale * ARGS.inputs.k[:1], ARGS.inputs.k.shape)
    inputs = replace(ARGS.inputs, g=jnp.full_like(ARGS.inputs.g, g), k=keys)
    assert all(np.isfinite(x).all() for x in leaves(gradient(ARGS.q, inputs, Implementation.JAX)))


def test_an_outer_jit_that_donates_the_pool_gets_it_back_in_the_same_memory() -> None:
    args = make_prefill(replace(TRAINING, spans=(Span(64, 70), Span(64, 20)), min_slots=200))

    def step(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gdn_prefill(args.q, args.inputs, args.rows, pool)

    compiled = jax.jit(step, donate_argnums=0).lower(args.pool).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == args.pool.nbytes
    shape = "f32[" + ",".join(map(str, args.pool.shape)) + "]"
    assert shape in compiled.as_text()
    assert not [line for line in compiled.as_text().splitlines() if shape in line and " copy(" in line]
