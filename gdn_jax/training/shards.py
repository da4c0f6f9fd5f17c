"""Writing and reading named tensors as safetensors: one file, or shards of bounded size with an index."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

Tensors = Mapping[str, Shaped[np.ndarray, "..."]]


def write_tensors(folder: Path, stem: str, tensors: Tensors, *, most_bytes: int) -> None:
    """Write STEM.safetensors, or STEM-00001-of-0000N.safetensors and STEM.safetensors.index.json.

    Args:
        folder: exists.
        stem: "model" is what loaders look for.
        tensors: by name; in this order.
        most_bytes: of one file's tensors; a tensor that is larger has a file of its own. 0 for one file.
    """
    groups: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in tensors.items():
        size = sum(other.nbytes for other in groups[-1].values())
        if most_bytes and groups[-1] and size + tensor.nbytes > most_bytes:
            groups.append({})
        groups[-1][name] = np.ascontiguousarray(tensor).reshape(tensor.shape)
    if len(groups) == 1:
        save_file(groups[0], folder / f"{stem}.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for index, group in enumerate(groups, 1):
        file = f"{stem}-{index:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
    write_json(folder / f"{stem}.safetensors.index.json", index)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_tensors(folder: Path, stem: str) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Return what `write_tensors` has written.

    Raises:
        OSError: a file is missing.
        ValueError: a file is damaged.
    """
    index = folder / f"{stem}.safetensors.index.json"
    files = [f"{stem}.safetensors"]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    try:
        return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    except SafetensorError as error:
        raise ValueError(f"{folder}, {stem}: {error}") from error
