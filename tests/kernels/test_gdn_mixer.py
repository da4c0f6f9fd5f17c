"""The mixer: every implementation against the reference, token by token; what it may read and what it must leave alone.

Tolerance: float32 1e-5 of the largest value, as for the delta rule. Convolution windows, and what a window keeps of raw
inputs, are moved and never computed, so they are equal bits.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_runs import ON_GPU, assert_no_barrier_is_missing, run_mosaic

from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.kernels.dispatch import Implementation, UnsupportedKernelError
from gdn_jax.kernels.gated_delta import DeltaInputs
from gdn_jax.kernels.gdn_mixer import (
    MixerTokens,
    MixerWeights,
    RecurrentState,
    ReplayWindow,
    gdn_mixer_advance,
    mosaic_advance,
)

FLOAT32 = 1e-5
LANES, SLOTS = 5, 16
FAST = pytest.mark.parametrize("implementation", [Implementation.JAX, Implementation.MOSAIC])
# (read slot, write slot, save slot, save at, folded, replayed, new, lane)
SAVES = (3, 3, 7, 64, 62, 3, 2, 1)  # in place, with a save in the window's midst
MOVES = (4, 5, 8, 64, 62, 1, 1, 3)  # to another slot; the save is not reached
SHARES = (4, 10, 0, 0, 62, 1, 1, 4)  # reads the slot that another row reads too
FRESH = (0, 6, 0, 0, 0, 0, 2, 0)  # nothing before it
CLOSES = (2, 2, 9, 64, 60, 4, 0, 2)  # folds its whole window, saved at its end, and runs nothing
PADDING = (0, 0, 0, 0, 0, 0, 0, LANES)

Arguments = tuple[MixerTokens, MixerWeights, AdvanceRows, jax.Array, RecurrentState]


def draw(
    *rows: tuple[int, ...],
    heads: tuple[int, int, int],
    window: int = 4,
    replay: int = 4,
    taps: int = 4,
    dtype="float32",
) -> Arguments:
    """Draw arguments for rows of (Nk, Nv, width); tokens past a row's counts, and slots that no row reads, hold NaN."""
    rng = np.random.default_rng(0)
    num_key, num_value, width = heads
    channels = (2 * num_key + num_value) * width
    counts = np.array(rows, np.int32).T
    names = ("read_slot", "write_slot", "save_slot", "save_at", "folded", "num_replay", "num_new")

    def normal(*shape: int, as_dtype: str = dtype) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), as_dtype)

    def tokens(*shape: int) -> jax.Array:
        is_new = np.arange(window) < counts[6][:, None]
        return jnp.where(is_new.reshape(*is_new.shape, *[1] * len(shape)), normal(len(rows), window, *shape), jnp.nan)

    def slots(*shape: int, as_dtype: str = dtype) -> jax.Array:
        is_read = np.isin(np.arange(SLOTS), counts[0][counts[0] > 0]).reshape(SLOTS, *[1] * len(shape))
        return jnp.where(is_read, normal(SLOTS, *shape, as_dtype=as_dtype), jnp.nan).astype(as_dtype)

    keys = rng.normal(size=(LANES, replay, num_key, width))
    gate = partial(normal, LANES, replay, num_value, as_dtype="float32")
    delta = DeltaInputs(
        k=jnp.asarray(keys / np.linalg.norm(keys, axis=-1, keepdims=True), dtype),
        v=normal(LANES, replay, num_value, width),
        g=-jnp.abs(gate()),
        beta=jax.nn.sigmoid(gate()),
    )
    state = RecurrentState(
        recurrent=slots(num_value, width, width, as_dtype="float32"),
        conv=slots(taps - 1, channels),
        replay=ReplayWindow(conv=normal(LANES, replay, channels), delta=delta),
    )
    return (
        MixerTokens.of(tokens(channels), tokens(num_value, width), tokens(num_value), tokens(num_value)),
        MixerWeights(
            taps=normal(taps, channels),
            a_log=normal(num_value, as_dtype="float32"),
            dt_bias=normal(num_value, as_dtype="float32"),
            norm=normal(width, as_dtype="float32"),
        ),
        AdvanceRows(**dict(zip(names, jnp.asarray(counts[:7]), strict=True))),
        jnp.asarray(counts[7]),
        state,
    )


def advance(args: Arguments, implementation: Implementation) -> tuple[jax.Array, RecurrentState]:
    """Run a mixer; returns outputs and state. Mosaic kernels must be free of races where they are interpreted."""
    run = jax.jit(partial(gdn_mixer_advance, eps=1e-6, implementation=implementation))
    return run_mosaic(lambda: run(*args)) if implementation == Implementation.MOSAIC else run(*args)


def assert_equal(args: Arguments, got: tuple[jax.Array, RecurrentState], tolerance: float) -> None:
    """Compare with the reference: outputs of new tokens, every slot, and the kept window of every new token."""
    want = advance(args, Implementation.REFERENCE)
    rows, lane, before = args[2], np.asarray(args[3]), args[4]
    is_new = np.asarray(rows.is_new(args[0].packed.shape[1]))
    close(got[0][is_new], want[0][is_new], tolerance)
    close(got[1].recurrent, want[1].recurrent, tolerance)
    close(got[1].conv, want[1].conv, 0.0)
    stay = np.setdiff1d(np.arange(LANES), lane)
    for old, kept, expected in zip(*map(jax.tree.leaves, (before.replay, got[1].replay, want[1].replay)), strict=True):
        close(kept[stay], old[stay], 0.0)
        for row in np.flatnonzero(lane < LANES):
            new = np.flatnonzero(is_new[row])
            close(kept[lane[row], new], expected[lane[row], new], tolerance)


def close(got: jax.Array, want: jax.Array, tolerance: float) -> None:
    """Compare relative to the largest expected magnitude; NaN must stand where it is expected, and nowhere else."""
    wide, right = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert (np.isnan(wide) == np.isnan(right)).all()
    finite = right[~np.isnan(right)]
    error = np.abs(wide[~np.isnan(right)] - finite).max(initial=0.0)
    assert error <= tolerance * np.abs(finite).max(initial=1e-30), f"error {error}"


@FAST
class TestMixer:
    def test_rows_of_every_kind_equal_the_reference(self, implementation: Implementation) -> None:
        args = draw(SAVES, MOVES, SHARES, FRESH, CLOSES, PADDING, heads=(1, 2, 64))
        assert_equal(args, advance(args, implementation), FLOAT32)

    @pytest.mark.parametrize(
        "heads", [(4, 8, 64), (1, 3, 64), (2, 2, 128)], ids=lambda heads: "x".join(map(str, heads))
    )
    def test_every_grouping_of_heads_equals_the_reference(
        self, heads: tuple[int, int, int], implementation: Implementation
    ) -> None:
        args = draw(SAVES, PADDING, heads=heads, window=2)
        assert_equal(args, advance(args, implementation), FLOAT32)

    @pytest.mark.parametrize(("window", "replay", "taps"), [(1, 1, 4), (1, 5, 2), (2, 3, 3)])
    def test_windows_and_taps_of_any_number_equal_the_reference(
        self, window: int, replay: int, taps: int, implementation: Implementation
    ) -> None:
        row = (3, 3, 7, 64, 63, 1, window, 1)
        args = draw(row, heads=(1, 1, 64), window=window, replay=replay, taps=taps)
        assert_equal(args, advance(args, implementation), FLOAT32)

    def test_gates_keep_their_precision_where_they_are_tiny(self, implementation: Implementation) -> None:
        tokens, *rest = draw((3, 3, 0, 0, 62, 1, 4, 1), heads=(1, 2, 64))
        a = jnp.broadcast_to(jnp.array([-40.0, -12.0, 3.0, 60.0])[None, :, None], tokens.a.shape)
        rest[0] = replace(rest[0], dt_bias=jnp.zeros((2,)))
        tokens = MixerTokens.of(tokens.raw, tokens.z, tokens.b, a)
        _, state = advance((tokens, *rest), implementation)
        rate, wide = np.exp(np.asarray(rest[0].a_log, np.float64)), np.asarray(a[0], np.float64)
        np.testing.assert_allclose(state.replay.delta.g[1], -rate * np.log1p(np.exp(wide)), rtol=1e-6)

    def test_16_bit_activations_are_rounded_where_the_reference_rounds(self, implementation: Implementation) -> None:
        args = draw(SAVES, FRESH, heads=(1, 2, 64), dtype="bfloat16")
        got = advance(args, implementation)
        assert got[0].dtype == jnp.bfloat16
        assert_equal(args, got, 2.0**-7)  # a sum in another order may round to the next of 8 bits


@pytest.mark.skipif(not ON_GPU, reason="the interpreter runs a warpgroup as one thread")
@pytest.mark.parametrize("heads", [(4, 8, 128), (1, 3, 64), (2, 2, 128)], ids=str)
def test_no_barrier_is_missing(heads: tuple[int, int, int]) -> None:
    args = draw(SAVES, MOVES, SHARES, FRESH, CLOSES, PADDING, heads=heads, dtype="bfloat16")
    run = partial(gdn_mixer_advance, eps=1e-6, implementation=Implementation.MOSAIC)
    assert_no_barrier_is_missing(run, *args)


def test_more_new_tokens_than_a_replay_window_holds_are_refused_by_the_mosaic_mixer() -> None:
    args = draw((3, 3, 0, 0, 62, 1, 4, 1), heads=(1, 1, 64), window=4, replay=3)
    with pytest.raises(ValueError, match="must hold all new tokens; got 4 for one of 3"):
        gdn_mixer_advance(*args, eps=1e-6, implementation=Implementation.MOSAIC)


def test_widths_that_differ_are_refused_by_the_mosaic_mixer() -> None:
    args = draw(SAVES, heads=(1, 1, 64))
    state = replace(args[4], recurrent=jnp.zeros((SLOTS, 1, 128, 64)))
    with pytest.raises(UnsupportedKernelError, match="of one width for the Mosaic mixer; got 64 and 128"):
        mosaic_advance.gdn_mixer_advance(*args[:4], state, eps=1e-6)


@FAST
def test_arrays_that_do_not_agree_are_refused(implementation: Implementation) -> None:
    tokens, weights, rows, lane, state = draw(SAVES, heads=(1, 2, 64))
    few_heads = replace(state, recurrent=state.recurrent[:, :1])
    few_taps = replace(weights, taps=weights.taps[1:])
    few_channels = replace(tokens, num_channels=192)
    narrow = replace(tokens, packed=tokens.packed[..., :384])
    with pytest.raises(
        ValueError, match=r"state.recurrent must be \[slots, Nv, dv, dk\] with Nv = 2 as in tokens; got"
    ):
        attempt(implementation, tokens, weights, rows, lane, few_heads)
    with pytest.raises(ValueError, match="one input less than there are taps, 2; got 3"):
        attempt(implementation, tokens, few_taps, rows, lane, state)
    with pytest.raises(ValueError, match=r"tokens.raw must have 2 Nk dk \+ Nv dv = 256 channels; got 192"):
        attempt(implementation, few_channels, weights, rows, lane, state)
    windows = replace(state.replay, conv=state.replay.conv[..., :192])
    thin_state = replace(state, conv=state.conv[..., :192], replay=windows)
    thin_weights = replace(weights, taps=weights.taps[:, :192])
    with pytest.raises(ValueError, match=r"weights.taps must have 2 Nk dk \+ Nv dv = 256 channels; got 192"):
        attempt(implementation, tokens, thin_weights, rows, lane, thin_state)
    with pytest.raises(ValueError, match="room for raw, z, b and a, 388 columns; got 384"):
        attempt(implementation, narrow, weights, rows, lane, state)
    with pytest.raises(ValueError, match="lane must be int32; got int16; cast it"):
        attempt(implementation, tokens, weights, rows, lane.astype(jnp.int16), state)


def attempt(implementation: Implementation, *args) -> None:
    gdn_mixer_advance(*args, eps=1e-6, implementation=implementation)
