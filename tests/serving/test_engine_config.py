"""EngineConfig: every setting checked once, and vLLM's names where they mean the same."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

from gdn_jax.serving.config import EngineConfig, SettingError, UnknownSettingError


@pytest.fixture(autouse=True)
def _no_type_checker() -> Iterator[None]:
    """As for a user: the class itself answers a value of the wrong type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("dtype", "int8", "one of auto, bfloat16, float16, float32"),
        ("load_format", "pt", "one of auto, safetensors, dummy"),
        ("kernels", "triton", "one of"),
        ("prefix_cache", "dense", "one of none, align, all"),
        ("state_dtype", ["float32"], "one of"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_seqs", True, "an integer"),
        ("max_num_seqs", 2.0, "an integer"),
        ("max_model_len", -1, "at least 0"),
        ("max_model_len", 1, "at least 2"),
        ("tokenizer", 7, "a str"),
        ("compile_cache", 9, "a str"),
        ("dtype", np.array(["auto", "auto"]), "one of"),
        ("warm_up", np.array([1, 2]), "True, False or 'auto'"),
        ("pool_memory_gib", 1e-300, "at least one byte"),
        ("num_blocks", -5, "at least 0"),
        ("num_state_slots", "8", "an integer"),
        ("seed", 0.5, "an integer"),
        ("gpu_memory_utilization", 1.5, "in 0..1"),
        ("gpu_memory_utilization", 0, "above 0"),
        ("gpu_memory_utilization", float("nan"), "finite"),
        ("state_memory_share", -0.1, "in 0..1"),
        ("pool_memory_gib", float("inf"), "finite"),
        ("pool_memory_gib", True, "number"),
        ("warm_up", "yes", "True, False or 'auto'"),
        ("warm_up", 1, "True, False or 'auto'"),
        ("audit", "no", "True or False"),
        ("deterministic", 1, "True or False"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_the_rule_and_the_value(
    name: str, value: object, rule: str
) -> None:
    with pytest.raises(SettingError, match=name) as caught:
        EngineConfig.from_arguments("folder", {name: value})
    assert rule in str(caught.value)
    assert repr(value) in str(caught.value) or value == 0


@pytest.mark.parametrize("model", [None, 5, b"folder"])
def test_a_model_that_is_no_path_is_refused_by_name(model: object) -> None:
    with pytest.raises(SettingError, match=f"model must be a str, .* got {model!r}"):
        EngineConfig.from_arguments(model, {})  # pyright: ignore[reportArgumentType]


def test_folders_may_be_path_objects() -> None:
    config = EngineConfig.from_arguments(Path("a"), {"tokenizer": Path("b"), "compile_cache": Path("c")})
    assert (config.model, config.tokenizer, config.compile_cache) == ("a", "b", "c")


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False, "prefix_cache": "all"},
        {"prefix_cache": "none", "enable_prefix_caching": True},
        {"prefix_cache": "none", "mamba_cache_mode": "align"},
        {"num_blocks": 3, "num_gpu_blocks_override": 4},
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_both_names(settings: dict[str, object]) -> None:
    with pytest.raises(SettingError, match="contradict") as caught:
        EngineConfig.from_arguments("folder", settings)
    assert all(name in str(caught.value) for name in settings)


def test_settings_that_say_the_same_twice_are_taken() -> None:
    config = EngineConfig.from_arguments("folder", {"enable_prefix_caching": False, "prefix_cache": "none"})
    assert config.prefix_cache == "none"


@pytest.mark.parametrize("interval", [32, 100, 513])
def test_a_state_interval_off_the_block_grid_is_refused(interval: int) -> None:
    with pytest.raises(ValueError, match=rf"multiple of block_size \(64\); got {interval}"):
        EngineConfig(model="folder", state_interval=interval)


@pytest.mark.parametrize("budget", [1, 32, 63])
def test_a_budget_below_a_block_is_refused_since_nothing_would_ever_be_scheduled(budget: int) -> None:
    with pytest.raises(ValueError, match=rf"at least one block \(64\); got {budget}"):
        EngineConfig(model="folder", max_num_batched_tokens=budget)
    EngineConfig(model="folder", max_num_batched_tokens=64)


@pytest.mark.parametrize("size", [16, 96, 128])
def test_a_block_other_than_the_kernels_chunk_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size must be 64.*got {size}"):
        EngineConfig(model="folder", block_size=size)


@pytest.mark.parametrize(
    ("name", "value", "ours", "expected"),
    [
        ("enable_prefix_caching", False, "prefix_cache", "none"),
        ("enable_prefix_caching", True, "prefix_cache", "all"),
        ("mamba_cache_mode", "align", "prefix_cache", "align"),
        ("mamba_block_size", 128, "state_interval", 128),
        ("mamba_ssm_cache_dtype", "bfloat16", "state_dtype", "bfloat16"),
        ("num_gpu_blocks_override", 10, "num_blocks", 10),
        ("enforce_eager", True, "warm_up", False),
        ("enforce_eager", False, "warm_up", "auto"),
        ("quantization", "fp8", "quantization", "fp8"),
        ("gpu_memory_utilization", 0.5, "gpu_memory_utilization", 0.5),
        ("max_num_batched_tokens", 8192, "max_num_batched_tokens", 8192),
    ],
)
def test_vllms_names_set_what_they_mean_here(name: str, value: object, ours: str, expected: object) -> None:
    assert getattr(EngineConfig.from_arguments("folder", {name: value}), ours) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 1),
        ("enable_chunked_prefill", True),
        ("kv_cache_dtype", "auto"),
        ("trust_remote_code", True),
        ("swap_space", 4),
        ("cpu_offload_gb", 0),
    ],
)
def test_vllms_settings_that_ask_for_nothing_are_accepted(name: str, value: object) -> None:
    assert EngineConfig.from_arguments("folder", {name: value}) == EngineConfig(model="folder")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("tensor_parallel_size", np.array([1, 2])),
        ("enable_chunked_prefill", False),
        ("quantization", "awq"),
        ("kv_cache_dtype", "fp8"),
        ("enable_prefix_caching", "yes"),
        ("enforce_eager", 1),
        ("revision", "main"),
    ],
)
def test_vllms_settings_that_ask_for_more_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be ") as caught:
        EngineConfig.from_arguments("folder", {name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ({"method": "mtp", "num_speculative_tokens": 2}, 2),
        ({"method": "qwen3_next_mtp"}, 3),
        ({"num_speculative_tokens": 8}, 8),
        ({"method": None, "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}, 2),
        ({"method": "mtp", "num_speculative_tokens": None}, 3),
        ({}, 0),
        ('{"method": "mtp", "num_speculative_tokens": 1}', 1),
        (None, 0),
    ],
)
def test_vllms_speculative_config_says_how_many_tokens_the_head_drafts(value: object, number: int) -> None:
    config = EngineConfig.from_arguments("folder", {"speculative_config": value})
    assert config == EngineConfig(model="folder", speculative_tokens=number)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"method": "eagle3", "num_speculative_tokens": 2}, "must have the method 'mtp' and no model; got .*'eagle3'"),
        ({"method": "ngram", "prompt_lookup_max": 2}, "must have the method 'mtp' and no model; got .*'ngram'"),
        ({"method": "mtp", "model": "some/draft"}, "must have the method 'mtp' and no model; got .*'some/draft'"),
        ({"method": "mtp", "ngram_size": 2}, "no keys but method, .*got 'ngram_size'"),
        ({"method": "mtp", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size must be 1; got 2"),
        (
            {"method": "mtp", "num_speculative_tokens": 9},
            r"num_speculative_tokens .*must be an integer in 0\.\.8; got 9",
        ),
        ({"method": "mtp", "num_speculative_tokens": "3"}, r"must be an integer in 0\.\.8; got '3'"),
        ("{", "must be a dict or JSON of one; got '{'"),
        ("[" * 100_000, "must be a dict or JSON of one; got "),
        (3, "must be a dict or JSON of one; got 3"),
    ],
)
def test_a_speculative_config_that_asks_for_another_drafter_is_refused(value: object, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        EngineConfig.from_arguments("folder", {"speculative_config": value})


@pytest.mark.parametrize(
    "name", ["max_model_len", "seed", "dtype", "tokenizer", "tensor_parallel_size", "quantization"]
)
def test_none_stands_for_the_default_as_scripts_pass_it(name: str) -> None:
    assert EngineConfig.from_arguments("folder", {name: None}) == EngineConfig(model="folder")


def test_an_unknown_name_is_refused_with_the_closest_known_one() -> None:
    with pytest.raises(TypeError, match=r"no argument 'max_num_seq'; did you mean 'max_num_seqs'\?"):
        EngineConfig.from_arguments("folder", {"max_num_seq": 3})
    with pytest.raises(UnknownSettingError, match=r"no argument 'xyzzy'; known are .*max_model_len"):
        EngineConfig.from_arguments("folder", {"xyzzy": 3})


def test_a_config_is_complete_and_does_not_change() -> None:
    config = EngineConfig(model="folder")
    assert None not in vars(config).values()
    with pytest.raises(AttributeError, match="cannot assign"):
        config.seed = 3  # type: ignore[misc]
