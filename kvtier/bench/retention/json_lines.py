"""JSON objects of a file, one per line, with errors that name file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import InvalidRequest

LINE_BYTES_MAX = 64 * 1024 * 1024
PROMPT_TOKENS_MAX = 1 << 26


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One JSON object and where it stood."""

    place: str
    fields: Mapping[str, Any]

    def field(self, name: str) -> Any:
        """A value; it and those below raise InvalidRequest where it is missing or of another kind."""
        if name not in self.fields:
            raise InvalidRequest(f"{self.place}: {name} is missing")
        return self.fields[name]

    def number(self, name: str) -> float:
        """At least 0, and below 2^53."""
        value = self.field(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
            raise InvalidRequest(f"{self.place}: {name}: expected a number of at least 0, got {value!r}")
        return value

    def tokens(self, name: str) -> int:
        """A number of tokens, as many as a prompt may have."""
        value = self.number(name)
        if value > PROMPT_TOKENS_MAX:
            raise InvalidRequest(f"{self.place}: {name}: expected at most {PROMPT_TOKENS_MAX} tokens, got {value!r}")
        return int(value)

    def ids(self, name: str) -> list[int]:
        """A list of integers."""
        value = self.field(name)
        if not isinstance(value, list) or not all(type(x) is int for x in value):
            raise InvalidRequest(f"{self.place}: {name}: expected a list of integers, got {str(value)[:40]!r}")
        return value


def lines(path: Path) -> Iterator[TraceLine]:
    """All lines but empty ones. Raises InvalidRequest."""
    with path.open("rb") as stream:
        for number, raw in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX), b""), 1):
            place = f"{path}:{number}"
            if not raw.strip():
                continue
            try:
                fields = json.loads(raw)
            except (ValueError, RecursionError) as wrong:
                raise InvalidRequest(f"{place}: not JSON: {wrong}") from None
            if not isinstance(fields, dict):
                raise InvalidRequest(f"{place}: expected a JSON object, got {type(fields).__name__}")
            yield TraceLine(place, fields)
