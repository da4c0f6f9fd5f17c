"""The dense feed-forward against NumPy float64."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn_jax.mlp import DenseMLP, swiglu


def test_feed_forward_is_down_of_silu_gate_times_up():
    layer = DenseMLP(12, 20, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 3, 12)).astype(np.float32)
    parts = (layer.gate_proj, layer.up_proj, layer.down_proj)
    gate, up, down = (np.asarray(part.weight[...], np.float64) for part in parts)
    assert (gate.shape, down.shape) == ((20, 12), (12, 20))
    g = x @ gate.T
    expected = (g / (1.0 + np.exp(-g)) * (x @ up.T)) @ down.T
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)  # sums of 20 terms of size 1


def test_bfloat16_activation_is_rounded_once():
    gate, up = (jnp.asarray(np.random.default_rng(seed).normal(size=100), jnp.bfloat16) for seed in (0, 1))
    got = swiglu(gate, up)
    assert got.dtype == jnp.bfloat16
    g, u = (np.asarray(array, np.float64) for array in (gate, up))
    np.testing.assert_allclose(np.asarray(got, np.float64), g / (1.0 + np.exp(-g)) * u, rtol=2**-8)
