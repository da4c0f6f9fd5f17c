"""The benchmarks' clock: every call of the loop's body is run, percentiles are in order, errors are relative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.device_time import TimedCalls, Times, apart, relative_error, time_apart, time_calls, time_rows


def test_every_call_gets_what_is_its_own_and_times_are_in_order() -> None:
    traced = []

    def call(carry: jax.Array, own: jax.Array) -> jax.Array:
        traced.append(own.shape)
        return carry + own.sum()

    held = [jnp.ones((size,)) for size in (2, 3)]
    times = time_calls(call, jnp.zeros(()), held, repeats=3)
    assert {(2,), (3,)} == set(traced)
    assert 0 < times.p10 <= times.median <= times.p90


def test_no_call_is_dropped_where_calls_take_nothing_from_one_another() -> None:
    ran = set()

    def run(own: jax.Array) -> jax.Array:
        def note(own: np.ndarray) -> np.ndarray:
            ran.add(float(own))
            return np.asarray(2 * own)

        return jax.pure_callback(note, own, own)  # which a compiler drops where nobody reads its result

    held = [jnp.float32(own) for own in range(3)]
    results = TimedCalls(apart(run)).run(tuple(jnp.zeros(()) for _ in held), held)
    assert [float(result) for result in results] == [0.0, 2.0, 4.0]
    assert ran == {0.0, 1.0, 2.0}


def test_what_is_apart_is_timed_as_other_calls_are() -> None:
    times = time_apart(jnp.sort, [jnp.arange(3.0), jnp.arange(3.0)], repeats=3)
    assert 0 < times.p10 <= times.median <= times.p90


def test_times_become_rows_in_microseconds() -> None:
    rows = time_rows("a/case", "mosaic", 1e-7, Times(median=2e-6, p10=1e-6, p90=3e-6))
    assert {row.metric: row.value for row in rows} == pytest.approx({"us": 2.0, "us p10": 1.0, "us p90": 3.0})
    assert all((row.case, row.implementation, row.error) == ("a/case", "mosaic", 1e-7) for row in rows)


def test_an_error_is_relative_to_the_largest_value() -> None:
    assert relative_error(np.array([1.0, -4.0]), np.array([1.5, -4.0])) == pytest.approx(0.125)
    assert np.isnan(relative_error(np.array([np.nan, 1.0]), np.array([1.0, 1.0])))
