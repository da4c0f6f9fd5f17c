"""Sizes of a made-up checkpoint, and the config.json that each published family writes for them."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

FAMILIES = ("next-moe", "next-dense", "q35-dense", "q35-moe", "q35-dense-flat", "q35-moe-flat")

# Sizes at which FP8 scales have several blocks, and every quantized matrix is a multiple of 128 or one block, as in
# the releases.
_FP8_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 64,
    "float32_gates": False,
}


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes:
    """Everything about a checkpoint but its family and seed.

    The fields of the first group carry the names of config.json, the others are about what is written and how.
    """

    vocab_size: int = 320
    hidden_size: int = 64
    num_hidden_layers: int = 4
    layer_types: tuple[str, ...] | None = None  # sets num_hidden_layers too; None: derived from the interval
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 16
    linear_value_head_dim: int = 16
    linear_conv_kernel_dim: int = 4
    intermediate_size: int = 96
    moe_intermediate_size: int = 32
    shared_expert_intermediate_size: int = 48
    num_experts: int = 8
    num_experts_per_tok: int = 3
    norm_topk_prob: bool = True  # Next only
    decoder_sparse_step: int = 1  # Next only
    mlp_only_layers: tuple[int, ...] = ()  # Next only
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1e7
    rope_scaling: dict[str, Any] | None = None  # e.g. rope_type yarn, factor, original_max_position_embeddings
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False

    mtp: bool = True
    vision: bool = True  # nested layouts only: tensors a text engine must skip
    fused_experts: bool = True  # 3.5 MoE in bf16 or float32; the other layouts have one tensor per expert
    float32_gates: bool = False  # A_log and linear_attn.norm in float32, whatever dtype says
    dtype: str = "bfloat16"  # or "float32"
    fp8: bool = False
    fp8_block: tuple[int, int] = (128, 128)
    num_shards: int = 1  # more than one: with an index
    mtp_in_own_file: bool = False
    text: bool = True  # tokenizer.json, tokenizer_config.json and the chat template; needs vocab_size >= 272
    readable: bool = False  # rarely predicts tokens that are not printable ASCII
    extra: dict[str, Any] = field(default_factory=dict)  # further keys for the text part of config.json

    def kind(self, layer: int) -> str:
        """Return "linear_attention" or "full_attention"."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "full_attention" if (layer + 1) % self.full_attention_interval == 0 else "linear_attention"

    @property
    def conv_channels(self) -> int:
        """C, the channels of the short convolution."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim


def is_moe(sizes: CheckpointSizes, family: str, layer: int) -> bool:
    """Say whether a decoder layer has experts. The MTP layer follows layer 0."""
    if not family.startswith("next"):
        return "moe" in family
    return sizes.num_experts > 0 and layer not in sizes.mlp_only_layers and (layer + 1) % sizes.decoder_sparse_step == 0


def resolve(family: str, overrides: dict[str, Any]) -> tuple[str, CheckpointSizes]:
    """Return the family without its -fp8 suffix, and its sizes with `overrides` applied.

    Raises:
        ValueError: the family or a combination of sizes does not exist.
    """
    base = family.removesuffix("-fp8")
    if base not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, with or without -fp8; got {family!r}")
    defaults: dict[str, Any] = {"tie_word_embeddings": base == "q35-dense", "float32_gates": base == "q35-dense"}
    if base != family:
        defaults |= _FP8_SIZES | {"fp8": True, "fused_experts": False}
    if base in ("next-moe", "next-dense"):
        defaults["fused_experts"] = False
    sizes = replace(CheckpointSizes(), **(defaults | overrides))
    if sizes.layer_types is not None:
        sizes = replace(sizes, num_hidden_layers=len(sizes.layer_types))
    if base == "next-dense" and "mlp_only_layers" not in overrides:
        sizes = replace(sizes, mlp_only_layers=tuple(range(sizes.num_hidden_layers)))
    if sizes.linear_num_value_heads % sizes.linear_num_key_heads:
        raise ValueError(
            f"linear_num_value_heads must be a multiple of linear_num_key_heads, got "
            f"{sizes.linear_num_value_heads} and {sizes.linear_num_key_heads}"
        )
    if sizes.fused_experts and (sizes.fp8 or base.startswith("next")):
        raise ValueError(f"{family} has one tensor per expert: leave fused_experts out")
    return base, sizes


_COMMON = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "partial_rotary_factor",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)
_MOE = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok")


def config_json(family: str, sizes: CheckpointSizes, ids: dict[str, int], quantized_not: list[str]) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        family: one of FAMILIES.
        sizes: the sizes.
        ids: token ids by content, e.g. "<|im_end|>".
        quantized_not: the modules that an FP8 checkpoint leaves alone; ignored without FP8.
    """
    values = asdict(sizes)
    text = {key: values[key] for key in _COMMON}
    text |= {"attention_bias": False, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
    text |= _next_keys(sizes, values, ids) if family.startswith("next") else _q35_keys(family, sizes, values, ids)
    config = _wrap(family, text | sizes.extra, ids)
    if sizes.fp8:
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(sizes.fp8_block),
            "modules_to_not_convert": quantized_not,
        }
    return config


def _next_keys(sizes: CheckpointSizes, values: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    keys = {key: values[key] for key in [*_MOE, "norm_topk_prob", "decoder_sparse_step", "intermediate_size"]}
    keys |= {"model_type": "qwen3_next", "torch_dtype": sizes.dtype, "mlp_only_layers": list(sizes.mlp_only_layers)}
    keys |= {"rope_theta": sizes.rope_theta, "rope_scaling": sizes.rope_scaling}
    keys |= {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    keys["full_attention_interval"] = sizes.full_attention_interval
    if sizes.layer_types is not None:
        keys["layer_types"] = list(sizes.layer_types)
    return keys


def _q35_keys(family: str, sizes: CheckpointSizes, values: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    moe = "moe" in family
    pairs = int(sizes.head_dim * sizes.partial_rotary_factor) // 2
    section = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]  # time, height, width of the three-axis rotation
    rope = {"mrope_interleaved": True, "mrope_section": section, "rope_type": "default"}
    rope |= {"rope_theta": sizes.rope_theta, "partial_rotary_factor": sizes.partial_rotary_factor}
    keys = {key: values[key] for key in (_MOE if moe else ("intermediate_size",))}
    keys |= {"model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text", "dtype": sizes.dtype}
    keys |= {"rope_parameters": rope | (sizes.rope_scaling or {}), "attn_output_gate": True}
    keys |= {"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": int(sizes.mtp)}
    keys |= {"mtp_use_dedicated_embeddings": False, "bos_token_id": None, "eos_token_id": ids["<|endoftext|>"]}
    keys["layer_types"] = [sizes.kind(i) for i in range(sizes.num_hidden_layers)]
    return keys


def _wrap(family: str, text: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Return the outer config: the text part itself when flat, else nested beside the vision part."""
    if family.startswith("next"):
        return {"architectures": ["Qwen3NextForCausalLM"], **text}
    name = "Qwen3_5Moe" if "moe" in family else "Qwen3_5"
    if family.endswith("-flat"):
        return {"architectures": [f"{name}ForCausalLM"], **text}
    outer = text["model_type"].removesuffix("_text")
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": outer,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {"model_type": outer, "depth": 1, "hidden_size": 16, "patch_size": 4, "num_heads": 2},
    }
