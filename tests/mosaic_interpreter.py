"""Pallas' interpreter of Mosaic GPU kernels: shared memory, bulk copies and barriers on the CPU, with races found."""

from collections.abc import Callable

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # the public names do not tell whether there was a race
from jax.experimental.pallas import mosaic_gpu as plgpu


def interpret[Result](run: Callable[[], Result]) -> Result:
    """Return what `run` returns, its Mosaic kernels interpreted; memory that nobody has written holds NaN.

    Raises:
        RuntimeError: two threads touched one place, one of them writing, in no order.
    """
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            result = jax.block_until_ready(run())
            if gpu_callbacks.get_races().races_found:  # newer versions of JAX raise by themselves
                raise RuntimeError("RACE DETECTED")
            return result
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
