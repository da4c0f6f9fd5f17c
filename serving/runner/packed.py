"""What a step is told by the host, as one array: each array that a call brings along costs a transfer of its own.

On a GPU's host that is a tenth of a millisecond for each of a dozen arrays of a few bytes, beside a step of three.
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

Layout = tuple[Any, tuple[tuple[tuple[int, ...], str], ...]]  # how arrays are put together; shape and dtype of each


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """A step's rows and what their requests ask for.

    Attributes:
        words: all small arrays, one after the other.
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
            last = first + math.prod(shape)
            leaves.append(self.words[first:last].reshape(shape).astype(dtype))
            first = last
        batch, lane, emits = jax.tree.unflatten(tree, leaves)
        return batch, SampledRows(lanes=self.lanes, lane=lane, emits=emits, demand=self.demand)


def pack_inputs(batch: PrefillBatch | AdvanceBatch, sampling: SampledRows) -> StepInputs:
    """Put a batch and its rows' lanes, NumPy arrays of 32-bit integers and flags, into one array."""
    leaves, tree = jax.tree.flatten((batch, sampling.lane, sampling.emits))
    return StepInputs(
        words=_join(leaves),
        lanes=sampling.lanes,
        layout=(tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)),
        demand=sampling.demand,
    )


def _join(arrays: Sequence[np.ndarray]) -> Any:  # the jit boundary makes a device array of it
    return np.concatenate([array.reshape(-1).astype(np.int32) for array in arrays])
