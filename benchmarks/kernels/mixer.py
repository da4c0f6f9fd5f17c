"""Time all that a GDN layer does between its projections in decode, beside the advance of the delta rule alone.

    python -m benchmarks.kernels.mixer

Every case is checked first against the plain-JAX version on the same inputs; a case whose check fails has no time. The
outputs of a call are the output gate of the next one, so that all of each call is needed. `share of advance` is the
time of the whole over that of the advance alone, in the same run.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.kernels import advance
from benchmarks.kernels.device_time import Times, time_calls
from benchmarks.results_file import ResultRow, write_results
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta.cases import ADVANCE_BENCHMARKS, AdvanceCase
from gdn_jax.kernels.gdn_mixer import MixerTokens, MixerWeights, RecurrentState, ReplayWindow, gdn_mixer_advance

_LOG = logging.getLogger(__name__)
_TAPS, _EPS = 4, 1e-6
_TOLERANCE = 2.0**-6  # outputs are rounded to 8 bits, of inputs that were rounded to 8 bits
_Carry = tuple[jax.Array, RecurrentState]  # the outputs of the call before, and the state
_CASES = {case.name.replace("advance", "mixer"): case for case in ADVANCE_BENCHMARKS if case.state_dtype == "float32"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: where the results go.
        cases: names of mixer cases.
        implementation: which kernels: mosaic, or jax for the plain ones.
        repeats: timed runs.
    """

    output: Path = Path("benchmarks/results/kernels-mixer.json")
    cases: tuple[str, ...] = tuple(_CASES)
    implementation: Literal["mosaic", "jax"] = "mosaic"
    repeats: int = 7


def draw(case: AdvanceCase, num_slots: int) -> tuple[MixerTokens, MixerWeights, RecurrentState]:
    """Draw the arguments of a case on the device, a lane for each row."""
    heads, args = case.heads, advance.draw(case, num_slots)
    keys = iter(jax.random.split(jax.random.key(1), 12))
    lead, channels = (
        (case.num_rows, case.window),
        2 * heads.num_key * heads.key_dim + heads.num_value * heads.value_dim,
    )

    def normal(*shape: int, dtype: str = case.dtype) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    gate = partial(normal, heads.num_value, dtype="float32")
    tokens = MixerTokens(
        raw=normal(*lead, channels),
        a=normal(*lead, heads.num_value),
        b=normal(*lead, heads.num_value),
        z=normal(*lead, heads.num_value, heads.value_dim),
    )
    weights = MixerWeights(
        conv=normal(channels, _TAPS), a_log=gate(), dt_bias=gate(), norm=normal(heads.value_dim, dtype="float32")
    )
    state = RecurrentState(
        recurrent=args.pool,
        conv=normal(num_slots, _TAPS - 1, channels),
        replay=ReplayWindow(conv=normal(*lead, channels), delta=args.replay),
    )
    return tokens, weights, state


def run(
    case: AdvanceCase, implementation: Implementation, first_slot: int, tokens: MixerTokens, weights: MixerWeights
) -> Callable[[RecurrentState], tuple[jax.Array, RecurrentState]]:
    """Return a call on the rows whose slots begin at `first_slot`."""
    rows, lane = advance.rows_at(case, first_slot), jnp.arange(case.num_rows, dtype=jnp.int32)
    return lambda state: gdn_mixer_advance(tokens, weights, rows, lane, state, eps=_EPS, implementation=implementation)


def check(case: AdvanceCase, implementation: Implementation) -> float:
    """Return the error of the outputs and states of a case against plain JAX.

    Raises:
        SystemExit: it is above the tolerance, so that no time would mean anything.
    """
    small = replace(case, num_rows=min(4, case.num_rows))
    tokens, weights, state = draw(small, 1 + small.num_rows)
    got, want = (
        jax.jit(run(small, which, 1, tokens, weights))(state) for which in (implementation, Implementation.JAX)
    )
    pairs = ((got[0], want[0]), (got[1].recurrent[1:], want[1].recurrent[1:]), (got[1].conv, want[1].conv))
    error = max(_error(a, b) for a, b in pairs)
    if not error <= _TOLERANCE:
        raise SystemExit(f"{case.name}: the mixer must be right within {_TOLERANCE}; error {error}: no times")
    return error


def _error(got: jax.Array, want: jax.Array) -> float:
    wide, right = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(wide - right).max() / np.abs(right).max())


def time_case(case: AdvanceCase, implementation: Implementation, repeats: int) -> tuple[Times, Times]:
    """Time the mixer, and the advance alone, in slots that change from call to call."""
    calls = advance.num_calls(case)
    tokens, weights, state = draw(case, 1 + calls * case.num_rows)

    def call(first_slot: int) -> Callable[[_Carry], _Carry]:
        def mix(carry: _Carry) -> _Carry:
            gated = replace(tokens, z=jnp.clip(carry[0], -1.0, 1.0))
            return run(case, implementation, first_slot, gated, weights)(carry[1])

        return mix

    calls_in_turn = [call(1 + i * case.num_rows) for i in range(calls)]
    whole = time_calls(calls_in_turn, (tokens.z, state), repeats=repeats)
    args = advance.draw(case, 1 + calls * case.num_rows)
    return whole, advance.time_case(case, args, implementation, repeats)


def benchmark(name: str, options: Options) -> Iterator[ResultRow]:
    """Check, then time, one case."""
    case, implementation = _CASES[name], Implementation(options.implementation)
    error = check(case, implementation)
    whole, alone = time_case(case, implementation, options.repeats)
    row = partial(ResultRow, case=name, implementation=options.implementation, error=error)
    yield row(metric="us", value=1e6 * whole.median, unit="us")
    yield row(metric="us p10", value=1e6 * whole.p10, unit="us")
    yield row(metric="us p90", value=1e6 * whole.p90, unit="us")
    yield row(metric="advance us", value=1e6 * alone.median, unit="us")
    yield row(metric="share of advance", value=whole.median / alone.median, unit="ratio")


def main() -> None:
    """Run the benchmark and write its results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    unknown = set(options.cases) - set(_CASES)
    if unknown:
        raise SystemExit(f"--cases must name mixer cases; got {sorted(unknown)}; there are {', '.join(_CASES)}")
    rows: list[ResultRow] = []
    for name in options.cases:
        for row in benchmark(name, options):
            _LOG.info("%s  %s  %s: %.4g %s", row.case, row.implementation, row.metric, row.value, row.unit)
            rows.append(row)
        write_results(options.output, "kernels-mixer", rows)  # after every case: a run may be cut short


if __name__ == "__main__":
    main()
