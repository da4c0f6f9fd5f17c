"""Time the advance of the gated delta rule on a device, as a share of the bandwidth of a copy in the same run.

    python -m benchmarks.kernels.advance

Every case is checked first, against a float64 recurrence over some of its rows; a case whose check fails has no time.
Where flash-linear-attention is installed, its fused recurrence runs the same new tokens on states that change from call
to call, as ours do in their slots; it replays nothing, where ours folds as many tokens as it runs. `us` is the whole
time of a call, `us net` that less the time of a kernel that does nothing, in the same loop.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

from benchmarks.kernels.device_time import (
    Times,
    check_request,
    copy_bandwidth,
    copy_row,
    random_keys,
    relative_error,
    run_cases,
    time_all_kept,
    time_calls,
    time_rows,
)
from benchmarks.kernels.peers import has_fla, time_fla_advance
from benchmarks.results_file import ResultRow
from gdn_jax.kernels.anchors import NULL_SLOT, AdvanceRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import gdn_advance
from gdn_jax.kernels.gated_delta.cases import ADVANCE_BENCHMARKS, CASES, AdvanceArguments, AdvanceCase
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs

_SUITE = "kernels-advance"
_LOG = logging.getLogger(__name__)
_CHECKED_ROWS = 4
_LEAST_POOL_BYTES = 256 << 20  # several times the second-level cache of a Hopper GPU
_MOST_CALLS = 64  # in the loop's body
_Carry = tuple[jax.Array, jax.Array]  # the outputs of the call before, and the pool
# Relative to the largest value. States at rest round once; outputs are rounded to the activations' dtype.
_STATE_TOLERANCES = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_OUTPUT_TOLERANCES = {"float32": 1e-5, "bfloat16": 2.0**-7}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: where the results go.
        cases: names of advance cases.
        implementation: which kernels: mosaic, jax for the plain ones, or the reference.
        repeats: timed runs.
    """

    output: Path = Path("benchmarks/results/kernels-advance.json")
    cases: tuple[str, ...] = tuple(case.name for case in ADVANCE_BENCHMARKS)
    implementation: Literal["mosaic", "jax", "reference"] = "mosaic"
    repeats: int = 7


@partial(jax.jit, static_argnums=(0, 1))  # else each array and size is compiled by itself, ten seconds for a case
def draw(case: AdvanceCase, num_slots: int) -> AdvanceArguments:
    """Draw the arguments of a case on the device; every row has full windows of replayed and new tokens."""
    heads, lead = case.heads, (case.num_rows, case.window)
    keys = random_keys(0, 12)

    def unit(num_heads: int, width: int, scale: float = 1.0) -> jax.Array:
        x = jax.random.normal(next(keys), (*lead, num_heads, width))
        return (scale * x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(case.dtype)

    def inputs() -> DeltaInputs:
        values = jax.random.normal(next(keys), (*lead, heads.num_value, heads.value_dim)).astype(case.dtype)
        g = -jax.random.exponential(next(keys), (*lead, heads.num_value)) / 20  # a state lives for some 20 tokens
        beta = jax.random.uniform(next(keys), (*lead, heads.num_value))
        return DeltaInputs(k=unit(heads.num_key, heads.key_dim), v=values, g=g, beta=beta)

    shape = (num_slots, heads.num_value, heads.value_dim, heads.key_dim)
    return AdvanceArguments(
        q=unit(heads.num_key, heads.key_dim, heads.key_dim**-0.5),
        new=inputs(),
        replay=inputs(),
        rows=rows_at(case, 1),
        pool=jax.random.normal(next(keys), shape, case.state_dtype),
    )


def rows_at(case: AdvanceCase, first_slot: int) -> AdvanceRows:
    """Return rows that fold in place, in slots from `first_slot` on."""
    slots = first_slot + jnp.arange(case.num_rows, dtype=jnp.int32)
    count = jnp.full((case.num_rows,), case.window, jnp.int32)
    return AdvanceRows(
        read_slot=slots,
        write_slot=slots,
        save_slot=jnp.full_like(slots, NULL_SLOT),
        save_at=jnp.zeros_like(slots),
        folded=jnp.full_like(slots, 1024),
        num_replay=count,
        num_new=count,
    )


def state_bytes(case: AdvanceCase) -> int:
    """Return the bytes of one row's state at rest."""
    heads = case.heads
    return heads.num_value * heads.value_dim * heads.key_dim * jnp.dtype(case.state_dtype).itemsize


def num_calls(case: AdvanceCase) -> int:
    """Return how many calls the loop's body holds: so many that no cache has room for the slots of all."""
    return min(_MOST_CALLS, max(2, -(-_LEAST_POOL_BYTES // (case.num_rows * state_bytes(case)))))


def moved_bytes(case: AdvanceCase) -> int:
    """Return the least bytes that a call moves: each state read and written once, each input and output once."""
    heads, size = case.heads, jnp.dtype(case.dtype).itemsize
    key, value = heads.num_key * heads.key_dim, heads.num_value * heads.value_dim
    new, replayed = 2 * key + 2 * value, key + value  # q, k, v, o; k, v
    per_token = size * (new + replayed) + 4 * 4 * heads.num_value  # g and beta of both
    return case.num_rows * (2 * state_bytes(case) + case.window * per_token)


def check(case: AdvanceCase, args: AdvanceArguments, implementation: Implementation) -> float:
    """Return the error of the states of some rows; their outputs are checked too.

    Raises:
        SystemExit: an error is above its tolerance, so that no time would mean anything.
    """
    checked = min(_CHECKED_ROWS, case.num_rows)
    before = np.asarray(args.pool[1 : 1 + checked], np.float64)
    replay, new = ({name: x[:checked] for name, x in vars(inputs).items()} for inputs in (args.replay, args.new))
    states, _ = run_float64(before, replay)
    _, want = run_float64(states, {**new, "q": args.q[:checked]})
    advance = jax.jit(partial(gdn_advance, implementation=implementation), donate_argnums=4)
    outputs, pool = advance(*vars(args).values())
    state_error, output_error = relative_error(pool[1 : 1 + checked], states), relative_error(outputs[:checked], want)
    limits = _STATE_TOLERANCES[case.state_dtype], _OUTPUT_TOLERANCES[case.dtype]
    if not (state_error <= limits[0] and output_error <= limits[1]):
        raise SystemExit(
            f"{case.name}: states and outputs must be right within {limits}; errors {state_error}, {output_error}: "
            "no times"
        )
    return state_error


def run_float64(states: np.ndarray, tokens: dict[str, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    """Run rows of tokens through the recurrence in float64.

    Args:
        states: `[rows, Nv, dv, dk]`.
        tokens: k, v, g and beta, `[rows, T, ...]`; q too where outputs are wanted.

    Returns:
        The states after all tokens; the outputs `[rows, T, Nv, dv]`, zeros without q.
    """
    wide = {name: np.asarray(x, np.float64) for name, x in tokens.items()}
    group, outputs = states.shape[1] // wide["k"].shape[2], np.zeros(wide["v"].shape)
    for t in range(wide["k"].shape[1]):
        k = np.repeat(wide["k"][:, t], group, axis=1)
        states = np.exp(wide["g"][:, t])[..., None, None] * states
        error = wide["beta"][:, t][..., None] * (wide["v"][:, t] - np.einsum("bhvk,bhk->bhv", states, k))
        states = states + error[..., None] * k[:, :, None, :]
        if "q" in wide:
            outputs[:, t] = np.einsum("bhvk,bhk->bhv", states, np.repeat(wide["q"][:, t], group, axis=1))
    return states, outputs


def time_case(case: AdvanceCase, args: AdvanceArguments, implementation: Implementation, repeats: int) -> Times:
    """Time a case in slots that change from call to call."""

    def call(pool: jax.Array, rows: AdvanceRows) -> _Carry:
        return gdn_advance(args.q, args.new, args.replay, rows, pool, implementation=implementation)

    def after(carry: _Carry, rows: AdvanceRows) -> _Carry:
        return lax.optimization_barrier(call(carry[1], rows))

    rows = [rows_at(case, 1 + i * case.num_rows) for i in range(num_calls(case))]
    # The Mosaic kernel that makes states makes outputs too; plain versions would leave out those that nobody reads.
    if implementation is not Implementation.MOSAIC:
        return time_all_kept(call, args.pool, rows, repeats=repeats)
    return time_calls(after, (jnp.zeros_like(args.new.v), args.pool), rows, repeats=repeats)


def time_nothing(repeats: int) -> Times:
    """Time an advance of padding: the launch of a kernel that moves nothing."""
    case = replace(ADVANCE_BENCHMARKS[0], num_rows=1, window=1)
    args = draw(case, 2)
    nothing = jax.tree.map(jnp.zeros_like, args.rows)

    def call(pool: jax.Array, rows: AdvanceRows) -> jax.Array:
        return gdn_advance(args.q, args.new, args.replay, rows, pool, implementation=Implementation.MOSAIC)[1]

    return time_calls(call, args.pool, [nothing] * 16, repeats=repeats)


def benchmark(case: AdvanceCase, *, options: Options, bandwidth: float, empty: float | None) -> Iterator[ResultRow]:
    """Check, then time, one case; yields times, the share of the copy's bandwidth, and a peer's time."""
    num_slots = 1 + num_calls(case) * case.num_rows
    implementation = Implementation(options.implementation)
    error = check(case, draw(case, num_slots), implementation)
    args = draw(case, num_slots)
    peer = _benchmark_fla(case, args, options.repeats) if has_fla() and case.state_dtype == "float32" else ()
    times = time_case(case, args, implementation, options.repeats)
    row = partial(ResultRow, case=case.name, implementation=options.implementation, error=error)
    yield from time_rows(case.name, options.implementation, error, times)
    if empty is not None:
        yield row(metric="us net", value=1e6 * (times.median - empty), unit="us")
    yield row(metric="share of copy", value=moved_bytes(case) / times.median / bandwidth, unit="ratio")
    yield from peer


def _benchmark_fla(case: AdvanceCase, args: AdvanceArguments, repeats: int) -> Sequence[ResultRow]:
    """Check and time flash-linear-attention on a case's new tokens; empty where its check fails."""
    states = args.pool[1:].reshape(num_calls(case), case.num_rows, *args.pool.shape[1:])
    arrays = {"q": args.q, **vars(args.new), "states": jnp.swapaxes(states, -1, -2)}
    times, outputs = time_fla_advance({name: np.asarray(x, np.float32) for name, x in arrays.items()}, repeats=repeats)
    checked = slice(min(_CHECKED_ROWS, case.num_rows))
    tokens = {"q": args.q[checked], **{name: x[checked] for name, x in vars(args.new).items()}}
    error = relative_error(outputs[checked], run_float64(np.asarray(states[0][checked], np.float64), tokens)[1])
    if not error <= _OUTPUT_TOLERANCES["bfloat16"]:
        _LOG.warning("%s: the error of flash-linear-attention is %g: no time", case.name, error)
        return ()
    return time_rows(case.name, "fla", error, times)


def main() -> None:
    """Run the benchmark and write its results."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = tyro.cli(Options, description=__doc__)
    known = {case.name: case for case in CASES.values() if isinstance(case, AdvanceCase)}
    check_request(_SUITE, options.cases, known, options.implementation)
    bandwidth = copy_bandwidth()
    rows = [copy_row(bandwidth)]
    empty = None
    if options.implementation == "mosaic":
        nothing = time_nothing(options.repeats)
        rows += time_rows("empty", "mosaic", None, nothing)
        empty = nothing.median
    timed = partial(benchmark, options=options, bandwidth=bandwidth, empty=empty)
    run_cases(_SUITE, options.output, options.cases, known, timed, rows)


if __name__ == "__main__":
    main()
