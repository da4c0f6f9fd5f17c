"""The benchmark of the prefill has no time for a kernel that is wrong, or that leaves out what it is to write."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import prefill as benchmark
from gdn_jax.kernels.gated_delta import gdn_prefill
from gdn_jax.kernels.gated_delta.cases import Heads, PrefillCase, Span
from gdn_jax.kernels.numerics import CHUNK

CASE = PrefillCase(
    name="small",
    heads=Heads(num_key=1, num_value=2, key_dim=16, value_dim=16),
    spans=(Span(0, 2 * CHUNK), Span(0, CHUNK + 9)),
    num_tokens=3 * CHUNK + 9,
    num_rows=2,
    export_every=CHUNK,
)
Result = tuple[jax.Array, jax.Array]


def check(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Result]) -> float:
    monkeypatch.setattr(benchmark, "gdn_prefill", kernel)
    monkeypatch.setattr(benchmark, "_MOST_CALLS", 2)
    options = benchmark.Options(implementation="jax")
    return benchmark.check(CASE, benchmark.prefill_of(CASE, options), correlated=False)


def without_exports(q, inputs, rows, pool, **options) -> Result:
    none = replace(rows, export_slot=jnp.zeros_like(rows.export_slot))
    return gdn_prefill(q, inputs, none, pool, **options)


def with_an_export_of_another_state(q, inputs, rows, pool, **options) -> Result:
    outputs, pool = gdn_prefill(q, inputs, rows, pool, **options)
    return outputs, pool.at[rows.export_slot[0, 0]].set(pool[rows.write_slot[0]])


def with_states_that_stay_once_they_are_there(q, inputs, rows, pool, **options) -> Result:
    outputs, after = gdn_prefill(q, inputs, rows, pool, **options)
    return outputs, jnp.where(jnp.any(pool[rows.write_slot] != 0), pool, after)


def with_one_output_that_is_no_number(q, inputs, rows, pool, **options) -> Result:
    outputs, pool = gdn_prefill(q, inputs, rows, pool, **options)
    return outputs.at[-1, -1, -1].set(jnp.nan), pool


def test_the_right_kernel_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, gdn_prefill) < 1e-6


@pytest.mark.parametrize(
    "kernel",
    [
        without_exports,
        with_an_export_of_another_state,
        with_states_that_stay_once_they_are_there,
        with_one_output_that_is_no_number,
    ],
)
def test_a_wrong_kernel_has_no_time(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Result]) -> None:
    with pytest.raises(SystemExit, match="outputs and states must be right"):
        check(monkeypatch, kernel)


def test_the_float64_model_stores_at_every_boundary_and_at_every_end() -> None:
    args = benchmark.draw(CASE, 0)
    _, states = benchmark.run_float64(CASE, args, np.array([0, 1]))
    exports, ends = np.asarray(args.rows.boundaries()[1]), np.asarray(args.rows.write_slot)
    assert set(states) == {*exports[exports > 0].tolist(), *ends.tolist()}
    assert len(states) == 5
