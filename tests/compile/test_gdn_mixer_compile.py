"""The mixer, compiled for an H200: three launches, of which two are Pallas kernels, with every pool in place."""

import jax.numpy as jnp
import pytest
from compile.aot import compile_for_h200, spec

from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import DeltaInputs
from gdn_jax.kernels.gdn_mixer import MixerTokens, MixerWeights, RecurrentState, ReplayWindow, gdn_mixer_advance

pytestmark = pytest.mark.compile
SLOTS, LANES, TAPS = 300, 64, 4


@pytest.mark.parametrize(
    ("num_rows", "window", "heads"), [(64, 4, (16, 32, 128)), (1, 1, (2, 8, 128)), (8, 9, (1, 3, 64))]
)
def test_state_stays_in_place_and_nothing_spills(num_rows: int, window: int, heads: tuple[int, int, int]) -> None:
    num_key, num_value, width = heads
    channels, lead, lanes = (2 * num_key + num_value) * width, (num_rows, window), (LANES, window)
    gate = spec((*lanes, num_value), jnp.float32)
    columns = channels + num_value * width + 2 * num_value
    tokens = spec((*lead, -(-columns // width) * width), jnp.bfloat16)
    weights = {
        "taps": spec((TAPS, channels), jnp.bfloat16),
        "a_log": spec((num_value,), jnp.float32),
        "dt_bias": spec((num_value,), jnp.float32),
        "norm": spec((width,), jnp.float32),
    }
    names = ("read_slot", "write_slot", "save_slot", "save_at", "folded", "num_replay", "num_new")
    state = {
        "recurrent": spec((SLOTS, num_value, width, width), jnp.float32),
        "conv": spec((SLOTS, TAPS - 1, channels), jnp.bfloat16),
        "raw": spec((*lanes, channels), jnp.bfloat16),
        "k": spec((*lanes, num_key, width), jnp.bfloat16),
        "v": spec((*lanes, num_value, width), jnp.bfloat16),
        "g": gate,
        "beta": gate,
    }

    def step(tokens, weights, rows, lane, state):
        pools = {name: state[name] for name in ("recurrent", "conv")}
        delta = DeltaInputs(**{name: state[name] for name in ("k", "v", "g", "beta")})
        out, after = gdn_mixer_advance(
            MixerTokens(packed=tokens, num_channels=channels, num_heads=num_value, width=width),
            MixerWeights(**weights),
            AdvanceRows(**rows),
            lane,
            RecurrentState(**pools, replay=ReplayWindow(conv=state["raw"], delta=delta)),
            eps=1e-6,
            implementation=Implementation.MOSAIC,
        )
        kept = {"recurrent": after.recurrent, "conv": after.conv, "raw": after.replay.conv, **vars(after.replay.delta)}
        return kept, out  # in the order of the donated ones, which are given to outputs by shape

    index = spec((num_rows,), jnp.int32)
    report = compile_for_h200(step, tokens, weights, dict.fromkeys(names, index), index, state, donate=(4,))
    assert report.spill_bytes == 0
    assert report.copies == ()
    assert report.aliased_bytes == sum(array.size * array.dtype.itemsize for array in state.values())
    assert [name for name in report.custom_calls if name.startswith("mosaic")] == ["mosaic_gpu_v2"] * 2
    assert report.launches <= 3  # the norm beside them
