"""Warm-up on several threads: what they compiled is what the calls run."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from oracles.runner_rig import BUCKETS, SIZES, make_runner

from gdn_jax.serving.runner import warm_up
from gdn_jax.serving.runner.warm_up import WarmUpCall, default_threads, run_all

_COMPILED = "/jax/core/compile/backend_compile_duration"
MAIN = threading.main_thread().name


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the threads that anything is compiled on, in order, and behind a colon of the function."""
    threads = list[str]()

    def note(event: str, _: float, **about: Any) -> None:
        if event == _COMPILED:
            threads.append(f"{threading.current_thread().name}: {about.get('fun_name')}")

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
    assert not any(name.startswith(MAIN) for name in compiled)


@pytest.mark.parametrize("num_threads", [0, 1])
def test_one_thread_compiles_nothing_ahead(compiled: list[str], num_threads: int) -> None:
    told = list[tuple[int, ...]]()
    calls = calls_of(functions())
    compiled.clear()
    run_all(calls, lambda *counts: told.append(counts), num_threads=num_threads)
    assert len(compiled) == 5
    assert all(name.startswith(MAIN) for name in compiled)
    assert told == [(done, 5) for done in range(1, 6)]


def test_a_step_that_cannot_be_compiled_raises_as_its_call_would() -> None:
    def fail() -> jax.stages.Lowered:
        raise ValueError("no such step")

    with pytest.raises(ValueError, match="no such step"):
        run_all([WarmUpCall(lower=fail, run=lambda: None)], None, num_threads=2)


def test_after_a_failure_what_is_left_is_not_compiled() -> None:
    begun, go_on = list[int](), threading.Event()

    def call(number: int) -> WarmUpCall:
        def compile_it() -> None:
            begun.append(number)
            if number == 0:
                raise RuntimeError("broken")
            go_on.wait()

        return WarmUpCall(lower=lambda: SimpleNamespace(compile=compile_it), run=lambda: None)  # pyright: ignore

    with pytest.raises(RuntimeError, match="broken"):
        run_all([call(number) for number in range(20)], None, num_threads=2)
    go_on.set()
    assert len(begun) < 20


def test_no_more_threads_compile_than_processors_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "_MOST_THREADS", 8)  # as outside of tests
    for processors, threads in ((1, 1), (2, 1), (8, 4), (128, 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, processors=processors: set(range(processors)))
        assert default_threads() == threads


def test_steps_of_a_runner_are_compiled_ahead(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Lowering puts descriptions in the place of arrays, which fail the check of annotations that tests run under.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    # Sizes of its own: tests of this process may have compiled the steps of the usual ones.
    sizes, buckets = replace(SIZES, num_blocks=13), replace(BUCKETS, prefill=((192, 3),))
    runner, told = make_runner(sizes=sizes, buckets=buckets), list[tuple[int, ...]]()
    compiled.clear()
    runner.warm_up(lambda *counts: told.append(counts), num_threads=2)
    assert told[-1] == (runner.num_compiled, runner.num_compiled)
    ahead = [name for name in compiled if not name.startswith(MAIN)]
    assert len(ahead) == runner.num_compiled
    assert not [name for name in compiled if name.startswith(MAIN) and ("step" in name or "score" in name)]
    assert all("step" in name or "score" in name for name in ahead)
