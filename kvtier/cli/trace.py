"""`kvtier trace`: a trace of a running cache's requests, for `kvtier plan` and `kvtier bench retention`, and traces of
other formats."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvtier.bench.retention.recording import Recording, block_tokens_of, write_mooncake, write_trace
from kvtier.bench.retention.traces import load_trace
from kvtier.cli.output import Json, console, replacing, write_json
from kvtier.cli.trace_socket import SILENT, SocketSilent, connected, lines_of, socket_of
from kvtier.errors import InvalidRequest
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


def record(source: Source, out: Out, duration: For = None, force: Force = False, json: Json = False) -> None:
    """Write times, lengths and numbered blocks of the requests of a running cache into a file, until Ctrl-C: no text,
    no tokens, and no hashes that could be looked up."""
    limit_s = float("inf") if duration is None else parse_duration(duration)
    path = socket_of(source)
    if out.exists() and not force:
        raise InvalidRequest(f"{out} is there already; name another file, or replace it with --force")
    began = time.monotonic()
    with connected(path) as connection:
        told = lines_of(connection, began + limit_s, LINE_BYTES_MAX)
        if not (first := next(told, b"")):
            raise SocketSilent(SILENT)
        block_tokens_of(first)  # raises: what OUT has stays
        with out.open("w", encoding="utf-8") as file:
            recording = Recording(file)
            if not json:
                print(f"kvtier: recording {path} into {out}; Ctrl-C ends it", file=sys.stderr)
            with contextlib.suppress(KeyboardInterrupt):
                recording.begin(first)
                _follow(told, recording)
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
    with replacing(out) as file:
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


def _follow(told: Iterator[bytes], recording: Recording) -> None:
    """Take lines in until the time is over, the engine has ended, or the recording is full."""
    while not recording.full and (line := next(told, None)) is not None:
        recording.add(line)
