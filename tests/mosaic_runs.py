"""Mosaic GPU kernels in tests: on a GPU as they are, elsewhere in Pallas' interpreter, which finds races too."""

from collections.abc import Callable

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # the public names do not tell whether there was a race
from jax.experimental.pallas import mosaic_gpu as plgpu

ON_GPU = jax.default_backend() == "gpu"


def run_mosaic[Result](run: Callable[[], Result]) -> Result:
    """Return what `run` returns: its Mosaic kernels compiled on a GPU, elsewhere interpreted.

    In the interpreter memory that nobody has written holds NaN.

    Raises:
        RuntimeError: two interpreted threads touched one place, one of them writing, in no order.
    """
    if ON_GPU:
        return jax.block_until_ready(run())
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            result = jax.block_until_ready(run())
            # Newer versions of JAX raise by themselves; older ones know of the last kernel alone that `run` calls.
            if gpu_callbacks.get_races().races_found:
                raise RuntimeError("RACE DETECTED")
            return result
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
