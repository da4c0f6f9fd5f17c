"""Small weight folders for tests, in every published layout, made from parameters that are known in advance.

Shapes and layouts are written down here a second time, on purpose: packing is done by reshaping and joining whole
heads, not by the loader's runs of rows. Values are multiples of 1/16 that bfloat16 and float16 hold exactly.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from gdn_jax.config import ModelConfig

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
ALWAYS_FLOAT32 = ("a_log", "dt_bias", "norm_weight")

_TEXT = {
    "vocab_size": 12,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 2,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "intermediate_size": 10,
}
_EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "shared_expert_intermediate_size": 7,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}
_RAW = {
    "next": {"model_type": "qwen3_next", **_TEXT, **_EXPERTS, "norm_topk_prob": True},
    "next_dense": {"model_type": "qwen3_next", **_TEXT, **_EXPERTS, "mlp_only_layers": [0, 1]},
    "q35": {"model_type": "qwen3_5_text", **_TEXT, **_ROPE, "mtp_num_hidden_layers": 1, "tie_word_embeddings": True},
    "q35_moe": {"model_type": "qwen3_5_moe_text", **_TEXT, **_ROPE, **_EXPERTS, "mtp_num_hidden_layers": 1},
}
FAMILIES = tuple(_RAW)


def make_config(family: str, **changes: object) -> ModelConfig:
    """Return a tiny model of a family; `changes` are keys of config.json."""
    return ModelConfig.from_dict({**_RAW[family], **changes})


def shapes(config: ModelConfig) -> dict[tuple, tuple[int, ...]]:
    """Return the shape of every parameter by path."""
    width, vocab = config.hidden_size, config.vocab_size
    found = {("decoder", "embed_tokens", "weight"): (vocab, width), ("decoder", "norm", "weight"): (width,)}
    if not config.tie_word_embeddings:
        found["decoder", "lm_head", "weight"] = (vocab, width)
    for i, (kind, is_moe) in enumerate(zip(config.layer_types, config.is_moe_layer, strict=True)):
        found |= {("decoder", "layers", i, *path): s for path, s in _layer(config, kind, is_moe).items()}
    if config.num_mtp_layers:
        mtp = {("layer", *path): s for path, s in _layer(config, "full_attention", config.mtp_is_moe).items()}
        mtp |= {(name, "weight"): (width,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        mtp["fc", "weight"] = (width, 2 * width)
        found |= {("mtp", *path): s for path, s in mtp.items()}
    return found


def _layer(config: ModelConfig, kind: str, is_moe: bool) -> dict[tuple, tuple[int, ...]]:
    width, heads, size = config.hidden_size, config.num_attention_heads, config.head_dim
    keys = config.num_linear_key_heads * config.linear_key_dim
    num_v, dv = config.num_linear_value_heads, config.linear_value_dim
    found: dict[tuple, tuple[int, ...]] = {
        ("input_layernorm", "weight"): (width,),
        ("post_attention_layernorm", "weight"): (width,),
    }
    if kind == "full_attention":
        mixer = {
            "q_proj": (2 * heads * size, width),
            "k_proj": (config.num_kv_heads * size, width),
            "v_proj": (config.num_kv_heads * size, width),
            "o_proj": (width, heads * size),
            "q_norm": (size,),
            "k_norm": (size,),
        }
        found |= {("mixer", name, "weight"): s for name, s in mixer.items()}
    else:
        projections = {
            "in_proj_qkv": (2 * keys + num_v * dv, width),
            "in_proj_z": (num_v * dv, width),
            "in_proj_b": (num_v, width),
            "in_proj_a": (num_v, width),
            "out_proj": (width, num_v * dv),
        }
        found |= {("mixer", name, "weight"): s for name, s in projections.items()}
        found["mixer", "conv_weight"] = (2 * keys + num_v * dv, config.conv_kernel)
        found |= {("mixer", "a_log"): (num_v,), ("mixer", "dt_bias"): (num_v,), ("mixer", "norm_weight"): (dv,)}
    return found | {("mlp", *path): s for path, s in _feed_forward(config, is_moe).items()}


def _feed_forward(config: ModelConfig, is_moe: bool) -> dict[tuple, tuple[int, ...]]:
    width = config.hidden_size

    def dense(inner: int) -> dict[tuple, tuple[int, ...]]:
        sizes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        return {(name, "weight"): s for name, s in sizes.items()}

    if not is_moe:
        return dense(config.intermediate_size)
    experts, inner = config.num_experts, config.moe_intermediate_size
    shared = dense(config.shared_expert_intermediate_size)
    return {
        ("gate", "weight"): (experts, width),
        ("experts_gate_up",): (experts, 2 * inner, width),
        ("experts_down",): (experts, width, inner),
        ("shared_expert_gate", "weight"): (1, width),
        **{("shared_expert", *path): s for path, s in shared.items()},
    }


def make_targets(config: ModelConfig, dtype: str = "bfloat16") -> dict[tuple, jax.ShapeDtypeStruct]:
    """Return what a model of this dtype asks the loader for."""
    return {
        path: jax.ShapeDtypeStruct(shape, np.dtype("float32" if path[-1] in ALWAYS_FLOAT32 else dtype))
        for path, shape in shapes(config).items()
    }


def make_parameters(config: ModelConfig, seed: int = 0) -> dict[tuple, np.ndarray]:
    """Return float32 values for every parameter."""
    rng = np.random.default_rng(seed)
    return {path: (rng.integers(-128, 128, shape) / 16).astype(np.float32) for path, shape in shapes(config).items()}


def as_stored(
    config: ModelConfig, parameters: Mapping[tuple, np.ndarray], *, packed: bool, fused: bool, mtp_fused: bool
) -> dict[str, np.ndarray]:
    """Return the tensors of a folder, by name, in float32.

    Args:
        config: the model.
        parameters: from `make_parameters`.
        packed: GDN inputs as two matrices grouped by key head, else as four.
        fused: experts of the main layers as one tensor, else one per expert.
        mtp_fused: the same for the MTP layer.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, value in parameters.items():
        if path[:2] == ("decoder", "layers"):
            tensors |= _stored_leaf(f"model.layers.{path[2]}.", path[3:], value, fused)
        elif path[:2] == ("mtp", "layer"):
            tensors |= _stored_leaf("mtp.layers.0.", path[2:], value, mtp_fused)
        elif path[:2] == ("decoder", "lm_head"):
            tensors["lm_head.weight"] = value
        else:
            tensors[".".join(path).replace("decoder.", "model.")] = value
    if packed:
        for i, kind in enumerate(config.layer_types):
            if kind == "linear_attention":
                _pack(config, tensors, f"model.layers.{i}.linear_attn.")
    return tensors


def _stored_leaf(prefix: str, path: tuple, value: np.ndarray, fused: bool) -> dict[str, np.ndarray]:
    gdn = {"conv_weight": "conv1d.weight", "a_log": "A_log", "dt_bias": "dt_bias", "norm_weight": "norm.weight"}
    if path[0] == "mlp" and path[1].startswith("experts_"):
        return _stored_experts(prefix + "mlp.experts.", path[1], value, fused)
    if path[-1] == "conv_weight":
        value = value[:, None, :]
    if path[0] == "mixer" and path[1] in gdn:
        return {f"{prefix}linear_attn.{gdn[path[1]]}": value}
    if path[0] == "mixer":
        block = "linear_attn" if path[1].startswith(("in_", "out_")) else "self_attn"
        path = (block, *path[1:])
    return {prefix + ".".join(path): value}


def _stored_experts(prefix: str, leaf: str, value: np.ndarray, fused: bool) -> dict[str, np.ndarray]:
    if fused:
        return {prefix + {"experts_gate_up": "gate_up_proj", "experts_down": "down_proj"}[leaf]: value}
    tensors = {}
    for expert, matrix in enumerate(value):
        if leaf == "experts_down":
            tensors[f"{prefix}{expert}.down_proj.weight"] = matrix
        else:
            half = len(matrix) // 2
            tensors[f"{prefix}{expert}.gate_proj.weight"] = matrix[:half]
            tensors[f"{prefix}{expert}.up_proj.weight"] = matrix[half:]
    return tensors


def _pack(config: ModelConfig, tensors: dict[str, np.ndarray], prefix: str) -> None:
    """Replace the four GDN input matrices by the two packed ones, in place."""
    heads = config.num_linear_key_heads
    keys = heads * config.linear_key_dim
    qkv = tensors.pop(prefix + "in_proj_qkv.weight")
    parts = [*np.split(qkv, [keys, 2 * keys]), tensors.pop(prefix + "in_proj_z.weight")]
    width = qkv.shape[1]
    by_head = np.concatenate([part.reshape(heads, -1, width) for part in parts], axis=1)
    tensors[prefix + "in_proj_qkvz.weight"] = by_head.reshape(-1, width)
    gates = [tensors.pop(f"{prefix}in_proj_{letter}.weight").reshape(heads, -1, width) for letter in "ba"]
    tensors[prefix + "in_proj_ba.weight"] = np.concatenate(gates, axis=1).reshape(-1, width)


def usual_form(config: ModelConfig, parameters: Mapping[tuple, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors in the layout of the family's bfloat16 releases."""
    is_next = config.model_type == "qwen3_next"
    return as_stored(config, parameters, packed=is_next, fused=not is_next, mtp_fused=not is_next)


def quantize(
    tensors: Mapping[str, np.ndarray], names: list[str], scale_dtype: np.dtype = BF16
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the tensors with some matrices in block FP8, and in float32 what those then mean."""
    rng = np.random.default_rng(7)
    stored, meant = dict(tensors), dict(tensors)
    for name in names:
        rows, columns = tensors[name].shape
        scale = rng.uniform(0.1, 2.0, (-(-rows // 128), -(-columns // 128))).astype(scale_dtype)
        wide = np.repeat(np.repeat(scale.astype(np.float32), 128, axis=0), 128, axis=1)[:rows, :columns]
        stored[name] = (tensors[name] / wide).astype(FP8)
        stored[name + "_scale_inv"] = scale
        meant[name] = stored[name].astype(np.float32) * wide
    return stored, meant


def save(folder: Path, tensors: Mapping[str, np.ndarray], dtype: np.dtype = BF16) -> Path:
    """Write model.safetensors; float32 arrays are rounded to `dtype`, others are kept."""
    save_file(_rounded(tensors, dtype), folder / "model.safetensors")
    return folder


def save_shards(folder: Path, tensors: Mapping[str, np.ndarray], files: list[str], dtype: np.dtype = BF16) -> Path:
    """Deal the tensors out to files, and write the index."""
    rounded = _rounded(tensors, dtype)
    weight_map = {name: files[i % len(files)] for i, name in enumerate(sorted(rounded))}
    for file in files:
        save_file({name: rounded[name] for name, home in weight_map.items() if home == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _rounded(tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> dict[str, np.ndarray]:
    return {
        name: np.ascontiguousarray(value.astype(dtype) if value.dtype == np.float32 else value)
        for name, value in tensors.items()
    }


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    """Write a file with any header (bytes as they are, else as JSON)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
