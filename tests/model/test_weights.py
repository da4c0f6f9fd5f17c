"""Loading whole sets of parameters: every layout gives the same arrays; damage gives one kind of error."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from safetensors import deserialize
from weight_folders import (
    BF16,
    FAMILIES,
    FP8,
    as_stored,
    make_config,
    make_parameters,
    make_targets,
    quantize,
    save,
    save_shards,
    usual_form,
    write_raw,
)

from gdn_jax import slabs
from gdn_jax.config import ModelConfig
from gdn_jax.decoder import Decoder
from gdn_jax.dummy import dummy_tensors
from gdn_jax.errors import WeightsError
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.mtp import MTPHead
from gdn_jax.weights import dummy_weights, has_mtp, load_tensors, load_weights


def assert_loads(folder: Path, config: ModelConfig, expected: dict, dtype: str = "bfloat16") -> None:
    """Load and compare every parameter, dtype included; `expected` is rounded to the parameter's dtype."""
    targets = make_targets(config, dtype)
    loaded = load_tensors(folder, config, targets)
    assert loaded.keys() == targets.keys()
    for path, array in loaded.items():
        assert array.dtype == targets[path].dtype, path
        np.testing.assert_array_equal(np.asarray(array), expected[path].astype(array.dtype), err_msg=str(path))


@pytest.mark.parametrize("mtp_fused", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_mix_of_layouts_loads_the_same_parameters(tmp_path, family, packed, fused, mtp_fused):
    config = make_config(family)
    parameters = make_parameters(config)
    save(tmp_path, as_stored(config, parameters, packed=packed, fused=fused, mtp_fused=mtp_fused))
    assert_loads(tmp_path, config, parameters)


@pytest.mark.parametrize("slab_bytes", [1, 200])
@pytest.mark.parametrize("family", ["next", "q35_moe"])
def test_loading_in_small_slabs_changes_nothing(tmp_path, monkeypatch, family, slab_bytes):
    config = make_config(family)
    parameters = make_parameters(config)
    save(tmp_path, usual_form(config, parameters))
    monkeypatch.setattr(slabs, "SLAB_BYTES", slab_bytes)
    assert_loads(tmp_path, config, parameters)


@pytest.mark.parametrize(("prefix", "head_prefix"), [("model.language_model.", ""), ("language_model.model.",) * 2])
def test_prefixes_of_exports_are_stripped(tmp_path, prefix, head_prefix):
    config = make_config("q35_moe")
    parameters = make_parameters(config)
    head_prefix = "language_model." if head_prefix else ""
    renamed = {}
    for name, value in usual_form(config, parameters).items():
        if name.startswith("model."):
            renamed[prefix + name.removeprefix("model.")] = value
        else:
            renamed[head_prefix + name] = value
    save(tmp_path, renamed)
    assert_loads(tmp_path, config, parameters)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_each_stored_dtype_loads_into_each_parameter_dtype(tmp_path, stored, dtype):
    config = make_config("q35", num_hidden_layers=1, layer_types=["full_attention"], mtp_num_hidden_layers=0)
    parameters = make_parameters(config)
    save(tmp_path, usual_form(config, parameters), np.dtype(stored))
    assert_loads(tmp_path, config, parameters, dtype)


def test_float32_is_rounded_once_to_nearest_even(tmp_path):
    config = make_config("q35")
    parameters = make_parameters(config)
    path = ("decoder", "norm", "weight")
    parameters[path] = np.float32([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3e38, 0, -0.0, 1e-40])
    save(tmp_path, usual_form(config, parameters), np.dtype("float32"))
    loaded = np.asarray(load_tensors(tmp_path, config, make_targets(config))[path])
    expected = np.array([1, 1 + 2**-6, 1 + 2**-7, -1, 3e38, 0, -0.0, 1e-40], BF16)
    np.testing.assert_array_equal(loaded.view(np.uint16), expected.view(np.uint16))


def test_decay_parameters_keep_float32_values_in_a_bfloat16_model(tmp_path):
    config = make_config("q35")
    parameters = make_parameters(config)
    tensors = usual_form(config, parameters)
    kept = ("A_log", "dt_bias", "linear_attn.norm.weight")
    for path in parameters:
        if path[-1] in ("a_log", "dt_bias", "norm_weight"):
            parameters[path] = parameters[path] + np.float32(1e-4)  # not a bfloat16 value
    exact = usual_form(config, parameters)
    stored = {name: exact[name] if name.endswith(kept) else value.astype(BF16) for name, value in tensors.items()}
    save(tmp_path, stored, np.dtype("float32"))
    assert_loads(tmp_path, config, parameters)


def test_shards_with_unusual_names_are_followed_through_the_index(tmp_path):
    config = make_config("next")
    parameters = make_parameters(config)
    files = ["model.safetensors-00001-of-00002.safetensors", "rest.safetensors", "mtp.safetensors"]
    save_shards(tmp_path, usual_form(config, parameters), files)
    assert_loads(tmp_path, config, parameters)


def test_vision_tensors_are_skipped_whatever_they_are(tmp_path):
    config = make_config("q35")
    parameters = make_parameters(config)
    vision = {"model.visual.blocks.0.attn.qkv.weight": np.ones((3, 2), np.int64), "visual.norm": np.ones(2, np.uint8)}
    save(tmp_path, usual_form(config, parameters) | vision)
    assert_loads(tmp_path, config, parameters)


def big_config(family: str) -> ModelConfig:
    """A model whose matrices span several scale blocks, none of them a multiple of 128."""
    sizes = {"hidden_size": 136, "linear_key_head_dim": 30, "linear_value_head_dim": 22, "moe_intermediate_size": 70}
    return make_config(family, **sizes, shared_expert_intermediate_size=130, intermediate_size=150)


def quantizable(tensors: dict) -> list[str]:
    """Names of the matrices that FP8 releases quantize."""
    kept = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "shared_expert_gate.weight", "mtp.fc.weight")
    small = ("in_proj_ba.weight", "in_proj_a.weight", "in_proj_b.weight")
    return [name for name, value in tensors.items() if value.ndim == 2 and not name.endswith((*kept, *small))]


@pytest.mark.parametrize(("scale_dtype", "slab_bytes"), [("bfloat16", slabs.SLAB_BYTES), ("float32", 40_000)])
@pytest.mark.parametrize(("family", "packed"), [("next", True), ("q35", False), ("q35_moe", False)])
def test_an_fp8_folder_loads_as_the_values_it_means(tmp_path, monkeypatch, family, packed, scale_dtype, slab_bytes):
    config = big_config(family)
    tensors = as_stored(config, make_parameters(config), packed=packed, fused=False, mtp_fused=False)
    stored, meant = quantize(tensors, quantizable(tensors), np.dtype(scale_dtype))
    (tmp_path / "fp8").mkdir()
    (tmp_path / "plain").mkdir()
    save(
        tmp_path / "fp8",
        {name: v if v.dtype != np.float32 or "scale" in name else v.astype(BF16) for name, v in stored.items()},
        np.dtype("float32"),
    )
    save(tmp_path / "plain", meant, np.dtype("float32"))
    targets = make_targets(config, "float32")
    plain = load_tensors(tmp_path / "plain", config, targets)
    monkeypatch.setattr(slabs, "SLAB_BYTES", slab_bytes)
    fp8 = load_tensors(tmp_path / "fp8", config, targets)
    for path in targets:
        np.testing.assert_array_equal(np.asarray(fp8[path]), np.asarray(plain[path]), err_msg=str(path))


def test_quantization_is_decided_tensor_by_tensor(tmp_path):
    # Within one parameter: the gate rows of expert 0 in FP8, its up rows in float16, the rest in bfloat16.
    config = big_config("q35_moe")
    parameters = make_parameters(config)
    tensors = as_stored(config, parameters, packed=False, fused=False, mtp_fused=True)
    prefix = "model.layers.1.mlp.experts.0."
    stored, meant = quantize(tensors, [prefix + "gate_proj.weight"])
    stored[prefix + "up_proj.weight"] = tensors[prefix + "up_proj.weight"].astype(np.float16)
    save(tmp_path, stored)
    path = ("decoder", "layers", 1, "mlp", "experts_gate_up")
    parameters[path][0, :70] = meant[prefix + "gate_proj.weight"]
    assert_loads(tmp_path, config, parameters)


def test_a_folder_without_mtp_fills_a_model_without_mtp(tmp_path):
    config = make_config("next")
    with_mtp = make_parameters(config)
    parameters = {path: value for path, value in with_mtp.items() if path[0] != "mtp"}
    save(tmp_path, usual_form(config, parameters))
    assert not has_mtp(tmp_path)
    without = {path: target for path, target in make_targets(config).items() if path[0] != "mtp"}
    assert load_tensors(tmp_path, config, without).keys() == parameters.keys()
    with pytest.raises(WeightsError, match=r"missing .*: mtp\.layers\.0\.input_layernorm\.weight, .*in all"):
        load_tensors(tmp_path, config, make_targets(config))
    save(tmp_path, usual_form(config, with_mtp))
    assert has_mtp(tmp_path)
    assert load_tensors(tmp_path, config, without).keys() == parameters.keys()


def test_progress_counts_every_byte_of_the_parameters_once(tmp_path):
    config = make_config("next")
    parameters = make_parameters(config)
    save(tmp_path, usual_form(config, parameters) | {"model.visual.x": np.ones(1000, np.float32)})
    seen = []
    load_tensors(tmp_path, config, make_targets(config), progress=lambda done, total: seen.append((done, total)))
    total = 2 * sum(value.size for value in parameters.values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert len(seen) > len(parameters)


def test_arrays_go_to_the_device_that_is_asked_for(tmp_path):
    config = make_config("q35")
    save(tmp_path, usual_form(config, make_parameters(config)))
    device = jax.devices()[-1]
    loaded = load_tensors(tmp_path, config, make_targets(config, "float32"), put_on=SingleDeviceSharding(device))
    assert all(array.devices() == {device} and array.committed for array in loaded.values())


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error(tmp_path):
    config = make_config("q35")
    save(tmp_path, usual_form(config, make_parameters(config)))
    path = tmp_path / "model.safetensors"

    def cut_at_start(done: int, total: int) -> None:
        if done == 0:
            path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(WeightsError, match="became shorter while it was read"):
        load_tensors(tmp_path, config, make_targets(config), progress=cut_at_start)


class Model(nnx.Module):
    """Decoder and MTP head, as the whole model names them."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        parts = {"dtype": jnp.dtype(jnp.bfloat16), "implementation": Implementation.JAX, "rngs": nnx.Rngs(0)}
        self.decoder = Decoder(config, **parts)
        self.mtp = MTPHead(config, **parts)


def abstract(config: ModelConfig) -> Model:
    return nnx.eval_shape(lambda: Model(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_has_exactly_the_parameters_that_these_tests_load(family):
    config = make_config(family)
    params = nnx.to_flat_state(nnx.state(abstract(config)))
    targets = make_targets(config)
    assert {path: (param.shape, np.dtype(param.dtype)) for path, param in params} == {
        path: (target.shape, target.dtype) for path, target in targets.items()
    }


def test_modules_are_filled_by_path_and_nothing_else_of_them_changes(tmp_path):
    config = make_config("next")
    parameters = make_parameters(config)
    save(tmp_path, usual_form(config, parameters))
    seen = []
    model = load_weights(abstract(config), config, tmp_path, progress=lambda *counts: seen.append(counts))
    assert model.config is config
    assert seen
    for path, param in nnx.to_flat_state(nnx.state(model)):
        np.testing.assert_array_equal(np.asarray(param[...]).astype(np.float32), parameters[path], err_msg=str(path))
    layer = model.decoder.layers[1]
    np.testing.assert_array_equal(
        np.asarray(layer.mixer.q_norm.weight[...]).astype(np.float32),
        parameters["decoder", "layers", 1, "mixer", "q_norm", "weight"],
    )


def test_dummy_modules_hold_the_dummy_tensors_of_their_seed():
    config = make_config("q35")
    targets = make_targets(config)
    model = dummy_weights(abstract(config), 5)
    expected = dummy_tensors(targets, 5)
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    assert flat.keys() == expected.keys()
    for path, param in flat.items():
        np.testing.assert_array_equal(np.asarray(param[...]), np.asarray(expected[path]))


@pytest.mark.parametrize(
    "name", ["tiny-next-moe", "tiny-next-dense", "tiny-q35-dense", "tiny-q35-moe", "tiny-q35-moe-fp8"]
)
def test_golden_folders_hold_what_was_loaded_from_them(golden_folder, name):
    folder = golden_folder / name
    config = ModelConfig.from_folder(folder)
    assert has_mtp(folder)
    loaded = load_tensors(folder, config, make_targets(config, "float32"))
    is_next, is_fp8 = "next" in name, name.endswith("fp8")
    fused = not is_next and not is_fp8
    again = as_stored(
        config, {path: np.asarray(a) for path, a in loaded.items()}, packed=is_next, fused=fused, mtp_fused=fused
    )
    stored: dict[str, np.ndarray] = {}
    dtypes = {"BF16": BF16, "F8_E4M3": FP8, "F32": np.dtype(np.float32)}
    for file in folder.glob("model*.safetensors"):
        for key, entry in deserialize(file.read_bytes()):
            stored[key] = np.frombuffer(entry["data"], dtypes[entry["dtype"]]).reshape(entry["shape"])
    stored = {key.replace(".language_model.", "."): value for key, value in stored.items() if ".visual." not in key}
    scales = {key: value for key, value in stored.items() if key.endswith("_scale_inv")}
    assert bool(scales) == is_fp8
    assert again.keys() == stored.keys() - scales.keys()
    for key, value in again.items():
        expected = stored[key].astype(np.float32)
        if (scale := scales.get(key + "_scale_inv")) is not None:
            wide = np.kron(scale.astype(np.float32), np.ones((128, 128), np.float32))
            expected = expected * wide[: expected.shape[0], : expected.shape[1]]
        np.testing.assert_array_equal(value, expected, err_msg=key)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> tuple[Path, ModelConfig, dict[tuple, np.ndarray]]:
    config = make_config("next", num_hidden_layers=1, layer_types=["full_attention"])
    folder = tmp_path_factory.mktemp("healthy")
    parameters = make_parameters(config)
    save(folder, usual_form(config, parameters))
    return folder, config, parameters


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_file_cut_anywhere_is_a_weights_error(healthy, tmp_path_factory, data):
    folder, config, _ = healthy
    content = (folder / "model.safetensors").read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    damaged = tmp_path_factory.mktemp("cut")
    (damaged / "model.safetensors").write_bytes(content[:length])
    with pytest.raises(WeightsError, match=r"must be a whole safetensors file"):
        load_tensors(damaged, config, make_targets(config))


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_header_with_wrong_bytes_is_a_weights_error_or_means_the_same(healthy, tmp_path_factory, data):
    # A few changes are harmless (white space for white space); none may end in wrong weights or another exception.
    folder, config, parameters = healthy
    content = bytearray((folder / "model.safetensors").read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    place = st.one_of(st.integers(0, 7), st.integers(8, header_end - 1))
    letters = st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789"{}[],:. -eE\\'))
    for position, byte in data.draw(st.lists(st.tuples(place, letters), min_size=1, max_size=4)):
        content[position] = byte
    damaged = tmp_path_factory.mktemp("wrong")
    (damaged / "model.safetensors").write_bytes(content)
    try:
        loaded = load_tensors(damaged, config, make_targets(config))
    except WeightsError:
        return
    for path, value in parameters.items():
        np.testing.assert_array_equal(np.asarray(loaded[path]).astype(np.float32), value, err_msg=str(path))


MEASURE = """
import json, sys
from pathlib import Path
import jax, numpy as np
sys.path.insert(0, sys.argv[2])
from weight_folders import make_config, make_targets
from gdn_jax.weights import load_tensors

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

config = make_config("q35", **json.loads(sys.argv[3]))
jax.block_until_ready(jax.numpy.ones(3) + 1)
before = status("VmRSS")
loaded = load_tensors(sys.argv[1], config, make_targets(config))
weights = sum(array.nbytes for array in loaded.values())
print(json.dumps({"weights": weights, "grown": status("VmHWM") - before}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_loading_needs_little_memory_beside_the_weights(tmp_path):
    sizes = {"vocab_size": 2**17, "hidden_size": 1024}
    config = make_config("q35", **sizes)
    zeros = {path: np.broadcast_to(np.float32(0), t.shape) for path, t in make_targets(config).items()}
    header, position = {}, 0
    for name, value in usual_form(config, zeros).items():
        end = position + 2 * value.size
        header[name] = {"dtype": "BF16", "shape": value.shape, "data_offsets": [position, end]}
        position = end
    write_raw(tmp_path / "model.safetensors", header)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) + position)  # a sparse file: zeros that take no room on disk
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(Path(__file__).parent), json.dumps(sizes)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    measured = json.loads(result.stdout)
    # The embedding alone has 256 MiB; holding it twice, or mapping the file, would break the bound.
    assert measured["weights"] > 256 * 2**20
    assert measured["grown"] < measured["weights"] + 200 * 2**20
