"""`kvtier trace record`: a trace of a running cache's requests, for `kvtier plan` and `kvtier bench retention`."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvtier.bench.retention.recording import Recording
from kvtier.cli.output import Json, console, write_json
from kvtier.config import Config
from kvtier.errors import ConfigError, FormatError, InvalidRequest, KVTierError
from kvtier.units import parse_duration

Source = Annotated[
    Path,
    typer.Argument(help="The engine's YAML file, or its trace.socket itself.", metavar="SOURCE", show_default=False),
]
Out = Annotated[Path, typer.Option("--out", help="The .jsonl file to write.")]
For = Annotated[str | None, typer.Option("--for", help="How long, such as 24h; none: until Ctrl-C.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")]

LINE_BYTES_MAX = 64 << 20
TICK_S = 0.5


class SocketSilent(KVTierError):
    """Nobody answers at the trace socket."""


def record(source: Source, out: Out, duration: For = None, force: Force = False, json: Json = False) -> None:
    """Write times, lengths and numbered blocks of the requests of a running cache into a file, until Ctrl-C: no text,
    no tokens, and no hashes that could be looked up."""
    limit_s = float("inf") if duration is None else parse_duration(duration)
    path = _socket_of(source)
    if out.exists() and not force:
        raise InvalidRequest(f"{out} is there already; name another file, or replace it with --force")
    began = time.monotonic()
    with _connected(path) as connection, out.open("w", encoding="utf-8") as file:
        recording = Recording(file)
        if not json:
            print(f"kvtier: recording {path} into {out}; Ctrl-C ends it", file=sys.stderr)
        with contextlib.suppress(KeyboardInterrupt):
            _follow(connection, recording, began + limit_s)
    spent = round(time.monotonic() - began, 1)
    if json:
        found = {"requests": recording.requests, "blocks": recording.blocks, "missed": recording.missed}
        write_json({"file": str(out), **found, "seconds": spent})
        return
    missed = f"; {recording.missed} came too fast and are missing" if recording.missed else ""
    console().print(f"{out}: {recording.requests:,} requests, {recording.blocks:,} blocks in {spent:,} s{missed}")


def _follow(connection: socket.socket, recording: Recording, until_s: float) -> None:
    """Take lines in until the time is over, the engine has ended, or the recording is full."""
    held, begun = bytearray(), False
    while time.monotonic() < until_s and not recording.full:
        try:
            part = connection.recv(1 << 20)
        except TimeoutError:
            continue
        held += part
        *lines, rest = held.split(b"\n")
        for line in lines:
            (recording.add if begun else recording.begin)(bytes(line))
            begun = True
        held = bytearray(rest)
        if len(held) > LINE_BYTES_MAX:
            raise FormatError("what answers is no trace socket of kvtier: its line does not end")
        if not part:
            break
    if not begun:
        raise SocketSilent("the trace socket says nothing: it serves its own user, four listeners at most")


@contextlib.contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TICK_S)
        try:
            connection.connect(str(path))
        except (OSError, ValueError) as wrong:
            raise SocketSilent(
                f"{path}: no cache listens there: {wrong}; is the engine up, with trace.socket?"
            ) from None
        yield connection


def _socket_of(source: Path) -> Path:
    if source.is_socket():
        return source
    if source.suffix not in (".yaml", ".yml"):
        raise InvalidRequest(f"{source} is neither a socket nor a YAML file")
    path = Config.load(source).trace.socket
    if path is None:
        raise ConfigError(f"{source}: trace.socket is not set: give it a path and start the engine anew")
    return path
