"""The way into the command line: an interrupt while it is being imported ends it without a traceback."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import current_thread, main_thread

_INTERRUPTED = 130  # 128 and the number of SIGINT, as shells say it


def main() -> None:
    """Run the command line; `gdn_jax.serving.command_line` says what its exit codes mean."""
    with _quiet_interrupts():
        # By name, and not at the top of the file: it brings jax, whose import takes seconds.
        command_line = import_module("gdn_jax.serving.command_line")
    try:
        sys.exit(command_line.run())
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


@contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """End the process at once on SIGINT: libraries may turn an exception within their import into another one."""
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else handles interrupts, or they are ignored
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main()
