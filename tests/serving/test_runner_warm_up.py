"""Warm-up on several threads: what they compiled is what the calls run."""

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from oracles.runner_rig import make_runner

from gdn_jax.serving.runner import warm_up
from gdn_jax.serving.runner.warm_up import WarmUpCall, default_threads, run_all

_COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the threads that anything is compiled on, in order."""
    threads = list[str]()

    def note(event: str, _: float, **__: Any) -> None:
        if event == _COMPILED:
            threads.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield threads
    jax.monitoring.unregister_event_duration_listener(note)


def calls_of(functions: list[Any]) -> list[WarmUpCall]:
    """Return calls of jitted functions of one argument."""
    x = jnp.ones(7)
    return [WarmUpCall(lower=lambda f=f: f.lower(x), run=lambda f=f: f(x)) for f in functions]


def functions() -> list[Any]:
    return [jax.jit(lambda x, n=n: (x * (n + 1.25)).sum()) for n in range(5)]


def test_calls_compile_nothing_that_was_compiled_ahead_and_progress_counts_each_once(compiled: list[str]) -> None:
    told = list[tuple[int, ...]]()
    calls = calls_of(functions())
    compiled.clear()
    run_all(calls, lambda *counts: told.append(counts), num_threads=2)
    assert told == [(done, 5) for done in range(1, 6)]
    assert len(compiled) == 5
    assert threading.main_thread().name not in compiled


@pytest.mark.parametrize("num_threads", [0, 1])
def test_one_thread_compiles_nothing_ahead(compiled: list[str], num_threads: int) -> None:
    told = list[tuple[int, ...]]()
    calls = calls_of(functions())
    compiled.clear()
    run_all(calls, lambda *counts: told.append(counts), num_threads=num_threads)
    assert compiled == [threading.main_thread().name] * 5
    assert told == [(done, 5) for done in range(1, 6)]


def test_a_step_that_cannot_be_compiled_raises_as_its_call_would() -> None:
    def fail() -> jax.stages.Lowered:
        raise ValueError("no such step")

    with pytest.raises(ValueError, match="no such step"):
        run_all([WarmUpCall(lower=fail, run=lambda: None)], None, num_threads=2)


def test_no_more_threads_compile_than_processors_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "_MOST_THREADS", 8)  # as outside of tests
    for processors, threads in ((1, 0), (2, 1), (8, 4), (128, 8), (None, 0)):
        monkeypatch.setattr("os.cpu_count", lambda processors=processors: processors)
        assert default_threads() == threads


def test_steps_of_a_runner_are_compiled_ahead(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Lowering puts descriptions in the place of arrays, which fail the check of annotations that tests run under.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    runner, told = make_runner(), list[tuple[int, ...]]()
    compiled.clear()
    runner.warm_up(lambda *counts: told.append(counts), num_threads=2)
    assert told[-1] == (runner.num_compiled, runner.num_compiled)
    assert sum(name != threading.main_thread().name for name in compiled) == runner.num_compiled
