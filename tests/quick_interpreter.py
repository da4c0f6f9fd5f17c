"""Pallas' interpreter of GPU kernels, its slowest parts made quick, which changes nothing that it finds.

Races: the interpreter compares the clock of each access to a buffer with those of all accesses before it, one by one.
Here NumPy compares them all, and Pallas' own search goes on among those that are in no order with the new one.

Callbacks: whatever a kernel does calls Python, and each argument of a call is put on a device, to be read back at once.
Here the arguments stay what they are: integers, and arrays of NumPy.

Products: the interpreter has NumPy's BLAS sum them in float32, where on some processors the order follows from where a
row lies. A tensor core has one order, and tests of bits rely on that. Here sums are in float64 and rounded once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from jax._src import callback, source_info_util
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock

Access = tuple[Any, NpVectorClock, Any, str]  # thread, clock, range, line of the kernel
_matmul = np.matmul  # which kernels are interpreted without


class Accesses:
    """The accesses of one kind to one buffer."""

    def __init__(self) -> None:
        self._made: list[Access] = []
        self._clocks = np.empty((1, 0), np.int32)  # by component and access, with room for more

    def append(self, access: Access) -> None:
        """Add one; its clock is kept as it stands."""
        count, clock = len(self._made), access[1].clock
        if count == self._clocks.shape[1]:
            room = np.empty((len(clock), 2 * count + 64), np.int32)
            room[:, :count] = self._clocks
            self._clocks = room
        self._clocks[:, count] = clock
        self._made.append(access)

    def in_no_order(self, clock: NpVectorClock) -> list[Access]:
        """Return those that are neither before a clock nor after it; one with an equal clock is among them."""
        known, now = self._clocks[:, : len(self._made)], clock.clock[:, None]
        is_before, is_after = (known <= now).all(0), (known >= now).all(0)
        return [self._made[index] for index in np.flatnonzero(is_before == is_after)]


def search_among_unordered(search: Callable[..., None], kind: str, others: tuple[str, ...]) -> Callable[..., None]:
    """Return a method that finds what `search` does, where an access of `kind` may race with those of `others`."""

    def check(self, thread, clock, buffer_key, rnge, source_info=None) -> None:
        line = "pallas_call" if source_info is None else source_info_util.summarize(source_info)
        with self.lock:
            seen = vars(self).setdefault("seen", defaultdict(Accesses))
            unordered = {other: seen[other, buffer_key].in_no_order(clock) for other in others}
            seen[kind, buffer_key].append((thread, clock, rnge, line))
        if any(unordered.values()):
            few = copy(self)
            few.reads, few.writes = ({buffer_key: unordered.get(name, [])} for name in ("reads", "writes"))
            try:
                search(few, thread, clock, buffer_key, rnge, source_info)
            finally:
                self.races_found |= few.races_found

    return check


def keep_on_host(arguments: Sequence[np.ndarray], device: object) -> list[Any]:
    """Return a callback's arguments: scalar integers as Python's, which is how the interpreter takes them, too."""
    return [x.item() if x.ndim == 0 and x.dtype.kind == "i" else np.asarray(x) for x in arguments]


def multiply(left: np.ndarray, right: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a product as `np.matmul` does, whose rows do not depend on where they lie."""
    return _matmul(left, right, dtype=np.float64).astype(dtype)


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Have kernels interpreted so; they must have run at the end of the block."""
    check_read = search_among_unordered(RaceDetectionState.check_read, "reads", ("writes",))
    check_write = search_among_unordered(RaceDetectionState.check_write, "writes", ("reads", "writes"))
    with (
        patch.multiple(RaceDetectionState, check_read=check_read, check_write=check_write),
        patch.object(callback, "api", SimpleNamespace(device_put=keep_on_host)),
        patch.object(np, "matmul", multiply),
    ):
        yield
