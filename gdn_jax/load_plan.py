"""Comparing weight files with parameters, from headers alone, before any weight is read.

The plan binds each parameter to the runs of rows it is made of. Making it checks both ways: every parameter is covered
exactly once, every text tensor is used exactly once, and every float8 weight has its scales. All that is wrong goes
into one error.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gdn_jax.config import ModelConfig
from gdn_jax.errors import WeightsError
from gdn_jax.quantization import FLOAT8, SCALE_DTYPES, SCALE_SUFFIX, scale_shape
from gdn_jax.tensor_files import NUMPY_DTYPES, Problems, StoredTensor
from gdn_jax.tensor_names import ParameterPath, Piece, Targets, canonical_name, is_mtp, num_rows, pieces_of

_LOG = logging.getLogger(__name__)
_HEAD = "lm_head.weight"

_DUPLICATE = "a tensor may stand in the files under one name only (remove the copy)"
_MISSING = "tensors that the config calls for are missing (fetch the folder again, or correct config.json)"
_SPARE = "tensors belong to no parameter (is it another model's folder, or a quantization other than block FP8?)"
_SHAPE = "tensors have other shapes than the config says (correct config.json, or fetch the matching weights)"
_DTYPE = (
    f"weights must be stored as {', '.join(NUMPY_DTYPES)} (convert them, or use an unquantized or block-FP8 release)"
)
_NO_SCALE = f"a float8 weight needs its scales beside it, named with {SCALE_SUFFIX} (fetch the folder again)"
_NO_WEIGHT = "scales must belong to a float8 matrix (fetch the folder again)"
_SCALE_SHAPE = "scales must be one per block of 128 x 128 (other block sizes are not read)"
_SCALE_DTYPE = f"scales must be stored as {' or '.join(SCALE_DTYPES)} (convert them)"
_ROWS = "every row of a tensor must be used exactly once (the config contradicts itself)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A piece bound to the tensor that holds it, and to that tensor's scales if it is quantized."""

    piece: Piece
    tensor: StoredTensor
    scale: StoredTensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the piece in the file, its scales not counted."""
        return self.tensor.num_bytes // num_rows(self.tensor.shape) * self.piece.num_rows


Plan = dict[ParameterPath, list[Source]]


def make_plan(folder: Path, tensors: Mapping[str, StoredTensor], config: ModelConfig, targets: Targets) -> Plan:
    """Bind every parameter to its tensors.

    Args:
        folder: where the tensors are, for messages.
        tensors: by stored name.
        config: says how packed projections are grouped, and whether the head is tied.
        targets: shape of each parameter.

    Raises:
        WeightsError: something is missing, spare, misshapen, of a dtype that is not read, or without its scales; the
            message names it all.
    """
    problems = Problems(folder)
    text = _text_tensors(tensors, problems)
    _tell_of_unused_head(text, targets)
    text = {name: tensor for name, tensor in text.items() if not _is_unwanted(name, config, targets)}
    scales = {name: tensor for name, tensor in text.items() if name.endswith(SCALE_SUFFIX)}
    weights = {name: tensor for name, tensor in text.items() if name not in scales}
    _check_storage(weights, scales, problems)
    pieces = {path: pieces_of(path, target.shape, config, weights) for path, target in targets.items()}
    _check_use(pieces, weights, targets, problems)
    problems.raise_if_any()
    return {
        path: [
            Source(piece=piece, tensor=weights[piece.name], scale=scales.get(piece.name + SCALE_SUFFIX))
            for piece in parts
        ]
        for path, parts in pieces.items()
    }


def _text_tensors(tensors: Mapping[str, StoredTensor], problems: Problems) -> dict[str, StoredTensor]:
    """Return the text model's tensors by canonical name."""
    text: dict[str, StoredTensor] = {}
    for stored, tensor in tensors.items():
        name = canonical_name(stored)
        if name in text:
            problems.add(_DUPLICATE, f"{text[name].name} and {stored}")
        elif name is not None:
            text[name] = tensor
    return text


def _tell_of_unused_head(text: Iterable[str], targets: Targets) -> None:
    """Log that a head is left out: to whoever asked for none that is right, but never a thing to guess at."""
    unused = sum(map(is_mtp, text))
    if unused and not _has_head(targets):
        _LOG.info("%d tensors of the MTP head are not read: the model is loaded without it", unused)


def _has_head(targets: Targets) -> bool:
    return any(path[0] == "mtp" for path in targets)


def _is_unwanted(name: str, config: ModelConfig, targets: Targets) -> bool:
    """Say whether a text tensor is rightly left out: a model without MTP head, or a copy of the tied matrix."""
    if is_mtp(name):
        return not _has_head(targets)
    if name.startswith(_HEAD) and config.tie_word_embeddings:
        _LOG.info("%s is not read: the config ties the output matrix to the embedding", name)
        return True
    return False


def _check_storage(weights: Mapping[str, StoredTensor], scales: Mapping[str, StoredTensor], problems: Problems) -> None:
    """Check dtypes, and that float8 weights and scales come in pairs that fit."""
    for name, tensor in weights.items():
        if tensor.dtype not in NUMPY_DTYPES:
            problems.add(_DTYPE, f"{tensor.name} is {tensor.dtype}")
        if tensor.dtype == FLOAT8 and name + SCALE_SUFFIX not in scales:
            problems.add(_NO_SCALE, tensor.name)
    for name, scale in scales.items():
        weight = weights.get(name.removesuffix(SCALE_SUFFIX))
        if weight is None or weight.dtype != FLOAT8 or len(weight.shape) != 2:
            found = "no weight" if weight is None else f"{weight.dtype} of shape {list(weight.shape)}"
            problems.add(_NO_WEIGHT, f"{scale.name} beside {found}")
            continue
        if scale.shape != scale_shape(weight.shape):
            expected = f"{list(scale_shape(weight.shape))} for a weight of {list(weight.shape)}"
            problems.add(_SCALE_SHAPE, f"{scale.name}: expected {expected}, got {list(scale.shape)}")
        if scale.dtype not in SCALE_DTYPES:
            problems.add(_SCALE_DTYPE, f"{scale.name} is {scale.dtype}")


def _check_use(
    pieces: Mapping[ParameterPath, list[Piece]],
    weights: Mapping[str, StoredTensor],
    targets: Targets,
    problems: Problems,
) -> None:
    """Check that pieces and tensors, and pieces and parameters, cover each other exactly."""
    expected: dict[str, tuple[int, ...]] = {}
    used: dict[str, list[tuple[int, int]]] = {}
    for path, parts in pieces.items():
        if not _tile(((part.target_row, part.num_rows) for part in parts), num_rows(targets[path].shape)):
            name = ".".join(map(str, path))
            raise WeightsError(
                f"parameter {name} of shape {list(targets[path].shape)} is not what the config's sizes make it; "
                "build the model from the same config that loads it"
            )
        for part in parts:
            expected[part.name] = part.shape
            used.setdefault(part.name, []).append((part.first_row, part.num_rows))
    for name, shape in expected.items():
        if name not in weights:
            problems.add(_MISSING, name)
        elif weights[name].shape != shape:
            problems.add(_SHAPE, f"{weights[name].name}: expected {list(shape)}, got {list(weights[name].shape)}")
        elif not _tile(used[name], num_rows(shape)):
            problems.add(_ROWS, weights[name].name)
    for name, tensor in weights.items():
        if name not in expected:
            problems.add(_SPARE, tensor.name)


def _tile(runs: Iterable[tuple[int, int]], total: int) -> bool:
    """Say whether runs (first, length), in any order, cover 0..total exactly once."""
    end = 0
    for first, length in sorted(runs):
        if first != end:
            return False
        end += length
    return end == total
