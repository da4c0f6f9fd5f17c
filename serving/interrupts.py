"""Ctrl-C between two steps instead of in the middle of one, where it would leave the books half-written."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the block ends; the process's own handler gets it then. A second one passes at once.

    Does nothing off the main thread, which alone is interrupted, and where the handler is not Python's to call.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        """Remember the first interrupt; whoever sends another does not want to wait."""
        held.append((number, frame))
        if len(held) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(held) == 1:
            handler(*held[0])
