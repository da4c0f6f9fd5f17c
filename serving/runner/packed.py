"""What a step is told by the host, as one array: each array that a call brings along costs a transfer of its own.

On a GPU's host that is a tenth of a millisecond for each of a dozen arrays of a few bytes, beside a step of three.

A compiler may hand a piece of the array to a kernel as it lies there, and Pallas kernels for GPUs refuse an array that
does not begin at a multiple of 256 bytes. So every piece does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from gdn_jax.kernels.anchors import AnyArray
from gdn_jax.serving.runner.sampling import Demand, LaneParameters, SampledRows
from gdn_jax.state import AdvanceBatch, PrefillBatch

ALIGNED_WORDS = 64  # at multiples of which pieces begin
Layout = tuple[Any, tuple[tuple[tuple[int, ...], str], ...]]  # how arrays are put together; shape and dtype of each


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """A step's rows and what their requests ask for.

    Attributes:
        words: all small arrays, one after the other, each from a multiple of `ALIGNED_WORDS` on.
        lanes: sampling parameters of all lanes, which stay on the device.
        layout: static: what the words mean.
        demand: static: as in `SampledRows`.
    """

    words: Int[AnyArray, "words"]
    lanes: LaneParameters
    layout: Layout = field(metadata={"static": True})
    demand: Demand = field(metadata={"static": True})

    def unpack(self) -> tuple[Any, SampledRows]:
        """Return the batch (`PrefillBatch` or `AdvanceBatch`) and the sampled rows; for inside a step."""
        tree, arrays = self.layout
        leaves, first = list[Array](), 0
        for shape, dtype in arrays:
            count = math.prod(shape)
            leaves.append(self.words[first : first + count].reshape(shape).astype(dtype))
            first += _aligned(count)
        batch, lane, emits = jax.tree.unflatten(tree, leaves)
        return batch, SampledRows(lanes=self.lanes, lane=lane, emits=emits, demand=self.demand)


def pack_inputs(batch: PrefillBatch | AdvanceBatch, sampling: SampledRows) -> StepInputs:
    """Put a batch and its rows' lanes, NumPy arrays of 32-bit integers and flags, into one array.

    Raises:
        ValueError: an array is of another dtype, which words cannot hold.
    """
    leaves, tree = jax.tree.flatten((batch, sampling.lane, sampling.emits))
    if others := {str(leaf.dtype) for leaf in leaves} - {"int32", "bool"}:
        raise ValueError(f"inputs of a step must be int32 or bool; got {', '.join(sorted(others))}; cast them")
    return StepInputs(
        words=_join(leaves),
        lanes=sampling.lanes,
        layout=(tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)),
        demand=sampling.demand,
    )


def _join(arrays: Sequence[np.ndarray]) -> Any:  # the jit boundary makes a device array of it
    words = np.zeros(sum(_aligned(array.size) for array in arrays), np.int32)
    first = 0
    for array in arrays:
        words[first : first + array.size] = array.reshape(-1)
        first += _aligned(array.size)
    return words


def _aligned(count: int) -> int:
    """Return how many words a piece of `count` takes."""
    return -(-count // ALIGNED_WORDS) * ALIGNED_WORDS
