"""Differentiating a whole model as fine-tuning does: a prefill from null slots, with a pool of the null slot alone."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_steps import SMALL
from oracles.checkpoints import write_checkpoint

from gdn_jax.model import load_model

IDS = np.random.RandomState(0).randint(0, 97, 100).astype(np.int32)

LossAndGradient = Callable[[nnx.State], tuple[jax.Array, nnx.State]]


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> tuple[LossAndGradient, nnx.State]:
    """The mean loss of guessing each next token, with its gradient, and the parameters.

    Every token takes every expert: where a step changes which ones are taken, the loss is not continuous.
    """
    sizes = {**SMALL, "num_experts": 3, "num_experts_per_tok": 3}
    model = load_model(write_checkpoint(tmp_path_factory.mktemp("model"), "next-moe", seed=1, **sizes))
    graph, params = nnx.split(model)

    def loss(params: nnx.State) -> jax.Array:
        logprobs = jax.nn.log_softmax(nnx.merge(graph, params).logits(IDS))
        return -jnp.take_along_axis(logprobs[:-1], jnp.asarray(IDS)[1:, None], axis=1).mean()

    return jax.jit(jax.value_and_grad(loss)), params


def moved(params: nnx.State, direction: nnx.State, step: float) -> nnx.State:
    return jax.tree.map(lambda param, change: param + step * change, params, direction)


def test_every_parameter_gets_a_finite_gradient(training):
    compute, params = training
    loss, gradient = compute(params)
    assert 10.0 < float(loss) < 25.0  # random logits of deviation 5 are often wrong and sure of it
    for path, leaf in nnx.to_flat_state(gradient):
        values = np.asarray(leaf[...])
        assert np.all(np.isfinite(values)), path
        assert np.any(values) == (path[0] != "mtp"), path  # the head plays no part in the model's own logits


def test_gradient_agrees_with_a_difference_along_a_random_uphill_direction(training):
    compute, params = training
    _, gradient = compute(params)
    rng = np.random.RandomState(0)

    def draw(param: jax.Array, slope: jax.Array) -> np.ndarray:
        """Return changes as large as the parameter's values, each uphill, so that none cancels another's mistake."""
        size = np.sqrt(np.mean(np.square(param))) + 0.01
        return (size * np.abs(rng.normal(size=param.shape)) * np.sign(slope)).astype(np.float32)

    direction = jax.tree.map(draw, params, gradient)
    products = jax.tree.map(lambda one, other: float(np.vdot(one, other)), gradient, direction)
    slope, step = sum(jax.tree.leaves(products)), 1e-4
    ahead, back = (float(compute(moved(params, direction, sign * step))[0]) for sign in (1, -1))
    # A loss of 17 in float32 is good to about 3e-6, a ten-thousandth of this difference; curvature adds as much.
    np.testing.assert_allclose((ahead - back) / (2 * step), slope, rtol=1e-3)


def test_a_step_against_the_gradient_lowers_the_loss(training):
    compute, params = training
    before, gradient = compute(params)
    after, _ = compute(moved(params, gradient, -0.03))
    norm = sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient))
    assert float(before - after) == pytest.approx(0.03 * norm, rel=0.3)  # nearly what the slope promises
