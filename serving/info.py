"""What a model is, what it needs and what fits, from its config alone."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from gdn_jax.config import ModelConfig
from gdn_jax.errors import ConfigError
from gdn_jax.model import resolve_dtype
from gdn_jax.serving.core.errors import StartupError
from gdn_jax.serving.runner.memory import MemoryRequest, describe_bytes, plan_memory
from gdn_jax.shipped import model_folder
from gdn_jax.sizes import (
    kv_bytes_per_token,
    mtp_kv_bytes_per_token,
    parameter_count,
    state_bytes_per_slot,
    weight_bytes,
)

_GIB = 1 << 30
_MOST_GIB = 2.0**30  # above any machine's; counts of bytes stay finite


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """What there is to say of a model.

    Attributes:
        lines: for people, by name.
        fits: whether the device could serve it at all.
    """

    lines: dict[str, str]
    fits: bool


def describe_model(model: str, *, memory_gib: float, dtype: str) -> ModelReport:
    """Return a report.

    Args:
        model: folder with config.json, a config file, or the name of a shipped model.
        memory_gib: memory of the device that should run it, in GiB.
        dtype: "auto" or a dtype by name.

    Raises:
        ConfigError: the config cannot be used, or the memory is not a positive number.
    """
    if not 0 < memory_gib <= _MOST_GIB:
        raise ConfigError(f"memory_gib must be a positive number of at most {_MOST_GIB:.0f}; got {memory_gib}")
    config = _read(Path(model_folder(model)))
    name = str(resolve_dtype(dtype, config))
    main, mtp = parameter_count(config)
    kv, mtp_kv = kv_bytes_per_token(config, name), mtp_kv_bytes_per_token(config, name)
    state = state_bytes_per_slot(config, config.state_dtype, name)
    length = config.context_length
    quantized = "" if config.quantization is None else ", FP8 weights"
    fits, in_words = _what_fits(config, memory_gib, name)
    lines = {
        "model": f"{config.model_type}, {config.num_gdn_layers} GDN + {config.num_attention_layers} attention layers",
        "parameters": f"{main:,} and {mtp:,} in the MTP head",
        "weights": f"{describe_bytes(weight_bytes(config))} on disk{quantized}, MTP head included",
        "state": f"{describe_bytes(state)} per sequence or checkpoint, {config.state_dtype} recurrent part",
        "kv": f"{describe_bytes(kv)} per token, and {describe_bytes(mtp_kv)} for the MTP head, {name}",
        "context": f"{length} tokens, {describe_bytes(kv * length)} of KV",
        "fits": in_words,
    }
    return ModelReport(lines=lines, fits=fits)


def _read(path: Path) -> ModelConfig:
    if not path.is_file():
        return ModelConfig.from_folder(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be readable JSON; got {error}; download the file again") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold one JSON object; got {raw!r:.40}; download the file again")
    return ModelConfig.from_dict(cast("dict[str, object]", raw))


def _what_fits(config: ModelConfig, memory_gib: float, dtype: str) -> tuple[bool, str]:
    """Return whether an engine with the usual settings would start, and what it could hold or why not."""
    request = MemoryRequest(
        total_bytes=int(memory_gib * _GIB * 0.9),
        device_bytes=int(memory_gib * _GIB),
        pool_bytes=0,
        dtype=dtype,
        state_dtype=config.state_dtype,
        max_model_len=0,
        max_num_seqs=16,
        budget=2048,
        window=1,
        block_size=64,
    )
    try:  # the engine leaves the MTP head out
        plan = plan_memory(replace(config, num_mtp_layers=0), request)
    except StartupError as problem:
        return False, f"not in {memory_gib:g} GiB: {problem}"
    tokens = (plan.num_blocks - 1) * plan.block_size
    return True, (
        f"in {memory_gib:g} GiB: {plan.max_num_seqs} sequences at once, {tokens:,} tokens of KV, "
        f"{plan.num_slots - 1} states"
    )
