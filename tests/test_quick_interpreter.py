"""The quick interpreter finds the races that Pallas' own finds, and no others; its products have one order of sums."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_runs import ON_GPU, run_mosaic
from quick_interpreter import multiply, quick_interpreter

THREADS, ACCESSES, BUFFERS = 3, 300, 2
WIDTH = 128


def verdicts(seed: int) -> list[bool]:
    """Make drawn accesses, and say of each whether it is found to race with those before it."""
    rng = np.random.default_rng(seed)
    # An older version of JAX wants to know a number that it does not use.
    races = RaceDetectionState(**{field.name: 1 for field in fields(RaceDetectionState) if field.name == "num_cores"})
    clocks = [NpVectorClock(THREADS) for _ in range(THREADS)]
    found = []
    for _ in range(ACCESSES):
        thread = int(rng.integers(THREADS))
        if rng.random() < 0.4:  # one waits for another
            clocks[thread].update(clocks[rng.integers(THREADS)])
        if rng.random() < 0.9:  # else its clock equals the last one's
            clocks[thread].inc(thread)
        begin = int(rng.integers(12))
        span = (slice(begin, begin + int(rng.integers(1, 3)), 1), int(rng.integers(3)))
        check = races.check_write if rng.random() < 0.4 else races.check_read
        races.races_found = False
        try:
            check(thread, clocks[thread].copy(), f"buffer {rng.integers(BUFFERS)}", span)
        except RuntimeError:  # newer versions raise
            found.append(True)
        else:
            found.append(races.races_found)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_drawn_accesses_race_where_pallas_says_so(seed: int) -> None:
    want = verdicts(seed)
    with quick_interpreter():
        assert verdicts(seed) == want
    assert {True, False} == set(want)


def hand_over(x: jax.Array, *, waits: bool) -> jax.Array:
    """Double x [WIDTH] in one warpgroup and add one in another, which waits for the first or does not."""

    def body(x, out, between, done) -> None:
        member = jax.lax.axis_index("member")
        layout = plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=1)

        @pl.when(member == 0)
        def _() -> None:
            between[...] = 2 * plgpu.load(x, layout=layout)
            plgpu.barrier_arrive(done)

        @pl.when(member == 1)
        def _() -> None:
            if waits:
                plgpu.barrier_wait(done)
            out[...] = 1 + plgpu.load(between, layout=layout)
            if not waits:
                plgpu.barrier_wait(done)

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((WIDTH,), x.dtype),
        scratch_types=[plgpu.SMEM((WIDTH,), x.dtype), plgpu.Barrier()],
        num_threads=2,
        thread_name="member",
    )
    return run_mosaic(lambda: run(x))


@pytest.mark.skipif(ON_GPU, reason="only the interpreter finds races")
def test_a_warpgroup_that_reads_what_another_writes_must_wait_for_it() -> None:
    x = jnp.arange(WIDTH, dtype=jnp.float32)
    np.testing.assert_array_equal(hand_over(x, waits=True), 2 * x + 1)
    with pytest.raises(Exception, match="RACE DETECTED"):
        hand_over(x, waits=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_a_product_has_the_same_bits_wherever_it_lies(dtype: str) -> None:
    rng = np.random.default_rng(0)
    left, right = (np.asarray(jnp.asarray(rng.standard_normal((64, 64)), dtype)) for _ in range(2))
    product = multiply(left, right, np.dtype(np.float32))
    assert product.dtype == np.float32
    want = left.astype(np.float64) @ right.astype(np.float64)
    np.testing.assert_allclose(product, want, rtol=1e-6, atol=1e-6)
    for shift in (1, 5, 20):
        moved = multiply(np.roll(left, shift, axis=0), right, np.dtype(np.float32))
        assert np.roll(moved, -shift, axis=0).tobytes() == product.tobytes()
