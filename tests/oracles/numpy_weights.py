"""Sizes and tensors of a checkpoint folder, as plain numbers and float64 NumPy arrays.

Owns the reading of config.json and *.safetensors in every published layout, and the one common form they are
brought to: no name prefix, Qwen3-Next's packed projections taken apart, experts stacked, FP8 blocks multiplied out.
Everything is exact in float64. It shares no code with the package, so that a mistake there is not repeated here.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
# Longest first: "model." would also match a nested name.
_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the mathematics needs to know of a config.json; sizes of matrices are read off the matrices."""

    num_layers: int
    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_key_heads: int  # Nk of the delta rule
    num_value_heads: int  # Nv
    key_dim: int  # dk
    value_dim: int  # dv
    conv_kernel: int  # K
    eps: float
    experts_per_token: int
    norm_topk_prob: bool
    inverse_frequencies: np.ndarray  # [R / 2], radians per position
    rotary_scale: float  # factor on cos and sin; 1 without YaRN
    tied: bool
    fp8_block: tuple[int, int]  # rows, columns that share a scale


def read_sizes(folder: Path) -> Sizes:
    """Return the sizes named by `folder`/config.json, nested or flat."""
    outer = json.loads((folder / "config.json").read_text())
    text = outer.get("text_config", outer)
    interval = text.get("full_attention_interval", 4)
    derived = [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(text["num_hidden_layers"])
    ]
    frequencies, scale = _rotary(text)
    is_next = text["model_type"] == "qwen3_next"
    return Sizes(
        num_layers=text["num_hidden_layers"],
        layer_types=tuple(text.get("layer_types") or derived),
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        num_key_heads=text["linear_num_key_heads"],
        num_value_heads=text["linear_num_value_heads"],
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        conv_kernel=text["linear_conv_kernel_dim"],
        eps=text["rms_norm_eps"],
        experts_per_token=text.get("num_experts_per_tok", 0),
        norm_topk_prob=text.get("norm_topk_prob", True) if is_next else True,  # only Next reads the key
        inverse_frequencies=frequencies,
        rotary_scale=scale,
        tied=outer.get("tie_word_embeddings", False),
        fp8_block=tuple((outer.get("quantization_config") or {}).get("weight_block_size", (128, 128))),
    )


def _rotary(text: dict) -> tuple[np.ndarray, float]:
    """Return the rotary parameters of a text config: Next keeps them at the top level, 3.5 in rope_parameters."""
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    base = rope.get("rope_theta", text.get("rope_theta", 10000.0))
    fraction = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    rotary_dim = int(text["head_dim"] * fraction)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or text["max_position_embeddings"]
        frequencies = yarn_frequencies(
            base,
            rotary_dim,
            rope["factor"],
            original,
            fast=rope.get("beta_fast") or 32.0,
            slow=rope.get("beta_slow") or 1.0,
        )
        return frequencies, rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1.0
    if kind != "default":
        raise ValueError(f"rope_type must be default or yarn, got {kind!r}")
    return base ** (-np.arange(0, rotary_dim, 2) / rotary_dim), 1.0


def yarn_frequencies(
    base: float, rotary_dim: int, factor: float, original: int, *, fast: float = 32.0, slow: float = 1.0
) -> np.ndarray:
    """Return YaRN's inverse frequencies [rotary_dim / 2] (Peng et al. 2023, eq. 19 to 23).

    Channels that turn more than `fast` times within the `original` context keep their frequency, those that turn
    less than `slow` times have it divided by `factor`, with a linear ramp over the channels between.
    """

    def channel(turns: float) -> float:
        return rotary_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    first, last = max(math.floor(channel(fast)), 0), min(math.ceil(channel(slow)), rotary_dim - 1)
    ramp = np.clip((np.arange(rotary_dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
    plain = base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return plain * (1 - ramp) + plain / factor * ramp


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of one file in their stored dtypes; the format is a JSON header and then raw bytes."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__" and entry["dtype"] in _DTYPES:
            low, high = (start + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(raw[low:high], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def read_weights(folder: Path, sizes: Sizes) -> dict[str, np.ndarray]:
    """Return every text tensor of `folder` in float64 under its common name.

    Common names are the published ones without prefix, in the Qwen3.5 form: layers.0.linear_attn.in_proj_qkv.weight,
    layers.0.mlp.experts.gate_up_proj [E, 2I, H], lm_head.weight, mtp.fc.weight.
    """
    stored: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != "golden.safetensors":  # expected values, not weights
            stored |= {_strip(name): array for name, array in read_safetensors(path).items() if "visual" not in name}
    weights = {
        name: dequantize(array, stored.get(f"{name}_scale_inv"), sizes.fp8_block)
        for name, array in stored.items()
        if not name.endswith("_scale_inv")
    }
    for name in [name for name in weights if name.endswith("in_proj_qkvz.weight")]:
        _unpack_next(weights, name.removesuffix("in_proj_qkvz.weight"), sizes)
    for name in [name for name in weights if name.endswith("experts.0.gate_proj.weight")]:
        _stack_experts(weights, name.removesuffix("0.gate_proj.weight"))
    return weights


def _strip(name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def dequantize(weight: np.ndarray, scale: np.ndarray | None, block: tuple[int, int]) -> np.ndarray:
    """Return `weight` in float64, times the scale of its block (row // block[0], column // block[1]) if it has one."""
    exact = weight.astype(np.float64)
    if scale is None:
        return exact
    rows, columns = (np.arange(length) // size for length, size in zip(weight.shape, block, strict=True))
    return exact * scale.astype(np.float64)[rows][:, columns]


def _unpack_next(weights: dict[str, np.ndarray], prefix: str, sizes: Sizes) -> None:
    """Replace Next's two packed projections, whose rows are grouped by key head, by the four of Qwen3.5."""
    groups, per_group = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    packed = weights.pop(f"{prefix}in_proj_qkvz.weight")
    packed = packed.reshape(groups, -1, packed.shape[-1])
    width, values = sizes.key_dim, per_group * sizes.value_dim
    q, k, v, z = np.split(packed, [width, 2 * width, 2 * width + values], axis=1)
    weights[f"{prefix}in_proj_qkv.weight"] = np.concatenate([x.reshape(-1, packed.shape[-1]) for x in (q, k, v)])
    weights[f"{prefix}in_proj_z.weight"] = z.reshape(-1, packed.shape[-1])
    gates = weights.pop(f"{prefix}in_proj_ba.weight").reshape(groups, 2 * per_group, -1)
    weights[f"{prefix}in_proj_b.weight"] = gates[:, :per_group].reshape(sizes.num_value_heads, -1)
    weights[f"{prefix}in_proj_a.weight"] = gates[:, per_group:].reshape(sizes.num_value_heads, -1)


def _stack_experts(weights: dict[str, np.ndarray], prefix: str) -> None:
    """Replace one tensor per expert by the fused form, gate rows before up rows."""
    gate_up, down = [], []
    while f"{prefix}{len(down)}.gate_proj.weight" in weights:
        parts = [weights.pop(f"{prefix}{len(down)}.{name}_proj.weight") for name in ("gate", "up", "down")]
        gate_up.append(np.concatenate(parts[:2]))
        down.append(parts[2])
    weights[f"{prefix}gate_up_proj"], weights[f"{prefix}down_proj"] = np.stack(gate_up), np.stack(down)
