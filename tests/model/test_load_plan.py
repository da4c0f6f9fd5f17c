"""What is wrong with a folder is found from headers alone, and all of it is told."""

import numpy as np
import pytest
from weight_folders import BF16, FP8, make_config, make_parameters, make_targets, save, save_shards, usual_form

from gdn_jax.errors import WeightsError
from gdn_jax.tensor_files import TensorFiles
from gdn_jax.weights import load_tensors

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"  # [32, 8] in the tiny models


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    config = make_config("q35_moe")
    stored = usual_form(config, make_parameters(config))
    assert stored[Q_PROJ].shape == (32, 8)
    return stored


def failure(folder, tensors, *, family: str = "q35_moe", targets=None) -> str:
    """Save, load, and return the message; no weight may be read on the way."""
    save(folder, tensors)

    def read_rows(*_: object) -> None:
        raise AssertionError("a weight was read before everything was checked")

    config = make_config(family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFiles, "read_rows", read_rows)
        with pytest.raises(WeightsError) as error:
            load_tensors(folder, config, targets or make_targets(config))
    assert str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        Q_PROJ,
        "model.layers.0.linear_attn.A_log",
        "model.layers.0.linear_attn.in_proj_z.weight",
        "model.layers.1.mlp.experts.gate_up_proj",
        "mtp.fc.weight",
        "mtp.layers.0.mlp.experts.down_proj",
    ],
)
def test_a_missing_tensor_is_named(tmp_path, tensors, name):
    del tensors[name]
    message = failure(tmp_path, tensors)
    assert message.endswith(
        f"tensors that the config calls for are missing (fetch the folder again, or correct config.json): {name}"
    )


def test_a_missing_expert_is_named(tmp_path):
    config = make_config("next")
    stored = usual_form(config, make_parameters(config))
    del stored["model.layers.1.mlp.experts.0.up_proj.weight"]
    del stored["mtp.layers.0.mlp.experts.2.down_proj.weight"]
    message = failure(tmp_path, stored, family="next")
    assert message.endswith("model.layers.1.mlp.experts.0.up_proj.weight, mtp.layers.0.mlp.experts.2.down_proj.weight")


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.input_layernorm.weight", "model.layers.1.self_attn.q_proj.bias", "model.mtp.fc.weight",
     "mtp.layers.1.input_layernorm.weight", "model.layers.0.mlp.experts.0.gate_proj.qweight", "something"],
)  # fmt: skip
def test_a_spare_tensor_is_named(tmp_path, tensors, name):
    tensors["language_model." + name] = np.ones(2, np.float32)
    message = failure(tmp_path, tensors)
    assert "tensors belong to no parameter" in message
    assert message.endswith(f": language_model.{name}")


def test_experts_in_both_forms_at_once_are_an_error(tmp_path, tensors):
    tensors["model.layers.0.mlp.experts.1.down_proj.weight"] = np.ones((8, 5), np.float32)
    message = failure(tmp_path, tensors)
    assert "missing" in message
    assert "belong to no parameter" in message
    assert "model.layers.0.mlp.experts.down_proj" in message


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (Q_PROJ, (16, 8), [32, 8]),
        (Q_PROJ, (8, 32), [32, 8]),
        (Q_PROJ, (256,), [32, 8]),
        ("model.layers.0.linear_attn.conv1d.weight", (24, 4), [24, 1, 4]),
        ("model.layers.0.linear_attn.A_log", (3,), [6]),
        ("model.layers.0.mlp.experts.gate_up_proj", (3, 5, 8), [3, 10, 8]),
        ("model.embed_tokens.weight", (13, 8), [12, 8]),
        ("mtp.fc.weight", (8, 8), [8, 16]),
    ],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path, tensors, name, shape, expected):
    tensors[name] = np.ones(shape, np.float32)
    message = failure(tmp_path, tensors)
    assert message.endswith(f"{name}: expected {expected}, got {list(shape)}")


@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8"])
def test_a_dtype_that_is_not_read_is_named(tmp_path, tensors, dtype):
    tensors[Q_PROJ] = np.ones((32, 8), dtype)
    message = failure(tmp_path, tensors)
    assert "weights must be stored as BF16, F16, F32, F8_E4M3" in message
    assert f"{Q_PROJ} is " in message


def test_a_float8_weight_without_scale_is_named(tmp_path, tensors):
    tensors[Q_PROJ] = np.ones((32, 8), FP8)
    assert failure(tmp_path, tensors).endswith(f"named with _scale_inv (fetch the folder again): {Q_PROJ}")


def test_a_scale_without_weight_is_named(tmp_path, tensors):
    name = "model.layers.1.self_attn.x_proj.weight_scale_inv"
    tensors[name] = np.ones((1, 1), np.float32)
    assert failure(tmp_path, tensors).endswith(f"{name} beside no weight")


def test_a_scale_beside_an_unquantized_weight_is_named(tmp_path, tensors):
    tensors[Q_PROJ + "_scale_inv"] = np.ones((1, 1), np.float32)
    assert failure(tmp_path, tensors).endswith(f"{Q_PROJ}_scale_inv beside BF16 of shape [32, 8]")


def test_a_scale_beside_a_float8_vector_is_named(tmp_path, tensors):
    tensors["model.norm.weight"] = np.ones(8, FP8)
    tensors["model.norm.weight_scale_inv"] = np.ones((1, 1), np.float32)
    assert failure(tmp_path, tensors).endswith("model.norm.weight_scale_inv beside F8_E4M3 of shape [8]")


@pytest.mark.parametrize("shape", [(1,), (1, 2), (2, 1), (32, 1), (1, 1, 1)])
def test_a_misshapen_scale_is_named_with_both_shapes(tmp_path, tensors, shape):
    tensors[Q_PROJ] = np.ones((32, 8), FP8)
    tensors[Q_PROJ + "_scale_inv"] = np.ones(shape, np.float32)
    message = failure(tmp_path, tensors)
    assert message.endswith(f"{Q_PROJ}_scale_inv: expected [1, 1] for a weight of [32, 8], got {list(shape)}")


def test_a_scale_in_another_dtype_is_named(tmp_path, tensors):
    tensors[Q_PROJ] = np.ones((32, 8), FP8)
    tensors[Q_PROJ + "_scale_inv"] = np.ones((1, 1), np.float16)
    message = failure(tmp_path, tensors)
    assert message.endswith(f"scales must be stored as BF16 or F32 (convert them): {Q_PROJ}_scale_inv is F16")


def test_one_tensor_under_two_prefixes_is_named(tmp_path, tensors):
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]
    message = failure(tmp_path, tensors)
    assert "one name only" in message
    assert "model.language_model.norm.weight" in message


def test_everything_that_is_wrong_is_told_at_once_with_counts(tmp_path, tensors):
    for name in [name for name in tensors if name.startswith("model.layers.1.self_attn")]:
        tensors["other." + name] = tensors.pop(name)
    tensors["model.norm.weight"] = np.ones(9, np.float32)
    message = failure(tmp_path, tensors)
    assert message.count("... (6 in all)") == 2
    assert "model.norm.weight: expected [8], got [9]" in message


def test_half_an_mtp_head_is_an_error_only_for_a_model_with_one(tmp_path, tensors):
    for name in ("mtp.norm.weight", "mtp.layers.0.self_attn.k_norm.weight"):
        del tensors[name]
    message = failure(tmp_path, tensors)
    assert message.endswith("mtp.layers.0.self_attn.k_norm.weight, mtp.norm.weight")
    config = make_config("q35_moe")
    targets = {path: target for path, target in make_targets(config).items() if path[0] != "mtp"}
    assert load_tensors(tmp_path, config, targets).keys() == targets.keys()


def test_a_head_that_is_left_out_on_purpose_is_skipped_and_said_and_nothing_else_is(tmp_path, tensors, caplog):
    config = make_config("q35_moe", mtp_num_hidden_layers=0)
    targets = make_targets(config)
    assert not any(path[0] == "mtp" for path in targets)
    save(tmp_path, tensors)
    with caplog.at_level("INFO"):
        assert load_tensors(tmp_path, config, targets).keys() == targets.keys()
    count = sum(name.startswith("mtp.") for name in tensors)
    assert f"{count} tensors of the MTP head are not read" in caplog.text
    tensors["model.layers.9.input_layernorm.weight"] = np.ones(8, np.float32)
    del tensors["model.norm.weight"]
    save(tmp_path, tensors)
    with pytest.raises(WeightsError) as error:
        load_tensors(tmp_path, config, targets)
    assert "missing (fetch the folder again, or correct config.json): model.norm.weight" in str(error.value)
    assert "model.layers.9.input_layernorm.weight" in str(error.value)
    assert "mtp" not in str(error.value)


def test_a_folder_whose_head_is_read_or_absent_says_nothing_of_it(tmp_path, tensors, caplog):
    config = make_config("q35_moe")
    save(tmp_path, tensors)
    with caplog.at_level("INFO"):
        load_tensors(tmp_path, config, make_targets(config))
    assert "MTP" not in caplog.text


def test_a_copy_of_the_tied_matrix_is_left_out_and_said(tmp_path, caplog):
    config = make_config("q35")
    parameters = make_parameters(config)
    stored = usual_form(config, parameters)
    stored["language_model.lm_head.weight"] = np.zeros((12, 8), np.float32)
    save(tmp_path, stored)
    with caplog.at_level("INFO"):
        loaded = load_tensors(tmp_path, config, make_targets(config))
    path = ("decoder", "embed_tokens", "weight")
    np.testing.assert_array_equal(np.asarray(loaded[path]), parameters[path].astype(BF16))
    assert "lm_head.weight is not read" in caplog.text


def test_an_untied_model_never_takes_the_embedding_for_its_head(tmp_path):
    config = make_config("q35", tie_word_embeddings=False)
    stored = usual_form(config, make_parameters(config))
    del stored["lm_head.weight"]
    save(tmp_path, stored)
    with pytest.raises(WeightsError, match=r"missing .*: lm_head\.weight$"):
        load_tensors(tmp_path, config, make_targets(config))


def test_rows_that_no_parameter_takes_are_an_error(tmp_path):
    config = make_config("next")
    stored = usual_form(config, make_parameters(config))
    targets = make_targets(config)
    del targets["decoder", "layers", 0, "mixer", "in_proj_z", "weight"]
    message = failure(tmp_path, stored, family="next", targets=targets)
    assert "every row of a tensor must be used exactly once" in message
    assert message.endswith("in_proj_qkvz.weight")


def test_a_model_of_other_sizes_than_the_config_is_an_error(tmp_path):
    config, other = make_config("next"), make_config("next", linear_key_head_dim=4)
    save(tmp_path, usual_form(config, make_parameters(config)))
    with pytest.raises(WeightsError, match=r"parameter decoder\.layers\.0\.mixer\.in_proj_qkv\.weight .*same config"):
        load_tensors(tmp_path, other, make_targets(config))


def test_a_deleted_shard_fails_before_anything_is_read(tmp_path, tensors):
    save_shards(tmp_path, tensors, ["a.safetensors", "b.safetensors", "c.safetensors"])
    (tmp_path / "b.safetensors").unlink()
    config = make_config("q35_moe")
    with pytest.raises(WeightsError, match=r"b\.safetensors"):
        load_tensors(tmp_path, config, make_targets(config))
