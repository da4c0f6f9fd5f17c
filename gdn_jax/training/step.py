"""The compiled steps of a run: one update, and the losses of one held-out batch.

All that is static stands in `StepSetup`; shapes never change, so each is compiled once.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from gdn_jax.training.batch import TrainBatch
from gdn_jax.training.config import OptimizerConfig
from gdn_jax.training.loss import LossOptions, training_loss
from gdn_jax.training.optimizer import make_optimizer
from gdn_jax.training.parameters import Layout, Params

Metrics = dict[str, Array]


class TrainState(NamedTuple):
    """What an update changes: float32 parameters by tensor name, and the optimizer's moments and count."""

    params: Params
    moments: optax.OptState


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """What a step is compiled for."""

    layout: Layout
    optimizer: OptimizerConfig
    loss: LossOptions
    micro_batches: int


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(setup: StepSetup, state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
    """Return the state after one update, and what the batch was like before it.

    Where loss or gradient is not finite, the state stays as it is and `is_finite` is False.

    Args:
        setup: static.
        state: donated.
        batch: its rows are a multiple of `setup.micro_batches`.

    Returns:
        The state, and float32 `loss`, its parts, `num_targets` and `grad_norm` (before the clip), and `is_finite`.
    """
    gradient, metrics = _summed(setup, state.params, batch)
    norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient)))
    is_finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
    updates, moments = make_optimizer(setup.optimizer).update(gradient, state.moments, state.params)
    params = jax.tree.map(jnp.add, state.params, updates)
    after = TrainState(params=params, moments=moments)
    after = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, state)
    return after, {**metrics, "grad_norm": norm, "is_finite": is_finite}


@partial(jax.jit, static_argnums=0)
def evaluation_step(setup: StepSetup, params: Params, batch: TrainBatch) -> Metrics:
    """Return the parts of the loss of a batch, which is not cut into micro-batches."""
    return _losses(setup, params, batch.token_ids, batch.document)[1]


def _losses(
    setup: StepSetup, params: Params, token_ids: Int[Array, "rows T"], document: Int[Array, "rows T"]
) -> tuple[Float[Array, ""], Metrics]:
    batch = TrainBatch(token_ids=token_ids, document=document)
    loss, metrics = training_loss(setup.layout.model(params), batch, setup.loss)
    return loss, {"loss": loss, **{name: value.astype(jnp.float32) for name, value in metrics.items()}}


def _summed(setup: StepSetup, params: Params, batch: TrainBatch) -> tuple[Params, Metrics]:
    """Return gradient and losses of the whole batch, each micro-batch counting as much as it has targets."""
    parts = jax.tree.map(lambda x: x.reshape(setup.micro_batches, -1, x.shape[-1]), (batch.token_ids, batch.document))

    def weighed(part: tuple[Array, Array]) -> tuple[Params, Metrics]:
        (_, metrics), gradient = jax.value_and_grad(partial(_losses, setup), has_aux=True)(params, *part)
        count = metrics["num_targets"]
        sums = jax.tree.map(lambda value: count * value, (gradient, metrics))
        return sums[0], {**sums[1], "num_targets": count}

    def add(total: tuple[Params, Metrics], part: tuple[Array, Array]) -> tuple[tuple[Params, Metrics], None]:
        return jax.tree.map(jnp.add, total, weighed(part)), None

    shapes = jax.eval_shape(weighed, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (gradient, metrics), _ = jax.lax.scan(add, zeros, parts)
    count = metrics["num_targets"]
    share = 1.0 / jnp.maximum(count, 1.0)
    gradient, metrics = jax.tree.map(lambda total: total * share, (gradient, metrics))
    return gradient, {**metrics, "num_targets": count}
