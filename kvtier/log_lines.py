"""kvtier's log lines as a configuration wants them: their level, and one JSON object a line.

The application that kvtier runs in owns logging; with `auto` nothing of it is touched. The settings are the process's:
of several caches the one that was opened or reloaded last decides.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

LOGGER = "kvtier"


class JsonLine(logging.Formatter):
    """{"time", "level", "logger", "process", "message"}, and "error" with the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        made = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": made.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)  # plain ASCII: standard error may take no more, and a terminal obeys some of the rest


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at that time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(JsonLine())

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


_JSON = _StandardError()
_found: dict[str, Any] = {}
"""What the application had set, while something else is in force: "level"; "handlers" and "propagate"."""


def set_log_lines(level: str, format: str) -> None:
    """`level`: debug, info, warning, error, or auto for the application's; `format`: json, on standard error alone, or
    auto for the application's handlers. Changes the logger `kvtier` of this process. Idempotent."""
    ours = logging.getLogger(LOGGER)
    if level != "auto":
        _found.setdefault("level", ours.level)
        ours.setLevel(level.upper())
    elif "level" in _found:
        ours.setLevel(_found.pop("level"))
    if format == "json" and _JSON not in ours.handlers:
        _found["handlers"], _found["propagate"] = ours.handlers, ours.propagate
        ours.handlers, ours.propagate = [_JSON], False
    elif format == "auto" and _JSON in ours.handlers:
        ours.handlers, ours.propagate = _found.pop("handlers"), _found.pop("propagate")
