"""Info: what is said of a model from its config alone, and of a config that is none."""

import json
from pathlib import Path

import pytest
from oracles.engine_rig import TINY

from gdn_jax.errors import ConfigError
from gdn_jax.serving.info import ModelReport, describe_model


def describe(model: Path | str, **options: object) -> dict[str, str]:
    return full_report(model, **options).lines


def full_report(model: Path | str, **options: object) -> ModelReport:
    return describe_model(str(model), **{"memory_gib": 1.0, "dtype": "auto"} | options)  # pyright: ignore[reportArgumentType]


def test_a_folder_and_its_config_file_say_the_same() -> None:
    assert describe(TINY) == describe(TINY / "config.json")


def test_the_numbers_are_those_counted_by_hand() -> None:
    report = describe(TINY, dtype="float32")
    assert report["model"] == "qwen3_5_text, 3 GDN + 1 attention layers"
    state = 3 * (4 * 16 * 16 + 3 * 128) * 4  # three layers' state and convolution window, float32
    assert report["state"].startswith(f"{state / 1024:.2f} KiB per sequence or checkpoint")
    assert report["kv"].startswith("512 B per token")  # 2 x 2 heads x 32 x 4 bytes
    assert report["context"].startswith("4096 tokens, 2.00 MiB")
    assert report["fits"].startswith("in 1 GiB: 16 sequences at once")


def test_a_memory_that_is_too_small_is_said_with_a_remedy_that_can_help() -> None:
    report = full_report(TINY, memory_gib=0.0001)
    assert not report.fits
    assert report.lines["fits"].startswith("not in 0.0001 GiB: weights must fit what may be used of the device, ")
    assert report.lines["fits"].endswith(": use a smaller model or a device with more memory")
    assert full_report(TINY).fits


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"null", b"\xff\xfe{}", b"{", b"", b"[" * 100_000], ids=lambda content: repr(content[:6])
)
def test_a_config_that_is_no_json_object_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    for model in (file, tmp_path):
        with pytest.raises(ConfigError, match=r"config\.json must"):
            describe(model)


def test_a_config_without_a_model_in_it_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="llama"):
        describe(file)


@pytest.mark.parametrize("memory_gib", [0, -1, float("nan"), float("inf"), 1e308])
def test_a_memory_that_is_no_size_is_refused(memory_gib: float) -> None:
    with pytest.raises(ConfigError, match="memory_gib must be a positive number"):
        describe(TINY, memory_gib=float(memory_gib))
