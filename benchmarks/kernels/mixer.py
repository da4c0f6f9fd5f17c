"""Time all that a GDN layer does between its projections in decode, beside the advance of the delta rule alone.

    python -m benchmarks.kernels.mixer

Every case is checked first against the reference; a case whose check fails has no time. `share of advance` is the time
of the whole over that of the advance alone, in the same run.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro

from benchmarks.kernels import advance
from benchmarks.kernels.device_time import (
    Times,
    check_request,
    random_keys,
    relative_error,
    run_cases,
    time_all_kept,
    time_rows,
)
from benchmarks.results_file import ResultRow
from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta.cases import ADVANCE_BENCHMARKS, AdvanceCase
from gdn_jax.kernels.gdn_mixer import MixerTokens, MixerWeights, RecurrentState, ReplayWindow, gdn_mixer_advance

_SUITE = "kernels-mixer"
_TAPS, _EPS = 4, 1e-6
_TOLERANCE = 2.0**-6  # outputs are rounded to 8 bits, of inputs that were rounded to 8 bits


def _mixer_name(case: AdvanceCase) -> str:
    return case.name.replace("advance", "mixer")


_CASES = {_mixer_name(case): case for case in ADVANCE_BENCHMARKS if case.state_dtype == "float32"}


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


@partial(jax.jit, static_argnums=(0, 1))
def draw(case: AdvanceCase, num_slots: int) -> tuple[MixerTokens, MixerWeights, RecurrentState]:
    """Draw the arguments of a case on the device, a lane for each row."""
    heads, args = case.heads, advance.draw(case, num_slots)
    keys = random_keys(1, 12)
    lead = case.num_rows, case.window
    channels = 2 * heads.num_key * heads.key_dim + heads.num_value * heads.value_dim

    def normal(*shape: int, dtype: str = case.dtype) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    gate = partial(normal, heads.num_value, dtype="float32")
    gates = (normal(*lead, heads.num_value) for _ in range(2))
    tokens = MixerTokens.of(normal(*lead, channels), normal(*lead, heads.num_value, heads.value_dim), *gates)
    weights = MixerWeights(
        taps=normal(_TAPS, channels), a_log=gate(), dt_bias=gate(), norm=normal(heads.value_dim, dtype="float32")
    )
    state = RecurrentState(
        recurrent=args.pool,
        conv=normal(num_slots, _TAPS - 1, channels),
        replay=ReplayWindow(conv=normal(*lead, channels), delta=args.replay),
    )
    return tokens, weights, state


def mix(
    case: AdvanceCase,
    implementation: Implementation,
    tokens: MixerTokens,
    weights: MixerWeights,
    rows: AdvanceRows,
    state: RecurrentState,
) -> tuple[jax.Array, RecurrentState]:
    """Call the mixer, a lane for each row."""
    lane = jnp.arange(case.num_rows, dtype=jnp.int32)
    return gdn_mixer_advance(tokens, weights, rows, lane, state, eps=_EPS, implementation=implementation)


def check(case: AdvanceCase, implementation: Implementation) -> float:
    """Return the error of the outputs, states and windows of a case against the reference.

    Raises:
        SystemExit: it is above the tolerance, so that no time would mean anything.
    """
    tokens, weights, state = draw(case, 1 + case.num_rows)
    rows = advance.rows_at(case, 1)
    got, want = (
        jax.jit(partial(mix, case, which))(tokens, weights, rows, state)
        for which in (implementation, Implementation.REFERENCE)
    )
    leaves = (jax.tree.leaves(result) for result in (got, want))
    error = max(relative_error(*pair) for pair in zip(*leaves, strict=True))
    if not error <= _TOLERANCE:
        raise SystemExit(f"{case.name}: the mixer must be right within {_TOLERANCE}; error {error}: no times")
    return error


def time_case(case: AdvanceCase, implementation: Implementation, repeats: int) -> tuple[Times, Times]:
    """Time the mixer, and the advance alone, in slots that change from call to call."""
    num_calls = advance.num_calls(case)
    tokens, weights, state = draw(case, 1 + num_calls * case.num_rows)

    def call(
        state: RecurrentState, held: tuple[MixerTokens, MixerWeights, AdvanceRows]
    ) -> tuple[jax.Array, RecurrentState]:
        return mix(case, implementation, *held, state)

    held = [(tokens, weights, advance.rows_at(case, 1 + i * case.num_rows)) for i in range(num_calls)]
    whole = time_all_kept(call, state, held, repeats=repeats)
    args = advance.draw(case, 1 + num_calls * case.num_rows)
    return whole, advance.time_case(case, args, implementation, repeats)


def benchmark(case: AdvanceCase, options: Options) -> Iterator[ResultRow]:
    """Check, then time, one case."""
    name, implementation = _mixer_name(case), Implementation(options.implementation)
    error = check(case, implementation)
    whole, alone = time_case(case, implementation, options.repeats)
    row = partial(ResultRow, case=name, implementation=options.implementation, error=error)
    yield from time_rows(name, options.implementation, error, whole)
    yield row(metric="advance us", value=1e6 * alone.median, unit="us")
    yield row(metric="share of advance", value=whole.median / alone.median, unit="ratio")


def main() -> None:
    """Run the benchmark and write its results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    check_request(_SUITE, options.cases, _CASES, options.implementation)
    run_cases(_SUITE, options.output, options.cases, _CASES, partial(benchmark, options=options))


if __name__ == "__main__":
    main()
