"""The name table: which stored tensors make up each parameter of the model.

A parameter is known by its path in the module tree, e.g. `("decoder", "layers", 3, "mixer", "q_proj", "weight")`; a
tensor by its canonical name, which is its stored name without the prefixes that exports differ in. Most parameters are
one tensor as it stands. Two kinds come in more than one form, told apart by the names that exist:

    experts      one fused tensor, or one tensor per expert and projection
    GDN inputs   in_proj_qkv, _z, _b, _a, or two matrices packed by key head (Qwen3-Next)

All forms are described alike, as runs of rows (`Piece`). What is written has one form only (`stored_form`). This module
reads no files and checks no shapes.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass

import jax

from gdn_jax.config import ModelConfig

ParameterPath = tuple[str | int, ...]
Targets = Mapping[ParameterPath, jax.ShapeDtypeStruct]

_VISION_PREFIXES = ("model.visual.", "visual.")
_TOP: dict[ParameterPath, str] = {
    ("decoder", "embed_tokens", "weight"): "model.embed_tokens.weight",
    ("decoder", "norm", "weight"): "model.norm.weight",
    ("decoder", "lm_head", "weight"): "lm_head.weight",
    ("mtp", "fc", "weight"): "mtp.fc.weight",
    ("mtp", "pre_fc_norm_embedding", "weight"): "mtp.pre_fc_norm_embedding.weight",
    ("mtp", "pre_fc_norm_hidden", "weight"): "mtp.pre_fc_norm_hidden.weight",
    ("mtp", "norm", "weight"): "mtp.norm.weight",
}
_LAYER: dict[ParameterPath, str] = {
    ("input_layernorm", "weight"): "input_layernorm.weight",
    ("post_attention_layernorm", "weight"): "post_attention_layernorm.weight",
    ("mixer", "q_proj", "weight"): "self_attn.q_proj.weight",
    ("mixer", "k_proj", "weight"): "self_attn.k_proj.weight",
    ("mixer", "v_proj", "weight"): "self_attn.v_proj.weight",
    ("mixer", "o_proj", "weight"): "self_attn.o_proj.weight",
    ("mixer", "q_norm", "weight"): "self_attn.q_norm.weight",
    ("mixer", "k_norm", "weight"): "self_attn.k_norm.weight",
    ("mixer", "in_proj_qkv", "weight"): "linear_attn.in_proj_qkv.weight",
    ("mixer", "in_proj_z", "weight"): "linear_attn.in_proj_z.weight",
    ("mixer", "in_proj_b", "weight"): "linear_attn.in_proj_b.weight",
    ("mixer", "in_proj_a", "weight"): "linear_attn.in_proj_a.weight",
    ("mixer", "conv_weight"): "linear_attn.conv1d.weight",
    ("mixer", "a_log"): "linear_attn.A_log",
    ("mixer", "dt_bias"): "linear_attn.dt_bias",
    ("mixer", "norm_weight"): "linear_attn.norm.weight",
    ("mixer", "out_proj", "weight"): "linear_attn.out_proj.weight",
    ("mlp", "gate_proj", "weight"): "mlp.gate_proj.weight",
    ("mlp", "up_proj", "weight"): "mlp.up_proj.weight",
    ("mlp", "down_proj", "weight"): "mlp.down_proj.weight",
    ("mlp", "gate", "weight"): "mlp.gate.weight",
    ("mlp", "experts_gate_up"): "mlp.experts.gate_up_proj",
    ("mlp", "experts_down"): "mlp.experts.down_proj",
    ("mlp", "shared_expert", "gate_proj", "weight"): "mlp.shared_expert.gate_proj.weight",
    ("mlp", "shared_expert", "up_proj", "weight"): "mlp.shared_expert.up_proj.weight",
    ("mlp", "shared_expert", "down_proj", "weight"): "mlp.shared_expert.down_proj.weight",
    ("mlp", "shared_expert_gate", "weight"): "mlp.shared_expert_gate.weight",
}
_PER_EXPERT = {"experts_gate_up": ("gate_proj", "up_proj"), "experts_down": ("down_proj",)}
_PACKED = {
    "in_proj_qkv": ("in_proj_qkvz", ("q", "k", "v")),
    "in_proj_z": ("in_proj_qkvz", ("z",)),
    "in_proj_b": ("in_proj_ba", ("b",)),
    "in_proj_a": ("in_proj_ba", ("a",)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of rows of a stored tensor that becomes a run of rows of a parameter.

    The rows of either are those of its `[-1, last axis]` view.

    Attributes:
        name: canonical name of the tensor.
        shape: the shape it must have in the file.
        first_row: where the run begins in the tensor.
        target_row: where it goes in the parameter.
        num_rows: its length.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int
    target_row: int
    num_rows: int


def num_rows(shape: tuple[int, ...]) -> int:
    """Return how many rows the `[-1, last axis]` view of an array has; a vector is one row."""
    return math.prod(shape[:-1])


def canonical_name(stored: str) -> str | None:
    """Return a text tensor's name without what exports put around it, or None for a tensor of the vision tower.

    `model.language_model.X` and `language_model.model.X` are `model.X`; `language_model.lm_head.weight` is
    `lm_head.weight`. Any other name is its own canonical name.
    """
    if stored.startswith(_VISION_PREFIXES):
        return None
    name = stored.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        name = "model." + name.removeprefix("model.language_model.")
    return name


def is_mtp(name: str) -> bool:
    """Say whether a canonical name belongs to the MTP head."""
    return name.startswith("mtp.")


def pieces_of(path: ParameterPath, shape: tuple[int, ...], config: ModelConfig, stored: Container[str]) -> list[Piece]:
    """Return the pieces of one parameter, in the form in which the folder holds it.

    Args:
        path: of the parameter.
        shape: of the parameter.
        config: the model; its linear-attention sizes say how packed projections are grouped.
        stored: canonical names that exist. If neither form of a parameter does, the form usual for the family is
            returned.

    Raises:
        KeyError: no such parameter is in the table.
    """
    name = _name_of(path)
    other_form: list[Piece] = []
    if path[-1] in _PER_EXPERT:
        other_form = _expert_pieces(name.rpartition(".")[0], _PER_EXPERT[path[-1]], shape)
    elif path[-2] in _PACKED:
        packed, parts = _PACKED[path[-2]]
        other_form = _packed_pieces(name.replace(f"{path[-2]}.", f"{packed}."), parts, shape, config)
    other_exists = any(piece.name in stored for piece in other_form)
    if other_exists or (other_form and name not in stored and config.model_type == "qwen3_next"):
        return other_form
    _, tensor_shape = stored_form(path, shape)
    return [Piece(name=name, shape=tensor_shape, first_row=0, target_row=0, num_rows=num_rows(shape))]


def stored_form(path: ParameterPath, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the name and the shape under which a parameter is written as one tensor, its elements in the same order.

    That is the form of Qwen3.5; reading also knows others, see `pieces_of`.

    Args:
        path: of the parameter.
        shape: of the parameter.

    Raises:
        KeyError: no such parameter is in the table.
    """
    return _name_of(path), (shape[0], 1, shape[1]) if path[-1] == "conv_weight" else tuple(shape)


def _name_of(path: ParameterPath) -> str:
    if path[:2] == ("decoder", "layers"):
        return f"model.layers.{path[2]}.{_LAYER[path[3:]]}"
    if path[:2] == ("mtp", "layer"):
        return f"mtp.layers.0.{_LAYER[path[2:]]}"
    return _TOP[path]


def _expert_pieces(folder: str, projections: tuple[str, ...], shape: tuple[int, ...]) -> list[Piece]:
    """Stack experts, and within each its projections; `folder` ends in `.experts`."""
    num_experts, expert_rows, width = shape
    rows = expert_rows // len(projections)
    return [
        Piece(
            name=f"{folder}.{expert}.{projection}.weight",
            shape=(rows, width),
            first_row=0,
            target_row=expert * expert_rows + index * rows,
            num_rows=rows,
        )
        for expert in range(num_experts)
        for index, projection in enumerate(projections)
    ]


def _packed_pieces(name: str, parts: tuple[str, ...], shape: tuple[int, ...], config: ModelConfig) -> list[Piece]:
    """Collect parts out of a projection whose rows are grouped by key head.

    With 2 key heads, rows q0 k0 v0 z0 q1 k1 v1 z1 give q, k, v = q0 q1 k0 k1 v0 v1 (each name a run of rows).
    """
    groups, ratio = config.num_linear_key_heads, config.value_heads_per_key_head
    key, value = config.linear_key_dim, ratio * config.linear_value_dim
    layout = {"b": ratio, "a": ratio} if parts[0] in "ba" else {"q": key, "k": key, "v": value, "z": value}
    group_rows = sum(layout.values())
    pieces, target_row = [], 0
    for part in parts:
        offset = sum(list(layout.values())[: list(layout).index(part)])
        for group in range(groups):
            pieces.append(
                Piece(
                    name=name,
                    shape=(groups * group_rows, shape[1]),
                    first_row=group * group_rows + offset,
                    target_row=target_row,
                    num_rows=layout[part],
                )
            )
            target_row += layout[part]
    return pieces
