"""`kvtier trace`: a trace of a running cache's requests, for `kvtier plan` and `kvtier bench retention`, and traces of
other formats."""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.bench.retention.recording import Recording, write_mooncake, write_trace
from kvtier.bench.retention.traces import load_trace
from kvtier.cli.output import Json, console, write_json
from kvtier.config import Config
from kvtier.errors import ConfigError, FormatError, InvalidRequest, KVTierError
from kvtier.request_trace import user_of
from kvtier.units import parse_duration

Source = Annotated[
    Path,
    typer.Argument(help="The engine's YAML file, or its trace.socket itself.", metavar="SOURCE", show_default=False),
]
Out = Annotated[Path, typer.Option("--out", help="The .jsonl file to write.")]
For = Annotated[str | None, typer.Option("--for", help="How long, such as 24h; none: until Ctrl-C.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")]

Given = Annotated[Path, typer.Argument(help="A trace of any known format.", metavar="TRACE", show_default=False)]
To = Annotated[str, typer.Option("--to", help="kvtier, or mooncake for vLLM's timed_trace and AIPerf.")]
BlockTokens = Annotated[
    int | None, typer.Option("--block-tokens", min=1, help="The trace has hash_ids of blocks of this size.")
]
Millis = Annotated[bool, typer.Option("--milliseconds", help="Its timestamps count milliseconds.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only so many requests.")]

LINE_BYTES_MAX = 64 << 20
TICK_S = 0.5
TELL_S = 5.0
HEADER_BYTES_MAX = 1 << 20
"""How long a socket's first line may take, and be."""


class SocketSilent(KVTierError):
    """Nobody answers at the trace socket."""


def record(source: Source, out: Out, duration: For = None, force: Force = False, json: Json = False) -> None:
    """Write times, lengths and numbered blocks of the requests of a running cache into a file, until Ctrl-C: no text,
    no tokens, and no hashes that could be looked up."""
    limit_s = float("inf") if duration is None else parse_duration(duration)
    path = socket_of(source)
    if out.exists() and not force:
        raise InvalidRequest(f"{out} is there already; name another file, or replace it with --force")
    began = time.monotonic()
    with connected(path) as connection, out.open("w", encoding="utf-8") as file:
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


def convert(
    source: Given, out: Out, to: To = "kvtier", block_tokens: BlockTokens = None, milliseconds: Millis = False,
    limit: Limit = None, force: Force = False, json: Json = False,
) -> None:  # fmt: skip
    """Read a trace of any known format and write it as kvtier's own, or as Mooncake's lines, which vLLM's `bench serve`
    and AIPerf replay."""
    if to not in ("kvtier", "mooncake"):
        raise InvalidRequest(f"--to {to}: write kvtier or mooncake")
    if milliseconds and block_tokens is None:
        raise InvalidRequest("--milliseconds is of a trace of hash_ids: give its --block-tokens, too")
    if out.exists() and not force:
        raise InvalidRequest(f"{out} is there already; name another file, or replace it with --force")
    trace = load_trace(source, limit=limit, block_tokens=block_tokens, unit_s=1e-3 if milliseconds else 1.0)
    with out.open("w", encoding="utf-8") as file:
        (write_trace if to == "kvtier" else write_mooncake)(trace, file)
    told = {"format": trace.format, "requests": len(trace.requests), "blocks": trace.unique,
            "block_tokens": trace.block_tokens}  # fmt: skip
    if json:
        write_json({"file": str(out), **told})
        return
    console().print(
        f"{out}: {len(trace.requests):,} requests, {trace.unique:,} blocks of {trace.block_tokens} tokens, read as "
        f"{trace.format}"
    )


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
def connected(path: Path) -> Iterator[socket.socket]:
    """A connection to a cache's trace socket. Raises SocketSilent, also where another user may have put it there: what
    it says names what is purged."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TICK_S)
        try:
            connection.connect(str(path))
        except (OSError, ValueError) as wrong:
            raise SocketSilent(
                f"{path}: no cache listens there: {wrong}; is the engine up, with trace.socket?"
            ) from None
        user, own = user_of(connection), os.geteuid()
        shared = path.parent.stat().st_mode & stat.S_IWOTH
        if user not in (0, own) and (own or shared):  # root may listen to a service in a folder that is not all's
            raise SocketSilent(f"{path}: user {user} listens there; put trace.socket into a folder of the engine's own")
        yield connection


def told_namespace(path: Path) -> dict[str, Any]:
    """The fields of the namespace that the cache at a trace socket has. Raises SocketSilent or FormatError."""
    held, until_s = b"", time.monotonic() + TELL_S
    with connected(path) as connection:
        while b"\n" not in held and time.monotonic() < until_s and len(held) < HEADER_BYTES_MAX:
            try:
                part = connection.recv(1 << 16)
            except TimeoutError:
                continue
            if not part:
                break
            held += part
    if not held:
        raise SocketSilent("the trace socket says nothing: it serves its own user, four listeners at most")
    try:
        fields = jsonlib.loads(held.partition(b"\n")[0])["namespace"]
    except (ValueError, TypeError, KeyError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise FormatError(f"{path}: what answers is no trace socket of this release of kvtier")
    return fields


def socket_of(source: Path) -> Path:
    if source.is_socket():
        return source
    if source.suffix not in (".yaml", ".yml"):
        raise InvalidRequest(f"{source} is neither a socket nor a YAML file")
    path = Config.load(source).trace.socket
    if path is None:
        raise ConfigError(f"{source}: trace.socket is not set: give it a path and start the engine anew")
    return path
