"""The command line in the test's own process, and engines for it that need no model."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from gdn_jax.serving.__main__ import main


@contextmanager
def own_environment() -> Iterator[None]:
    """Undo what a command line sets for its process: variables, and handlers of log lines."""
    with patch.dict(os.environ):
        yield
    for name in ("gdn_jax", "uvicorn"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(logging.NOTSET)


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["gdn-jax", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert isinstance(stop.value.code, int)
    return stop.value.code
