"""config.json of a trained model: every key that an engine for `qwen3_5_text` reads, written out.

What it writes, `ModelConfig.from_dict` reads back to the same sizes. Keys that other engines want and this one does not
(`initializer_range`, `use_cache`, ...) have the values of the releases.
"""

from gdn_jax.config import ModelConfig
from gdn_jax.training.errors import TrainingError

# Keys whose value is a field of `ModelConfig`, and that field.
_FIELDS = {
    "model_type": "model_type",
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "linear_conv_kernel_dim": "conv_kernel",
    "linear_key_head_dim": "linear_key_dim",
    "linear_value_head_dim": "linear_value_dim",
    "linear_num_key_heads": "num_linear_key_heads",
    "linear_num_value_heads": "num_linear_value_heads",
    "mamba_ssm_dtype": "state_dtype",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "mtp_num_hidden_layers": "num_mtp_layers",
}
# Keys whose value is the same for every model of this kind.
_FIXED: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "mtp_use_dedicated_embeddings": False,
    "bos_token_id": None,
}
_FORMED = (
    "dtype",
    "layer_types",
    "full_attention_interval",
    "partial_rotary_factor",
    "rope_parameters",
    "eos_token_id",
    "pad_token_id",
)
# What a [model] table may hold: these, and an older spelling that `ModelConfig` reads.
MODEL_KEYS = (*_FIELDS, *_FIXED, *_FORMED, "rope_theta")


def published_config(config: ModelConfig, *, dtype: str, end_token: int) -> dict[str, object]:
    """Return the content of config.json.

    Args:
        config: a dense, unquantized model without YaRN.
        dtype: in which the weights are stored.
        end_token: id of `<|endoftext|>`; used where the config names no end token.

    Raises:
        TrainingError: the model cannot be written in this layout.
    """
    if config.yarn is not None:
        raise TrainingError("a trained model has no YaRN; got one in the config; leave rope scaling out of [model]")
    ends = config.eos_token_ids or (end_token,)
    share = config.rotary_dim / config.head_dim
    return {
        **_FIXED,
        **{key: getattr(config, field) for key, field in _FIELDS.items()},
        "dtype": dtype,
        "layer_types": list(config.layer_types),
        "full_attention_interval": _interval(config),
        "partial_rotary_factor": share,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": share,
            "mrope_interleaved": True,
            "mrope_section": _three_axes(config.rotary_dim // 2),
        },
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "pad_token_id": end_token,
    }


def _interval(config: ModelConfig) -> int:
    """Return the distance of full-attention layers; layer_types, which stands beside it, is what counts."""
    full = [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"]
    return full[0] + 1 if full else config.num_layers + 1


def _three_axes(pairs: int) -> list[int]:
    """Share the rotated pairs out to time, height and width, as the releases do: 32 gives 11, 11, 10."""
    return [(pairs + 2 - axis) // 3 for axis in range(3)]
