"""Benchmarks of the mixer have no time for one that keeps no replay window, and run the tiles they are asked for."""

from dataclasses import replace
from typing import Literal

import jax
import pytest

from benchmarks.kernels import mixer as benchmark
from benchmarks.kernels import mixer_prefill
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta.cases import ADVANCE_BENCHMARKS, PREFILL_BENCHMARKS, Heads
from gdn_jax.kernels.gdn_mixer import RecurrentState, gdn_mixer_advance

CASE = replace(
    ADVANCE_BENCHMARKS[0], num_rows=3, window=2, heads=Heads(num_key=1, num_value=2, key_dim=16, value_dim=16)
)


def that_keeps_no_window(tokens, weights, rows, lane, state, **options) -> tuple[jax.Array, RecurrentState]:
    out, after = gdn_mixer_advance(tokens, weights, rows, lane, state, **options)
    is_right = options["implementation"] is Implementation.REFERENCE
    return out, after if is_right else replace(after, replay=state.replay)


def test_the_right_mixer_passes() -> None:
    assert benchmark.check(CASE, Implementation.JAX) <= 2.0**-8


def test_a_mixer_that_keeps_no_replay_window_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "gdn_mixer_advance", that_keeps_no_window)
    with pytest.raises(SystemExit, match="the mixer must be right within"):
        benchmark.check(CASE, Implementation.JAX)


@pytest.mark.parametrize("asked", [{"places": 16}, {"heads": 1}, {"heads": 1, "places": 32}])
def test_tiles_of_a_prefill_are_those_that_were_asked_for(asked: dict[str, Literal[1, 16, 32]]) -> None:
    case = PREFILL_BENCHMARKS[0]
    chosen = vars(mixer_prefill.Options().tiles(case))
    assert vars(mixer_prefill.Options(**asked).tiles(case)) == {**chosen, **asked} != chosen
