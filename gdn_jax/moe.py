"""Mixture of experts: a softmax router, the chosen experts, and a shared expert that is always on.

    p = softmax(x W_gate^T) over all experts;  e = top k of p;  w = p_e, divided by their sum if norm_topk_prob
    y = sum_e w_e expert_e(x) + sigmoid(x w_s^T) shared(x)

No router bias, no expert groups, no capacity limit. A token's output depends on no other token.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.grouped_matmul import grouped_matmul
from gdn_jax.linear import Linear, normal_weight
from gdn_jax.mlp import DenseMLP, swiglu


class MoE(nnx.Module):
    """The feed-forward of mixture layers.

    Router, softmax, shared gate and the weighted sum are float32 whatever the dtype: near ties choose the experts.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: jnp.dtype, implementation: Implementation, rngs: nnx.Rngs
    ) -> None:
        """Create router, experts and shared expert.

        Args:
            config: the model.
            dtype: parameters and activations.
            implementation: which kernels compute it.
            rngs: source of the initial values.
        """
        hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.num_experts = experts
        self.top_k = config.num_experts_per_token
        self.norm_topk_prob = config.norm_topk_prob
        self.implementation = implementation
        self.gate = Linear(hidden, experts, dtype=dtype, rngs=rngs)
        # Gate rows first, then up rows, as fused weights are stored.
        self.experts_gate_up = normal_weight((experts, 2 * width, hidden), fan_in=hidden, dtype=dtype, rngs=rngs)
        self.experts_down = normal_weight((experts, hidden, width), fan_in=width, dtype=dtype, rngs=rngs)
        self.shared_expert = DenseMLP(hidden, config.shared_expert_intermediate_size, dtype=dtype, rngs=rngs)
        self.shared_expert_gate = Linear(hidden, 1, dtype=dtype, rngs=rngs)

    def route(self, x: Float[Array, "N H"]) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """Choose each token's experts.

        Returns:
            Float32 weights, largest first, and the experts' ids.
        """
        probability = jax.nn.softmax(self.gate.in_float32(x), axis=-1)
        weights, ids = jax.lax.top_k(probability, self.top_k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights, ids

    def __call__(self, x: Float[Array, "N H"]) -> Float[Array, "N H"]:
        """Return the feed-forward of every token, in x's dtype."""
        weights, ids = self.route(x)
        chosen = self._chosen_experts(x, ids).astype(jnp.float32)
        shared = jax.nn.sigmoid(self.shared_expert_gate.in_float32(x)) * self.shared_expert(x).astype(jnp.float32)
        return ((weights[:, :, None] * chosen).sum(axis=1) + shared).astype(x.dtype)

    def _chosen_experts(self, x: Float[Array, "N H"], ids: Int[Array, "N k"]) -> Float[Array, "N k H"]:
        """Return the output of every chosen expert: rows are sorted by expert, multiplied, and put back."""
        expert = ids.reshape(-1)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.bincount(expert, length=self.num_experts).astype(jnp.int32)
        rows = x[order // self.top_k]
        gate_up = grouped_matmul(rows, self.experts_gate_up[...], sizes, implementation=self.implementation)
        hidden = swiglu(*jnp.split(gate_up, 2, axis=-1))
        out = grouped_matmul(hidden, self.experts_down[...], sizes, implementation=self.implementation)
        return out[jnp.argsort(order)].reshape(*ids.shape, x.shape[-1])
