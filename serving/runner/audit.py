"""Audit: what stands in the published slots and pages, compared with a fresh computation of the same tokens.

An Auditor owns the tokens behind published names, digests of what it has found right, and a small state of its own in
which it computes sequences again, one block at a time. It changes nothing in the pools that it reads. What it has found
right is not computed again while its bytes stay the same, so a later overwrite shows. Slow; for tests and for hunting
bugs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from gdn_jax.kernels.anchors import NULL_SLOT, PrefillRows
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.serving.runner.lanes import LaneSampling
from gdn_jax.serving.runner.packed import pack_inputs
from gdn_jax.serving.runner.pools import DeviceState
from gdn_jax.serving.runner.steps import Params, StepStatic, prefill_step
from gdn_jax.state import ModelState, PrefillBatch, RecurrentState

# Largest error allowed, as a share of the largest number of the array. The audit runs other shapes than the step that
# wrote the data, and decode folds token by token where prefill works in chunks, so sums are rounded in another order:
# about 1e-6 in float32. In the short dtypes a layer's input is rounded to 2^-11 or 2^-8, and a stack of layers adds up
# a few such steps.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
_OWN_SLOT = 1


@dataclass(frozen=True, kw_only=True)
class AuditSequence:
    """Tokens of one sequence and the names of its full blocks, in order."""

    tokens: tuple[int, ...]
    names: tuple[bytes, ...]


class Pools:
    """A device state on the host: by kind of name, the arrays whose first axis the places of such names index."""

    def __init__(self, state: ModelState) -> None:
        """Copy a state; the next step may then donate it."""
        self._arrays: dict[str, dict[str, np.ndarray]] = {"checkpoint": {}, "block": {}}
        for index, layer in enumerate(state.layers):
            if isinstance(layer, RecurrentState):
                self._arrays["checkpoint"] |= {
                    f"layer {index}'s recurrent state": np.array(layer.recurrent),
                    f"layer {index}'s convolution window": np.array(layer.conv),
                }
            else:
                self._arrays["block"] |= {
                    f"layer {index}'s keys": np.array(layer.k),
                    f"layer {index}'s values": np.array(layer.v),
                }
        self._arrays["checkpoint"]["the hidden vector"] = np.array(state.hidden)
        if state.mtp is not None:
            self._arrays["block"] |= {
                "the MTP head's keys": np.array(state.mtp.k),
                "the MTP head's values": np.array(state.mtp.v),
            }

    def content(self, kind: str, place: int) -> dict[str, np.ndarray]:
        """Return what a checkpoint's slot or a block's page holds, by name."""
        return {part: array[place] for part, array in self._arrays[kind].items()}

    def digest(self, kind: str, place: int) -> bytes:
        """Return a digest of that."""
        digest = sha256()
        for array in self.content(kind, place).values():
            digest.update(array.tobytes())
        return digest.digest()


class Recomputation:
    """Computes one sequence at a time from nothing, in a state of one slot and the pages of one sequence."""

    def __init__(
        self, static: StepStatic, params: Params, state: DeviceState, *, block_size: int, max_blocks: int
    ) -> None:
        """Compute with a model.

        Args:
            static: the model, as the audited steps have it.
            params: its parameters.
            state: nobody else's, with slots 0 and 1 and pages 0..max_blocks.
            block_size: tokens per block.
            max_blocks: blocks of the longest sequence.
        """
        self._static, self._params, self._state = static, params, state
        self._block_size = block_size
        self._table = _int32([range(1, max_blocks + 1)])
        self._sampling = LaneSampling(0).gather(np.zeros((1,), np.int32), np.zeros((1,), np.bool_))

    def pools(self, tokens: Sequence[int], num_blocks: int) -> Iterator[Pools]:
        """Yield the pools after each of the first `num_blocks` blocks.

        Slot 1 holds the state then; the keys and values of the sequence's block b stand in page b + 1.
        """
        size = self._block_size
        for block in range(num_blocks):
            batch = PrefillBatch(
                token_ids=_int32(tokens[block * size : (block + 1) * size]),
                rows=PrefillRows(
                    offset=_int32([0]),
                    length=_int32([size]),
                    start=_int32([block * size]),
                    read_slot=_int32([_OWN_SLOT if block else NULL_SLOT]),
                    write_slot=_int32([_OWN_SLOT]),
                    export_slot=_int32([[NULL_SLOT]]),
                ),
                block_tables=self._table,
            )
            inputs = pack_inputs(batch, self._sampling)
            *_, self._state = prefill_step(self._static, self._params, self._state, inputs)
            yield Pools(self._state.model)


class Auditor:
    """Checks published checkpoints and blocks; see the module docstring."""

    def __init__(
        self, read: Callable[[], ModelState], recomputation: Recomputation, *, block_size: int, tolerance: float
    ) -> None:
        """Audit pools.

        Args:
            read: returns the audited state, between two steps.
            recomputation: of the same model.
            block_size: tokens per block.
            tolerance: as the table above.
        """
        self._read, self._recomputation = read, recomputation
        self._block_size, self._tolerance = block_size, tolerance
        self._found: dict[bytes, tuple[AuditSequence, int]] = {}  # a name: whose, and its number of blocks
        self._right: dict[tuple[str, bytes], bytes] = {}  # digests of what was compared and found right

    def forget(self) -> None:
        """Start afresh, as after pools were emptied."""
        self._found.clear()
        self._right.clear()

    def check(
        self,
        sequences: Iterable[AuditSequence],
        *,
        checkpoints: Iterable[tuple[bytes, int]],
        blocks: Iterable[tuple[bytes, int]],
    ) -> None:
        """Compare every published checkpoint and block with its name's tokens.

        Args:
            sequences: those that the step just committed had rows of; nothing else can have got a new name.
            checkpoints: every published name and its state slot.
            blocks: every published name and its KV block.

        Raises:
            InvariantError: the content differs, or nobody knows the tokens of a name; the message says which.
        """
        for sequence in sequences:
            for index, name in enumerate(sequence.names):
                self._found.setdefault(name, (sequence, index + 1))
        places = {("checkpoint", name): slot for name, slot in checkpoints}
        places |= {("block", name): block for name, block in blocks}
        pools = Pools(self._read())
        digests = {key: pools.digest(key[0], place) for key, place in places.items()}
        doubtful = {key for key, digest in digests.items() if self._right.get(key) != digest}
        names = {name for _, name in places}
        self._found = {name: found for name, found in self._found.items() if name in names}
        while doubtful:
            self._compare_sequence(pools, places, doubtful)
        self._right = digests

    def _compare_sequence(
        self, pools: Pools, places: Mapping[tuple[str, bytes], int], doubtful: set[tuple[str, bytes]]
    ) -> None:
        """Compute the longest doubtful sequence again, and compare and strike out all that it passes."""
        unknown = [key for key in doubtful if key[1] not in self._found]
        if unknown:
            raise InvariantError(f"{_described(*unknown[0])} is published, and no step ran its tokens")
        sequence, num_blocks = max((self._found[name] for _, name in doubtful), key=lambda found: found[1])
        for block, fresh in enumerate(self._recomputation.pools(sequence.tokens, num_blocks)):
            for kind, own_place in (("checkpoint", _OWN_SLOT), ("block", block + 1)):
                key = (kind, sequence.names[block])
                if key not in doubtful:
                    continue
                expected = fresh.content(kind, own_place)
                for part, array in pools.content(kind, places[key]).items():
                    error = _error(array, expected[part])
                    if not error <= self._tolerance:
                        raise InvariantError(
                            f"{_described(*key)}, after {(block + 1) * self._block_size} tokens, in place "
                            f"{places[key]}: {part} differs from a fresh computation by {error:.3g} of its largest "
                            f"number; at most {self._tolerance:g} is rounding"
                        )
                doubtful.discard(key)


def _int32(values: Sequence[object]) -> Any:
    """Return an array that may stand in a pytree that kernels read: the jit boundary makes a device array of it."""
    return np.asarray(values, np.int32)


def _described(kind: str, name: bytes) -> str:
    return f"{kind} {name.hex()[:16]}"


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, as a share of the largest expected number; NaN where one is not a number."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    scale = max(float(np.max(np.abs(expected))), float(np.finfo(np.float32).tiny))
    return float(np.max(np.abs(found - expected))) / scale
