"""Rotary settings of a published config: base, rotated share of a head, YaRN.

Three spellings exist. Qwen3-Next writes `rope_theta`, `partial_rotary_factor` and `rope_scaling` beside the other keys;
Qwen3.5 writes one object, `rope_parameters`, whose entries win over such copies. The three-axis (`mrope_*`) entries are
not read: with text, all three positions are equal and the rotation is the plain one.
"""

import math
from dataclasses import dataclass

from gdn_jax.config_keys import ConfigKeys, shown
from gdn_jax.errors import ConfigError, UnsupportedModelError

_DEFAULT_THETA = 10000.0
_DEFAULT_PARTIAL = 0.25
# They change the frequencies or the scale in ways that no supported release uses.
_UNSUPPORTED_YARN_KEYS = ("mscale", "mscale_all_dim", "truncate")


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """Settings of YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension", section 3).

    Attributes:
        factor: how many times the context grows; at least 1.
        original_max_position: context limit before, in tokens.
        beta_fast: channels that turn more often than this within that limit keep their frequency.
        beta_slow: channels that turn less often than this have it divided by `factor`.
        attention_factor: what cos and sin are multiplied with.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float

    def __post_init__(self) -> None:
        """Refuse settings that give no frequencies."""
        if self.factor < 1:
            raise ConfigError(f"YaRN's factor must be at least 1; got {self.factor}; use rope_type default for none")
        if self.original_max_position < 1:
            raise ConfigError(
                "original_max_position_embeddings must be at least 1 with YaRN; "
                f"got {self.original_max_position}; give the model's native limit, such as 262144"
            )
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"YaRN's beta_fast must be above beta_slow; got {self.beta_fast} and {self.beta_slow}; "
                "remove both for 32 and 1"
            )


@dataclass(frozen=True, kw_only=True)
class RopeSettings:
    """What the rotary embedding needs, read from either spelling."""

    theta: float
    partial_rotary_factor: float
    yarn: YarnConfig | None


def read_rope(text: ConfigKeys) -> RopeSettings:
    """Read the rotary settings from the text model's keys.

    Raises:
        ConfigError: a value is missing or of the wrong type, or the two spellings disagree about scaling.
        UnsupportedModelError: a rope type other than default and yarn, or settings per layer type.
    """
    parameters = text.table("rope_parameters") or ConfigKeys({}, text.path("rope_parameters"))
    scaling = text.table("rope_scaling") or ConfigKeys({}, text.path("rope_scaling"))
    nested = [key for key in parameters.names() if isinstance(parameters.raw(key), dict)]
    if nested:
        raise UnsupportedModelError(
            f"{text.path('rope_parameters')} must be one set of rotary settings for all layers; got one for "
            f"{shown(nested[0])}; supported are configs without a set per layer type"
        )
    own_type, old_type = _rope_type(parameters), _rope_type(scaling)
    if own_type and old_type and own_type != old_type:
        raise ConfigError(
            f"{text.path('rope_parameters')} and {text.path('rope_scaling')} must agree; "
            f"got rope types {own_type!r} and {old_type!r}; keep one of the two"
        )
    yarn = None
    if "yarn" in (own_type, old_type):
        yarn = _read_yarn(parameters if own_type else scaling)
    return RopeSettings(
        theta=parameters.number("rope_theta", text.number("rope_theta", _DEFAULT_THETA)),
        partial_rotary_factor=parameters.number(
            "partial_rotary_factor", text.number("partial_rotary_factor", _DEFAULT_PARTIAL)
        ),
        yarn=yarn,
    )


def _rope_type(keys: ConfigKeys) -> str:
    """Return "default", "yarn", or "" where the object names no type ("type" is the older name of the key)."""
    key = "rope_type" if keys.has("rope_type") else "type"
    # An object with a factor means some scaling; without a type there is no telling which.
    name = keys.text(key, "")
    if not name and keys.has("factor"):
        raise ConfigError(
            f"{keys.path('rope_type')} must say what the factor means; got nothing; write yarn, or remove the factor"
        )
    # "mrope" was the older type name of a three-axis rotation without scaling.
    if name not in ("", "default", "mrope", "yarn"):
        raise UnsupportedModelError(
            f"{keys.path(key)} must be default or yarn; got {name!r}; use a config with one of the two"
        )
    return "default" if name == "mrope" else name


def _read_yarn(keys: ConfigKeys) -> YarnConfig:
    for key in _UNSUPPORTED_YARN_KEYS:
        if keys.has(key) and not (key == "truncate" and keys.raw(key) is True):
            raise UnsupportedModelError(
                f"{keys.path(key)} must be absent with YaRN; got {shown(keys.raw(key))}; supported are factor, "
                "original_max_position_embeddings, beta_fast, beta_slow and attention_factor"
            )
    if not keys.has("original_max_position_embeddings"):
        raise ConfigError(
            f"{keys.path('original_max_position_embeddings')} must be given with YaRN; got nothing; "
            "add the model's native limit, such as 262144"
        )
    factor = keys.number("factor", None)
    return YarnConfig(
        factor=factor,
        original_max_position=keys.integer("original_max_position_embeddings", 0),
        beta_fast=keys.number("beta_fast", 32.0),
        beta_slow=keys.number("beta_slow", 1.0),
        attention_factor=keys.number("attention_factor", 0.1 * math.log(factor) + 1.0),
    )
