"""Safetensors files of a model folder: which files count, what their headers promise, and reading rows of a tensor.

Owns the open files. Knows nothing of models: names are as stored. Headers are checked in full before anything else is
read (layout of the format: 8 bytes of little-endian header length, a JSON header, then the tensors back to back), and
rows are read with plain file reads into the caller's memory, so that no file is ever mapped into the process.
"""

import json
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from gdn_jax.errors import WeightsError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
NUMPY_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}

_LOG = logging.getLogger(__name__)
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_BITS = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """What a header says of one tensor.

    Attributes:
        name: as stored.
        file: the file that holds it.
        dtype: the format's spelling, e.g. "BF16".
        shape: as stored.
        offset: bytes from the start of the file to its first element.
        num_bytes: bytes of its elements.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Problems:
    """Collects what is wrong with a folder, by rule, so that one error can tell all of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_rule: dict[str, list[str]] = {}

    def add(self, rule: str, item: str) -> None:
        """Note that `item` (a name, with the value found) breaks `rule` (which also says the remedy)."""
        self._by_rule.setdefault(rule, []).append(item)

    def raise_if_any(self) -> None:
        """Raise one WeightsError that lists, for each rule, the first items and how many there are."""
        if self._by_rule:
            parts = [f"{rule}: {first_few(items)}" for rule, items in self._by_rule.items()]
            raise WeightsError(f"cannot load the weights in {self._folder}: " + "; ".join(parts))


def first_few(items: Iterable[str]) -> str:
    """Join the first 5 of `items`, and say how many there are when there are more."""
    items = list(items)
    return ", ".join(items[:5]) + (f", ... ({len(items)} in all)" if len(items) > 5 else "")


class TensorFiles:
    """The weight files of one folder, for reading; `close` when done.

    Attributes:
        tensors: every stored tensor by its stored name, in file order.
    """

    def __init__(self, folder: Path) -> None:
        """Read and check every header; log which safetensors files of the folder do not count.

        Raises:
            WeightsError: see `list_tensors`.
        """
        self.tensors = list_tensors(folder)
        self._open: dict[Path, int] = {}
        unused = {path.name for path in folder.glob("*.safetensors")} - {t.file.name for t in self.tensors.values()}
        if unused:
            _LOG.info(
                "%s: not read, since neither %s nor the index names them: %s",
                folder,
                SINGLE_NAME,
                first_few(sorted(unused)),
            )

    def close(self) -> None:
        """Close the files that reads have opened."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read_rows(self, tensor: StoredTensor, first_row: int, out: Shaped[np.ndarray, "rows width"]) -> None:
        """Fill `out` with consecutive rows of a tensor seen as `[-1, its last axis]`.

        Args:
            tensor: one of `tensors`, of the dtype of `out`.
            first_row: the row that goes to `out[0]`.
            out: C-contiguous; as wide as the tensor's last axis.

        Raises:
            WeightsError: the file became unreadable or shorter since its header was checked.
        """
        target = memoryview(out.view(np.uint8).reshape(-1))
        position = tensor.offset + first_row * out.shape[1] * out.dtype.itemsize
        try:
            if tensor.file not in self._open:
                self._open[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            while target:
                count = os.preadv(self._open[tensor.file], [target], position)
                if count == 0:
                    raise WeightsError(
                        f"{tensor.file} ended inside tensor {tensor.name}: it became shorter while it was read; "
                        "let the download finish, then load again"
                    )
                target, position = target[count:], position + count
        except OSError as error:
            raise WeightsError(f"{tensor.file} cannot be read ({error}); check the file and its permissions") from error


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a folder's weight files by stored name, from the headers alone.

    With an index, exactly the files it names count; without one, model.safetensors does.

    Raises:
        WeightsError: no weight file; an index that is damaged, names a missing file, or disagrees with the files; a
            file that is not a whole safetensors file; a tensor that two files hold.
    """
    index = folder / INDEX_NAME
    weight_map = _read_index(index) if index.is_file() else None
    files = sorted(set(weight_map.values())) if weight_map is not None else [_single_file(folder).name]
    problems = Problems(folder)
    for name in files:
        if not (folder / name).is_file():
            problems.add(f"{INDEX_NAME} names files that are missing (fetch the folder again)", name)
    problems.raise_if_any()
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        for tensor in read_header(folder / name):
            if tensor.name in tensors:
                item = f"{tensor.name} in {tensors[tensor.name].file.name} and {name}"
                problems.add("a tensor may stand in one file only (remove the stray file or correct the index)", item)
            tensors[tensor.name] = tensor
    if weight_map is not None:
        _compare_index(weight_map, tensors, problems)
    problems.raise_if_any()
    return tensors


def _compare_index(weight_map: dict[str, str], tensors: dict[str, StoredTensor], problems: Problems) -> None:
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            rule = f"{INDEX_NAME} names tensors that are not in the file it gives (fetch the folder again)"
            problems.add(rule, f"{name} in {file}")
    for name, tensor in tensors.items():
        if name not in weight_map:
            rule = f"{INDEX_NAME} must name every tensor of its files (it is stale or cut; fetch it again)"
            problems.add(rule, f"{name} in {tensor.file.name}")


def _single_file(folder: Path) -> Path:
    """Return model.safetensors, or say what else the folder holds."""
    single = folder / SINGLE_NAME
    if single.is_file():
        return single
    if single.is_symlink() or single.exists():
        found = "no file" if single.exists() else "a link to a file that is not there"
        raise WeightsError(f"{single} must be a file; it is {found}; fetch it again")
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", *_PICKLE_SUFFIXES))
    rule = f"weights must be in {SINGLE_NAME}, or in shards named by {INDEX_NAME}"
    if any(name.endswith(".safetensors") for name in others):
        raise WeightsError(f"{rule}; {folder} has only {first_few(others)}; fetch the index too")
    if others:
        raise WeightsError(
            f"{rule}; {folder} has only {first_few(others)}, and only safetensors is read, never pickled files; "
            "convert them to safetensors"
        )
    raise WeightsError(f"{rule}; {folder} has neither; fetch the weights, or use load_format='dummy' for random ones")


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's map from tensor name to the name of a file in the same folder."""
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise WeightsError(f"{path} must be a JSON file; it cannot be read ({error}); fetch it again") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} must hold a non-empty object weight_map; got {weight_map!r}; fetch it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or "\0" in file:
            raise WeightsError(
                f"{path} must name files of its own folder; got {file!r} for {name}; put every shard beside the index"
            )
    return weight_map


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of one safetensors file, in the order of their data.

    Raises:
        WeightsError: the file is not a whole, well-formed safetensors file.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8:
                raise _damaged(path, f"it has {file_bytes} bytes, fewer than the 8 of the header length")
            if not 0 < header_bytes <= min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, f"its header length reads {header_bytes} in a file of {file_bytes} bytes")
            header = json.loads(file.read(header_bytes), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, WeightsError):
            raise
        raise _damaged(path, f"its header cannot be read ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    tensors = sorted(
        (_stored_tensor(path, name, entry, start) for name, entry in header.items()),
        key=lambda tensor: (tensor.offset, tensor.num_bytes),
    )
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            where = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise _damaged(path, f"tensor {tensor.name} {where} (byte {tensor.offset}, expected {end})")
        end += tensor.num_bytes
    if end != file_bytes:
        raise _damaged(path, f"its header describes {end} bytes, but the file has {file_bytes}")
    return tensors


def _stored_tensor(path: Path, name: str, entry: object, start: int) -> StoredTensor:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _damaged(path, f"tensor {name} has dtype {dtype!r}, unknown to the format")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"tensor {name} has shape {shape!r} and offsets {offsets!r}, which must be counts")
    num_bytes = math.prod(shape) * _BITS[dtype] // 8
    if offsets[1] - offsets[0] != num_bytes:
        raise _damaged(path, f"tensor {name}, {dtype} {shape}, needs {num_bytes} bytes; its offsets are {offsets}")
    return StoredTensor(
        name=name, file=path, dtype=dtype, shape=tuple(shape), offset=start + offsets[0], num_bytes=num_bytes
    )


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object, refusing a key that comes twice (the later would silently win)."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name comes twice")
    return result


def _damaged(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{path} must be a whole safetensors file: {what}; fetch the file again")
