"""Sampling parameters by lane, on the host: set when a request gets its lane, gathered by each step's rows."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from gdn_jax.serving.core.plan import RowPlan
from gdn_jax.serving.runner.buckets import fit
from gdn_jax.serving.runner.sampling import RowSampling, SamplingInputs, pack_rows

_BANNED_SIZES = (64, 4096)  # padded counts of banned ids: steps are compiled ahead for the first, hardly any need more
MAX_BANNED = _BANNED_SIZES[-1]


class LaneSampling:
    """One row of `SamplingInputs` per lane, and whether the lane's request wants log probabilities."""

    def __init__(self, num_lanes: int) -> None:
        """Create lanes that nobody uses: greedy ones, and one more behind them for padding."""
        self._num_lanes = num_lanes
        self._rows = [RowSampling()] * (num_lanes + 1)
        self._num_top = [-1] * num_lanes  # -1: no log probabilities wanted
        self._pack(_BANNED_SIZES[0])

    def assign(self, lane: int, row: RowSampling, num_logprobs: int | None) -> None:
        """Give a lane to a request."""
        self._rows[lane] = row
        self._num_top[lane] = -1 if num_logprobs is None else num_logprobs
        width = fit(_BANNED_SIZES, max(len(other.banned) for other in self._rows))
        if width != self._width:
            self._pack(width)
            return
        packed = vars(pack_rows([row], num_rows=1, num_banned=width))
        for name, array in self._arrays.items():
            array[lane] = packed[name][0]

    def _pack(self, width: int) -> None:
        self._width = width
        packed = pack_rows(self._rows, num_rows=len(self._rows), num_banned=width)
        self._arrays: dict[str, Any] = {item.name: getattr(packed, item.name) for item in fields(packed)}

    def num_top(self, lane: int) -> int | None:
        """Return how many alternatives the lane's request wants; None for no log probabilities."""
        return None if self._num_top[lane] < 0 else self._num_top[lane]

    def gather(self, rows: Sequence[RowPlan], num_rows: int) -> tuple[SamplingInputs, np.ndarray]:
        """Return the rows' parameters, padded with greedy rows, and whether any row wants log probabilities."""
        lanes = np.full((num_rows,), self._num_lanes, np.int32)
        lanes[: len(rows)] = [row.lane for row in rows]
        inputs = SamplingInputs(**{name: value[lanes] for name, value in self._arrays.items()})
        return inputs, np.asarray(any(self._num_top[row.lane] >= 0 for row in rows))
