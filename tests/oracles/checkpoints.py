"""Write small random checkpoints in every published layout, the same bytes for the same arguments.

`write_checkpoint(folder, "q35-moe", seed=3, num_experts=6)` is all a test needs: config.json, generation_config.json,
the weights, the tokenizer and the chat template. Families: next-moe, next-dense, q35-dense, q35-moe (nested),
q35-dense-flat, q35-moe-flat (text-only exports), and each of them with -fp8. The fields of `CheckpointSizes` are the
sizes and their defaults.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from oracles import checkpoint_text
from oracles.checkpoint_sizes import CheckpointSizes, config_json, resolve
from oracles.checkpoint_weights import common_weights, stored_weights

_DTYPES = {"float32": "F32", "int32": "I32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
_RARE = 0.25  # factor on the rows of unreadable tokens
_PADDING = 0.02  # factor on the rows without a token: releases leave them untrained


def write_checkpoint(
    folder: str | Path,
    family: str,
    seed: int,
    *,
    edit: Callable[[dict[str, np.ndarray]], None] | None = None,
    **sizes: Any,
) -> Path:
    """Write a checkpoint and return its folder.

    Args:
        folder: made if missing; files of the same names are overwritten.
        family: one of the families of the module docstring.
        seed: of the weights; a tensor depends on it and on the tensor's own unprefixed name only, so the same seed and
            sizes are the same model in every layout (up to FP8 rounding).
        edit: changes the random weights, by their unprefixed names, before they are stored.
        **sizes: any field of `CheckpointSizes`.

    Raises:
        ValueError: the family does not exist or the sizes contradict each other.
        TypeError: a size has an unknown name.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    base, chosen = resolve(family, sizes)
    ids = _special_ids(chosen)
    weights = common_weights(base, chosen, seed, _token_scales(chosen))
    if edit is not None:
        edit(weights)
    tensors = stored_weights(base, chosen, weights, seed)
    quantized_not = [name.removesuffix(".weight") for name in tensors if f"{name}_scale_inv" not in tensors]
    quantized_not = [name for name in quantized_not if not name.endswith("_scale_inv")]
    _write_json(folder / "config.json", config_json(base, chosen, ids, quantized_not))
    _write_json(folder / "generation_config.json", _generation_config(base, ids))
    _write_weights(folder, chosen, tensors)
    if chosen.text:
        _write_text(folder, base, chosen)
    return folder


def _special_ids(sizes: CheckpointSizes) -> dict[str, int]:
    if sizes.text:
        return checkpoint_text.vocabulary(sizes.vocab_size)[2]
    return {token: i for i, token in enumerate(checkpoint_text.SPECIAL_TOKENS)}  # no tokenizer: any ids will do


def _token_scales(sizes: CheckpointSizes) -> np.ndarray:
    """Return the factor on each token's row of the output matrix [V]."""
    scales = np.ones(sizes.vocab_size)
    if sizes.text:
        if sizes.readable:
            scales[:] = _RARE
            scales[checkpoint_text.readable_ids(sizes.vocab_size)] = 1.0
        scales[checkpoint_text.num_tokens(sizes.vocab_size) :] = _PADDING
    return scales


def _generation_config(family: str, ids: dict[str, int]) -> dict[str, Any]:
    """Return the family's sampling defaults, with two end tokens of which config.json names one."""
    end, stop = ids["<|endoftext|>"], ids["<|im_end|>"]
    sampling = {"temperature": 0.7, "top_p": 0.8} if family.startswith("next") else {"temperature": 1.0, "top_p": 0.95}
    return {
        "bos_token_id": end,
        "do_sample": True,
        "eos_token_id": [stop, end],
        "pad_token_id": end,
        "top_k": 20,
    } | sampling


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write one file: the length of the header, a padded JSON header, the raw tensors.

    Done by hand, since the library orders and pads as its version likes, and equal tensors must give equal bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start, chunks = 0, []
    # Widest items first keeps every tensor aligned to its item size, as readers that map the file expect.
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        chunks.append(np.ascontiguousarray(tensors[name]).tobytes())
        end = start + len(chunks[-1])
        dtype = _DTYPES[str(tensors[name].dtype)]
        header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def _write_weights(folder: Path, sizes: CheckpointSizes, tensors: dict[str, np.ndarray]) -> None:
    """Write model.safetensors, or shards with an index: neighbours go to different shards, as loaders must expect."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for i, name in enumerate(sorted(tensors)):
        if sizes.mtp_in_own_file and name.startswith("mtp."):
            file = "mtp.safetensors"
        elif sizes.num_shards == 1:
            file = "model.safetensors"
        else:
            file = f"model-{i % sizes.num_shards + 1:05d}-of-{sizes.num_shards:05d}.safetensors"
        groups.setdefault(file, {})[name] = tensors[name]
    for file, group in groups.items():
        write_safetensors(folder / file, group)
    if len(groups) > 1:
        weight_map = {name: file for file, group in groups.items() for name in group}
        size = sum(array.nbytes for array in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_text(folder: Path, family: str, sizes: CheckpointSizes) -> None:
    text = checkpoint_text.tokenizer_json(family, sizes.vocab_size)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json", checkpoint_text.tokenizer_config(family, sizes.max_position_embeddings)
    )
    if not family.startswith("next"):
        (folder / "chat_template.jinja").write_text(checkpoint_text.Q35_TEMPLATE, encoding="utf-8")
