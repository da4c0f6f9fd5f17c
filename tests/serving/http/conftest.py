"""One server over the stub engine for all tests that ask for nothing special."""

import logging
from collections.abc import Iterator

import pytest
from http_rig import LiveServer, live_server


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live_server() as found:
        yield found


@pytest.fixture(autouse=True, scope="session")
def _no_handlers_of_command_lines() -> None:
    """Tests of the command line leave handlers behind that write to a terminal which is closed by now."""
    for name in ("gdn_jax", "uvicorn"):
        logging.getLogger(name).handlers.clear()
