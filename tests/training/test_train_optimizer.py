"""The optimizer: its schedule, what it decays, and the initial values it starts from."""

import jax.numpy as jnp
import numpy as np
import pytest
from training.train_rig import MODEL

from gdn_jax.config import ModelConfig
from gdn_jax.training.config import OptimizerConfig
from gdn_jax.training.flops import flops_per_token
from gdn_jax.training.optimizer import decays, learning_rate_schedule, make_optimizer
from gdn_jax.training.parameters import initial_parameters, make_layout

CONFIG = ModelConfig.from_dict(MODEL)
SETTINGS = OptimizerConfig(
    peak_learning_rate=0.5,
    warmup_steps=10,
    total_steps=110,
    final_share=0.1,
    weight_decay=0.2,
    clip_norm=1e9,
    eps=1e-12,
)


def test_the_learning_rate_rises_and_falls_to_its_final_share():
    schedule = learning_rate_schedule(SETTINGS)
    rates = [float(schedule(step)) for step in (0, 5, 10, 60, 110, 200)]
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.275, 0.05, 0.05])


def test_only_matrices_that_mix_channels_decay():
    params = initial_parameters(CONFIG, 0)
    chosen = {name for name, decayed in decays(params).items() if decayed}
    assert "model.embed_tokens.weight" in chosen
    assert "mtp.fc.weight" in chosen
    assert "model.layers.0.linear_attn.in_proj_z.weight" in chosen
    spared = {name.rpartition(".layers.")[2].partition(".")[2] for name in set(params) - chosen if ".layers." in name}
    assert spared == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "linear_attn.A_log",
        "linear_attn.conv1d.weight",
        "linear_attn.dt_bias",
        "linear_attn.in_proj_a.weight",
        "linear_attn.in_proj_b.weight",
        "linear_attn.norm.weight",
        "self_attn.k_norm.weight",
        "self_attn.q_norm.weight",
    }


def test_the_second_step_is_that_of_adamw_written_out():
    optimizer = make_optimizer(SETTINGS)
    param = {"matrix": jnp.full((1, 2), 3.0), "vector": jnp.full((2,), 3.0)}
    gradients = [np.array([0.5, -2.0]), np.array([1.5, 1.0])]
    state = optimizer.init(param)
    for gradient in gradients:
        updates, state = optimizer.update(
            {"matrix": jnp.float32(gradient[None]), "vector": jnp.float32(gradient)}, state, param
        )
    first = (0.1 * 0.9 * gradients[0] + 0.1 * gradients[1]) / (1 - 0.9**2)
    second = (0.05 * 0.95 * gradients[0] ** 2 + 0.05 * gradients[1] ** 2) / (1 - 0.95**2)
    rate = 0.05  # the second of ten steps from 0 to 0.5
    np.testing.assert_allclose(updates["vector"], -rate * first / np.sqrt(second), rtol=1e-5)
    np.testing.assert_allclose(updates["matrix"][0], -rate * (first / np.sqrt(second) + 0.2 * 3.0), rtol=1e-5)


def test_matrices_that_write_into_the_stream_begin_smaller():
    params = {name: np.asarray(param) for name, param in initial_parameters(CONFIG, 3).items()}
    sizes = {name: param.std() * param.shape[-1] ** 0.5 for name, param in params.items() if param.ndim == 2}
    assert sizes["model.embed_tokens.weight"] == pytest.approx(1.0, rel=0.05)
    assert sizes["model.layers.0.mlp.up_proj.weight"] == pytest.approx(1.0, rel=0.1)
    assert sizes["model.layers.0.mlp.down_proj.weight"] == pytest.approx(0.5, rel=0.1)
    assert sizes["model.layers.1.self_attn.o_proj.weight"] == pytest.approx(0.5, rel=0.1)
    assert sizes["mtp.layers.0.mlp.down_proj.weight"] == pytest.approx(0.5**0.5, rel=0.1)
    assert all(param.dtype == np.float32 for param in params.values())
    assert np.all(np.exp(params["model.layers.0.linear_attn.A_log"]) >= 1.0)
    other = initial_parameters(CONFIG, 4)
    assert not np.array_equal(other["model.embed_tokens.weight"], params["model.embed_tokens.weight"])


def test_compute_dtypes_are_those_of_the_model():
    dtypes = {name: dtype for name, _, _, dtype in make_layout(CONFIG, "bfloat16").leaves}
    kept = {name.rpartition("linear_attn.")[2] for name, dtype in dtypes.items() if dtype == "float32"}
    assert kept == {"A_log", "dt_bias", "norm.weight"}
    assert set(dtypes.values()) == {"float32", "bfloat16"}
    assert hash(make_layout(CONFIG, "bfloat16")) == hash(make_layout(CONFIG, "bfloat16"))
    assert make_layout(CONFIG, "bfloat16") == make_layout(CONFIG, "bfloat16")


def test_flops_are_counted_by_hand():
    layout = make_layout(CONFIG, "float32")
    mlp, output, attention = 3 * 32 * 48, 320 * 32, 3 * 32 * 32 + 2 * 16 * 32
    gdn = (16 + 16 + 32) * 32 + 32 * 32 + 2 * 2 * 32 + 32 * 32
    head = 2 * 32 * 32 + attention + mlp + output
    rows = 2 * 16 * 64  # heads, width, T
    expected = 6 * (output + gdn + attention + 2 * mlp + 2 * head + 3 * rows)
    assert flops_per_token(CONFIG, layout, sequence_length=64, mtp_depth=2.0) == expected
