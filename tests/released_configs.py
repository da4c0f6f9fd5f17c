"""The released configs, changed ones, and the errors that they raise; shared by the tests of config reading."""

import copy
import json
from pathlib import Path

import pytest

from gdn_jax.config import ModelConfig
from gdn_jax.errors import ConfigError

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
RELEASED = {folder.name: json.loads((folder / "config.json").read_text()) for folder in sorted(MODELS.iterdir())}
NEXT, DENSE, MOE = "qwen3-next-80b-a3b-instruct", "qwen3.5-27b", "qwen3.5-35b-a3b"
FLAT = "qwen3.8-2.4t-a95b"
GDN, FULL = "linear_attention", "full_attention"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}


def released(name: str, **text_changes: object) -> dict:
    """Return a released config with keys of its text model replaced; the value `...` removes a key."""
    raw = copy.deepcopy(RELEASED[name])
    text = raw.get("text_config", raw)
    for key, value in text_changes.items():
        text.pop(key, None)
        if value is not ...:
            text[key] = value
    return raw


def with_outer(raw: dict, **changes: object) -> dict:
    """Return a config with keys of its top level replaced; the value `...` removes a key."""
    kept = {key: value for key, value in raw.items() if key not in changes}
    return {**kept, **{key: value for key, value in changes.items() if value is not ...}}


def read(name: str, **text_changes: object) -> ModelConfig:
    return ModelConfig.from_dict(released(name, **text_changes))


def refusal(raw: dict, kind: type[ConfigError] = ConfigError) -> str:
    """Return the message of the error that a config raises; it must state rule, value and remedy."""
    with pytest.raises(kind) as caught:
        ModelConfig.from_dict(raw)
    assert type(caught.value) is kind
    message = str(caught.value)
    rule, value, remedy = message.split("; ", 2)
    assert "must" in rule
    assert value.startswith("got ")
    assert remedy
    return message


def write_file(folder: Path, content: str, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    return folder
