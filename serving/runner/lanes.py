"""Sampling parameters by lane: set when a request gets its lane, kept on the device, read by each step's rows.

They are constant over a request's life, so a step sends lane numbers and nothing else; an array goes to the device
again when one of its lanes has changed. Every array has one shape for good: nothing a request asks for compiles anew.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from gdn_jax.serving.runner.adjust import NO_ADJUSTMENTS, RowAdjustments, pack_adjustments
from gdn_jax.serving.runner.sampling import Demand, LaneParameters, RowSampling, SampledRows, demand_of, pack_rows

MAX_BANNED = 1024  # most banned ids of a request; a step takes as many as its rows need (see sampling.py)


class LaneSampling:
    """One row of `LaneParameters` per lane, and how many alternatives the lane's request wants listed."""

    def __init__(self, num_lanes: int, *, tell_demand: bool = False) -> None:
        """Create lanes that nobody uses: greedy ones, and one more behind them for padding.

        Args:
            num_lanes: lanes.
            tell_demand: whether rows are marked by the most that they ask for, so that steps for those that ask for
                little are compiled apart; else as if they asked for anything.
        """
        self._num_lanes = num_lanes
        self._tell_demand = tell_demand
        self._demand = np.full((num_lanes + 1,), Demand.GREEDY, np.int8)
        self._num_top: list[int | None] = [None] * num_lanes
        nobody = _pack(RowSampling(), None, NO_ADJUSTMENTS)
        self._host: dict[str, np.ndarray] = {
            name: np.repeat(array, num_lanes + 1, axis=0) for name, array in nobody.items()
        }
        self._changed = set[str]()
        self._parameters = LaneParameters(**self._on_device(self._host))

    def assign(
        self, lane: int, row: RowSampling, num_logprobs: int | None, adjustments: RowAdjustments = NO_ADJUSTMENTS
    ) -> None:
        """Give a lane to a request."""
        self._num_top[lane] = num_logprobs
        asks_for_more = num_logprobs is not None or adjustments.adjusts
        self._demand[lane] = Demand.ANYTHING if asks_for_more else demand_of(row)
        for name, value in _pack(row, num_logprobs, adjustments).items():
            if not np.array_equal(self._host[name][lane], value[0]):
                self._host[name][lane] = value[0]
                self._changed.add(name)

    def release(self, lane: int) -> None:
        """Take a lane back: it is greedy and bans nothing until it is assigned again."""
        self.assign(lane, RowSampling(), None)

    def num_top(self, lane: int) -> int | None:
        """Return how many alternatives the lane's request wants; None for no log probabilities."""
        return self._num_top[lane]

    def gather(self, lane: np.ndarray, emits: np.ndarray) -> SampledRows:
        """Return the rows on these lanes, with the parameters of all lanes; the last lane is for padding.

        Args:
            lane: of each row.
            emits: whether the row wants the token after its last one.
        """
        if self._changed:
            self._parameters = replace(self._parameters, **self._on_device(self._changed))
            self._changed.clear()
        rows: Any = {"lane": lane, "emits": emits}
        demand = Demand(int(self._demand[lane].max())) if self._tell_demand else Demand.ANYTHING
        return SampledRows(lanes=self._parameters, demand=demand, **rows)

    def _on_device(self, names: Iterable[str]) -> dict[str, Any]:
        # Copies, since on a CPU the device may keep the very array that the next request changes.
        return {name: jax.device_put(self._host[name].copy()) for name in names}


def _pack(row: RowSampling, num_logprobs: int | None, adjustments: RowAdjustments) -> dict[str, np.ndarray]:
    """Return the fields of `LaneParameters` for one lane."""
    drawn: dict[str, Any] = vars(pack_rows([row], num_rows=1, num_banned=MAX_BANNED))
    adjusted = {name: array[None] for name, array in pack_adjustments(adjustments).items()}
    return {**drawn, "wants_logprobs": np.asarray([num_logprobs is not None]), **adjusted}
