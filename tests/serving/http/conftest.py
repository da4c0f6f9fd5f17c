"""One server over the stub engine for all tests that ask for nothing special."""

from collections.abc import Iterator

import pytest
from http_rig import LiveServer, live_server


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live_server() as found:
        yield found
