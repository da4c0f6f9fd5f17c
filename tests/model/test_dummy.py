"""Dummy weights: the same for the same seed, path and shape; of sane size; different everywhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from weight_folders import FAMILIES, make_config, make_targets

from gdn_jax import slabs
from gdn_jax.dummy import dummy_tensors

LAYER = ("decoder", "layers", 0)


def one(path: tuple, shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.asarray(dummy_tensors({path: jax.ShapeDtypeStruct(shape, np.dtype(dtype))}, seed)[path])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_model_gets_its_shape_and_dtype(family):
    targets = make_targets(make_config(family))
    arrays = dummy_tensors(targets, 3)
    assert {path: (a.shape, a.dtype) for path, a in arrays.items()} == {
        path: (t.shape, t.dtype) for path, t in targets.items()
    }
    assert all(bool(jnp.isfinite(array).all()) for array in arrays.values())


def test_values_depend_on_seed_and_path_and_on_no_other_parameter():
    path, shape = (*LAYER, "mlp", "up_proj", "weight"), (40, 30)
    alone = one(path, shape)
    targets = {("mtp", "norm", "weight"): jax.ShapeDtypeStruct((9,), jnp.float32)}
    targets[path] = jax.ShapeDtypeStruct(shape, jnp.float32)
    np.testing.assert_array_equal(np.asarray(dummy_tensors(targets, 0)[path]), alone)
    others = [one(path, shape, seed=1), one(("decoder", "layers", 1, *path[3:]), shape)]
    for other in others:
        assert abs(np.corrcoef(other.ravel(), alone.ravel())[0, 1]) < 0.15  # 4 standard deviations of 1200 samples


def test_bfloat16_values_are_the_float32_ones_rounded():
    path, shape = (*LAYER, "mlp", "up_proj", "weight"), (40, 30)
    np.testing.assert_array_equal(one(path, shape, dtype="bfloat16"), one(path, shape).astype(jnp.bfloat16))


@pytest.mark.parametrize("shape", [(400, 1024), (50, 4096), (4, 100, 512)])
def test_matrices_keep_activations_at_unit_size(shape):
    leaf = "experts_down" if len(shape) == 3 else "embed_tokens"
    values = one(("decoder", leaf, "weight"), shape)
    assert abs(values.mean()) < 0.01 * shape[-1] ** -0.5 * 4
    np.testing.assert_allclose(values.std(), shape[-1] ** -0.5, rtol=0.02)
    assert 0.01 < values.std() < 0.05


def test_zero_centred_norms_are_near_zero_and_the_gdn_norm_is_near_one():
    norm = one((*LAYER, "input_layernorm", "weight"), (1000,))
    gdn = one((*LAYER, "mixer", "norm_weight"), (128,))
    assert 0.015 < np.abs(norm).max() <= 0.02
    assert 0.01 < np.abs(gdn - 1).max() <= 0.0201


def test_decays_are_those_of_trained_models():
    # exp(-A softplus(dt_bias)) per token lies between exp(-1.6) and exp(-0.001), all over that range.
    a_log = one((*LAYER, "mixer", "a_log"), (4096,))
    step = np.logaddexp(0, one((*LAYER, "mixer", "dt_bias"), (4096,)).astype(np.float64))
    assert a_log.min() >= 0
    assert a_log.max() <= np.log(16) + 1e-6
    assert 1e-3 * 0.99 < step.min() < 1.1e-3
    assert 0.09 < step.max() < 0.1 * 1.01
    assert 0.005 < np.median(step) < 0.02


def test_convolution_taps_have_the_usual_spread():
    taps = one((*LAYER, "mixer", "conv_weight"), (1000, 4))
    assert 0.45 < np.abs(taps).max() <= 0.5


def test_slabs_of_one_parameter_differ_and_go_to_the_device_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(slabs, "SLAB_BYTES", 4000)
    device = jax.devices()[-1]
    path = (*LAYER, "mlp", "experts_gate_up")
    array = dummy_tensors(
        {path: jax.ShapeDtypeStruct((3, 10, 100), np.dtype("float32"))}, 0, put_on=SingleDeviceSharding(device)
    )[path]
    assert array.devices() == {device}
    values = np.asarray(array).reshape(3, -1)
    assert np.abs(np.corrcoef(values) - np.eye(3)).max() < 0.15
