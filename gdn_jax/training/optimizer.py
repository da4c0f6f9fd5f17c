"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) behind a clip of the global norm; warm-up, then a cosine."""

import jax
import optax

from gdn_jax.training.config import OptimizerConfig

_GATES = ("in_proj_a.weight", "in_proj_b.weight")


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return the optimizer of parameters that are a dict by tensor name."""
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises a decay, a float, to the power of an integer count
            return chain.update(updates, state, params)

    return optax.GradientTransformation(chain.init, update)


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Return the learning rate by step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.peak_learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.total_steps,
        end_value=config.peak_learning_rate * config.final_share,
    )


def decays(params: dict[str, jax.Array]) -> dict[str, bool]:
    """Say which tensors are pulled towards zero: matrices that mix channels.

    Not norms (zero is no better a gain than another), not what sets decays and write strengths, not the convolution.
    """
    return {
        name: param.ndim == 2 and not name.endswith(_GATES) and "conv1d" not in name for name, param in params.items()
    }
