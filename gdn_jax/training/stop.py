"""Ctrl-C and SIGTERM during training: the first asks for a clean end, the second ends at once."""

import signal
from threading import current_thread, main_thread
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """While it is entered, notes signals instead of dying of them. Outside the main thread it notes nothing.

    Attributes:
        is_set: whether a signal came.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "StopSignal":
        if current_thread() is main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        self._restore()  # the next one does what it always does

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
