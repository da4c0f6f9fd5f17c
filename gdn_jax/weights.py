"""Filling a model's parameters: from safetensors files, or with seeded random numbers.

A load has two halves. The plan (`load_plan`) compares headers with parameters and refuses whatever does not fit, before
any weight is read. Then the files are read in order and each parameter is built on the device, large ones in slabs, so
that little host memory is needed beside the parameters themselves.

Which tensor goes where is `tensor_names`; files are `tensor_files`; FP8 is `quantization`; random numbers are `dummy`.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jaxtyping import Array, Float, Float32

from gdn_jax.config import ModelConfig
from gdn_jax.dummy import dummy_tensors
from gdn_jax.load_plan import Plan, Source, make_plan
from gdn_jax.quantization import decode, num_blocks, row_scales
from gdn_jax.slabs import build_array
from gdn_jax.tensor_files import NUMPY_DTYPES, StoredTensor, TensorFiles, list_tensors
from gdn_jax.tensor_names import ParameterPath, Targets, canonical_name, is_mtp, num_rows

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_LOG = logging.getLogger(__name__)


def load_weights[Model: nnx.Module](
    model: Model,
    config: ModelConfig,
    folder: str | Path,
    *,
    put_on: Sharding | None = None,
    progress: Progress | None = None,
) -> Model:
    """Return `model` with every parameter read from a folder of safetensors files.

    Args:
        model: parameters may be abstract; their shapes and dtypes are what the files must fill.
        config: of the same model.
        folder: as for `load_tensors`.
        put_on: where the parameters go; None is JAX's default device.
        progress: as for `load_tensors`.

    Raises:
        WeightsError: see `load_tensors`.
    """
    return _fill(model, lambda targets: load_tensors(folder, config, targets, put_on=put_on, progress=progress))


def dummy_weights[Model: nnx.Module](model: Model, seed: int = 0, *, put_on: Sharding | None = None) -> Model:
    """Return `model` with seeded random parameters; see `dummy.dummy_tensors`.

    Args:
        model: parameters may be abstract.
        seed: same seed, same weights.
        put_on: where the parameters go; None is JAX's default device.
    """
    return _fill(model, lambda targets: dummy_tensors(targets, seed, put_on=put_on))


def _fill[Model: nnx.Module](model: Model, make: Callable[[Targets], Mapping[ParameterPath, jax.Array]]) -> Model:
    graph, state = nnx.split(model)
    variables = cast("dict[ParameterPath, nnx.Variable]", dict(nnx.to_flat_state(state)))
    arrays = make({path: jax.ShapeDtypeStruct(param.shape, param.dtype) for path, param in variables.items()})
    return nnx.merge(graph, nnx.from_flat_state({path: variables[path].replace(arrays[path]) for path in variables}))


def has_mtp(folder: str | Path) -> bool:
    """Say whether a folder's weights hold an MTP head, from the headers alone.

    Raises:
        WeightsError: the files are missing or damaged.
    """
    return any(is_mtp(canonical_name(name) or "") for name in list_tensors(Path(folder)))


def load_tensors(
    folder: str | Path,
    config: ModelConfig,
    targets: Targets,
    *,
    put_on: Sharding | None = None,
    progress: Progress | None = None,
) -> dict[ParameterPath, jax.Array]:
    """Read the arrays of a set of parameters.

    Each tensor is taken in the dtype it is stored in (bfloat16, float16, float32, or float8 with block scales) and
    rounded once, to its parameter's.

    Args:
        folder: holds model.safetensors, or shards and model.safetensors.index.json.
        config: says how packed projections are grouped, and whether the head is tied.
        targets: shape and dtype of each parameter.
        put_on: where the arrays go, each as a whole (one device, or copies on several); None is JAX's default device.
        progress: called with bytes read and bytes to read (scales not counted), first with 0.

    Returns:
        One array per target.

    Raises:
        WeightsError: a file is damaged, or its tensors are not exactly those of the parameters, found before any weight
            is read; or a file changed while it was read.
    """
    with closing(TensorFiles(Path(folder))) as files:
        plan = make_plan(Path(folder), files.tensors, config, targets)
        reader = _Reader(files, plan, put_on=put_on, progress=progress)
        # In file order, so that a disk reads forward.
        order = sorted(plan, key=lambda path: (plan[path][0].tensor.file, plan[path][0].tensor.offset))
        return {path: reader.read(targets[path], plan[path]) for path in order}


class _Reader:
    """Builds planned parameters on the device and counts the bytes read for them."""

    def __init__(self, files: TensorFiles, plan: Plan, *, put_on: Sharding | None, progress: Progress | None) -> None:
        self._files = files
        self._put_on = put_on
        self._progress = progress or (lambda done, total: None)
        self._done = 0
        self._total = sum(source.num_bytes for sources in plan.values() for source in sources)
        _LOG.info("reading %d parameters, %.2f GiB", len(plan), self._total / 2**30)
        self._progress(0, self._total)

    def read(self, target: jax.ShapeDtypeStruct, sources: list[Source]) -> Float[Array, "..."]:
        """Return one parameter."""
        lead, rows = target.shape[0], num_rows(target.shape)

        def make_slab(start: int, stop: int) -> Float[Array, "..."]:
            # A vector has one row however long its only axis is; elsewhere each leading index has as many rows.
            stored, scale = self._read_rows(sources, start * rows // lead, stop * rows // lead)
            shape = (stop - start, *target.shape[1:])
            if scale is None and stored.dtype == target.dtype:
                return jax.device_put(stored.reshape(shape), self._put_on)
            return decode(*jax.device_put((stored, scale), self._put_on), shape=shape, dtype=target.dtype)

        return build_array(target, make_slab, self._put_on)

    def _read_rows(
        self, sources: list[Source], first: int, stop: int
    ) -> tuple[Float[np.ndarray, "rows width"], Float32[np.ndarray, "rows column_blocks"] | None]:
        """Return rows `first:stop` of a parameter as stored, and their scales if any of them is quantized.

        Rows stored in different dtypes come as float32, which holds each of them exactly; rows without scales among
        others that have some get scale 1.
        """
        sources = [source for source in sources if _overlap(source, first, stop)]
        dtypes = {NUMPY_DTYPES[source.tensor.dtype] for source in sources}
        width = sources[0].tensor.shape[-1]
        stored = np.empty((stop - first, width), dtypes.pop() if len(dtypes) == 1 else np.float32)
        scale = None
        if any(source.scale for source in sources):
            scale = np.ones((stop - first, num_blocks(width)), np.float32)
        for source in sources:
            rows = _overlap(source, first, stop)
            here = slice(rows.start - first, rows.stop - first)
            stored_row = source.piece.first_row + rows.start - source.piece.target_row
            self._read_into(stored[here], source.tensor, stored_row)
            if source.scale is not None and scale is not None:
                blocks = np.empty(source.scale.shape, NUMPY_DTYPES[source.scale.dtype])
                self._files.read_rows(source.scale, 0, blocks)
                scale[here] = row_scales(blocks, stored_row, len(rows))
        self._progress(self._done, self._total)
        return stored, scale

    def _read_into(self, out: Float[np.ndarray, "rows width"], tensor: StoredTensor, first_row: int) -> None:
        native = NUMPY_DTYPES[tensor.dtype]
        rows = out if out.dtype == native else np.empty(out.shape, native)
        self._files.read_rows(tensor, first_row, rows)
        if rows is not out:
            out[...] = rows.astype(out.dtype)
        self._done += rows.nbytes


def _overlap(source: Source, first: int, stop: int) -> range:
    """Return the rows of a parameter that a source fills, within `first:stop`; empty if none."""
    begin = source.piece.target_row
    return range(max(first, begin), min(stop, begin + source.piece.num_rows))
