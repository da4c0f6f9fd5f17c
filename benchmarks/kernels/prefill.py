"""Time the prefill of the gated delta rule on a device, beside what a copy and a matrix product reach in the same run.

    python -m benchmarks.kernels.prefill

Every case is checked first against a float64 recurrence over some of its heads, with drawn keys and with strongly
correlated ones: outputs, exported and final states. A case whose check fails has no time. Tokens stand on the chunk
grid before the clock starts, where the mixer's prefill writes them. Where flash-linear-attention, FlashQLA or
jax-linear-attention are installed, they run the same tokens from empty states; what FlashQLA's authors publish of
FlashInfer on an H200 stands beside them as it is published. `--warpgroups` and `--stages` try other tiles.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

from benchmarks.kernels.device_time import (
    TimedCalls,
    Times,
    check_request,
    copy_bandwidth,
    copy_row,
    empty,
    matmul_rate,
    matmul_row,
    random_keys,
    run_cases,
    time_all_kept,
    time_rows,
)
from benchmarks.kernels.peers import has_jla, jla_prefill, time_torch_prefill, torch_prefills
from benchmarks.results_file import ResultRow
from gdn_jax.kernels.anchors import NULL_SLOT, PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import gdn_prefill
from gdn_jax.kernels.gated_delta.cases import CASES, PREFILL_BENCHMARKS, PrefillArguments, PrefillCase, make_rows
from gdn_jax.kernels.gated_delta.chunk_grid import num_places, place_of_tokens, take, token_of_places
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs
from gdn_jax.kernels.gated_delta.mosaic_prefill import gates_on_grid, gdn_prefill_on_grid
from gdn_jax.kernels.gated_delta.tiles import PrefillTiles, prefill_tiles
from gdn_jax.kernels.numerics import CHUNK

_SUITE = "kernels-prefill"
_LOG = logging.getLogger(__name__)
_CHECKED_HEADS = 2
_LEAST_BYTES = 256 << 20  # of all calls' tokens: several times the second-level cache of a Hopper GPU
_MOST_CALLS = 8  # in the loop's body
# Relative, in the Euclidean norm: operands are rounded to 8 bits, which correlated keys make worse.
_TOLERANCES = {"random": 4e-3, "correlated": 1e-2}
# Microseconds on an H200 by FlashQLA's own benchmark of FlashInfer 0.6.13.
_FLASHINFER = {
    "prefill/16x32/1x2048": 106,
    "prefill/16x32/1x4096": 201,
    "prefill/16x32/1x8192": 394,
    "prefill/16x32/1x32768": 1550,
    "prefill/16x32/4x2048": 111,
    "prefill/16x32/8x1024": 119,
    "prefill/16x32/4x8192": 425,
    "prefill/16x32/1024+7168": 346,
    "prefill/16x64/1x8192": 392,
    "prefill/2x8/1x8192": 417,
}
_Carry = tuple[jax.Array, jax.Array]  # the outputs of the call before, and the pool


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: where the results go.
        cases: names of prefill cases.
        implementation: which kernels: mosaic, or jax for the plain ones.
        repeats: timed runs.
        warpgroups: that multiply in one program of the serial kernel; 0: as the kernel chooses.
        stages: turns of their loop that shared memory has room for; 0: as the kernel chooses.
    """

    output: Path = Path("benchmarks/results/kernels-prefill.json")
    cases: tuple[str, ...] = tuple(case.name for case in PREFILL_BENCHMARKS)
    implementation: Literal["mosaic", "jax"] = "mosaic"
    repeats: int = 7
    warpgroups: Literal[0, 1, 2] = 0
    stages: int = 0

    def tiles(self, case: PrefillCase) -> PrefillTiles:
        """Return the tiles that a case is run with."""
        asked = {"warpgroups": self.warpgroups, "stages": self.stages}
        chosen = prefill_tiles(case.num_rows * case.heads.num_value, case.heads.value_dim)
        return replace(chosen, **{name: value for name, value in asked.items() if value})


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """What is checked and timed, of arguments that are laid out before.

    Attributes:
        lay_out: makes the arguments, but for the pool.
        run: of these and the pool.
        take_back: outputs on the packed axis, for the check.
    """

    lay_out: Callable[[PrefillArguments], tuple]
    run: Callable[..., _Carry]
    take_back: Callable[[jax.Array, PrefillArguments], jax.Array]

    @cached_property
    def calls(self) -> TimedCalls[_Carry, tuple]:
        """The calls in a loop."""
        return TimedCalls(lambda carry, args: lax.optimization_barrier(self.run(*args, carry[1])))

    def first_carry(self, args: PrefillArguments) -> _Carry:
        """Return what the first call takes."""
        return empty(jax.eval_shape(self.run, *self.lay_out(args), args.pool)[0]), args.pool


def prefill_of(case: PrefillCase, options: Options) -> Prefill:
    """Return the Mosaic prefill on the chunk grid, or the plain one of packed tokens."""
    if options.implementation == "jax":
        return Prefill(
            lay_out=lambda args: (args.q, args.inputs, args.rows),
            run=partial(gdn_prefill, implementation=Implementation.JAX),
            take_back=lambda outputs, args: outputs,
        )

    def lay_out(args: PrefillArguments) -> tuple:
        token = token_of_places(place(args), num_places(case.num_tokens, case.num_rows))
        tokens = jnp.concatenate([args.q, args.inputs.k, args.inputs.v], axis=1)
        return take(tokens, token), gates_on_grid(args.inputs, token), args.rows

    def place(args: PrefillArguments) -> jax.Array:
        return place_of_tokens(args.rows, case.num_tokens)

    return Prefill(
        lay_out=jax.jit(lay_out),
        run=partial(gdn_prefill_on_grid, num_key=case.heads.num_key, tiles=options.tiles(case)),
        take_back=jax.jit(lambda outputs, args: take(outputs, place(args))),
    )


@partial(jax.jit, static_argnums=0, static_argnames="correlated")
def draw(case: PrefillCase, seed: int | jax.Array, *, correlated: bool = False) -> PrefillArguments:
    """Draw the arguments of a case on the device; correlated keys share most of their direction, and overwrite it."""
    heads, keys = case.heads, random_keys(seed, 6)
    key_shape, value_shape = ((case.num_tokens, count, width) for count, width in _widths(case))

    def unit(x: jax.Array, scale: float = 1.0) -> jax.Array:
        return (scale * x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(case.dtype)

    k = jax.random.normal(next(keys), key_shape)
    beta = jax.random.uniform(next(keys), value_shape[:2])
    if correlated:
        k = 0.3 * k + jax.random.normal(next(keys), (1, *key_shape[1:]))
        beta = 0.9 + 0.1 * beta
    g = -jax.random.exponential(next(keys), value_shape[:2]) / 20  # a state lives for some 20 tokens
    values = jax.random.normal(next(keys), value_shape).astype(case.dtype)
    rows, num_slots = make_rows(case)
    return PrefillArguments(
        q=unit(jax.random.normal(next(keys), key_shape), heads.key_dim**-0.5),
        inputs=DeltaInputs(k=unit(k), v=values, g=g, beta=beta),
        rows=rows,
        pool=jnp.zeros((num_slots, heads.num_value, heads.value_dim, heads.key_dim), case.state_dtype),
    )


def _widths(case: PrefillCase) -> tuple[tuple[int, int], tuple[int, int]]:
    heads = case.heads
    return (heads.num_key, heads.key_dim), (heads.num_value, heads.value_dim)


def check(case: PrefillCase, prefill: Prefill, *, correlated: bool) -> float:
    """Return the error of outputs and of exported and final states of some heads, the larger of the two.

    Raises:
        SystemExit: it is above its tolerance, so that no time would mean anything.
    """
    # The last call's tokens are its own: what it leaves out must not be there from the call before.
    drawn = [draw(case, seed, correlated=correlated) for seed in reversed(range(_num_calls(case)))]
    args = drawn[-1]
    outputs, pool = prefill.calls.run(prefill.first_carry(args), [prefill.lay_out(each) for each in drawn])
    outputs = prefill.take_back(outputs, args)
    checked = np.linspace(0, case.heads.num_value - 1, _CHECKED_HEADS).astype(int)
    want, states = run_float64(case, args, checked)
    stored = pool[np.array(list(states))][:, checked]
    error = max(_error(outputs[:, checked], want), _error(stored, np.stack(list(states.values()))))
    limit = _TOLERANCES["correlated" if correlated else "random"]
    if not error <= limit:
        kind = "correlated" if correlated else "drawn"
        raise SystemExit(f"{case.name}: outputs and states must be right within {limit}; error {error} on {kind} keys")
    return error


def _error(got: jax.Array | np.ndarray, want: np.ndarray) -> float:
    wide = np.asarray(got, np.float64)
    return float(np.linalg.norm(wide - want) / np.linalg.norm(want))


def run_float64(
    case: PrefillCase, args: PrefillArguments, heads: np.ndarray
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Run some value heads through the recurrence in float64, from empty states.

    Returns:
        Outputs `[T, heads, dv]`; exported and final states `[heads, dv, dk]` by slot.
    """
    group = case.heads.num_value // case.heads.num_key
    q, k = (np.asarray(x[:, heads // group], np.float64) for x in (args.q, args.inputs.k))
    v, g, beta = (np.asarray(x[:, heads], np.float64) for x in (args.inputs.v, args.inputs.g, args.inputs.beta))
    outputs, states, begin = [], {}, 0
    for span, ends in zip(case.spans, _stored(args.rows), strict=True):
        state, first = np.zeros((len(heads), v.shape[2], k.shape[2])), begin - span.start
        for count, slot in ends:
            tokens = slice(begin, first + count)
            with jax.enable_x64(True):
                state, out = _recurrence(state, *(x[tokens] for x in (q, k, v, g, beta)))
            states[slot], begin = np.asarray(state), tokens.stop
            outputs.append(np.asarray(out))
    return np.concatenate(outputs), states


def _stored(rows: PrefillRows) -> list[list[tuple[int, int]]]:
    """Return for each row, in ascending order, after how many tokens of its sequence which slot gets its state."""
    counts, slots = (np.asarray(x).tolist() for x in rows.boundaries())
    ends = zip(np.asarray(rows.start + rows.length).tolist(), np.asarray(rows.write_slot).tolist(), strict=True)
    exports = (
        [(count, slot) for count, slot in zip(*of_row, strict=True) if slot != NULL_SLOT]
        for of_row in zip(counts, slots, strict=True)
    )
    return [[*exported, end] for exported, end in zip(exports, ends, strict=True)]


@jax.jit
def _recurrence(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Run some tokens, one by one; the first axis of all but the state is tokens, the second heads."""

    def product(state: jax.Array, vector: jax.Array) -> jax.Array:
        return (state * vector[:, None, :]).sum(-1)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = token
        state = state * jnp.exp(g)[:, None, None]
        error = beta[:, None] * (v - product(state, k))
        state = state + error[:, :, None] * k[:, None, :]
        return state, product(state, q)

    return lax.scan(step, state, (q, k, v, g, beta))


def moved_bytes(case: PrefillCase) -> int:
    """Return the least bytes that a call moves: each input and output once, states and exports written once."""
    (num_key, key_dim), (num_value, value_dim) = _widths(case)
    size, state = jnp.dtype(case.dtype).itemsize, num_value * value_dim * key_dim * jnp.dtype(case.state_dtype).itemsize
    per_token = size * 2 * (num_key * key_dim + num_value * value_dim) + 8 * num_value
    exports = sum(span.length // case.export_every for span in case.spans) if case.export_every else 0
    return case.num_tokens * per_token + (case.num_rows + exports) * state


def num_operations(case: PrefillCase) -> int:
    """Return the floating-point operations of a call's products over chunks."""
    (num_key, key_dim), (num_value, value_dim) = _widths(case)
    per_key_head = 2 * 2 * CHUNK * CHUNK * key_dim  # K K^T and Q K^T
    per_value_head = 2 * CHUNK * (3 * key_dim + 2 * CHUNK) * value_dim  # K S, Q S, K^T V'; T W, P V'
    return case.num_tokens // CHUNK * (num_key * per_key_head + num_value * per_value_head)


def time_case(case: PrefillCase, prefill: Prefill, options: Options) -> Times:
    """Time a case on tokens that change from call to call."""
    drawn = [draw(case, seed) for seed in range(_num_calls(case))]
    held = [prefill.lay_out(args) for args in drawn]
    # The Mosaic kernel that makes states makes outputs too; plain versions would leave out those that nobody reads.
    if options.implementation == "jax":
        return time_all_kept(lambda pool, args: prefill.run(*args, pool), drawn[0].pool, held, repeats=options.repeats)
    return prefill.calls.time(prefill.first_carry(drawn[0]), held, repeats=options.repeats)


def _num_calls(case: PrefillCase) -> int:
    return min(_MOST_CALLS, max(2, -(-_LEAST_BYTES // moved_bytes(case))))


def benchmark(case: PrefillCase, *, options: Options, bandwidth: float, rate: float) -> Iterator[ResultRow]:
    """Check, then time, one case; yields times, shares of copy and product, and peers' times."""
    prefill = prefill_of(case, options)
    error = check(case, prefill, correlated=False)
    correlated = check(case, prefill, correlated=True)
    times = time_case(case, prefill, options)
    row = partial(ResultRow, case=case.name, implementation=options.implementation)
    yield from time_rows(case.name, options.implementation, error, times)
    yield row(metric="error, correlated keys", value=correlated, unit="ratio", error=correlated)
    yield row(metric="share of copy", value=moved_bytes(case) / times.median / bandwidth, unit="ratio", error=error)
    yield row(metric="share of matmul", value=num_operations(case) / times.median / rate, unit="ratio", error=error)
    if not case.export_every:  # nobody else exports float32 states at chosen boundaries
        yield from _peers(case, options.repeats)


def _peers(case: PrefillCase, repeats: int) -> Iterator[ResultRow]:
    """Check and time what others have; nothing for one whose check fails."""
    if case.name in _FLASHINFER:
        published = partial(ResultRow, case=case.name, metric="us", unit="us", error=None)
        yield published(value=_FLASHINFER[case.name], implementation="flashinfer, published")
    args = draw(case, 0)
    checked = np.array([0])
    want, _ = run_float64(case, args, checked)
    arrays = {name: np.asarray(x, np.float32) for name, x in {"q": args.q, **vars(args.inputs)}.items()}
    lengths = [span.length for span in case.spans]
    timed = {
        name: partial(time_torch_prefill, module, arrays, lengths, repeats=repeats)
        for name, module in torch_prefills().items()
    }
    if has_jla() and len(set(lengths)) == 1:
        timed["jla"] = partial(_time_jla, case, args, repeats)
    for name, time_peer in timed.items():
        try:
            times, outputs = time_peer()
        except Exception as failure:  # a peer that does not run here takes nothing from our numbers
            _LOG.warning("%s: %s does not run: %r: no time", case.name, name, failure)
            continue
        error = _error(outputs[:, checked], want)
        if error <= _TOLERANCES["correlated"]:
            yield from time_rows(case.name, name, error, times)
        else:
            _LOG.warning("%s: the error of %s is %g: no time", case.name, name, error)


def _time_jla(case: PrefillCase, args: PrefillArguments, repeats: int) -> tuple[Times, np.ndarray]:
    """Time jax-linear-attention on rows of one length, in a jitted loop as ours."""
    prefill = jla_prefill()
    by_row = {
        name: x.reshape(case.num_rows, -1, *x.shape[1:]) for name, x in {"q": args.q, **vars(args.inputs)}.items()
    }

    def call(nothing: None, inputs: dict[str, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], None]:
        order = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
        return prefill(*order, scale=1.0, output_final_state=True), nothing

    (outputs, _), _ = jax.jit(call)(None, by_row)
    kept = np.asarray(outputs, np.float32).reshape(args.inputs.v.shape)
    return time_all_kept(call, None, [by_row] * 4, repeats=repeats), kept


def main() -> None:
    """Run the benchmark and write its results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    known = {case.name: case for case in CASES.values() if isinstance(case, PrefillCase)}
    check_request(_SUITE, options.cases, known, options.implementation)
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    rows = [copy_row(bandwidth), matmul_row(rate)]
    timed = partial(benchmark, options=options, bandwidth=bandwidth, rate=rate)
    run_cases(_SUITE, options.output, options.cases, known, timed, rows)


if __name__ == "__main__":
    main()
