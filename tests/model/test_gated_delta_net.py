"""The Gated DeltaNet layer against the float64 oracle: both ways through, odd sizes, both implementations."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_steps import ROWS, SLOTS, Span, Window, advance_batch, prefill_batch
from oracles.numpy_layers import gated_delta_net

from gdn_jax.config import ModelConfig
from gdn_jax.gated_delta_net import GatedDeltaNet
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import DeltaInputs
from gdn_jax.state import RecurrentState, ReplayWindow

WIDTH = 24
# (Nk, Nv, dk, dv, K): value heads per key head 1, 3 and 8, keys wider and narrower than values, every window size.
EQUAL_HEADS, THREE_PER_KEY, EIGHT_PER_KEY = (3, 3, 16, 24, 2), (2, 6, 24, 8, 3), (1, 8, 8, 16, 4)
JAX, REFERENCE = Implementation.JAX, Implementation.REFERENCE
# Outputs and states of size 1 after up to 110 float32 steps: seen to differ by 3e-6.
FLOAT32 = {"rtol": 1e-4, "atol": 2e-5}


def make_config(sizes: tuple[int, ...]) -> ModelConfig:
    num_k, num_v, dk, dv, kernel = sizes
    return ModelConfig.from_dict(
        {
            "model_type": "qwen3_next",
            "hidden_size": WIDTH,
            "linear_num_key_heads": num_k,
            "linear_num_value_heads": num_v,
            "linear_key_head_dim": dk,
            "linear_value_head_dim": dv,
            "linear_conv_kernel_dim": kernel,
            "rms_norm_eps": 1e-3,
        }
    )


def make_layer(sizes, implementation=JAX, dtype="float32") -> GatedDeltaNet:
    """Return a layer with random weights, made in NumPy: compiling every initialiser would take seconds."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape, scale=max(leaf.shape[-1], 4) ** -0.5), leaf.dtype)

    def make():
        return GatedDeltaNet(
            make_config(sizes), dtype=jnp.dtype(dtype), implementation=implementation, rngs=nnx.Rngs(0)
        )

    graph, abstract = nnx.split(nnx.eval_shape(make))
    layer = nnx.merge(graph, jax.tree.map(fill, abstract))
    layer.norm_weight[...] = 1.0 + layer.norm_weight[...]
    return layer


def oracle(layer: GatedDeltaNet, sizes, x):
    """Return outputs, state S^T [Nv, dv, dk] and window [K - 1, C] after one sequence x [n, H], in float64."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    weights = {f"{name}.weight": getattr(layer, name).weight[...] for name in names}
    weights |= {"conv1d.weight": layer.conv_weight[...][:, None], "norm.weight": layer.norm_weight[...]}
    weights |= {"A_log": layer.a_log[...], "dt_bias": layer.dt_bias[...]}
    weights = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}
    num_k, num_v, dk, dv, kernel = sizes
    described = SimpleNamespace(num_key_heads=num_k, num_value_heads=num_v, key_dim=dk, value_dim=dv, eps=1e-3)
    memory = np.zeros((num_v, dk, dv)), np.zeros((2 * num_k * dk + num_v * dv, kernel - 1))
    y, (state, window) = gated_delta_net(np.asarray(x, np.float64), weights, described, memory)
    return y, state.swapaxes(1, 2), window.T


def nan_state(sizes, dtype="float32") -> RecurrentState:
    """Return slots and replay windows full of NaN: what is read must have been written."""
    num_k, num_v, dk, dv, kernel = sizes
    channels, lead = 2 * num_k * dk + num_v * dv, (2, 3)
    full = {"dtype": dtype, "fill_value": jnp.nan}
    delta = DeltaInputs(
        k=jnp.full((*lead, num_k, dk), **full),
        v=jnp.full((*lead, num_v, dv), **full),
        g=jnp.full((*lead, num_v), jnp.nan, jnp.float32),
        beta=jnp.full((*lead, num_v), jnp.nan, jnp.float32),
    )
    return RecurrentState(
        recurrent=jnp.full((SLOTS, num_v, dv, dk), jnp.nan, jnp.float32),
        conv=jnp.full((SLOTS, kernel - 1, channels), **full),
        replay=ReplayWindow(conv=jnp.full((*lead, channels), **full), delta=delta),
    )


def sequences(lengths=(110, 80)):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(length, WIDTH)).astype(np.float32) for length in lengths]


def spans(starts, stops):
    return [
        Span(tokens=[0] * (stop - start), pages=(), start=start, read=row + 1 if start else 0, write=row + 1)
        for row, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def run_prefill(prefill, x, starts, stops, state):
    """Run x[row][starts[row] : stops[row]] packed; return the output of each row, and the state."""
    parts = [sequence[a:b] for sequence, a, b in zip(x, starts, stops, strict=True)]
    packed = np.full((192, WIDTH), 7.0, x[0].dtype)
    packed[: sum(map(len, parts))] = np.concatenate(parts)
    out, state = prefill(jnp.asarray(packed), state, to_device(prefill_batch(spans(starts, stops))))
    out = np.asarray(out)
    return [out[: len(parts[0])], out[len(parts[0]) :][: len(parts[1])]], state


def run_advance(advance, x, starts, counts, replay, state):
    window = np.full((ROWS, 3, WIDTH), 7.0, np.float32)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        window[row, :count] = x[row][start : start + count]
    rows = [
        Window(tokens=[0] * count, pages=(), lane=1 - row, read=row + 1, write=row + 1, folded=0, num_replay=replayed)
        for row, (count, replayed) in enumerate(zip(counts, replay, strict=True))
    ]
    out, state = advance(jnp.asarray(window), state, to_device(advance_batch(rows)))
    return np.asarray(out), state


def to_device(batch):
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize(
    ("sizes", "implementation"),
    [(EQUAL_HEADS, JAX), (THREE_PER_KEY, REFERENCE), (EIGHT_PER_KEY, JAX)],
    ids=["1-per-key", "3-per-key-reference", "8-per-key"],
)
def test_prefill_and_advance_continue_each_other_as_one_sequence(sizes, implementation):
    layer = make_layer(sizes, implementation)
    prefill, advance = jax.jit(layer.prefill), jax.jit(layer.advance)
    x = sequences()
    wanted = [oracle(layer, sizes, sequence)[0] for sequence in x]
    state = nan_state(sizes)
    for starts, stops in (((0, 0), (70, 66)), ((70, 66), (99, 74))):
        outputs, state = run_prefill(prefill, x, starts, stops, state)
        for got, exact, a, b in zip(outputs, wanted, starts, stops, strict=True):
            np.testing.assert_allclose(got, exact[a:b], **FLOAT32)
    position, replay = np.array([99, 74]), (0, 0)
    for counts, kept in (((3, 1), (3, 1)), ((2, 3), (1, 2)), ((1, 3), (1, 3))):  # the second step's drafts: rejected
        out, state = run_advance(advance, x, position, counts, replay, state)
        for row, count in enumerate(counts):
            np.testing.assert_allclose(out[row, :count], wanted[row][position[row] :][:count], **FLOAT32)
        position, replay = position + kept, kept
    _, state = run_advance(advance, x, position, (0, 0), replay, state)
    for row, sequence in enumerate(x):
        _, recurrent, window = oracle(layer, sizes, sequence[: position[row]])
        np.testing.assert_allclose(state.recurrent[row + 1], recurrent, **FLOAT32)
        np.testing.assert_allclose(state.conv[row + 1], window, **FLOAT32)
    assert np.isnan(np.delete(np.asarray(state.recurrent), (1, 2), axis=0)).all()


def test_a_bfloat16_layer_keeps_decays_and_states_in_float32_and_stays_near_the_exact_one():
    layer = make_layer(THREE_PER_KEY, dtype="bfloat16")
    kept = {layer.a_log[...].dtype, layer.dt_bias[...].dtype, layer.norm_weight[...].dtype}
    assert kept == {jnp.dtype("float32")}
    x = [sequence.astype(jnp.bfloat16) for sequence in sequences()]
    outputs, state = run_prefill(jax.jit(layer.prefill), x, (0, 0), (99, 80), nan_state(THREE_PER_KEY, "bfloat16"))
    assert outputs[0].dtype == state.conv.dtype == jnp.bfloat16
    assert state.recurrent.dtype == jnp.float32
    for got, sequence, length in zip(outputs, x, (99, 80), strict=True):
        exact, _, _ = oracle(layer, THREE_PER_KEY, sequence[:length])
        # Rounded at 2^-9 relative after each of six products: a few per cent, of a large value of itself.
        np.testing.assert_allclose(got.astype(np.float64), exact, rtol=0.02, atol=0.05 * exact.std())


def test_fresh_layers_decay_at_the_published_rates():
    """A in 1..16 and time steps in 1e-3..1e-1 (softplus of the bias), the ranges of the architecture's initialiser."""

    @jax.jit  # one compilation instead of one per random array
    def make():
        return nnx.state(
            GatedDeltaNet(make_config(EIGHT_PER_KEY), dtype=jnp.dtype("float32"), implementation=JAX, rngs=nnx.Rngs(0))
        )

    layer = make()
    rate, step = np.exp(layer.a_log[...]), np.log1p(np.exp(np.asarray(layer.dt_bias[...], np.float64)))
    assert np.all((rate >= 1.0) & (rate <= 16.0))
    assert np.all((step >= 0.99e-3) & (step <= 1.01e-1))
    assert np.ptp(rate) > 1.0
    assert np.abs(layer.conv_weight[...]).max() <= 0.5  # K^-0.5
