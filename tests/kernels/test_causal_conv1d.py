"""The causal convolution: every implementation against a float64 model and recorded values.

Outputs agree within 1e-5 of the largest expected value in float32 (four products and an exponential). Windows are
copies of raw inputs: compared exactly.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import kernel_float64 as oracle
from oracles.golden_kernels import golden_arrays

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.causal_conv1d import causal_conv1d_advance, causal_conv1d_prefill
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta.cases import (
    ADVANCE_TESTS,
    CASES,
    PREFILL_TESTS,
    AdvanceCase,
    make_advance,
    make_prefill,
)

TOLERANCE = 1e-5
CHANNELS = 6
COUNTS = [case for case in ADVANCE_TESTS if "/heads/" not in case.name]  # a convolution knows no heads
IN_JAX = pytest.mark.parametrize("implementation", [Implementation.REFERENCE, Implementation.JAX])


def draw(shape: tuple[int, ...], seed: int, dtype: str = "float32", owned: jax.Array | None = None) -> jax.Array:
    """Draw normal numbers; NaN where not `owned`, which covers the leading axes."""
    x = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return jnp.asarray(x if owned is None else np.where(np.asarray(owned)[..., None], x, np.float32(np.nan)), dtype)


def draw_windows(rows: PrefillRows | AdvanceRows, num_slots: int, window: int, dtype: str = "float32") -> jax.Array:
    """Windows at the slots that are read; NaN elsewhere, the null slot included."""
    read = np.unique(np.asarray(rows.read_slot))
    pool = np.full((num_slots, window, CHANNELS), np.nan, np.float32)
    pool[read[read != 0]] = np.random.default_rng(7).standard_normal(((read != 0).sum(), window, CHANNELS))
    return jnp.asarray(pool, dtype)


def assert_close(got: jax.Array, want: np.ndarray) -> None:
    error = np.abs(np.asarray(got, np.float64) - want).max(initial=0.0)
    assert error <= TOLERANCE * np.abs(want).max(initial=1e-30)


def assert_rounded_once(got: jax.Array, want: np.ndarray) -> None:
    """Each bfloat16 value is within half a unit in its last place (of 8 bits), and the float32 error, of `want`."""
    half_unit = 2.0 ** (np.floor(np.log2(np.abs(want) + 1e-30)) - 8)
    assert (np.abs(np.asarray(got, np.float64) - want) <= half_unit + TOLERANCE).all()


def assert_stored(pool: jax.Array, before: jax.Array, stored: dict[int, np.ndarray]) -> None:
    """Stored windows are exact; every other slot has the bits it had."""
    assert pool.dtype == before.dtype
    for slot, window in stored.items():
        assert np.asarray(pool[slot], np.float64).tolist() == window.tolist()
    untouched = [slot for slot in range(pool.shape[0]) if slot not in stored]
    assert np.asarray(pool)[untouched].tobytes() == np.asarray(before)[untouched].tobytes()


@IN_JAX
class TestPrefill:
    @pytest.mark.parametrize(("name", "taps"), [(case.name, 4) for case in PREFILL_TESTS] + [("test/misaligned", 2)])
    def test_equals_the_float64_model_and_touches_nothing_else(
        self, name: str, taps: int, implementation: Implementation
    ) -> None:
        rows = make_prefill(CASES[name]).rows
        x = draw((256, CHANNELS), 1, owned=rows.row_of(256)[1])
        weight, pool = draw((CHANNELS, taps), 2), draw_windows(rows, 16, taps - 1)
        outputs, after = causal_conv1d_prefill(x, weight, rows, pool, implementation=implementation)
        want, stored = oracle.conv_prefill(x, weight, rows, pool)
        assert_close(outputs, want)
        assert_stored(after, pool, stored)

    def test_bfloat16_is_summed_in_float32_and_rounded_once(self, implementation: Implementation) -> None:
        rows = make_prefill(CASES["test/continued"]).rows
        x = draw((256, CHANNELS), 1, "bfloat16", rows.row_of(256)[1])
        weight, pool = draw((CHANNELS, 4), 2, "bfloat16"), draw_windows(rows, 16, 3, "bfloat16")
        outputs, after = causal_conv1d_prefill(x, weight, rows, pool, implementation=implementation)
        want, stored = oracle.conv_prefill(x, weight, rows, pool)
        assert outputs.dtype == jnp.bfloat16
        assert_rounded_once(outputs, want)
        assert_stored(after, pool, stored)

    @pytest.mark.parametrize("cut", [1, 2, 3, 63, 64, 65, 249])
    def test_a_span_cut_anywhere_equals_the_whole_bit_for_bit(self, cut: int, implementation: Implementation) -> None:
        rows = make_prefill(CASES["test/one-row"]).rows
        x, weight, pool = draw((256, CHANNELS), 1), draw((CHANNELS, 4), 2), draw_windows(rows, 16, 3)

        def run(offset: int, length: int, read: int, pool: jax.Array) -> tuple[np.ndarray, jax.Array]:
            fields = {"offset": offset, "start": offset, "length": length, "read_slot": read, "write_slot": 15}
            changed = {name: jnp.asarray([value, 0, 0, 0], jnp.int32) for name, value in fields.items()}
            part = replace(rows, **changed, export_slot=jnp.zeros((4, 5), jnp.int32))
            outputs, after = causal_conv1d_prefill(x, weight, part, pool, implementation=implementation)
            return np.asarray(outputs), after

        whole, whole_pool = run(0, 250, 0, pool)
        first, between = run(0, cut, 0, pool)
        second, after = run(cut, 250 - cut, 15, between)
        assert np.concatenate([first[:cut], second[cut:]]).tobytes() == whole.tobytes()
        assert np.asarray(after[15]).tobytes() == np.asarray(whole_pool[15]).tobytes()


@IN_JAX
class TestAdvance:
    @pytest.mark.parametrize("case", COUNTS, ids=lambda case: case.name)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_equals_the_float64_model_and_touches_nothing_else(
        self, case: AdvanceCase, dtype: str, implementation: Implementation
    ) -> None:
        rows = make_advance(case).rows
        shape = (case.num_rows, case.window, CHANNELS)
        x = draw(shape, 1, dtype, rows.is_new(case.window))
        replay = draw(shape, 2, dtype, jnp.arange(case.window)[None] < rows.num_replay[:, None])
        weight, pool = draw((CHANNELS, 4), 3, dtype), draw_windows(rows, 20, 3, dtype)
        outputs, after = causal_conv1d_advance(x, replay, weight, rows, pool, implementation=implementation)
        want, stored = oracle.conv_advance(x, replay, weight, rows, pool)
        assert outputs.dtype == dtype
        (assert_close if dtype == "float32" else assert_rounded_once)(outputs, want)
        assert_stored(after, pool, stored)


@IN_JAX
@pytest.mark.parametrize("name", ["T1", "T2", "T3", "T70", "K2", "K3"])
def test_recorded_values(golden_folder: Path, name: str, implementation: Implementation) -> None:
    case = golden_arrays(golden_folder, f"conv.{name}.")
    batch, length, channels = case["x"].shape
    num_rows, num_tokens = 2, 140  # one shape for all cases of equal taps
    fields = np.zeros((5, num_rows), np.int32)  # offset, length, start, read slot, write slot
    slot = np.arange(1, batch + 1)
    fields[:, :batch] = np.arange(batch) * length, np.full(batch, length), 0 * slot, slot, slot
    x = np.full((num_tokens, channels), np.nan, np.float32)
    x[: batch * length] = case["x"].reshape(-1, channels)
    pool = np.full((num_rows + 1, case["w"].shape[1] - 1, channels), np.nan, np.float32)
    pool[slot] = case["state"].swapaxes(-1, -2)

    for expected in ("y", "y_zero_state"):
        fields[3] *= expected == "y"
        offset, lengths, start, read_slot, write_slot = map(jnp.asarray, fields)
        rows = PrefillRows(
            offset=offset,
            length=lengths,
            start=start,
            read_slot=read_slot,
            write_slot=write_slot,
            export_slot=jnp.zeros((num_rows, 0), jnp.int32),
        )
        outputs, after = causal_conv1d_prefill(
            jnp.asarray(x), jnp.asarray(case["w"]), rows, jnp.asarray(pool), implementation=implementation
        )
        assert_close(np.asarray(outputs)[: batch * length], case[expected].reshape(-1, channels))
        if expected == "y":
            assert np.asarray(after, np.float64)[slot].swapaxes(-1, -2).tolist() == case["state_out"].tolist()


def test_gradients_equal_those_of_the_reference() -> None:
    rows = make_prefill(CASES["test/misaligned"]).rows
    x, weight, ct = draw((256, CHANNELS), 1), draw((CHANNELS, 4), 2), draw((256, CHANNELS), 3)
    null = {name: jnp.zeros_like(getattr(rows, name)) for name in ("read_slot", "write_slot", "export_slot")}
    pool = jnp.zeros((1, 3, CHANNELS))

    def loss(x: jax.Array, weight: jax.Array, implementation: Implementation) -> jax.Array:
        outputs, _ = causal_conv1d_prefill(x, weight, replace(rows, **null), pool, implementation=implementation)
        return jnp.sum(ct * outputs)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    got, want = gradient(x, weight, Implementation.JAX), gradient(x, weight, Implementation.REFERENCE)
    for a, b in zip(got, want, strict=True):
        assert np.abs(b).max() > 0
        assert_close(a, np.asarray(b, np.float64))
