"""Time all that a GDN layer does between its projections in prefill, and what surrounds the delta rule alone.

    python -m benchmarks.kernels.mixer_prefill

Every case is checked first against the plain version; a case whose check fails has no time. `inputs` is the kernel
before the delta rule and `norm` the one after it, each beside what a copy of as many bytes takes in the same run.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro

from benchmarks.kernels.device_time import (
    Times,
    check_request,
    copy_bandwidth,
    copy_row,
    random_keys,
    relative_error,
    run_cases,
    time_all_kept,
    time_rows,
)
from benchmarks.results_file import ResultRow
from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import DeltaInputs
from gdn_jax.kernels.gated_delta.cases import PREFILL_BENCHMARKS, PrefillCase, make_rows
from gdn_jax.kernels.gated_delta.chunk_grid import num_places, place_of_tokens
from gdn_jax.kernels.gdn_mixer import MixerTokens, MixerWeights, RecurrentState, ReplayWindow, gdn_mixer_prefill
from gdn_jax.kernels.gdn_mixer.mosaic_prefill import gdn_mixer_prefill as mosaic_prefill
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_inputs import Laid, prefill_inputs
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_norm import norm_from_grid
from gdn_jax.kernels.gdn_mixer.tiles import MixerTiles, mixer_tiles

_SUITE = "kernels-mixer-prefill"
_TAPS, _EPS = 4, 1e-6
_TOLERANCE = 2.0**-5  # of outputs that are rounded to 8 bits, of inputs and operands that are
_LEAST_BYTES = 256 << 20  # of all calls' tokens: several times the second-level cache of a Hopper GPU
_MOST_CALLS = 8  # in the loop's body


def _mixer_name(case: PrefillCase) -> str:
    return f"mixer/{case.name}"


_CASES = {_mixer_name(case): case for case in PREFILL_BENCHMARKS}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: where the results go.
        cases: names of mixer cases.
        implementation: which kernels: mosaic, or jax for the plain ones, whose parts are not timed.
        repeats: timed runs.
        heads: that a program of the kernel before the delta rule owns, 1 or 2; 0: as the kernel chooses.
        places: that it fills, 16, 32 or 64; 0: as the kernel chooses.
    """

    output: Path = Path("benchmarks/results/kernels-mixer-prefill.json")
    cases: tuple[str, ...] = tuple(_CASES)
    implementation: Literal["mosaic", "jax"] = "mosaic"
    repeats: int = 7
    heads: Literal[0, 1, 2] = 0
    places: Literal[0, 16, 32, 64] = 0

    def tiles(self, case: PrefillCase) -> MixerTiles:
        """Return the tiles that a case is run with."""
        asked = {"heads": self.heads, "places": self.places}
        chosen = mixer_tiles(case.num_tokens, case.heads.num_key, case.heads.num_value)
        return replace(chosen, **{name: value for name, value in asked.items() if value})


@partial(jax.jit, static_argnums=0)
def draw(case: PrefillCase, seed: int | jax.Array) -> tuple[MixerTokens, MixerWeights]:
    """Draw the tokens and weights of a case on the device."""
    heads, keys = case.heads, random_keys(seed, 8)

    def normal(*shape: int, dtype: str = case.dtype) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    lead, gate = case.num_tokens, partial(normal, heads.num_value, dtype="float32")
    gates = (normal(lead, heads.num_value) for _ in range(2))
    tokens = MixerTokens.of(normal(lead, _channels(case)), normal(lead, heads.num_value, heads.value_dim), *gates)
    norm = normal(heads.value_dim, dtype="float32")
    return tokens, MixerWeights(taps=normal(_TAPS, _channels(case)), a_log=gate(), dt_bias=gate(), norm=norm)


def _channels(case: PrefillCase) -> int:
    return 2 * case.heads.num_key * case.heads.key_dim + case.heads.num_value * case.heads.value_dim


def empty_state(case: PrefillCase, num_slots: int) -> RecurrentState:
    """Return slots of zeros, and the least replay window."""
    heads = case.heads
    keys, values = (jnp.zeros((1, 1, count, heads.key_dim), case.dtype) for count in (heads.num_key, heads.num_value))
    g, beta = (jnp.zeros((1, 1, heads.num_value)) for _ in range(2))  # not one array: all are donated
    return RecurrentState(
        recurrent=jnp.zeros((num_slots, heads.num_value, heads.value_dim, heads.key_dim), case.state_dtype),
        conv=jnp.zeros((num_slots, _TAPS - 1, _channels(case)), case.dtype),
        replay=ReplayWindow(
            conv=jnp.zeros((1, 1, _channels(case)), case.dtype), delta=DeltaInputs(k=keys, v=values, g=g, beta=beta)
        ),
    )


def mix(
    case: PrefillCase,
    options: Options,
    tokens: MixerTokens,
    weights: MixerWeights,
    rows: PrefillRows,
    state: RecurrentState,
) -> tuple[jax.Array, RecurrentState]:
    """Call the mixer as the engine does, or with tiles that were asked for."""
    if options.implementation == "mosaic" and (options.heads or options.places):
        return mosaic_prefill(tokens, weights, rows, state, eps=_EPS, tiles=options.tiles(case))
    implementation = Implementation(options.implementation)
    return gdn_mixer_prefill(tokens, weights, rows, state, eps=_EPS, implementation=implementation)


def check(case: PrefillCase, options: Options) -> float:
    """Return the error of the outputs, states and windows of a case against the plain version.

    Raises:
        SystemExit: it is above the tolerance, so that no time would mean anything.
    """
    tokens, weights = draw(case, 0)
    rows, num_slots = make_rows(case)
    state = empty_state(case, num_slots)
    plain = Options(implementation="jax")
    got, want = (jax.jit(partial(mix, case, which))(tokens, weights, rows, state) for which in (options, plain))
    pairs = ((got[0], want[0]), (got[1].recurrent[1:], want[1].recurrent[1:]), (got[1].conv, want[1].conv))
    error = max(relative_error(a, b) for a, b in pairs)
    if not error <= _TOLERANCE:
        raise SystemExit(f"{_mixer_name(case)}: the mixer must be right within {_TOLERANCE}; error {error}: no times")
    return error


def moved_bytes(case: PrefillCase) -> dict[str, int]:
    """Return the least bytes that each kernel around the delta rule moves: what it reads and writes, once."""
    size, values = jnp.dtype(case.dtype).itemsize, case.heads.num_value * case.heads.value_dim
    gates = case.heads.num_value * 2 * (size + 4)  # a and b, g and beta
    inputs = case.num_tokens * (2 * size * _channels(case) + gates)
    return {"inputs": inputs, "norm": case.num_tokens * 3 * size * values}


def time_whole(case: PrefillCase, options: Options) -> Times:
    """Time the mixer on tokens that change from call to call."""

    def call(
        state: RecurrentState, held: tuple[MixerTokens, MixerWeights, PrefillRows]
    ) -> tuple[jax.Array, RecurrentState]:
        return mix(case, options, *held, state)

    rows, num_slots = make_rows(case)
    held = [(*draw(case, seed), rows) for seed in range(_num_calls(case))]
    return time_all_kept(call, empty_state(case, num_slots), held, repeats=options.repeats)


def time_inputs(case: PrefillCase, options: Options) -> Times:
    """Time the kernel before the delta rule."""
    heads, (rows, num_slots) = case.heads, make_rows(case)

    def run(tokens: MixerTokens, weights: MixerWeights, conv: jax.Array) -> tuple[Laid, jax.Array]:
        return prefill_inputs(tokens, weights, rows, conv, num_key=heads.num_key, tiles=options.tiles(case))

    def call(conv: jax.Array, held: tuple[MixerTokens, MixerWeights]) -> tuple[Laid, jax.Array]:
        return run(*held, conv)

    held = [draw(case, seed) for seed in range(_num_calls(case))]
    return time_all_kept(call, empty_state(case, num_slots).conv, held, repeats=options.repeats)


def time_norm(case: PrefillCase, options: Options) -> Times:
    """Time the kernel after the delta rule."""
    heads, (rows, _) = case.heads, make_rows(case)
    place = place_of_tokens(rows, case.num_tokens)
    shape = num_places(case.num_tokens, case.num_rows), heads.num_value, heads.value_dim

    def call(nothing: None, held: tuple[MixerTokens, MixerWeights, jax.Array]) -> tuple[jax.Array, None]:
        tokens, weights, out = held
        return norm_from_grid(out, tokens, place, weights.norm, eps=_EPS), nothing

    held = [
        (*draw(case, seed), jax.random.normal(next(random_keys(seed, 1)), shape, case.dtype))
        for seed in range(_num_calls(case))
    ]
    return time_all_kept(call, None, held, repeats=options.repeats)


def _num_calls(case: PrefillCase) -> int:
    return min(_MOST_CALLS, max(2, -(-_LEAST_BYTES // moved_bytes(case)["inputs"])))


def benchmark(case: PrefillCase, *, options: Options, bandwidth: float) -> Iterator[ResultRow]:
    """Check, then time, one case; yields its times, and the shares of a copy of what surrounds the delta rule."""
    name, error = _mixer_name(case), check(case, options)
    yield from time_rows(name, options.implementation, error, time_whole(case, options))
    if options.implementation == "jax":
        return
    row = partial(ResultRow, case=name, implementation=options.implementation, error=error)
    for part, time_part in (("inputs", time_inputs), ("norm", time_norm)):
        seconds = time_part(case, options).median
        yield row(metric=f"{part} us", value=1e6 * seconds, unit="us")
        yield row(metric=f"{part} share of copy", value=moved_bytes(case)[part] / seconds / bandwidth, unit="ratio")


def main() -> None:
    """Run the benchmark and write its results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    check_request(_SUITE, options.cases, _CASES, options.implementation)
    bandwidth = copy_bandwidth()
    rows = [copy_row(bandwidth)]
    timed = partial(benchmark, options=options, bandwidth=bandwidth)
    run_cases(_SUITE, options.output, options.cases, _CASES, timed, rows)


if __name__ == "__main__":
    main()
