"""The benchmarks' loop, compiled for an H200: calls that take nothing from one another stay in it, every one."""

from typing import Any

import jax.numpy as jnp
import pytest
from compile.aot import compile_for_h200, spec
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.kernels.device_time import TimedCalls, all_kept
from gdn_jax.kernels.mosaic import store_apart

pytestmark = pytest.mark.compile


def test_calls_that_take_nothing_from_one_another_are_all_run_in_every_round() -> None:
    matrix = spec((64, 64), jnp.float32)

    def body(x: Any, out: Any) -> None:
        store_apart(out, 2 * plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False))

    doubles = plgpu.kernel(body, out_type=matrix, kernel_name="doubles")
    loop = TimedCalls(all_kept(lambda nothing, x: (doubles(x), nothing)))
    report = compile_for_h200(loop.run, ((matrix,) * 3, None), [matrix] * 3, donate=(0,))
    assert len([name for name in report.custom_calls if name.startswith("mosaic_gpu")]) == 3
    assert report.launches == 2, "the loop, and a copy of its counter: no call stands before it"
