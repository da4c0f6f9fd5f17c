"""Sizes derived from a config, against the published figures of every released model.

Parameters are exact. The other figures are published to one decimal (or none), so the derived value must round to them.
"""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from gdn_jax.config import ModelConfig
from gdn_jax.sizes import (
    kv_bytes_per_token,
    mtp_kv_bytes_per_token,
    parameter_count,
    state_bytes_per_slot,
    weight_bytes,
)

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
KIB, MIB, GIB = 2**10, 2**20, 2**30

# folder: main parameters, MTP parameters, weights GiB, state MiB with a float32 and with a bfloat16 recurrent state,
# KiB of keys and values per token: main, MTP.
NEXT = (79_674_391_296, 1_650_471_424, "151.5", "73.7", "37.7", 24, 2)
B08 = (752_393_024, 20_452_864, "1.4", "18.6", "9.6", 12, 2)
B2 = (1_881_825_088, 60_828_160, "3.6", "18.6", "9.6", 12, 2)
B4 = (4_205_751_296, 120_599_552, "8.1", "49.1", "25.1", 32, 4)
B9 = (8_953_803_264, 243_290_624, "17.1", "49.1", "25.1", 32, 4)
B27 = (26_895_998_464, 424_699_392, "50.9", "146.8", "74.8", 64, 4)
B35 = (34_660_610_688, 844_640_768, "66.1", "61.4", "31.4", 20, 2)
B122 = (122_111_526_912, 2_523_679_232, "232.2", "146.5", "74.5", 24, 2)
B397 = (396_346_350_336, 6_595_568_128, "750.5", "183.2", "93.2", 30, 2)
T24 = (2_419_804_697_984, 26_378_027_520, "4556", "560", "284", 92, 4)


def fp8(row: tuple, weights: str) -> tuple:
    return (*row[:2], weights, *row[3:])


PUBLISHED = {
    "qwen3-next-80b-a3b-instruct": NEXT,
    "qwen3-next-80b-a3b-instruct-fp8": fp8(NEXT, "76.4"),
    "qwen3-coder-next": NEXT,
    "qwen3.5-0.8b": B08,
    "qwen3.5-0.8b-fp8": fp8(B08, "1.0"),
    "qwen3.5-2b": B2,
    "qwen3.5-2b-fp8": fp8(B2, "2.3"),
    "qwen3.5-4b": B4,
    "qwen3.5-4b-fp8": fp8(B4, "4.6"),
    "qwen3.5-9b": B9,
    "qwen3.5-9b-fp8": fp8(B9, "10.5"),
    "qwen3.5-27b": B27,
    "qwen3.5-27b-fp8": fp8(B27, "27.9"),
    "qwen3.5-35b-a3b": B35,
    "qwen3.5-35b-a3b-fp8": fp8(B35, "34.1"),
    "qwen3.5-122b-a10b": B122,
    "qwen3.5-122b-a10b-fp8": fp8(B122, "117.6"),
    "qwen3.5-397b-a17b": B397,
    "qwen3.5-397b-a17b-fp8": fp8(B397, "377.4"),
    "qwen3.8-2.4t-a95b": T24,
}


def load(name: str) -> ModelConfig:
    return ModelConfig.from_folder(MODELS / name)


def printed(value: float, like: str) -> str:
    return f"{value:.{len(like.partition('.')[2])}f}"


def test_every_released_config_has_published_figures() -> None:
    assert {folder.name for folder in MODELS.iterdir()} == {*PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_counts(name: str) -> None:
    assert parameter_count(load(name)) == PUBLISHED[name][:2]


@pytest.mark.parametrize("name", PUBLISHED)
def test_weight_bytes_print_as_published(name: str) -> None:
    published = PUBLISHED[name][2]
    assert printed(weight_bytes(load(name)) / GIB, published) == published


@pytest.mark.parametrize("name", PUBLISHED)
def test_state_bytes_print_as_published(name: str) -> None:
    config, (float32, bfloat16) = load(name), PUBLISHED[name][3:5]
    assert printed(state_bytes_per_slot(config, "float32", "bfloat16") / MIB, float32) == float32
    assert printed(state_bytes_per_slot(config, "bfloat16", "bfloat16") / MIB, bfloat16) == bfloat16


@pytest.mark.parametrize("name", PUBLISHED)
def test_key_value_bytes_equal_the_published_ones(name: str) -> None:
    config, (main, mtp) = load(name), PUBLISHED[name][5:]
    assert kv_bytes_per_token(config, "bfloat16") == main * KIB
    assert mtp_kv_bytes_per_token(config, "bfloat16") == mtp * KIB


def test_fp8_release_of_27b_has_the_published_size_on_disk() -> None:
    # 30.87 GB with the bfloat16 vision part of about 0.92 GB, which is the difference of 55.56 GB and bfloat16 text.
    vision = 55.56e9 - weight_bytes(load("qwen3.5-27b"))
    assert (weight_bytes(load("qwen3.5-27b-fp8")) + vision) / 1e9 == pytest.approx(30.87, abs=0.01)


def test_a_model_without_mtp_has_no_mtp_sizes() -> None:
    config = load("qwen3.5-4b")
    bare = replace(config, num_mtp_layers=0)
    main, mtp = parameter_count(config)
    assert parameter_count(bare) == (main, 0)
    assert weight_bytes(bare) == weight_bytes(config) - 2 * mtp
    assert mtp_kv_bytes_per_token(bare, "bfloat16") == 0


def test_bytes_follow_the_dtypes() -> None:
    config = load("qwen3.5-4b")
    assert weight_bytes(replace(config, dtype="float32")) == 2 * weight_bytes(config)
    assert kv_bytes_per_token(config, "float32") == 2 * kv_bytes_per_token(config, jnp.bfloat16)
    recurrent = 24 * 32 * 128 * 128
    window = 24 * 3 * 8192
    assert state_bytes_per_slot(config, jnp.dtype(jnp.float32), jnp.float16) == 4 * recurrent + 2 * window


def test_fp8_blocks_at_the_edge_of_a_matrix_have_a_scale_too() -> None:
    config = load("qwen3.5-0.8b-fp8")
    narrow = replace(config, intermediate_size=130)  # two blocks, as 256 has
    wide = replace(config, intermediate_size=256)
    layers = 24 + 1  # with MTP
    assert weight_bytes(wide) - weight_bytes(narrow) == layers * 3 * 1024 * 126


def test_golden_parameters_equal_those_in_the_weight_files(golden_folder: Path) -> None:
    from safetensors import safe_open

    for folder in sorted(golden_folder.glob("tiny-*")):
        counts = [0, 0]
        for file in sorted(folder.glob("model*.safetensors")):
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if "visual" in name or name.endswith("_scale_inv"):
                        continue
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    counts[name.startswith("mtp.")] += size
        assert parameter_count(ModelConfig.from_folder(folder)) == tuple(counts), folder.name
