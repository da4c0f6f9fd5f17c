"""Seeded random weights for a checkpoint, and the names and forms under which each family stores them.

A tensor depends on the seed and on its own common name only, so that two layouts of the same sizes and seed are the
same model. Scales follow the real models loosely: logits have a standard deviation of about 4.5, every layer adds
a quarter to a half of the embedding's size to the residual stream, and the decays of a layer's heads reach from a
few tokens to hundreds.
"""

import math
from zlib import crc32

import ml_dtypes
import numpy as np
from oracles.checkpoint_sizes import CheckpointSizes, is_moe

LOGIT_STD = 4.5
EMBED_STD = 1.6  # where the output matrix is not tied to it
FINAL_GAIN = 1.3  # size of the final norm's 1 + w
_QUANTIZED = ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj", *(f"{name}_proj" for name in "qkvo"))


class Draws:
    """Random arrays by name.

    Sums of uniform numbers of a frozen generator, so that the bits are the same on every platform and NumPy version
    (a normal variate would go through the platform's logarithm).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
        """Return numbers between `low` and `high`."""
        return low + (high - low) * self._samples(name, shape)

    def normal(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> np.ndarray:
        """Return nearly normal numbers: a sum of four uniform ones, at most 3.5 `std` from the mean."""
        u = self._samples(name, (4, *shape))
        return mean + std * math.sqrt(3.0) * (u[0] + u[1] + u[2] + u[3] - 2.0)

    def _samples(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.random.RandomState(crc32(f"{self._seed}/{name}".encode())).random_sample(shape)


def common_weights(family: str, sizes: CheckpointSizes, seed: int, token_scales: np.ndarray) -> dict[str, np.ndarray]:
    """Return all text tensors in float64 under unprefixed names, in the Qwen3.5 form with fused experts.

    Args:
        family: one of FAMILIES.
        sizes: the sizes.
        seed: of the weights.
        token_scales: factor on each row of the output matrix [V]; below 1 for tokens that should stay rare.
    """
    draws, h = Draws(seed), sizes.hidden_size
    head_std = LOGIT_STD / (FINAL_GAIN * math.sqrt(h))
    embed_std = head_std if sizes.tie_word_embeddings else EMBED_STD
    tensors = {"embed_tokens.weight": draws.normal("embed_tokens", (sizes.vocab_size, h), embed_std)}
    if sizes.tie_word_embeddings:
        tensors["embed_tokens.weight"] *= token_scales[:, None]
    else:
        tensors["lm_head.weight"] = (
            _successors(draws, tensors["embed_tokens.weight"]) * head_std * token_scales[:, None]
        )
    tensors["norm.weight"] = _final_norm(draws, "norm", sizes)
    # A tied model without this would soon alternate between two tokens.
    stream_std = embed_std * (1.2 if sizes.tie_word_embeddings else 1.0)
    for i in range(sizes.num_hidden_layers):
        tensors |= _layer(draws, f"layers.{i}.", sizes.kind(i), sizes, stream_std, moe=is_moe(sizes, family, i))
    if sizes.mtp:
        # A head that mostly looks at the next token's embedding guesses right often enough for tests of acceptance.
        eye = np.concatenate([np.eye(h), 0.2 * np.eye(h)], axis=1)
        tensors["mtp.fc.weight"] = eye + draws.normal("mtp.fc", (h, 2 * h), 0.02)
        tensors["mtp.pre_fc_norm_embedding.weight"] = draws.normal("mtp.pre_fc_norm_embedding", (h,), 0.15)
        tensors["mtp.pre_fc_norm_hidden.weight"] = draws.normal("mtp.pre_fc_norm_hidden", (h,), 0.15)
        tensors["mtp.norm.weight"] = tensors["norm.weight"] + draws.normal("mtp.norm", (h,), 0.05)
        moe = is_moe(sizes, family, 0)
        tensors |= _layer(draws, "mtp.layers.0.", "full_attention", sizes, 0.5, moe=moe)
    return tensors


def _successors(draws: Draws, embedding: np.ndarray) -> np.ndarray:
    """Return an output matrix [V, H] of unit size in which every token has a likely successor.

    Its rows are 0.6 parallel to the embedding of another token. That widens the gap between the first and the second
    choice, and gives the MTP head, which sees one embedding, something to guess from.
    """
    order = np.argsort(draws.uniform("lm_head.order", (len(embedding),), 0.0, 1.0), kind="stable")
    return 0.8 * draws.normal("lm_head", embedding.shape, 1.0) + 0.6 * embedding[order] / EMBED_STD


def _final_norm(draws: Draws, name: str, sizes: CheckpointSizes) -> np.ndarray:
    weight = draws.normal(name, (sizes.hidden_size,), 0.15, FINAL_GAIN - 1)
    if sizes.tie_word_embeddings:  # random signs of 1 + w, else a tied model would repeat its input for ever
        flip = draws.uniform(f"{name}.sign", weight.shape, 0.0, 1.0) < 0.5
        weight = np.where(flip, -2.0 - weight, weight)
    return weight


def _layer(
    draws: Draws, prefix: str, kind: str, sizes: CheckpointSizes, stream_std: float, *, moe: bool
) -> dict[str, np.ndarray]:
    """Return one decoder layer whose two blocks add about 0.25 and 0.4 times `stream_std`."""
    h = sizes.hidden_size
    tensors = {
        f"{prefix}{name}.weight": draws.normal(prefix + name, (h,), 0.2)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    mixer = _gated_delta_net if kind == "linear_attention" else _attention
    for name, array in mixer(draws, prefix, sizes, stream_std).items():
        tensors[prefix + name] = array
    for name, array in (_moe if moe else _dense)(draws, f"{prefix}mlp.", sizes, stream_std).items():
        tensors[f"{prefix}mlp.{name}"] = array
    return tensors


def _matrix(draws: Draws, name: str, shape: tuple[int, ...], gain: float = 1.0) -> np.ndarray:
    return draws.normal(name, shape, gain / math.sqrt(shape[-1]))


def _attention(draws: Draws, prefix: str, s: CheckpointSizes, stream_std: float) -> dict[str, np.ndarray]:
    prefix += "self_attn."
    q, kv, h = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim, s.hidden_size
    return {
        "self_attn.q_proj.weight": _matrix(draws, f"{prefix}q_proj", (2 * q, h)),
        "self_attn.k_proj.weight": _matrix(draws, f"{prefix}k_proj", (kv, h)),
        "self_attn.v_proj.weight": _matrix(draws, f"{prefix}v_proj", (kv, h)),
        # Gated averages of values are about 0.35 large, gated and normed GDN outputs and products of an FFN about 0.6.
        "self_attn.o_proj.weight": _matrix(draws, f"{prefix}o_proj", (h, q), 0.25 * stream_std / 0.35),
        "self_attn.q_norm.weight": draws.normal(f"{prefix}q_norm", (s.head_dim,), 0.25, 0.4),
        "self_attn.k_norm.weight": draws.normal(f"{prefix}k_norm", (s.head_dim,), 0.25, 0.4),
    }


def _gated_delta_net(draws: Draws, prefix: str, s: CheckpointSizes, stream_std: float) -> dict[str, np.ndarray]:
    prefix += "linear_attn."
    heads, values, h = s.linear_num_value_heads, s.linear_num_value_heads * s.linear_value_head_dim, s.hidden_size
    spread = -4.0 + 6.0 * np.arange(heads) / max(heads - 1, 1)  # log of the decay rate: long memory to short
    return {
        "linear_attn.in_proj_qkv.weight": _matrix(draws, f"{prefix}in_proj_qkv", (s.conv_channels, h)),
        "linear_attn.in_proj_z.weight": _matrix(draws, f"{prefix}in_proj_z", (values, h)),
        "linear_attn.in_proj_b.weight": _matrix(draws, f"{prefix}in_proj_b", (heads, h), 1.5),
        "linear_attn.in_proj_a.weight": _matrix(draws, f"{prefix}in_proj_a", (heads, h), 1.5),
        "linear_attn.conv1d.weight": draws.normal(
            f"{prefix}conv1d", (s.conv_channels, 1, s.linear_conv_kernel_dim), 0.6
        ),
        "linear_attn.A_log": spread + draws.normal(f"{prefix}A_log", (heads,), 0.2),
        "linear_attn.dt_bias": draws.uniform(f"{prefix}dt_bias", (heads,), -4.0, 1.0),
        "linear_attn.norm.weight": draws.normal(f"{prefix}norm", (s.linear_value_head_dim,), 0.2, 1.0),
        "linear_attn.out_proj.weight": _matrix(draws, f"{prefix}out_proj", (h, values), 0.25 * stream_std / 0.6),
    }


def _dense(draws: Draws, prefix: str, s: CheckpointSizes, stream_std: float) -> dict[str, np.ndarray]:
    width, h = s.intermediate_size, s.hidden_size
    return {
        "gate_proj.weight": _matrix(draws, f"{prefix}gate_proj", (width, h)),
        "up_proj.weight": _matrix(draws, f"{prefix}up_proj", (width, h)),
        "down_proj.weight": _matrix(draws, f"{prefix}down_proj", (h, width), 0.4 * stream_std / 0.6),
    }


def _moe(draws: Draws, prefix: str, s: CheckpointSizes, stream_std: float) -> dict[str, np.ndarray]:
    experts, width, shared, h = s.num_experts, s.moe_intermediate_size, s.shared_expert_intermediate_size, s.hidden_size
    return {
        "gate.weight": _matrix(draws, f"{prefix}gate", (experts, h), 1.6),
        "experts.gate_up_proj": _matrix(draws, f"{prefix}experts.gate_up_proj", (experts, 2 * width, h)),
        "experts.down_proj": _matrix(draws, f"{prefix}experts.down_proj", (experts, h, width), 0.4 * stream_std / 0.6),
        "shared_expert.gate_proj.weight": _matrix(draws, f"{prefix}shared_expert.gate_proj", (shared, h)),
        "shared_expert.up_proj.weight": _matrix(draws, f"{prefix}shared_expert.up_proj", (shared, h)),
        "shared_expert.down_proj.weight": _matrix(
            draws, f"{prefix}shared_expert.down_proj", (h, shared), 0.4 * stream_std / 0.6
        ),
        "shared_expert_gate.weight": _matrix(draws, f"{prefix}shared_expert_gate", (1, h)),
    }


def stored_weights(
    family: str, sizes: CheckpointSizes, tensors: dict[str, np.ndarray], seed: int
) -> dict[str, np.ndarray]:
    """Return the tensors as `family` stores them: its names, its forms, its dtypes, FP8 scales and vision tensors."""
    if family.startswith("next"):
        tensors = _pack_next(tensors, sizes)
    if not sizes.fused_experts:
        tensors = _split_experts(tensors)
    nested = not family.startswith("next") and not family.endswith("-flat")
    prefix = "model.language_model." if nested else "model."
    dtype = np.float32 if sizes.dtype == "float32" else ml_dtypes.bfloat16
    stored: dict[str, np.ndarray] = {}
    for common, array in tensors.items():
        name = common if common.startswith(("mtp.", "lm_head.")) else prefix + common
        if sizes.fp8 and is_quantized(common):
            stored[name], stored[f"{name}_scale_inv"] = quantize(array, sizes.fp8_block)
        elif sizes.float32_gates and common.endswith(("A_log", "linear_attn.norm.weight")):
            stored[name] = array.astype(np.float32)
        else:
            stored[name] = _rounded(array, dtype)
    if nested and sizes.vision:
        draws = Draws(seed)
        for name, shape in (("blocks.0.attn.qkv.weight", (48, 16)), ("patch_embed.proj.bias", (16,))):
            stored[f"model.visual.{name}"] = _rounded(draws.normal(f"visual.{name}", shape, 0.02), dtype)
    return stored


def _rounded(array: np.ndarray, dtype: type) -> np.ndarray:
    """Return numbers in a dtype, by way of float32: older versions of ml-dtypes go that way, newer ones round once."""
    return array.astype(np.float32).astype(dtype)


def is_quantized(name: str) -> bool:
    """Say whether an FP8 release quantizes this tensor: matrices of mixers, experts and FFNs, also those of MTP."""
    parts = name.split(".")
    if "linear_attn" in parts or "self_attn" in parts:
        return parts[-2] in _QUANTIZED
    return "mlp" in parts and parts[-2] in ("gate_proj", "up_proj", "down_proj")


def quantize(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return `weight` [out, in] as float8_e4m3fn and the bfloat16 multiplier of each block."""
    largest = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
    row, column = (np.arange(length) // size for length, size in zip(weight.shape, block, strict=True))
    scale = np.maximum.reduceat(np.abs(weight), range(0, weight.shape[0], block[0]), axis=0)
    scale = np.maximum.reduceat(scale, range(0, weight.shape[1], block[1]), axis=1)
    scale = _rounded(np.where(scale > 0, scale / largest, 1.0), ml_dtypes.bfloat16)
    ratio = weight / scale.astype(np.float64)[row][:, column]
    # A scale that was rounded down leaves a value above the largest one, which would be stored as NaN.
    return _rounded(np.clip(ratio, -largest, largest), ml_dtypes.float8_e4m3fn), scale


def _pack_next(tensors: dict[str, np.ndarray], s: CheckpointSizes) -> dict[str, np.ndarray]:
    """Return the tensors with the GDN projections packed as in Qwen3-Next: per key head q, k, v, z and b, a."""
    packed = {name: array for name, array in tensors.items() if ".in_proj_" not in name}
    groups, keys = s.linear_num_key_heads, s.linear_num_key_heads * s.linear_key_head_dim
    for name, qkv in tensors.items():
        if name.endswith("in_proj_qkv.weight"):
            prefix = name.removesuffix("qkv.weight")
            z, b, a = (tensors[f"{prefix}{part}.weight"] for part in "zba")
            for target, parts in (("qkvz", [*np.split(qkv, [keys, 2 * keys]), z]), ("ba", [b, a])):
                grouped = np.concatenate([part.reshape(groups, -1, s.hidden_size) for part in parts], axis=1)
                packed[f"{prefix}{target}.weight"] = grouped.reshape(-1, s.hidden_size)
    return packed


def _split_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with one gate, up and down matrix per expert instead of the fused ones."""
    split: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, (gate_up, down) in enumerate(zip(array, tensors[f"{prefix}down_proj"], strict=True)):
                gate, up = np.split(gate_up, 2)
                split |= {
                    f"{prefix}{expert}.gate_proj.weight": gate,
                    f"{prefix}{expert}.up_proj.weight": up,
                    f"{prefix}{expert}.down_proj.weight": down,
                }
        elif not name.endswith("experts.down_proj"):
            split[name] = array
    return split
