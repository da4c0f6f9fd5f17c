"""The prefill of the gated delta rule, compiled for an H200: nothing spilled, no pool copied, whatever its size."""

import jax.numpy as jnp
import pytest
from compile.aot import Report, compile_for_h200, spec

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.gated_delta import DeltaInputs
from gdn_jax.kernels.gated_delta.cases import Heads
from gdn_jax.kernels.gated_delta.mosaic_prefill import gdn_prefill
from gdn_jax.kernels.gated_delta.tiles import prefill_tiles

pytestmark = pytest.mark.compile
REAL = Heads(num_key=16, num_value=32, key_dim=128, value_dim=128)
BEYOND_32_BITS = 2**31 // (32 * 128 * 128) + 100  # slots whose elements no 32-bit number counts


def compiled(
    heads: Heads, *, num_tokens: int, num_rows: int, num_slots: int, state_dtype: str = "float32", dtype=jnp.bfloat16
) -> Report:
    """Compile a prefill that may export at eight boundaries of each row."""
    gate = spec((num_tokens, heads.num_value), jnp.float32)
    k = spec((num_tokens, heads.num_key, heads.key_dim), dtype)
    v = spec((num_tokens, heads.num_value, heads.value_dim), dtype)
    pool = spec((num_slots, heads.num_value, heads.value_dim, heads.key_dim), state_dtype)
    rows = dict.fromkeys(("offset", "length", "start", "read_slot", "write_slot"), spec((num_rows,), jnp.int32))

    def run(q, inputs, rows, exports, pool):
        rows = PrefillRows(**rows, export_slot=exports)
        return gdn_prefill(q, DeltaInputs(**inputs), rows, pool)

    inputs = {"k": k, "v": v, "g": gate, "beta": gate}
    return compile_for_h200(run, k, inputs, rows, spec((num_rows, 8), jnp.int32), pool, donate=(4,))


def assert_in_place(report: Report, heads: Heads, num_slots: int, state_bytes: int = 4) -> None:
    assert report.spill_bytes == 0
    assert all(kernel.stack_bytes == 0 for kernel in report.kernels)
    assert report.aliased_bytes == num_slots * heads.num_value * heads.value_dim * heads.key_dim * state_bytes
    # Rows are laid out by a table of tokens, which is filled by a scatter.
    assert not [shape for shape in report.copies if shape.startswith(("f32[", "bf16[", "f16["))]
    names = [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in report.kernels]
    assert names == ["gdn_prefill_chunks", "gdn_prefill_states"]
    chunks, _ = report.kernels
    assert chunks.registers <= 128  # four programs of it on a multiprocessor


@pytest.mark.parametrize(("num_rows", "num_slots"), [(1, BEYOND_32_BITS), (8, 300)])
def test_real_sizes_compile_in_place_with_room_for_what_every_chunk_contributes(num_rows: int, num_slots: int) -> None:
    report = compiled(REAL, num_tokens=8192, num_rows=num_rows, num_slots=num_slots)
    assert_in_place(report, REAL, num_slots)
    # Tokens and outputs on the grid, two matrices for each chunk and value head, gates: no state of any chunk.
    chunks = 8192 // 64 + 2 * num_rows
    per_chunk = 64 * (2 * 16 + 2 * 32) * 128 * 2 + 32 * (2 * 64 * 64 * 2 + 5 * 64 * 4)
    assert report.temporary_bytes <= 1.05 * chunks * per_chunk


# Two sizes, since ptxas speaks but once of the kernel that both would have.
@pytest.mark.parametrize(("state_dtype", "num_tokens"), [("float16", 1024), ("bfloat16", 1088)])
def test_two_warpgroups_spill_nothing_with_16_bit_states_either(state_dtype: str, num_tokens: int) -> None:
    assert prefill_tiles(8 * REAL.num_value, REAL.value_dim).warpgroups == 2
    report = compiled(REAL, num_tokens=num_tokens, num_rows=8, num_slots=20, state_dtype=state_dtype)
    assert_in_place(report, REAL, 20, 2)


@pytest.mark.parametrize(
    ("heads", "state_dtype", "dtype"),
    [
        ((4, 4, 64, 64), "float32", jnp.bfloat16),
        ((2, 4, 128, 64), "float16", jnp.bfloat16),
        ((1, 3, 64, 128), "bfloat16", jnp.float16),
    ],
    ids=str,
)
def test_every_kind_of_grouping_width_and_dtype_compiles_in_place(
    heads: tuple[int, int, int, int], state_dtype: str, dtype
) -> None:
    num_key, num_value, key_dim, value_dim = heads
    sizes = Heads(num_key=num_key, num_value=num_value, key_dim=key_dim, value_dim=value_dim)
    report = compiled(sizes, num_tokens=512, num_rows=3, num_slots=7, state_dtype=state_dtype, dtype=dtype)
    assert_in_place(report, sizes, 7, jnp.dtype(state_dtype).itemsize)
