"""A running cache's trace socket, as commands find it, connect to it and read its lines."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtier.config import Config
from kvtier.errors import ConfigError, FormatError, InvalidRequest, KVTierError
from kvtier.request_trace import user_of

TICK_S = 0.5
TELL_S = 5.0
HEADER_BYTES_MAX = 1 << 20
"""How long a socket's first line may take, and be."""

SILENT = "the trace socket says nothing: it serves its own user, four listeners at most"


class SocketSilent(KVTierError):
    """Nobody answers at the trace socket."""


def socket_of(source: Path) -> Path:
    """The socket itself, or that which a YAML file names, whether anybody listens there or not. Secrets of the file may
    be the engine's alone. Raises InvalidRequest or ConfigError."""
    if source.is_socket():
        return source
    if source.suffix not in (".yaml", ".yml"):
        hint = "" if source.exists() else "; there is no such file: is the engine up, with trace.socket?"
        raise InvalidRequest(f"{source} is neither a socket nor a YAML file{hint}")
    path = Config.load(source, absent={}).trace.socket
    if path is None:
        raise ConfigError(f"{source}: trace.socket is not set: give it a path and start the engine anew")
    return path


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    """A connection to a cache's trace socket. Raises SocketSilent, also where another user may have put it there: what
    it says names what is purged."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TICK_S)
        try:
            connection.connect(str(path))
            shared = path.parent.stat().st_mode & stat.S_IWOTH
        except (OSError, ValueError) as wrong:
            raise SocketSilent(
                f"{path}: no cache listens there: {wrong}; is the engine up, with trace.socket?"
            ) from None
        user, own = user_of(connection), os.geteuid()
        if user not in (0, own) and (own or shared):  # root may listen to a service in a folder that is not all's
            raise SocketSilent(f"{path}: user {user} listens there; put trace.socket into a folder of the engine's own")
        yield connection


def lines_of(connection: socket.socket, until_s: float, bytes_max: int) -> Iterator[bytes]:
    """Whole lines as they come, until the monotonic time `until_s` or until the other end is gone. Raises FormatError
    for a line of more than `bytes_max`, and OSError."""
    held = bytearray()
    while time.monotonic() < until_s:
        try:
            part = connection.recv(1 << 20)
        except TimeoutError:
            continue
        if not part:
            return
        held += part
        *lines, rest = held.split(b"\n")
        yield from map(bytes, lines)
        held = bytearray(rest)
        if len(held) > bytes_max:
            raise FormatError("what answers is no trace socket of kvtier: its line does not end")


def told_namespace(path: Path) -> dict[str, Any]:
    """The fields of the namespace that the cache at a trace socket has. Raises SocketSilent or FormatError."""
    with connected(path) as connection:
        header = next(lines_of(connection, time.monotonic() + TELL_S, HEADER_BYTES_MAX), b"")
    if not header:
        raise SocketSilent(SILENT)
    try:
        fields = json.loads(header)["namespace"]
    except (ValueError, TypeError, KeyError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise FormatError(f"{path}: what answers is no trace socket of this release of kvtier")
    return fields
