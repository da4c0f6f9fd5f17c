"""Mosaic GPU kernels in tests: on a GPU as they are, elsewhere in Pallas' interpreter, which finds races too."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # the public names do not tell whether there was a race
from jax.experimental.pallas import mosaic_gpu as plgpu
from quick_interpreter import quick_interpreter

ON_GPU = jax.default_backend() == "gpu"
# Kernels that are told whether they are interpreted: those that multiply out of registers.
_TOLD = {
    "gated_delta.mosaic_prefill": "gdn_prefill",
    "gdn_mixer.mosaic_prefill": "gdn_mixer_prefill",
    "paged_attention.mosaic_prefill": "paged_attention_prefill",
    "paged_attention.mosaic_advance": "paged_attention_advance",
}


def tell_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels that the dispatch leads to traced for the interpreter, unless there is a GPU."""
    for name, function in _TOLD.items():
        module = import_module(f"gdn_jax.kernels.{name}")
        monkeypatch.setattr(module, function, partial(getattr(module, function), interpret=not ON_GPU))


def run_mosaic[Result](run: Callable[[], Result]) -> Result:
    """Return what `run` returns: its Mosaic kernels compiled on a GPU, elsewhere interpreted.

    In the interpreter memory that nobody has written holds NaN.

    Raises:
        RuntimeError: two interpreted threads touched one place, one of them writing, in no order.
    """
    if ON_GPU:
        return jax.block_until_ready(run())
    try:
        with quick_interpreter(), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            result = jax.block_until_ready(run())
            # Newer versions of JAX raise by themselves; older ones know of the last kernel alone that `run` calls.
            if gpu_callbacks.get_races().races_found:
                raise RuntimeError("RACE DETECTED")
            return result
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def assert_no_barrier_is_missing(run: Callable[..., Any], *args: Any, times: int = 20) -> None:
    """A jittable call returns the bits, again and again, that it has with Mosaic's own barriers; on a GPU.

    Args:
        run: what is compiled with them and without.
        args: its arguments.
        times: calls without.
    """
    left_out: list[bool] = []  # whether each kernel would do without them

    def with_barriers(**params: Any) -> plgpu.CompilerParams:
        left_out.append(params.get("unsafe_no_auto_barriers", False))
        return params_of(**{**params, "unsafe_no_auto_barriers": False})

    def bits(result: Any) -> list[bytes]:
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result)]

    params_of = plgpu.CompilerParams
    jax.clear_caches()  # of jaxprs, which hold a kernel's parameters
    with patch.object(plgpu, "CompilerParams", with_barriers):
        want = bits(jax.jit(run)(*args))
    assert any(left_out), "nothing is compared with itself"
    jax.clear_caches()
    fast = jax.jit(run)
    for _ in range(times):
        assert bits(fast(*args)) == want
