"""Start-up: what is read, in which order, what is said, and that a start that fails leaves nothing behind."""

import json
import logging
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jaxtyping
import pytest
from oracles.engine_rig import SETTINGS, TINY
from safetensors.numpy import load_file, save_file

from gdn_jax.config import ModelConfig
from gdn_jax.errors import ConfigError, WeightsError
from gdn_jax.kernels.dispatch import Implementation, UnsupportedKernelError
from gdn_jax.serving import startup
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.core.errors import StartupError
from gdn_jax.serving.startup import EngineParts, build_engine
from gdn_jax.tensor_files import TensorFiles

MODEL = ModelConfig.from_folder(TINY)
GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def start(folder: Path, **settings: Any) -> EngineParts:
    chosen = {name: value for name, value in SETTINGS.items() if name != "use_tqdm"}
    return build_engine(EngineConfig.from_arguments(str(folder), chosen | settings), show_progress=False)


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_every_file_is_read_once_and_every_choice_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reads: Counter[str] = Counter()
    read_text = Path.read_text

    def count(path: Path, *args: Any, **options: Any) -> str:
        reads[path.name] += 1
        return read_text(path, *args, **options)

    def count_headers(self: TensorFiles, *args: Any) -> None:
        reads["headers"] += 1
        read_headers(self, *args)

    read_headers = TensorFiles.__init__
    monkeypatch.setattr(Path, "read_text", count)
    monkeypatch.setattr(TensorFiles, "__init__", count_headers)
    with caplog.at_level(logging.INFO, "gdn_jax"):
        start(folder)
    assert [reads[name] for name in ("config.json", "generation_config.json", "headers")] == [1, 1, 1]
    lines = [record.getMessage() for record in caplog.records]
    for opening in ("kernels: ", "prefix cache: ", "model: qwen3_5_text"):
        assert sum(line.startswith(opening) for line in lines) == 1


@pytest.mark.parametrize("number", [0, 2])
def test_the_mtp_head_takes_memory_only_where_it_drafts(
    folder: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    with caplog.at_level(logging.INFO, "gdn_jax"):
        parts = start(folder, speculative_tokens=number)
    assert MODEL.num_mtp_layers == 1
    assert parts.model_config.num_mtp_layers == (1 if number else 0)
    assert len(parts.engine._runner._params) == (52 if number else 40)
    pages = 2 if number else 1  # of the one attention layer, and of the head
    assert parts.memory.block_bytes == 64 * 2 * 2 * 32 * 4 * pages  # keys and values, float32
    said = "the MTP head drafts 2 tokens a step" if number else "speculation: off; the MTP head is left out"
    assert said in caplog.text


def test_drafts_of_a_model_without_a_head_are_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    """Many fine-tuned releases name an MTP layer and have lost its weights."""
    stripped = tmp_path / "stripped"
    shutil.copytree(folder, stripped)
    tensors = load_file(stripped / "model.safetensors")
    save_file({name: array for name, array in tensors.items() if "mtp" not in name}, stripped / "model.safetensors")
    with pytest.raises(StartupError, match=r"hold no tensor mtp\.\*; set speculative_tokens to 0"):
        start(stripped, speculative_tokens=2)
    assert start(stripped).model_config.num_mtp_layers == 0
    config = json.loads((stripped / "config.json").read_text())
    text = config.get("text_config", config)
    text["mtp_num_hidden_layers"] = 0
    (stripped / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="names no MTP layer; set speculative_tokens to 0"):
        start(stripped, speculative_tokens=2)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"kernels": "reference", "max_model_len": 10**7}, StartupError),
        ({"quantization": "fp8"}, StartupError),
        ({"tokenizer": "no-such-folder"}, StartupError),
    ],
)
def test_a_start_that_fails_changes_no_setting_of_jax_and_reads_no_weight(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], error: type[Exception]
) -> None:
    def refuse(*anything: object, **options: object) -> None:
        raise AssertionError("too early")

    monkeypatch.setattr(jax.config, "update", refuse)
    monkeypatch.setattr(startup, "load_weights", refuse)
    monkeypatch.setattr(startup, "_keep_compiled", refuse)
    with pytest.raises(error):
        start(folder, **settings)


def test_kernels_that_cannot_run_here_are_refused_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*anything: object, **options: object) -> None:
        raise UnsupportedKernelError("not on this device")

    (folder / "model.safetensors").write_bytes(b"never looked at")
    monkeypatch.setattr(startup, "choose_kernels", refuse)
    with pytest.raises(UnsupportedKernelError):
        start(folder)


def test_damaged_files_are_refused_by_kind(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(WeightsError):
        start(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="one JSON object"):
        start(folder)


def test_quantized_weights_that_are_asked_for_and_not_there_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"quantization must be .* got 'fp8', and .* is not quantized"):
        start(folder, quantization="fp8")


def test_what_generation_config_asks_for_in_vain_is_warned_of_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder / "generation_config.json", repetition_penalty=1.1, num_beams=4)
    with caplog.at_level(logging.WARNING, "gdn_jax"):
        start(folder, load_format="dummy")
    warnings = [record.getMessage() for record in caplog.records]
    assert len([line for line in warnings if "asks for num_beams=4, which is not applied" in line]) == 1


def test_another_tokenizers_folder_brings_no_end_tokens_and_no_sampling(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(TINY, tmp_path / "other"))
    change(other / "generation_config.json", eos_token_id=[5], temperature=0.1)
    change(folder / "generation_config.json", eos_token_id=[306], temperature=0.4)
    parts = start(folder, tokenizer=str(other), load_format="dummy")
    assert 5 not in parts.tokenizer.end_token_ids
    assert parts.tokenizer.end_token_ids[0] == 306
    assert parts.defaults.temperature == 0.4


def device(platform: str, limit: int | None) -> Any:
    stats = None if limit is None else {"bytes_limit": limit}
    return SimpleNamespace(platform=platform, device_kind="a card", memory_stats=lambda: stats)


@pytest.fixture
def _no_type_checker() -> Any:
    """As with a real device, which only looks like the stand-in here."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("_no_type_checker")
def test_the_share_of_an_accelerators_memory_is_said_with_what_it_is_of(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model=str(TINY), gpu_memory_utilization=0.5)
    with caplog.at_level(logging.INFO, "gdn_jax"):
        request = startup.memory_request(config, MODEL, device("gpu", 100 * GIB), Implementation.MOSAIC)
    assert (request.total_bytes, request.implementation) == (50 * GIB, Implementation.MOSAIC)
    assert "50.00 GiB to use, gpu_memory_utilization (0.5) of the 100.00 GiB" in caplog.text


@pytest.mark.usefixtures("_no_type_checker")
def test_an_accelerator_that_does_not_say_its_memory_needs_a_pool_size() -> None:
    silent = device("gpu", None)
    with pytest.raises(StartupError, match="set pool_memory_gib"):
        startup.memory_request(EngineConfig(model=str(TINY)), MODEL, silent, Implementation.JAX)
    config = EngineConfig(model=str(TINY), pool_memory_gib=2)
    request = startup.memory_request(config, MODEL, silent, Implementation.JAX)
    assert (request.total_bytes, request.pool_bytes) == (0, 2 * GIB)
