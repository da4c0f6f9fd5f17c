"""Pallas' interpreter of Mosaic GPU kernels: shared memory, bulk copies and barriers on the CPU, with races found."""

from collections.abc import Iterator
from contextlib import contextmanager

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # the public names do not tell whether there was a race
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextmanager
def interpreted() -> Iterator[None]:
    """Trace Mosaic kernels for the interpreter; memory that nobody has written holds NaN."""
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            yield
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def races_found() -> bool:
    """Return whether two threads of the newest interpreted call touched one place, one of them writing, in no order."""
    return gpu_callbacks.get_races().races_found
