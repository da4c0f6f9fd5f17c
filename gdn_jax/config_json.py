"""The published config.json: where its keys stand, what their absence means, and what is refused by name.

Turns that file into the fields of `ModelConfig`, which checks how they fit together. Sources: the configuration
classes `Qwen3NextConfig`, `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig` of Hugging Face transformers.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from gdn_jax.config_keys import ConfigKeys, one_of, shown
from gdn_jax.config_quantization import read_quantization
from gdn_jax.config_rope import read_rope
from gdn_jax.errors import ConfigError, UnsupportedModelError
from gdn_jax.shipped import shipped_models

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"

_NEXT, _DENSE, _MOE = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
_FAMILIES = {_NEXT: _NEXT, "qwen3_5": _DENSE, _DENSE: _DENSE, "qwen3_5_moe": _MOE, _MOE: _MOE}
_REFUSED_FAMILIES = {
    name: "a different architecture (Qwen3.8-Flash-Next: residual streams, n-gram embeddings, block selection)"
    for name in ("qwen4_exp", "qwen4_exp_text")
}
_DTYPES = ("bfloat16", "float16", "float32")
_MAX_LAYERS = 4096  # far above any model; keeps a mistyped count from building an endless layer list

# What an absent key means: Next, dense 3.5, 3.5 with experts.
_DEFAULTS: dict[str, tuple[int, int, int]] = {
    "vocab_size": (151936, 248320, 248320),
    "hidden_size": (2048, 4096, 2048),
    "num_hidden_layers": (48, 32, 40),
    "num_attention_heads": (16, 16, 16),
    "num_key_value_heads": (2, 4, 2),
    "head_dim": (256, 256, 256),
    "linear_num_key_heads": (16, 16, 16),
    "linear_num_value_heads": (32, 32, 32),
    "linear_key_head_dim": (128, 128, 128),
    "linear_value_head_dim": (128, 128, 128),
    "linear_conv_kernel_dim": (4, 4, 4),
    "full_attention_interval": (4, 4, 4),
    "intermediate_size": (5632, 12288, 0),
    "num_experts": (512, 0, 256),
    "num_experts_per_tok": (10, 0, 8),
    "moe_intermediate_size": (512, 0, 512),
    "shared_expert_intermediate_size": (512, 0, 512),
    "max_position_embeddings": (32768, 32768, 32768),
    "mtp_num_hidden_layers": (1, 1, 1),
}


class _Keys(ConfigKeys):
    """Keys of the text model, with the defaults of its family."""

    def __init__(self, values: Mapping[str, object], name: str, family: str) -> None:
        super().__init__(values, name)
        self.family = family

    def size(self, key: str) -> int:
        """Return a whole number, by default that of the family."""
        return self.integer(key, _DEFAULTS[key][(_NEXT, _DENSE, _MOE).index(self.family)])


def read_folder(folder: str | Path) -> dict[str, object]:
    """Return the content of a folder's config.json.

    Raises:
        ConfigError: no such folder, no config.json in it, or one that is not a JSON object.
        UnsupportedModelError: the folder holds an adapter, or quantized weights that config.json does not mention.
    """
    path = Path(folder)
    # os.path answers False where Path.is_dir raises (an overlong name); Path("") would be the working directory.
    if not str(folder) or not os.path.isdir(path):
        raise ConfigError(_no_folder_message(str(folder)))
    if (path / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"the model must be a whole model; {path} holds a LoRA adapter (adapter_config.json); "
            "merge the adapter into its base model and give the merged folder"
        )
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"a model folder must hold config.json; {path} has none; give the folder of a complete download in the "
            "published layout (config.json, tokenizer files, safetensors weights)"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} must be readable JSON; got {error}; download the file again") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must hold one JSON object; got {shown(raw)}; download the file again")
    if (path / "hf_quant_config.json").exists() and not raw.get("quantization_config"):
        raise UnsupportedModelError(
            f"weights must be unquantized or official FP8; {path} holds hf_quant_config.json (ModelOpt); "
            "use the bfloat16 or the official FP8 release"
        )
    return raw


def read_fields(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of `ModelConfig` for a published config.

    Raises:
        ConfigError: a value has the wrong type.
        UnsupportedModelError: a family or setting that is not supported.
    """
    outer = ConfigKeys(raw)
    text = _text_keys(outer)
    _refuse_settings(text)
    rope = read_rope(text)
    head_dim = text.size("head_dim")
    layer_types = _layer_types(text)
    return {
        "model_type": text.family,
        "vocab_size": text.size("vocab_size"),
        "hidden_size": text.size("hidden_size"),
        "num_layers": text.size("num_hidden_layers"),
        "layer_types": layer_types,
        "num_attention_heads": text.size("num_attention_heads"),
        "num_kv_heads": text.size("num_key_value_heads"),
        "head_dim": head_dim,
        "num_linear_key_heads": text.size("linear_num_key_heads"),
        "num_linear_value_heads": text.size("linear_num_value_heads"),
        "linear_key_dim": text.size("linear_key_head_dim"),
        "linear_value_dim": text.size("linear_value_head_dim"),
        "conv_kernel": text.size("linear_conv_kernel_dim"),
        "rotary_dim": int(head_dim * rope.partial_rotary_factor),
        "rope_theta": rope.theta,
        "yarn": rope.yarn,
        "rms_norm_eps": text.number("rms_norm_eps", 1e-6),
        **_feed_forward(text, len(layer_types)),
        # A nested config also carries the key inside; the outer one is what the published weights follow.
        "tie_word_embeddings": outer.flag("tie_word_embeddings", default=False),
        "max_position_embeddings": text.size("max_position_embeddings"),
        "num_mtp_layers": text.size("mtp_num_hidden_layers"),
        "dtype": _dtype(text, outer),
        "state_dtype": _dtype_name(text, "mamba_ssm_dtype", "float32"),
        "quantization": _quantization(text, outer),
        "eos_token_ids": (text if text.has("eos_token_id") else outer).integers("eos_token_id"),
    }


def _no_folder_message(name: str) -> str:
    if name and os.path.exists(name):
        return f"a model must be given as a folder; {name!r} is a file; give the folder that holds it"
    # What has the form owner/name may be a mistyped path as well as a name on a hub.
    hub_name = name if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) else "OWNER/NAME"
    target = hub_name.split("/")[1]
    shipped = ", ".join(shipped_models())
    return (
        f"a model must be given as a local folder or by the name of a shipped one ({shipped}), names on a hub are not "
        f"looked up; there is no folder {name!r}; check the path, or download the model first "
        f"(huggingface-cli download {hub_name} --local-dir {target}, or hf download in newer versions) and use {target}"
    )


def _text_keys(outer: ConfigKeys) -> _Keys:
    nested = outer.table("text_config")
    if nested is None:
        return _Keys(outer.values, "", _family(outer))
    for key in ("rope_scaling", "rope_parameters"):
        if outer.has(key) and outer.raw(key) != nested.raw(key):
            raise ConfigError(
                f"{key} must stand inside text_config, where the text model's keys are read; "
                "got another one beside it; move it there"
            )
    family = _family(nested if nested.has("model_type") else outer)
    if outer.has("model_type") and _family(outer) != family:
        raise ConfigError(
            f"model_type and text_config.model_type must belong together; got {shown(outer.raw('model_type'))} and "
            f"{shown(nested.raw('model_type'))}; restore the published pair"
        )
    return _Keys(nested.values, "text_config", family)


def _family(keys: ConfigKeys) -> str:
    name = keys.text("model_type", "")
    if name in _FAMILIES:
        return _FAMILIES[name]
    supported = f"supported model types are {one_of([*_FAMILIES])}"
    if not name:
        raise ConfigError(f"{keys.path('model_type')} must name the model's family; got nothing; {supported}")
    reason = f", {_REFUSED_FAMILIES[name]}" if name in _REFUSED_FAMILIES else ""
    raise UnsupportedModelError(
        f"{keys.path('model_type')} must be a supported family; got {shown(name)}{reason}; {supported}"
    )


def _refuse_settings(text: _Keys) -> None:
    """Refuse settings that would compute something else than what is implemented."""
    for key, default, supported in (
        ("attn_output_gate", True, True),
        ("attention_bias", False, False),
        ("use_sliding_window", False, False),
        ("mtp_use_dedicated_embeddings", False, False),
    ):
        if text.flag(key, default=default) is not supported:
            raise UnsupportedModelError(
                f"{text.path(key)} must be {str(supported).lower()} or absent, as in every supported release; "
                f"got {str(not supported).lower()}; use a model without it"
            )
    for key in ("hidden_act", "output_gate_type"):
        name = text.text(key, "silu")
        if name not in ("silu", "swish"):
            raise UnsupportedModelError(
                f"{text.path(key)} must be silu or its other name swish; got {shown(name)}; use a model with it"
            )


def _layer_types(text: _Keys) -> tuple[str, ...]:
    count = text.size("num_hidden_layers")
    if count > _MAX_LAYERS:
        raise ConfigError(f"{text.path('num_hidden_layers')} must be at most {_MAX_LAYERS}; got {count}; correct it")
    if text.has("layer_types"):
        types = text.texts("layer_types")
        unknown = sorted({*types} - {LINEAR_ATTENTION, FULL_ATTENTION})
        if unknown:
            raise UnsupportedModelError(
                f"{text.path('layer_types')} must hold only {LINEAR_ATTENTION} and {FULL_ATTENTION}; "
                f"got {shown(unknown[0])}; use a model of a supported family"
            )
        return types
    interval = text.size("full_attention_interval")
    if interval < 1:
        raise ConfigError(f"{text.path('full_attention_interval')} must be at least 1; got {interval}; correct it")
    return tuple(FULL_ATTENTION if (index + 1) % interval == 0 else LINEAR_ATTENTION for index in range(count))


def _feed_forward(text: _Keys, num_layers: int) -> dict[str, object]:
    experts = 0 if text.family == _DENSE else text.size("num_experts")
    is_moe = (experts > 0,) * num_layers
    if text.family == _NEXT:
        step, dense = text.integer("decoder_sparse_step", 1), text.integers("mlp_only_layers")
        if step < 1:
            raise ConfigError(f"{text.path('decoder_sparse_step')} must be at least 1; got {step}; correct it")
        is_moe = tuple(experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    # No key says what the MTP layer is: it follows the first layer.
    return {
        "is_moe_layer": is_moe,
        "mtp_is_moe": is_moe[:1] == (True,),
        "intermediate_size": text.size("intermediate_size"),
        "num_experts": experts,
        "num_experts_per_token": text.size("num_experts_per_tok"),
        "moe_intermediate_size": text.size("moe_intermediate_size"),
        "shared_expert_intermediate_size": text.size("shared_expert_intermediate_size"),
        "norm_topk_prob": text.flag("norm_topk_prob", default=True) if text.family == _NEXT else True,
    }


def _quantization(text: ConfigKeys, outer: ConfigKeys) -> object:
    for keys in (outer, text):
        if keys.has("compression_config"):
            raise UnsupportedModelError(
                f"{keys.path('compression_config')} must be absent (compressed-tensors weights); got one; "
                "use the bfloat16 or the official FP8 release"
            )
    return read_quantization(outer.table("quantization_config") or text.table("quantization_config"))


def _dtype(text: ConfigKeys, outer: ConfigKeys) -> str:
    for keys in (text, outer):
        for key in ("dtype", "torch_dtype"):
            if keys.has(key):
                return _dtype_name(keys, key, "bfloat16")
    return "bfloat16"


def _dtype_name(keys: ConfigKeys, key: str, default: str) -> str:
    name = keys.text(key, default)
    if name not in _DTYPES:
        raise UnsupportedModelError(f"{keys.path(key)} must be {one_of(_DTYPES)}; got {shown(name)}; correct it")
    return name
