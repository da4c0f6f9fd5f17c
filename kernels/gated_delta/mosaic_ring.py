"""The chunks of a row, and rings in shared memory in which they arrive for the warpgroups of the serial kernel.

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
        size: stages.
        readers: warpgroups that read each of them.
    """
    return {
        "stage": stage,
        "here": plgpu.Barrier(num_arrivals=len(stage), num_barriers=size),
        "free": plgpu.Barrier(num_arrivals=readers, num_barriers=size),
    }


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Arrays in shared memory that arrive again and again, each time in the stage that is next.

    Attributes:
        stage: arrays `[size, ...]` by name.
        here: a barrier for each stage; completes when its arrays have arrived.
        free: a barrier for each stage; completes when all warpgroups have read them.
        size: stages; 2 or more where one is waited for before the one before it is released.
    """

    stage: dict[str, Any]
    here: Any
    free: Any
    size: int

    def _at(self, index: Array) -> Array:
        return lax.rem(index, jnp.int32(self.size))

    def copy(self, index: Array, sources: dict[str, Any]) -> None:
        """Have arrays copied from global memory, as soon as there is room; those without a source stay as they are."""
        stage = self._at(index)
        pl.when(index >= self.size)(lambda: plgpu.barrier_wait(self.free.at[stage]))
        for name, room in self.stage.items():
            if name in sources:
                plgpu.copy_gmem_to_smem(sources[name], room.at[stage], self.here.at[stage])
            else:
                plgpu.barrier_arrive(self.here.at[stage])

    def see_out(self, count: Array) -> None:
        """Wait until all that was copied has been read: every completion of a barrier is to be waited for."""

        def wait(index: Array, nothing: None) -> None:
            plgpu.barrier_wait(self.free.at[self._at(index)])
            return nothing

        lax.fori_loop(jnp.maximum(count - self.size, 0), count, wait, None)

    def wait(self, index: Array) -> None:
        """Wait until arrays have arrived."""
        plgpu.barrier_wait(self.here.at[self._at(index)])

    def arrays(self, index: Array) -> dict[str, Any]:
        """Return arrays, which may not have arrived yet."""
        return {name: ref.at[self._at(index)] for name, ref in self.stage.items()}

    def release(self, index: Array) -> None:
        """Say that this warpgroup reads them no more."""
        plgpu.barrier_arrive(self.free.at[self._at(index)])
