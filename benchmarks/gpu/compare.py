"""Two results of `make gpu-check` side by side. Pure but for `load`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from gpu.table import Line

_ABOUT = ("gpu", "cuda", "torch", "batch_copy")
_INPUTS = ("fragment", "count", "tokens", "gib", "seconds")


class _Results(msgspec.Struct):
    environment: dict[str, Any]
    parts: dict[str, list[dict[str, Any]]]


class _Document(msgspec.Struct):
    results: _Results


def load(path: Path) -> Mapping[str, Any]:
    """The results of one file. Raises ValueError where it is none of gpu-check's."""
    raw = path.read_bytes()
    try:
        results: dict[str, Any] = msgspec.to_builtins(msgspec.json.decode(raw, type=_Document).results)
        if not all(isinstance(row.get("name"), str) for rows in results["parts"].values() for row in rows):
            raise ValueError("a row has no name")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no results of gpu-check, which writes them to gpu-check.json ({error})") from None
    return results


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Line]:
    """Every figure that both have, the largest change first; then rows whose state differs, or that one alone has."""
    lines: list[Line] = []
    for name in _ABOUT:
        values = [str(each["environment"].get(name, "")) for each in (old, new)]
        lines.append((name, f"{values[0]} → {values[1]}" if values[0] != values[1] else values[0], ""))
    before, after = dict(_rows(old)), dict(_rows(new))
    changes = []
    for name in before.keys() & after.keys():
        for key, value in before[name].items():
            other = after[name].get(key)
            if key in _INPUTS or not isinstance(value, float) or not isinstance(other, float) or value == 0:
                continue
            change = other / value - 1
            changes.append((abs(change), f"{name}: {key}", f"{value:.4g} → {other:.4g}", f"{change:+.1%}"))
    lines += [(what, seen, change) for _, what, seen, change in sorted(changes, key=lambda each: (-each[0], each[1]))]
    for name in sorted(before.keys() | after.keys()):
        states = [_state(rows.get(name)) for rows in (before, after)]
        if states[0] != states[1]:
            lines.append((name, f"{states[0]} → {states[1]}", ""))
    return lines


def _rows(results: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for part, rows in results["parts"].items():
        for row in rows:
            yield f"{part}, {row['name']}", row


def _state(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "absent"
    return next((kind for kind in ("error", "skipped", "begun") if kind in row), "ran")
