"""The reports on compiled functions say what they should, seen on a pool that is scaled in place."""

import jax
import jax.numpy as jnp
import pytest
from compile.aot import Report, compile_for_h200, spec
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax.kernels.mosaic import HeadsOverWarps

SLOTS, ROWS, WIDTH = 1000, 8, 128

pytestmark = pytest.mark.compile


def scale(slots: jax.Array, pool: jax.Array, factor: float) -> jax.Array:
    """Return the pool with some of its slots scaled, by one Pallas kernel."""

    def scale_slot(slots, pool, tile, barrier):
        slot = slots[lax.axis_index("row")]
        plgpu.copy_gmem_to_smem(pool.at[slot], tile, barrier)
        plgpu.barrier_wait(barrier)
        tile[...] = plgpu.load(tile, layout=plgpu.Layout.WGMMA) * factor
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, pool.at[slot])
        plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    ref = jax.new_ref(pool)
    plgpu.kernel(
        scale_slot,
        out_type=(),
        scratch_types=[plgpu.SMEM((WIDTH, WIDTH), jnp.float32, transforms=transforms), plgpu.Barrier()],
        grid=(ROWS,),
        grid_names=("row",),
    )(slots, ref)
    return jax.freeze(ref)


def report(function, **options) -> Report:
    return compile_for_h200(function, spec((ROWS,), jnp.int32), spec((SLOTS, WIDTH, WIDTH), jnp.float32), **options)


def test_a_donated_pool_stays_in_place_and_one_that_is_kept_is_copied() -> None:
    donated = report(lambda slots, pool: scale(slots, pool, 0.5), donate=(1,))
    assert donated.aliased_bytes == SLOTS * WIDTH * WIDTH * 4
    assert donated.temporary_bytes == 0
    assert donated.copies == ()
    (kernel,) = donated.kernels
    assert kernel.name.startswith("scale_slot")
    assert 0 < kernel.registers <= 255
    assert donated.spill_bytes == 0

    # Another factor, since ptxas speaks of each kernel once in a process.
    kept = report(lambda slots, pool: (scale(slots, pool, 0.25), pool))
    assert kept.aliased_bytes == 0
    assert set(kept.copies) == {f"f32[{SLOTS},{WIDTH},{WIDTH}]"}


def test_memory_that_mosaic_swizzles_in_tiles_of_single_rows_is_refused() -> None:
    def first_rows(x: jax.Array) -> jax.Array:
        def store_first_row(x, out, tile):
            tile[...] = plgpu.load(x.at[lax.axis_index("row")], layout=plgpu.Layout.WGMMA, optimized=False)
            row = tile.at[pl.ds(lax.axis_index("row"), 1)]
            out[lax.axis_index("row")] = plgpu.load(row, layout=HeadsOverWarps(1, WIDTH).matrix, optimized=False)

        return plgpu.kernel(
            store_first_row,
            out_type=jax.ShapeDtypeStruct((ROWS, 1, WIDTH), x.dtype),
            scratch_types=[plgpu.SMEM((WIDTH, WIDTH), x.dtype)],
            grid=(ROWS,),
            grid_names=("row",),
        )(x)

    with pytest.raises(RuntimeError, match="swizzled tiles must have 8 rows"):
        compile_for_h200(first_rows, spec((ROWS, WIDTH, WIDTH), jnp.float32))


def test_a_slice_that_a_kernel_is_handed_from_the_middle_of_an_array_is_refused() -> None:
    def double(words: jax.Array, begin: int) -> jax.Array:
        def double_words(words, out):
            out[...] = 2 * plgpu.load(words, layout=plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=1))

        kernel = plgpu.kernel(double_words, out_type=jax.ShapeDtypeStruct((WIDTH,), words.dtype))
        return kernel(words[begin : begin + WIDTH])

    words = spec((SLOTS,), jnp.int32)
    assert compile_for_h200(lambda words: double(words, 64), words).copies == ()
    with pytest.raises(RuntimeError, match="multiple of 256 bytes; got one 4 bytes beyond"):
        compile_for_h200(lambda words: double(words, 65), words)
