"""The chunks of a row, and the ring in shared memory in which they arrive for the warpgroups of the serial kernel.

The kernel before the delta rule in the mixer (`gdn_mixer/mosaic_prefill_tiles.py`) finds a row's chunks here, too.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from gdn_jax.kernels.numerics import CHUNK


@dataclass(frozen=True, kw_only=True)
class Span:
    """The chunks of one row."""

    row: Array
    count: Array  # of chunks; 0 for an empty row
    number: Array  # of the first chunk, on the grid axis
    lead: Array  # places of that chunk before the row's first token
    end: Array  # places from its first one to one past the row's last token

    def places(self, index: Array) -> Any:
        """Return the places of a chunk on the grid axis."""
        return pl.ds(pl.multiple_of((self.number + index) * CHUNK, CHUNK), CHUNK)


def span_of(rows: dict[str, Any], row: Array) -> Span:
    """Return the chunks of a row, where `chunk_grid.py` lays them out; for inside a kernel."""
    offset, length = rows["offset"][row], rows["length"][row]
    lead = rows["start"][row] & (CHUNK - 1)
    count = lax.div(lead + length + (CHUNK - 1), jnp.int32(CHUNK))
    return Span(
        row=row,
        count=jnp.where(length > 0, count, 0),
        number=lax.div(offset, jnp.int32(CHUNK)) + 2 * row,
        lead=lead,
        end=lead + length,
    )


def ring_room(stage: dict[str, Any], size: int, readers: int) -> dict[str, Any]:
    """Return what a ring takes of shared memory and barriers: the fields of `Ring` but for its size.

    Args:
        stage: arrays `[size, ...]` by name, each to be copied by itself.
        size: chunks that there is room for.
        readers: warpgroups that read each chunk.
    """
    return {
        "stage": stage,
        "here": plgpu.Barrier(num_arrivals=len(stage), num_barriers=size),
        "free": plgpu.Barrier(num_arrivals=readers, num_barriers=size),
    }


@dataclass(frozen=True, kw_only=True)
class Ring:
    """What chunks need, in shared memory: chunk after chunk, each in the stage that is next.

    Attributes:
        stage: arrays `[size, ...]` by name.
        here: a barrier for each stage; completes when a chunk has arrived.
        free: a barrier for each stage; completes when all warpgroups have multiplied with a chunk.
        size: stages; 2 or more where the next chunk is waited for before one is released.
    """

    stage: dict[str, Any]
    here: Any
    free: Any
    size: int

    def _at(self, index: Array) -> Array:
        return lax.rem(index, jnp.int32(self.size))

    def copy(self, index: Array, sources: dict[str, Any]) -> None:
        """Have a chunk copied from global memory, as soon as there is room."""
        stage = self._at(index)
        pl.when(index >= self.size)(lambda: plgpu.barrier_wait(self.free.at[stage]))
        for name, room in self.stage.items():
            plgpu.copy_gmem_to_smem(sources[name], room.at[stage], self.here.at[stage])

    def see_out(self, count: Array) -> None:
        """Wait until all chunks have been read: every completion of a barrier is to be waited for."""

        def wait(index: Array, nothing: None) -> None:
            plgpu.barrier_wait(self.free.at[self._at(index)])
            return nothing

        lax.fori_loop(jnp.maximum(count - self.size, 0), count, wait, None)

    def wait(self, index: Array) -> None:
        """Wait until a chunk has arrived."""
        plgpu.barrier_wait(self.here.at[self._at(index)])

    def chunk(self, index: Array) -> dict[str, Any]:
        """Return the arrays of a chunk, which may not have arrived yet."""
        return {name: ref.at[self._at(index)] for name, ref in self.stage.items()}

    def release(self, index: Array) -> None:
        """Say that this warpgroup reads a chunk no more."""
        plgpu.barrier_arrive(self.free.at[self._at(index)])
