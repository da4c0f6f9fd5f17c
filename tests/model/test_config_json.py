"""The published config.json: what is refused by name, what is an error, and that nothing else comes out."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from released_configs import (
    DENSE,
    FLAT,
    FULL,
    GDN,
    MOE,
    NEXT,
    RELEASED,
    YARN,
    read,
    refusal,
    released,
    with_outer,
    write_file,
)

from gdn_jax.config import ModelConfig
from gdn_jax.errors import ConfigError, UnsupportedModelError


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "qwen4_exp", "text_config": {"model_type": "qwen4_exp_text"}},
        {"model_type": "qwen4_exp"},
        {"model_type": "qwen4_exp_text"},
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen4_exp_text"}},
    ],
)
def test_the_experimental_fourth_generation_is_refused_by_name(raw: dict) -> None:
    message = refusal(raw, UnsupportedModelError)
    assert "qwen4_exp" in message
    assert "Qwen3.8-Flash-Next" in message
    assert "qwen3_next, qwen3_5" in message


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen2_vl", "QWEN3_NEXT"])
def test_other_families_are_refused_with_what_is_supported(name: str) -> None:
    message = refusal({"model_type": name}, UnsupportedModelError)
    assert name in message
    assert "supported model types are qwen3_next, qwen3_5" in message


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"attn_output_gate": False}, "false"),
        ({"attention_bias": True}, "true"),
        ({"use_sliding_window": True}, "true"),
        ({"mtp_use_dedicated_embeddings": True}, "true"),
        ({"mtp_num_hidden_layers": 2}, "2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"output_gate_type": "sigmoid"}, "sigmoid"),
        ({"layer_types": ["sliding_attention"] * 64}, "sliding_attention"),
        ({"layer_types": ["mamba"] * 64}, "mamba"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"mamba_ssm_dtype": "int8"}, "int8"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "llama3"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {**YARN, "mscale": 0.7}}, "0.7"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "False"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ],
)
def test_settings_that_compute_something_else_are_refused_by_name(changes: dict, value: str) -> None:
    message = refusal(released(DENSE, **changes), UnsupportedModelError)
    (key,) = changes
    assert key in message
    assert value in message


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "4096"},
        {"hidden_size": 4096.0},
        {"hidden_size": True},
        {"hidden_size": -1},
        {"hidden_size": 0},
        {"hidden_size": float("nan")},
        {"hidden_size": 10**12},
        {"hidden_size": [4096]},
        {"vocab_size": 0},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 2**30},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": 3},
        {"linear_num_key_heads": 0},
        {"linear_num_key_heads": 5},
        {"linear_num_value_heads": 17},
        {"linear_key_head_dim": 0},
        {"linear_value_head_dim": 0},
        {"linear_conv_kernel_dim": 1},
        {"head_dim": 0},
        {"partial_rotary_factor": 0.27},
        {"partial_rotary_factor": 0.001},
        {"partial_rotary_factor": 2.0},
        {"partial_rotary_factor": 1e29},
        {"rope_theta": "1e7"},
        {"rope_theta": 0},
        {"rope_theta": float("inf")},
        {"rms_norm_eps": -1e-6},
        {"rms_norm_eps": float("nan")},
        {"full_attention_interval": 0},
        {"layer_types": [GDN] * 47},
        {"layer_types": []},
        {"layer_types": GDN},
        {"layer_types": [1] * 48},
        {"num_experts": -8},
        {"num_experts_per_tok": 513},
        {"num_experts_per_tok": 0},
        {"moe_intermediate_size": 0},
        {"shared_expert_intermediate_size": 0},
        {"decoder_sparse_step": 0},
        {"mlp_only_layers": ["0"]},
        {"norm_topk_prob": "true"},
        {"attention_bias": 0},
        {"max_position_embeddings": 0},
        {"hidden_act": 1},
        {"torch_dtype": 16},
        {"tie_word_embeddings": 1},
        {"eos_token_id": "<|im_end|>"},
        {"eos_token_id": -1},
        {"model_type": 3},
        {"text_config": []},
        {"quantization_config": "fp8"},
        {"quantization_config": {"bits": 8}},
    ],
    ids=str,
)
def test_wrong_types_and_contradictions_are_errors_that_name_the_key(changes: dict) -> None:
    (key,) = changes
    assert key in refusal(released(NEXT, **changes))


def test_a_dense_model_without_a_width_is_an_error() -> None:
    assert "intermediate_size" in refusal(released(DENSE, intermediate_size=0))
    assert "intermediate_size" in refusal(released(MOE, num_experts=0))


def test_a_config_without_a_family_is_an_error() -> None:
    assert "model_type" in refusal(released(NEXT, model_type=...))
    assert "model_type" in refusal(with_outer(released(MOE, model_type=...), model_type=...))


def test_families_inside_and_outside_must_belong_together() -> None:
    message = refusal(with_outer(released(MOE), model_type="qwen3_5"))
    assert "'qwen3_5'" in message
    assert "'qwen3_5_moe_text'" in message


def test_errors_name_the_key_where_it_stands() -> None:
    assert "text_config.hidden_size" in refusal(released(MOE, hidden_size="x"))
    assert "text_config" not in refusal(released(NEXT, hidden_size="x"))


def test_long_values_are_cut_in_messages() -> None:
    assert len(refusal(released(NEXT, hidden_size="9" * 5000))) < 300


def test_a_folder_is_read_like_its_content(tmp_path: Path) -> None:
    folder = write_file(tmp_path / "model", json.dumps(RELEASED[MOE]))
    assert ModelConfig.from_folder(folder) == ModelConfig.from_folder(str(folder)) == read(MOE)


def test_a_hub_name_is_told_from_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"local folder.*huggingface-cli download Qwen/Qwen3\.5-4B"):
        ModelConfig.from_folder("Qwen/Qwen3.5-4B")


@pytest.mark.parametrize("name", ["", "/no/such/folder", "missing", "x" * 5000, "a\0b"])
def test_a_missing_folder_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"local folder.*check the path"):
        ModelConfig.from_folder(name)


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    folder = write_file(tmp_path, json.dumps(RELEASED[MOE]))
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        ModelConfig.from_folder(folder / "config.json")


def test_a_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must hold config\.json"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "null", '{"model_type": "qwen3_next",}', "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"],
)
def test_a_config_that_is_no_json_object_is_an_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json must"):
        ModelConfig.from_folder(write_file(tmp_path, content))


def test_a_config_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config\.json must be readable"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("with_config", [True, False])
def test_an_adapter_is_refused(tmp_path: Path, *, with_config: bool) -> None:
    write_file(tmp_path, "{}", "adapter_config.json")
    if with_config:
        write_file(tmp_path, json.dumps(RELEASED[MOE]))
    with pytest.raises(UnsupportedModelError, match=r"LoRA adapter.*merge"):
        ModelConfig.from_folder(tmp_path)


def paths(values: dict) -> list[tuple[str, ...]]:
    """Return the path of every key of a config, nested ones too."""
    found = []
    for key, value in values.items():
        found.append((key,))
        if isinstance(value, dict):
            found += [(key, *rest) for rest in paths(value)]
    return found


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["yarn", "default", "silu", "fp8", GDN, FULL, "qwen3_5", "qwen3_next", "qwen3_5_moe_text"])
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=4), SCALARS, max_size=3)
MUTABLE = [NEXT + "-fp8", DENSE + "-fp8", MOE, FLAT]


@st.composite
def mutated_configs(draw: st.DrawFn) -> dict:
    raw = copy.deepcopy(RELEASED[draw(st.sampled_from(MUTABLE))])
    extra = [("rope_scaling",), ("mlp_only_layers",), ("text_config",), ("rope_parameters", "factor")]
    for _ in range(draw(st.integers(1, 4))):
        *parents, last = draw(st.sampled_from([*paths(raw), *extra]))
        table: object = raw
        for key in parents:
            table = table.get(key) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            continue
        if draw(st.booleans()):
            table.pop(last, None)
        else:
            table[last] = draw(VALUES)
    return raw


@settings(max_examples=150, deadline=None)
@given(mutated_configs())
def test_a_damaged_config_is_read_or_refused_and_never_fails_otherwise(raw: dict) -> None:
    try:
        config = ModelConfig.from_dict(raw)
    except ConfigError:
        return
    assert hash(config) == hash(ModelConfig.from_dict(raw))
    assert config.num_gdn_layers + config.num_attention_layers == config.num_layers
    assert config.rotary_dim % 2 == 0
    assert config.context_length >= 1
