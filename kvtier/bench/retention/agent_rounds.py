"""Rounds of coding agents, in tokens, as TraceLab publishes them: `round_trace.jsonl`, or a DuckDB's table `rounds`.

    provider, session_id, session_file, round_index, model, input_tokens_total, prefix_tokens, output_tokens, and the
    timing_events of each round, of which the first is its time

It has no hashes: blocks are made from lengths. A round repeats the prompt of the one before it as far as it goes; one
with a shorter prompt was compacted, and repeats what the provider had cached of it (`prefix_tokens`). What a session's
first round had cached is the text that sessions of its model and provider begin with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from kvtier.bench.retention.json_lines import TraceLine, lines
from kvtier.bench.retention.trace import Names, Request, Trace, finish
from kvtier.errors import ConfigError, InvalidRequest

KEY = "input_tokens_total"
"""By which a line of this format is known."""

BLOCK_TOKENS = 64

_COLUMNS = ("provider", "session_id", "session_file", "round_index", "model", KEY, "prefix_tokens", "output_tokens")
_NEEDED = {"provider", "session_id", "round_index", KEY, "output_tokens"}


def from_lines(path: Path) -> Trace:
    """Read `round_trace.jsonl`. Raises InvalidRequest."""
    return _trace(path.stem, (_timed(line) for line in lines(path)))


def from_database(path: Path) -> Trace:
    """Read a DuckDB. Raises InvalidRequest for another one, ConfigError where the package is missing."""
    try:
        import duckdb
    except ImportError:
        raise ConfigError(f"{path} is a DuckDB: pip install duckdb, or give the .jsonl that it was made of") from None
    try:
        with duckdb.connect(str(path), read_only=True) as connection:
            present = {row[0] for row in connection.execute("DESCRIBE rounds").fetchall()}
            if missing := sorted(_NEEDED - present):
                raise InvalidRequest(f"{path}: the table rounds has no {', '.join(missing)}")
            columns = ", ".join(f"r.{name}" if name in present else f"NULL AS {name}" for name in _COLUMNS)
            found = connection.execute(
                f"SELECT {columns}, e.at FROM rounds r LEFT JOIN (SELECT round_pk, "
                "epoch(min(CAST(timestamp AS TIMESTAMP))) AS at FROM timing_events GROUP BY round_pk) e "
                "ON e.round_pk = r.round_pk ORDER BY r.round_pk"
            ).fetchall()
    except duckdb.Error as wrong:
        raise InvalidRequest(f"{path}: no DuckDB of rounds: {str(wrong).splitlines()[0]}") from None
    rows = (dict(zip((*_COLUMNS, "at"), row, strict=True)) for row in found)
    return _trace(path.stem, (TraceLine(f"{path}: rounds[{number}]", row) for number, row in enumerate(rows)))


def _timed(line: TraceLine) -> TraceLine:
    """A line with its time as `at`."""
    events = line.fields.get("timing_events")
    stamps = [event.get("timestamp") for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    try:
        at = min((datetime.fromisoformat(str(stamp)).timestamp() for stamp in stamps if stamp), default=None)
    except (ValueError, OverflowError) as wrong:
        raise InvalidRequest(f"{line.place}: timing_events: {wrong}") from None
    return TraceLine(line.place, {**line.fields, "at": at})


def _trace(name: str, rounds: Iterable[TraceLine]) -> Trace:
    names, numbers, requests = Names(), Names(), list[Request]()
    before: dict[Any, tuple[int, list[int], float]] = {}  # session → tokens, blocks and time of its latest round
    by_session: dict[Any, list[tuple[float, int, TraceLine]]] = {}
    for place, line in enumerate(rounds):
        key = line.field("provider"), line.fields.get("session_file"), line.field("session_id")
        by_session.setdefault(key, []).append((line.number("round_index"), place, line))
    for key, found in by_session.items():
        for _, _, line in sorted(found, key=lambda one: one[:2]):
            size, told = line.tokens(KEY), line.fields.get("at")
            cached = line.tokens("prefix_tokens") if line.fields.get("prefix_tokens") is not None else 0
            last = before.get(key)
            if last is None:
                blocks = [
                    names.of((key[0], line.fields.get("model"), n)) for n in range(min(cached, size) // BLOCK_TOKENS)
                ]
            else:
                kept = last[0] if size >= last[0] else min(cached, size)
                blocks = last[1][: kept // BLOCK_TOKENS]
            blocks += [names.of((line.place, n)) for n in range(size // BLOCK_TOKENS - len(blocks))]
            at = float(told) if isinstance(told, int | float) else last[2] if last is not None else 0.0
            before[key] = size, blocks, at
            made = line.tokens("output_tokens")
            requests.append(Request(at, list(blocks), size, made, numbers.of(json.dumps(key, default=str))))
    return finish(name, "tracelab", BLOCK_TOKENS, requests, len(names))
