"""A cache with a trace socket, and whether anybody listens there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvtier
from kvtier.config import Config
from kvtier.testing import sample_namespace
from tests.support.waiting import eventually

NS = sample_namespace(4096)
_LISTENED_AT = 0x10000  # __SO_ACCEPTCON, proc(5)


@contextmanager
def listening_cache(path: Path) -> Iterator[kvtier.Cache]:
    """A cache of 1 MiB that listens at `path`."""
    raw = {"tiers": {"g2": {"capacity": "1MiB"}}, "trace": {"socket": str(path)}}
    with kvtier.open(Config.parse(raw), NS) as cache:
        assert eventually(lambda: listens(path))
        yield cache


def listens(path: Path) -> bool:
    """The socket lies there a moment before it is listened at; a connection would be a listener."""
    sockets = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return any(fields[-1] == str(path) and int(fields[3], 16) & _LISTENED_AT for fields in sockets if len(fields) == 8)
