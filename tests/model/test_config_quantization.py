"""Quantization sections: the official FP8 layout, and every other one refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest
from released_configs import DENSE, FP8, MOE, RELEASED, read, refusal, released, with_outer, write_file

from gdn_jax.config import Fp8Quantization, ModelConfig
from gdn_jax.errors import UnsupportedModelError


@pytest.mark.parametrize("name", [name for name in RELEASED if name.endswith("-fp8")])
def test_fp8_releases_differ_from_the_others_in_storage_only(name: str) -> None:
    config = read(name)
    assert config.quantization == Fp8Quantization(block_shape=(128, 128))
    assert dataclasses.replace(config, quantization=None) == read(name.removesuffix("-fp8"))


def test_quantization_is_found_inside_the_text_config_too() -> None:
    assert read(DENSE, quantization_config=FP8).quantization == Fp8Quantization()


@pytest.mark.parametrize(
    ("changes", "named", "value"),
    [
        ({"quant_method": "modelopt"}, "quant_method", "modelopt"),
        ({"quant_method": "compressed-tensors"}, "quant_method", "compressed-tensors"),
        ({"quant_method": "gptq"}, "quant_method", "gptq"),
        ({"quant_method": "awq"}, "quant_method", "awq"),
        ({"quant_method": "bitsandbytes"}, "quant_method", "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "quant_method", "mxfp4"),
        ({"fmt": "e5m2"}, "fmt", "e5m2"),
        ({"activation_scheme": "static"}, "activation_scheme", "static"),
        ({"weight_block_size": [64, 128]}, "weight_block_size", "[64, 128]"),
        ({"weight_block_size": None}, "weight_block_size", "nothing"),
    ],
)
def test_other_quantizations_are_refused_by_name(changes: dict, named: str, value: str) -> None:
    message = refusal(with_outer(released(DENSE), quantization_config={**FP8, **changes}), UnsupportedModelError)
    assert f"quantization_config.{named}" in message
    assert value in message
    assert "official FP8" in message


def test_compressed_tensors_under_its_older_key_is_refused() -> None:
    assert "compressed-tensors" in refusal(with_outer(released(DENSE), compression_config={}), UnsupportedModelError)


def test_modelopt_weights_that_only_their_own_file_mentions_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path, "{}", "hf_quant_config.json")
    with pytest.raises(UnsupportedModelError, match="ModelOpt"):
        ModelConfig.from_folder(write_file(tmp_path, json.dumps(RELEASED[MOE])))
