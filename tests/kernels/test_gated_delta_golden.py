"""The gated delta rule against recorded float64 values, every implementation.

Tolerance: 1e-4 of the largest expected value, in float32 (repeated keys condition the triangular inverse; usual cases
stay below 1e-6).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_runs import ON_GPU, run_mosaic
from oracles.golden_kernels import golden_arrays

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import DeltaInputs, gdn_advance, gdn_prefill
from gdn_jax.kernels.gated_delta.inputs import l2_normalize
from gdn_jax.kernels.gated_delta.mosaic_prefill import gdn_prefill as mosaic_prefill

TOLERANCE = 1e-4
IN_JAX = pytest.mark.parametrize("implementation", [Implementation.REFERENCE, Implementation.JAX])
CASES = (
    "len1",
    "len2",
    "len63",
    "len64",
    "len65",
    "len128",
    "len200",
    "no_h0",
    "equal_heads",
    "group4_dk16_dv24",
    "real_heads",
    "no_l2norm",
    "zero_decay",
    "decay_50",
    "decay_underflow",
    "decay_mixed",
    "beta_zero",
    "beta_one",
    "beta_01",
    "same_key",
    "same_key_beta09",
    "keys_1e4",
    "keys_1e-4",
    "keys_zero",
    "values_1e3",
    "verify4",
    "long",
)
# What is hard about one chunk; sizes, lengths and packings are those of `test_gated_delta_mosaic.py`.
MOSAIC_CASES = (
    "len65",
    "no_h0",
    "decay_50",
    "decay_underflow",
    "decay_mixed",
    "beta_01",
    "same_key",
    "same_key_beta09",
    "keys_1e4",
    "keys_zero",
)
# Cases are padded to few shapes, since each shape is compiled: (key heads, value heads, key width, value width) to
# (tokens, rows, key heads, value heads) with the same number of value heads per key head.
SHAPES = {
    (2, 4, 16, 16): (1024, 5, 2, 4),
    (1, 2, 16, 16): (1024, 5, 2, 4),
    (3, 3, 16, 16): (66, 1, 3, 3),
    (2, 2, 16, 16): (66, 1, 3, 3),
    (1, 4, 16, 24): (67, 1, 1, 4),
    (1, 2, 128, 128): (130, 1, 1, 2),
}


class Golden:
    """Arrays of one named case."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.arrays = golden_arrays(folder, prefix)

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def heads(self) -> tuple[int, int, int, int]:
        """Return key heads, value heads, key width, value width."""
        return self["k"].shape[-2], self["v"].shape[-2], self["k"].shape[-1], self["v"].shape[-1]

    def queries_and_inputs(
        self, shape: tuple[int, ...], num_keys: int, num_values: int, *, least_width: int = 0
    ) -> tuple[jax.Array, DeltaInputs]:
        """Return scaled q and the other inputs as `[*shape, ...]`, q and k normalised if so marked.

        Tokens and heads that the case does not have are NaN. Heads narrower than `least_width` are widened with zeros,
        which change nothing.
        """
        length = int(np.prod(self["g"].shape[:-1]))

        def padded(name: str, num_heads: int) -> jax.Array:
            own_heads, *width = self[name].shape[self["g"].ndim - 1 :]
            wide = [max(least_width, *width)] if width else []
            x = np.full((int(np.prod(shape)), num_heads, *wide), np.nan, np.float32)
            x[:length, :own_heads] = 0
            x[:length, :own_heads, *map(slice, width)] = self[name].reshape(length, own_heads, *width)
            return jnp.asarray(x.reshape(*shape, num_heads, *wide))

        q, k, scale = padded("q", num_keys), padded("k", num_keys), self["k"].shape[-1] ** -0.5
        if "l2norm" not in self or self["l2norm"][0] == 1:
            q, k = l2_normalize(q, scale), l2_normalize(k)
        else:
            q = q * scale
        v, g, beta = (padded(name, num_values) for name in ("v", "g", "beta"))
        return q, DeltaInputs(k=k, v=v, g=g, beta=beta)

    def pool(self, num_slots: int, num_heads: int, *, least_width: int = 0) -> jax.Array:
        """Return states as stored, h0 of row i at slot 1 + i, NaN elsewhere."""
        _, own_heads, key_dim, value_dim = self.heads()
        wide = max(value_dim, least_width), max(key_dim, least_width)
        pool = np.full((num_slots, num_heads, *wide), np.nan, np.float32)
        if "h0" in self:
            pool[1 : 1 + len(self["h0"]), :own_heads] = 0
            pool[1 : 1 + len(self["h0"]), :own_heads, :value_dim, :key_dim] = self["h0"].swapaxes(-1, -2)
        return jnp.asarray(pool)


def int32(values: object) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got.astype(np.float64) - want).max() <= TOLERANCE * np.abs(want).max()


def check_packed(
    case: Golden,
    lengths: np.ndarray,
    prefill: Callable[..., tuple[jax.Array, jax.Array]],
    shape: tuple[int, int, int, int],
    *,
    least_width: int = 0,
) -> None:
    """Prefill packed sequences in place, padded to a shape as in SHAPES, and compare outputs and final states."""
    num_tokens, num_rows = int(lengths.sum()), len(lengths)
    all_tokens, all_rows, num_keys, num_values = shape
    _, own_heads, key_dim, value_dim = case.heads()
    q, inputs = case.queries_and_inputs((all_tokens,), num_keys, num_values, least_width=least_width)
    fields = np.zeros((5, all_rows), np.int32)  # offset, length, start, read slot, write slot
    slot = 1 + np.arange(num_rows)
    fields[:, :num_rows] = np.cumsum(lengths) - lengths, lengths, 0 * lengths, slot * ("h0" in case), slot
    offset, length, start, read_slot, write_slot = map(jnp.asarray, fields)
    rows = PrefillRows(
        offset=offset,
        length=length,
        start=start,
        read_slot=read_slot,
        write_slot=write_slot,
        export_slot=jnp.zeros((all_rows, 0), jnp.int32),
    )
    pool = case.pool(1 + all_rows, num_values, least_width=least_width)
    outputs, pool = prefill(q, inputs, rows, pool)
    own_outputs = np.asarray(outputs)[:num_tokens, :own_heads, :value_dim]
    assert_close(own_outputs, case["o"].reshape(own_outputs.shape))
    assert_close(np.asarray(pool)[slot, :own_heads, :value_dim, :key_dim].swapaxes(-1, -2), case["hT"])


@IN_JAX
@pytest.mark.parametrize("name", CASES)
def test_prefill_equals_recorded_values(golden_folder: Path, name: str, implementation: Implementation) -> None:
    case = Golden(golden_folder, f"gdr.{name}.")
    lengths = np.full(case["g"].shape[0], case["g"].shape[1])
    check_packed(case, lengths, partial(gdn_prefill, implementation=implementation), SHAPES[case.heads()])


@pytest.mark.skipif(ON_GPU, reason="tensor cores multiply no IEEE float32")
@pytest.mark.parametrize("name", MOSAIC_CASES)
def test_interpreted_mosaic_prefill_equals_recorded_values(golden_folder: Path, name: str) -> None:
    case = Golden(golden_folder, f"gdr.{name}.")
    lengths = np.full(case["g"].shape[0], case["g"].shape[1])

    def prefill(*args: Any) -> tuple[jax.Array, jax.Array]:
        return run_mosaic(partial(mosaic_prefill, *args, interpret=True))

    shape = int(lengths.sum()), len(lengths), *case.heads()[:2]
    check_packed(case, lengths, prefill, shape, least_width=64)


@IN_JAX
def test_packed_sequences_equal_recorded_values(golden_folder: Path, implementation: Implementation) -> None:
    case = Golden(golden_folder, "varlen.varlen.")
    prefill = partial(gdn_prefill, implementation=implementation)
    check_packed(case, np.diff(case["cu_seqlens"]), prefill, SHAPES[case.heads()])


@IN_JAX
@pytest.mark.parametrize("num_replay", [0, 1, 3, 4])
def test_advance_equals_recorded_values_for_every_split_into_replay_and_new_tokens(
    golden_folder: Path, num_replay: int, implementation: Implementation
) -> None:
    case = Golden(golden_folder, "gdr.verify4.")
    q, inputs = case.queries_and_inputs((2, 4), 2, 4)
    num_new = 4 - num_replay
    shift = (np.arange(4) + num_replay) % 4  # new tokens first in their window
    rows = AdvanceRows(
        read_slot=int32([1, 2]),
        write_slot=int32([3, 2]),
        save_slot=int32([4, 5]),
        save_at=int32([100 + num_replay, 64]),
        folded=int32([100, 62]),
        num_replay=int32([num_replay] * 2),
        num_new=int32([num_new] * 2),
    )
    new = jax.tree.map(lambda x: x[:, shift], inputs)
    outputs, pool = gdn_advance(q[:, shift], new, inputs, rows, case.pool(6, 4), implementation=implementation)
    states = np.asarray(pool).swapaxes(-1, -2)
    h_all = np.concatenate([case["h0"][:, None], case["h_all"]], axis=1)  # entry i: after i tokens

    assert (np.asarray(outputs)[:, num_new:] == 0).all()
    if num_new:
        assert_close(np.asarray(outputs)[:, :num_new], case["o"][:, num_replay:])
    assert_close(states[[3, 2]], h_all[:, num_replay])
    if num_replay > 0:
        assert_close(states[4], h_all[0, num_replay])
    else:
        assert np.isnan(states[4]).all()
    if num_replay >= 2:
        assert_close(states[5], h_all[1, 2])
    else:
        assert np.isnan(states[5]).all()
