"""What `kvtier top --web` shows of an engine's latest requests: heat of prefixes, slow requests. Asked for at its trace
socket; whoever answers there, the page is given rows of known types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier.cli.ask import ask_at, shown
from kvtier.cli.trace_socket import socket_of
from kvtier.errors import FormatError, KVTierError

WAIT_S = 5.0
ROWS_MAX = 20
TIERS_MAX = 8
NOTHING: dict[str, Any] = {"asked": False, "fault": "", "requests": 0, "since_s": None, "prefixes": [], "slow": []}


def latest_of(engine: Path) -> Callable[[], dict[str, Any]]:
    """Reads the rows, or the reason why there are none now: an engine may go and come back. Waits WAIT_S at most.
    Raises InvalidRequest for what is neither a socket nor a YAML file, and ConfigError."""
    path = socket_of(engine)

    def read() -> dict[str, Any]:
        try:
            return rows_of(ask_at(path, {"ask": "latest"}, WAIT_S))
        except (KVTierError, OSError) as wrong:
            return {**NOTHING, "asked": True, "fault": str(wrong)}

    return read


def rows_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer as rows. Raises FormatError."""
    try:
        since = answer["since_s"]
        return {
            **NOTHING,
            "asked": True,
            "requests": int(answer["requests"]),
            "since_s": None if since is None else _seconds(since),
            "prefixes": [_prefix(row) for row in answer["prefixes"][:ROWS_MAX]],
            "slow": [_slow(row) for row in answer["slow"][:ROWS_MAX]],
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as wrong:
        raise FormatError(f"what answers is no trace socket of this release of kvtier: {wrong!r}") from None


def _prefix(row: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: int(row[name]) for name in ("requests", "shared_tokens", "input_tokens", "computed")}
    return {"prefix": shown(row["prefix"]), **counts, "ago_s": _seconds(row["ago_s"]), "given": _given(row)}


def _slow(row: Mapping[str, Any]) -> dict[str, Any]:
    times = {name: _seconds(row[name] or 0.0) for name in ("ago_s", "placed_s", "waited_s", "first_s")}
    texts = {name: shown(row[name]) for name in ("name", "why", "reason")}
    return {**texts, **times, "computed_tokens": int(row["computed_tokens"]), "given": _given(row)}


def _seconds(value: Any) -> float:
    if not math.isfinite(seconds := float(value)):
        raise ValueError("a time is no number")  # nor would the page's JSON be any
    return seconds


def _given(row: Mapping[str, Any]) -> dict[str, int]:
    return {shown(tier): int(tokens) for tier, tokens in list(row["given"].items())[:TIERS_MAX]}
