"""The mixture of experts against a NumPy float64 loop over tokens, and the golden router."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.moe import MoE

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen3_next",
        "hidden_size": 24,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    }
)
# Sums of up to 28 float32 terms of size 1, four experts on top: about 1e-6.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}


def moe(config=CONFIG, *, dtype="float32", implementation=Implementation.JAX):
    """Return a layer with random weights, made in NumPy: compiling every initialiser would take seconds."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape, scale=leaf.shape[-1] ** -0.5), leaf.dtype)

    def make():
        return MoE(config, dtype=jnp.dtype(dtype), implementation=implementation, rngs=nnx.Rngs(0))

    graph, abstract = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graph, jax.tree.map(fill, abstract))


def tokens(count, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, 24)).astype(np.float32))


def in_float64(param):
    return np.asarray(param[...], np.float64)


def softmax(logits):
    weight = np.exp(logits - logits.max())
    return weight / weight.sum()


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def feed_forward(x, gate, up, down):
    g = gate @ x
    return down @ (g * sigmoid(g) * (up @ x))


def token_by_token(layer, x, *, normalise):
    shared = [in_float64(part.weight) for part in (layer.shared_expert.gate_proj, layer.shared_expert.up_proj)]
    shared.append(in_float64(layer.shared_expert.down_proj.weight))
    out = []
    for token in np.asarray(x, np.float64):
        probability = softmax(in_float64(layer.gate.weight) @ token)
        chosen = np.argsort(-probability)[:4]
        scale = probability[chosen].sum() if normalise else 1.0
        total = sigmoid(in_float64(layer.shared_expert_gate.weight) @ token) * feed_forward(token, *shared)
        for expert in chosen:
            gate, up = np.split(in_float64(layer.experts_gate_up)[expert], 2)
            answer = feed_forward(token, gate, up, in_float64(layer.experts_down)[expert])
            total = total + probability[expert] / scale * answer
        out.append(total)
    return np.array(out)


@pytest.mark.parametrize(
    ("normalise", "implementation"),
    [(True, Implementation.JAX), (False, Implementation.JAX), (True, Implementation.REFERENCE)],
)
def test_output_is_the_weighted_sum_of_chosen_experts_and_the_gated_shared_one(normalise, implementation):
    layer = moe(replace(CONFIG, norm_topk_prob=normalise), implementation=implementation)
    x = tokens(11)
    np.testing.assert_allclose(jax.jit(layer)(x), token_by_token(layer, x, normalise=normalise), **FLOAT32)


def test_other_tokens_change_no_bit_of_a_token():
    layer = jax.jit(moe())
    x = np.asarray(tokens(24))
    whole = np.asarray(layer(jnp.asarray(x)))
    padded = np.full_like(x, np.nan)  # padding holds anything
    padded[5:15] = x[:10]
    np.testing.assert_array_equal(np.asarray(layer(jnp.asarray(padded)))[5:15], whole[:10])
    mixed = np.array(tokens(24, seed=9))
    mixed[14:] = x[:10]
    np.testing.assert_array_equal(np.asarray(layer(jnp.asarray(mixed)))[14:], whole[:10])


def test_router_is_float32_whatever_the_dtype():
    layer = moe(dtype="bfloat16")
    x = tokens(7).astype(jnp.bfloat16)
    weights, ids = jax.jit(layer.route)(x)
    assert weights.dtype == jnp.float32
    for token, got, chosen in zip(np.asarray(x, np.float64), np.asarray(weights), np.asarray(ids), strict=True):
        probability = softmax(in_float64(layer.gate.weight) @ token)
        np.testing.assert_array_equal(chosen, np.argsort(-probability)[:4])
        np.testing.assert_allclose(got, probability[chosen] / probability[chosen].sum(), rtol=1e-5)


def test_bfloat16_output_is_near_the_exact_one():
    layer = moe(dtype="bfloat16")
    x = tokens(11).astype(jnp.bfloat16)
    got = jax.jit(layer)(x)
    assert got.dtype == jnp.bfloat16
    expected = token_by_token(layer, x, normalise=True)
    # Rounded at 2^-9 relative after each of three products: a few per cent of the output's deviation at worst.
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0, atol=0.03 * expected.std())


def test_every_parameter_gets_a_gradient():
    layer = moe()
    x, aim = tokens(40), tokens(40, seed=3)
    graph, params = nnx.split(layer)
    gradients = jax.jit(jax.grad(lambda params: (nnx.merge(graph, params)(x) * aim).sum()))(params)
    for path, gradient in nnx.to_flat_state(gradients):
        values = np.asarray(gradient[...])
        assert np.all(np.isfinite(values)), path
        assert np.any(values), path


def test_router_matches_the_golden_values(golden_folder):
    with safe_open(golden_folder / "kernels.safetensors", "np") as golden:
        x, weight, ids, p, p_norm = (golden.get_tensor(f"router.{name}") for name in ("x", "w", "ids", "p", "p_norm"))
    for normalise, expected in ((False, p), (True, p_norm)):
        layer = moe(replace(CONFIG, norm_topk_prob=normalise))
        layer.gate.weight[...] = jnp.asarray(weight)
        got, chosen = jax.jit(layer.route)(jnp.asarray(x))
        np.testing.assert_array_equal(chosen, ids)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
