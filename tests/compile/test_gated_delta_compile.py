"""The advance of the gated delta rule, compiled for an H200: nothing spilled, no pool copied, whatever its size."""

import jax.numpy as jnp
import pytest
from compile.aot import Report, compile_for_h200, spec

from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.kernels.gated_delta import DeltaInputs
from gdn_jax.kernels.gated_delta.cases import Heads
from gdn_jax.kernels.gated_delta.mosaic_advance import gdn_advance
from gdn_jax.kernels.gated_delta.tiles import AdvanceTiles

pytestmark = pytest.mark.compile
REAL = Heads(num_key=16, num_value=32, key_dim=128, value_dim=128)


def compiled(
    heads: Heads,
    state_dtype: str,
    *,
    num_rows: int,
    window: int,
    num_slots: int,
    layers: int = 1,
    tiles: AdvanceTiles | None = None,
) -> Report:
    """Compile a chain of advances, each on a pool of its own."""
    lead, keys, values = (num_rows, window), (heads.num_key, heads.key_dim), (heads.num_value, heads.value_dim)
    gate = spec((*lead, heads.num_value), jnp.float32)
    k, v = (spec((*lead, *shape), jnp.bfloat16) for shape in (keys, values))
    tokens = {"k": k, "v": v, "g": gate, "beta": gate}
    counts = ("read_slot", "write_slot", "save_slot", "save_at", "folded", "num_replay", "num_new")
    pool = spec((num_slots, heads.num_value, heads.value_dim, heads.key_dim), state_dtype)

    def chain(q, new, replay, rows, pools):
        arguments = q, DeltaInputs(**new), DeltaInputs(**replay), AdvanceRows(**rows)
        return [gdn_advance(*arguments, pool, tiles=tiles) for pool in pools]

    rows = dict.fromkeys(counts, spec((num_rows,), jnp.int32))
    return compile_for_h200(chain, k, tokens, tokens, rows, [pool] * layers, donate=(4,))


def assert_in_place(report: Report, pool_bytes: int) -> None:
    assert report.spill_bytes == 0
    assert report.aliased_bytes == pool_bytes
    assert report.copies == ()
    assert report.temporary_bytes < 1 << 10  # pointers of several results, no array


@pytest.mark.parametrize("state_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("window", [1, 4])
def test_the_pool_stays_in_place_and_registers_leave_room_for_others(state_dtype: str, window: int) -> None:
    report = compiled(REAL, state_dtype, num_rows=64, window=window, num_slots=300)
    assert_in_place(report, 300 * 32 * 128 * 128 * jnp.dtype(state_dtype).itemsize)
    is_small = window == 1 and state_dtype == "float32"  # tiles of 32 rows, six of which share a multiprocessor
    assert report.registers <= (85 if is_small else 128)


@pytest.mark.parametrize("state_dtype", ["float32", "float16"])
@pytest.mark.parametrize("value_rows", [32, 64])
def test_every_tiling_compiles_in_place(value_rows: int, state_dtype: str) -> None:
    tiles = AdvanceTiles(value_rows=value_rows)
    report = compiled(REAL, state_dtype, num_rows=8, window=3, num_slots=17, tiles=tiles)
    assert report.registers <= 128
    assert_in_place(report, 17 * 32 * 128 * 128 * jnp.dtype(state_dtype).itemsize)


@pytest.mark.parametrize(
    ("heads", "window"),
    [((4, 4, 64, 64), 1), ((2, 4, 128, 64), 9), ((1, 3, 64, 128), 2), ((4, 32, 128, 128), 5)],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else f"T{value}",
)
def test_every_grouping_and_width_compiles_in_place(heads: tuple[int, int, int, int], window: int) -> None:
    num_key, num_value, key_dim, value_dim = heads
    sizes = Heads(num_key=num_key, num_value=num_value, key_dim=key_dim, value_dim=value_dim)
    report = compiled(sizes, "float32", num_rows=3, window=window, num_slots=7)
    assert_in_place(report, 7 * num_value * key_dim * value_dim * 4)


def test_pools_beyond_two_to_the_31_elements_stay_in_place_in_a_chain_of_layers() -> None:
    num_slots = 2**31 // (32 * 128 * 128) + 100
    report = compiled(REAL, "float32", num_rows=8, window=1, num_slots=num_slots, layers=2)
    assert_in_place(report, 2 * num_slots * 32 * 128 * 128 * 4)
