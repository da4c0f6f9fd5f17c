"""Warm-up: every step is compiled before the first request, several at once.

A call of a step compiles it and waits for that, on one processor. JAX keeps what was
compiled without a call too: the call that follows takes it, and compiles nothing.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import jax

Progress = Callable[[int, int], None]  # called with (steps compiled, steps in all)
_MOST_THREADS = 8  # describing steps to the compiler is work for one thread, which keeps no more than these busy


@dataclass(frozen=True, kw_only=True)
class WarmUpCall:
    """One step on padding alone.

    Attributes:
        lower: describes it to the compiler.
        run: calls it.
    """

    lower: Callable[[], jax.stages.Lowered]
    run: Callable[[], object]


def default_threads() -> int:
    """Return how many threads compile: one for two processors, of which a compilation keeps one busy."""
    return min(_MOST_THREADS, (os.cpu_count() or 1) // 2)


def run_all(calls: Sequence[WarmUpCall], progress: Progress | None, *, num_threads: int) -> None:
    """Run every call, in order.

    Args:
        calls: each compiles its step, or finds it compiled.
        progress: told of each compiled step.
        num_threads: that compile beforehand, if more than one.
    """

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, len(calls))

    is_ahead = num_threads > 1
    if is_ahead:
        with ThreadPoolExecutor(num_threads) as threads:
            compiling = [threads.submit(call.lower().compile) for call in calls]
            for done, future in enumerate(as_completed(compiling), 1):
                future.result()
                tell(done)
    for done, call in enumerate(calls, 1):
        call.run()
        if not is_ahead:
            tell(done)
