"""Reading a TrainConfig from a TOML file: unknown keys are refused by name, with the nearest known one."""

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast, get_origin

from gdn_jax.training.config import BatchConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from gdn_jax.training.errors import TrainingError
from gdn_jax.training.loss import LossOptions
from gdn_jax.training.published import MODEL_KEYS

_TABLES: dict[str, type] = {
    "data": DataConfig,
    "run": RunConfig,
    "optimizer": OptimizerConfig,
    "batch": BatchConfig,
    "loss": LossOptions,
}


def read_train_config(path: str | Path, overrides: Mapping[str, Mapping[str, object]] | None = None) -> TrainConfig:
    """Read a TOML file.

    Args:
        path: of the file; paths inside it are relative to the working directory.
        overrides: values by table and key that win over the file's.

    Raises:
        TrainingError: the file cannot be read, a key is unknown or missing, a value of the wrong type or out of range.
    """
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"a training config must be a readable TOML file; {path}: {error}; correct it") from error
    for table, values in (overrides or {}).items():
        raw[table] = {**_table(raw, table), **values}
    _refuse_unknown("", raw, ["model", "tokenizer", *_TABLES])
    model = _table(raw, "model")
    _refuse_unknown("model.", model, ["folder"] if "folder" in model else MODEL_KEYS)
    if not model:
        raise TrainingError("model must be a table of config.json keys, or name a folder; got nothing; add [model]")
    if not isinstance(raw.get("tokenizer"), str):
        raise TrainingError(f"tokenizer must name a folder; got {raw.get('tokenizer')!r}; add it above the tables")
    parts = {name: _build(cls, name, _table(raw, name)) for name, cls in _TABLES.items()}
    return TrainConfig(model=model, tokenizer=raw["tokenizer"], **parts)


def _table(raw: Mapping[str, Any], name: str) -> dict[str, object]:
    table = raw.get(name, {})
    if not isinstance(table, dict):
        raise TrainingError(f"{name} must be a table; got {table!r}; write [{name}]")
    return table


def _refuse_unknown(prefix: str, table: Mapping[str, object], known: Iterable[str]) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.0)
            raise TrainingError(f"{prefix}{key} is not known; the nearest key is {prefix}{near[0]}; correct it")


def _build(cls: type, name: str, table: Mapping[str, object]) -> Any:
    known = {item.name: item for item in fields(cls)}
    _refuse_unknown(f"{name}.", table, known)
    for key, item in known.items():
        if key not in table and item.default is MISSING and item.default_factory is MISSING:
            raise TrainingError(f"{name}.{key} must be given; got nothing; add it")
    return cls(**{key: _value(f"{name}.{key}", known[key], value) for key, value in table.items()})


def _value(name: str, item: Field[Any], value: object) -> object:
    """Return a value as its field wants it: whole numbers may stand for others, lists become tuples."""
    kind = cast("Any", item.type)
    if kind in (int, float, str):
        number = kind is float and isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not kind and not number:
            raise TrainingError(f"{name} must be of type {kind.__name__}; got {value!r}; correct it")
        return _finite(name, value) if kind is float else value
    wants_list = get_origin(kind) is tuple
    if wants_list and isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    if not wants_list and isinstance(value, dict) and all(type(entry) in (int, float) for entry in value.values()):
        return {key: _finite(f"{name}.{key}", entry) for key, entry in value.items()}
    rule = "a list of strings" if wants_list else "a table of numbers"
    raise TrainingError(f"{name} must be {rule}; got {value!r}; correct it")


def _finite(name: str, value: object) -> float:
    """Return a number as a float; TOML writes `inf` and `nan`, and whole numbers of any length."""
    try:
        number = float(cast("Any", value))
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise TrainingError(f"{name} must be a finite number; got {value!r:.40}; correct it")
    return number
