"""Ctrl-C between two steps instead of in the middle of one, where it would leave the books half-written."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]


class _Hold:
    """Stands in for the process's handler of SIGINT, and keeps what it is to get."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler
        self._held: list[tuple[int, FrameType | None]] = []
        self.second_passes = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Keep an interrupt, or pass it on if it may pass and is not the first."""
        self._held.append((number, frame))
        if self.second_passes and len(self._held) > 1:
            self.second_passes = False  # first: if the handler raises, what cleans up after it is not interrupted
            self.deliver()
            self.second_passes = True

    def deliver(self) -> None:
        """Give the handler what was held; one that raises gets the first alone."""
        held, self._held = self._held, []
        for interrupt in held:
            self._handler(*interrupt)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold every SIGINT back until the block ends; the process's own handler gets it then.

    Does nothing off the main thread, which alone is interrupted, and where the handler is not Python's to call.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not _is_main_thread() or not callable(handler):
        yield
        return
    hold = _Hold(handler)
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        hold.deliver()


@contextmanager
def second_interrupt_passes() -> Iterator[None]:
    """Let a second SIGINT through at once: for a part of a `held_interrupts` block that may take long.

    The handler may raise anywhere in this block, on its way in and on its way out, and at most once. Does nothing where
    no interrupts are held.
    """
    hold = signal.getsignal(signal.SIGINT)
    if not _is_main_thread() or not isinstance(hold, _Hold):
        yield
        return
    hold.second_passes = True
    try:
        yield
    finally:
        hold.second_passes = False
