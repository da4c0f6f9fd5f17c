"""ModelConfig: what each family's keys mean, and what follows from them."""

import dataclasses
from pathlib import Path

import pytest
from released_configs import DENSE, FLAT, FULL, GDN, MOE, NEXT, RELEASED, read, released, with_outer

from gdn_jax.config import Fp8Quantization, ModelConfig


def test_next_is_read_from_a_flat_config() -> None:
    config = read(NEXT)
    assert config == ModelConfig(
        model_type="qwen3_next",
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        layer_types=(GDN, GDN, GDN, FULL) * 12,
        num_attention_heads=16,
        num_kv_heads=2,
        head_dim=256,
        num_linear_key_heads=16,
        num_linear_value_heads=32,
        linear_key_dim=128,
        linear_value_dim=128,
        conv_kernel=4,
        rotary_dim=64,
        rope_theta=1e7,
        yarn=None,
        rms_norm_eps=1e-6,
        intermediate_size=5120,
        is_moe_layer=(True,) * 48,
        mtp_is_moe=True,
        num_experts=512,
        num_experts_per_token=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=262144,
        num_mtp_layers=1,
        dtype="bfloat16",
        state_dtype="float32",
        quantization=None,
        eos_token_ids=(151645,),
    )


def test_dense_three_five_is_read_from_the_nested_text_config() -> None:
    config = read(DENSE)
    assert (config.model_type, config.hidden_size, config.num_layers) == ("qwen3_5_text", 5120, 64)
    assert (config.num_attention_heads, config.num_kv_heads, config.num_linear_value_heads) == (24, 4, 48)
    assert (config.intermediate_size, config.num_experts, config.mtp_is_moe) == (17408, 0, False)
    assert config.is_moe_layer == (False,) * 64
    assert (config.rope_theta, config.rotary_dim, config.eos_token_ids) == (1e7, 64, (248044,))


def test_three_five_with_experts_is_read_from_the_nested_text_config() -> None:
    config = read(MOE)
    assert (config.model_type, config.is_moe_layer, config.mtp_is_moe) == ("qwen3_5_moe_text", (True,) * 40, True)
    assert (config.num_experts, config.num_experts_per_token) == (256, 8)
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (512, 512)
    assert config.intermediate_size == 0


def test_text_only_exports_are_read_from_a_flat_config() -> None:
    assert (read(FLAT).model_type, read(FLAT).num_layers, read(FLAT).hidden_size) == ("qwen3_5_moe_text", 92, 8192)
    export = {**RELEASED["qwen3.5-4b"]["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    assert ModelConfig.from_dict(export) == read("qwen3.5-4b")


def test_derived_counts_follow_from_the_fields() -> None:
    config = read(DENSE)
    assert (config.conv_channels, config.conv_window) == (2 * 16 * 128 + 48 * 128, 3)
    assert (config.num_gdn_layers, config.num_attention_layers, config.value_heads_per_key_head) == (48, 16, 3)


def test_a_config_is_hashable_and_frozen() -> None:
    assert hash(read(MOE)) == hash(read(MOE))
    assert {read(MOE), read(MOE), read(DENSE)} == {read(DENSE), read(MOE)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        read(MOE).hidden_size = 1


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"model_type": "qwen3_next"}, (151936, 2048, 48, 16, 2, 5632, 512, 10, 512, 512)),
        ({"model_type": "qwen3_5", "text_config": {}}, (248320, 4096, 32, 16, 4, 12288, 0, 0, 0, 0)),
        ({"model_type": "qwen3_5_text"}, (248320, 4096, 32, 16, 4, 12288, 0, 0, 0, 0)),
        ({"model_type": "qwen3_5_moe"}, (248320, 2048, 40, 16, 2, 0, 256, 8, 512, 512)),
        ({"text_config": {"model_type": "qwen3_5_moe_text"}}, (248320, 2048, 40, 16, 2, 0, 256, 8, 512, 512)),
    ],
)
def test_absent_keys_mean_the_defaults_of_the_family(raw: dict, expected: tuple) -> None:
    config = ModelConfig.from_dict(raw)
    assert expected == (
        config.vocab_size,
        config.hidden_size,
        config.num_layers,
        config.num_attention_heads,
        config.num_kv_heads,
        config.intermediate_size,
        config.num_experts,
        config.num_experts_per_token,
        config.moe_intermediate_size,
        config.shared_expert_intermediate_size,
    )
    assert config.layer_types[:5] == (GDN, GDN, GDN, FULL, GDN)
    assert (config.head_dim, config.rotary_dim, config.rope_theta, config.yarn) == (256, 64, 10000.0, None)
    assert (config.num_linear_key_heads, config.num_linear_value_heads, config.conv_kernel) == (16, 32, 4)
    assert (config.linear_key_dim, config.linear_value_dim, config.rms_norm_eps) == (128, 128, 1e-6)
    assert (config.norm_topk_prob, config.tie_word_embeddings, config.num_mtp_layers) == (True, False, 1)
    assert (config.dtype, config.state_dtype, config.quantization) == ("bfloat16", "float32", None)
    assert (config.max_position_embeddings, config.eos_token_ids) == (32768, ())


def test_null_means_absent() -> None:
    assert read(MOE, hidden_act=None, head_dim=None, layer_types=None, rope_scaling=None) == read(MOE)


def test_unknown_keys_are_ignored() -> None:
    assert ModelConfig.from_dict(with_outer(released(MOE, router_jitter=1), vision_config={"depth": 27})) == read(MOE)


def test_layer_types_win_over_the_interval() -> None:
    types = [GDN, FULL, FULL, GDN]
    config = read(DENSE, num_hidden_layers=4, layer_types=types, full_attention_interval=2)
    assert config.layer_types == tuple(types)
    config = read(DENSE, num_hidden_layers=4, layer_types=..., full_attention_interval=2)
    assert config.layer_types == (GDN, FULL, GDN, FULL)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(True, False, True), (False, True, False), (..., True, False), (True, ..., True), (..., ..., False)],
)
def test_the_outer_key_decides_whether_a_nested_model_is_tied(outer: object, inner: object, *, tied: bool) -> None:
    raw = with_outer(released(DENSE, tie_word_embeddings=inner), tie_word_embeddings=outer)
    assert ModelConfig.from_dict(raw).tie_word_embeddings is tied


def test_a_flat_model_is_tied_by_its_only_key() -> None:
    assert read(FLAT, tie_word_embeddings=True).tie_word_embeddings
    assert not read(FLAT, tie_word_embeddings=...).tie_word_embeddings


@pytest.mark.parametrize(
    ("step", "dense_layers", "expected"),
    [(1, [], (True,) * 4), (2, [], (False, True) * 2), (1, [0, 3], (False, True, True, False)), (2, [1], (False,) * 3)],
)
def test_next_mixes_dense_layers_by_step_and_list(step: int, dense_layers: list[int], expected: tuple) -> None:
    config = read(NEXT, num_hidden_layers=4, decoder_sparse_step=step, mlp_only_layers=dense_layers)
    assert config.is_moe_layer[: len(expected)] == expected
    assert config.mtp_is_moe is expected[0]


def test_next_without_experts_is_dense() -> None:
    assert read(NEXT, num_experts=0).is_moe_layer == (False,) * 48


def test_only_next_reads_its_own_expert_keys() -> None:
    own = {"decoder_sparse_step": 2, "mlp_only_layers": [0], "norm_topk_prob": False}
    assert not read(NEXT, norm_topk_prob=False).norm_topk_prob
    assert read(MOE, **own) == read(MOE)
    assert read(DENSE, **own, num_experts=8) == read(DENSE)


@pytest.mark.parametrize("name", [NEXT, DENSE, MOE])
def test_the_mtp_layer_is_there_unless_the_config_says_none(name: str) -> None:
    assert read(name, mtp_num_hidden_layers=...).num_mtp_layers == 1
    assert read(name, mtp_num_hidden_layers=0).num_mtp_layers == 0


def test_dtypes_are_read_under_both_names_and_at_both_places() -> None:
    assert read(NEXT, torch_dtype="float16").dtype == "float16"
    assert read(MOE, dtype="float32").dtype == "float32"
    assert ModelConfig.from_dict(with_outer(released(MOE, dtype=...), torch_dtype="float16")).dtype == "float16"
    assert read(MOE, mamba_ssm_dtype="bfloat16").state_dtype == "bfloat16"


@pytest.mark.parametrize(("value", "expected"), [(7, (7,)), ([7, 5], (7, 5)), (None, ()), (0, (0,))])
def test_end_tokens_are_one_id_or_several(value: object, expected: tuple[int, ...]) -> None:
    assert read(DENSE, eos_token_id=value).eos_token_ids == expected
    assert ModelConfig.from_dict(with_outer(released(DENSE, eos_token_id=...), eos_token_id=value)).eos_token_ids == (
        expected
    )


def test_swish_is_silu() -> None:
    assert read(DENSE, output_gate_type="swish", hidden_act="swish") == read(DENSE)


def test_golden_configs_are_read(golden_folder: Path) -> None:
    configs = {folder.name: ModelConfig.from_folder(folder) for folder in golden_folder.glob("tiny-*")}
    dense, moe = configs["tiny-next-dense"], configs["tiny-q35-moe"]
    assert len(configs) == 5
    assert (dense.is_moe_layer, dense.mtp_is_moe, dense.intermediate_size) == ((False,) * 4, False, 80)
    assert (dense.layer_types, dense.rotary_dim, dense.dtype) == ((GDN, FULL) * 2, 8, "float32")
    assert moe.layer_types == (GDN, FULL, GDN, GDN, FULL)
    assert (moe.rotary_dim, moe.linear_value_dim, moe.rope_theta) == (12, 24, 5e5)
    assert configs["tiny-q35-dense"].tie_word_embeddings
    assert configs["tiny-q35-moe-fp8"].quantization == Fp8Quantization()
