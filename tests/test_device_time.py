"""The benchmarks' clock: every call of the loop's body is run, percentiles are in order, errors are relative."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.device_time import (
    TimedCalls,
    Times,
    all_kept,
    check_kernels,
    check_request,
    relative_error,
    time_all_kept,
    time_calls,
    time_rows,
)


def test_every_call_gets_what_is_its_own_and_times_are_in_order() -> None:
    traced = []

    def call(carry: jax.Array, own: jax.Array) -> jax.Array:
        traced.append(own.shape)
        return carry + own.sum()

    held = [jnp.ones((size,)) for size in (2, 3)]
    times = time_calls(call, jnp.zeros(()), held, repeats=3)
    assert {(2,), (3,)} == set(traced)
    assert 0 < times.p10 <= times.median <= times.p90


def test_no_call_is_dropped_whose_result_nobody_reads() -> None:
    ran = set()

    def call(state: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
        def note(own: np.ndarray) -> np.ndarray:
            ran.add(float(own))
            return np.asarray(2 * own)

        return jax.pure_callback(note, own, own), state + own  # a compiler drops a callback whose result is not read

    held = [jnp.float32(own) for own in range(3)]
    results, state = TimedCalls(all_kept(call)).run((tuple(jnp.zeros(()) for _ in held), jnp.zeros(())), held)
    assert [float(result) for result in results] == [0.0, 2.0, 4.0]
    assert ran == {0.0, 1.0, 2.0}
    assert float(state) % 3 == 0 < float(state)


def test_calls_without_a_state_are_timed_as_others_are() -> None:
    def call(nothing: None, own: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sort(own), nothing

    times = time_all_kept(call, None, [jnp.arange(3.0), jnp.arange(3.0)], repeats=3)
    assert 0 < times.p10 <= times.median <= times.p90


def test_times_become_rows_in_microseconds() -> None:
    rows = time_rows("a/case", "mosaic", 1e-7, Times(median=2e-6, p10=1e-6, p90=3e-6))
    assert {row.metric: row.value for row in rows} == pytest.approx({"us": 2.0, "us p10": 1.0, "us p90": 3.0})
    assert all((row.case, row.implementation, row.error) == ("a/case", "mosaic", 1e-7) for row in rows)


def test_an_error_is_relative_to_the_largest_value() -> None:
    assert relative_error(np.array([1.0, -4.0]), np.array([1.5, -4.0])) == pytest.approx(0.125)
    assert np.isnan(relative_error(np.array([np.nan, 1.0]), np.array([1.0, 1.0])))


def test_what_cannot_be_run_is_refused_before_anything_is_measured() -> None:
    check_request("suite", ["one"], {"one": 1, "two": 2}, "jax")
    with pytest.raises(SystemExit, match=r"must name cases of suite; got \['three'\]; there are one, two"):
        check_request("suite", ["one", "three"], ["one", "two"], "jax")
    with pytest.raises(SystemExit, match="must name at least one case of suite; there are one"):
        check_request("suite", [], ["one"], "jax")
    check_kernels("jax", "--kernels")


@pytest.mark.parametrize("capability", ["9.0", "8.0", None])
def test_pallas_kernels_are_refused_by_their_flag_but_on_a_hopper_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: str | None
) -> None:
    device = SimpleNamespace(device_kind="a device", compute_capability=capability or "none")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    if capability == "9.0":
        check_kernels("mosaic", "--kernels")
    else:
        with pytest.raises(SystemExit, match=r"--kernels: .* compute capability 9\.0.* or --kernels jax here"):
            check_kernels("mosaic", "--kernels")
