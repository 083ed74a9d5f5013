"""A YAML text as plain values, safe for any input: hostile text is refused.

A subset of YAML 1.2: mappings with text keys, sequences, and the scalars null, true, false, integers, decimal
floats and text. Anchors, aliases, tags, duplicate keys and several documents are errors: the first three make
small texts large or run code, the last two make it unclear which value applies. One pass over the parser's
events, no recursion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvtier.errors import ConfigError
from kvtier.units import shorten

TEXT_BYTES_MAX = 2 << 20
DEPTH_MAX = 16
NODES_MAX = 10_000

_INTEGER = re.compile(r"[-+]?[0-9]{1,18}", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,18}\.[0-9]{0,18}|\.[0-9]{1,18}|[0-9]{1,18})(?:[eE][-+]?[0-9]{1,3})?", re.ASCII)
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


@dataclass(slots=True)
class _Open:
    """A mapping or sequence that has begun and not ended. `key`: the mapping key whose value comes next."""

    held: dict[str, Any] | list[Any]
    path: str
    key: str | None = None

    def next_path(self) -> str:
        if isinstance(self.held, list):
            return f"{self.path}[{len(self.held)}]"
        return self.path if self.key is None else f"{self.path}.{self.key}".lstrip(".")


@dataclass(slots=True)
class _Builder:
    """Plain values from parser events. `lines`: the line of every key, by dotted name."""

    root: Any = None
    stack: list[_Open] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    nodes: int = 0

    def where(self) -> str:
        return self.stack[-1].next_path() if self.stack else ""

    def add(self, value: Any) -> None:
        """Put a whole scalar, or a collection that has just begun, in its place."""
        self.nodes += 1
        if self.nodes > NODES_MAX:
            raise ConfigError(f"{self.where()}: the file has more than {NODES_MAX} values")
        if not self.stack:
            self.root = value
            return
        top = self.stack[-1]
        if isinstance(top.held, list):
            top.held.append(value)
        else:
            assert top.key is not None
            top.held[top.key], top.key = value, None

    def begin(self, held: dict[str, Any] | list[Any]) -> None:
        path = self.where()
        if len(self.stack) >= DEPTH_MAX:
            raise ConfigError(f"{path}: nested deeper than {DEPTH_MAX} levels")
        if self.stack and isinstance(self.stack[-1].held, dict) and self.stack[-1].key is None:
            raise ConfigError(f"{path or 'the file'}: a key must be text, found a collection")
        self.add(held)
        self.stack.append(_Open(held, path))

    def scalar(self, text: str, plain: bool, line: int) -> None:
        top = self.stack[-1] if self.stack else None
        if top is None or isinstance(top.held, list) or top.key is not None:
            self.add(_scalar(text) if plain else text)
            return
        key = text if len(text) <= 128 else f"{text[:64]}…"
        if key in top.held:
            raise ConfigError(f"{f'{top.path}.{key}'.lstrip('.')}: the key is given twice")
        top.key = key
        self.lines[top.next_path()] = line


def _scalar(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def read_document(text: str | bytes) -> dict[str, Any]:
    """The mapping that `text` holds. Pure. Raises ConfigError naming the key, or the line where it is not YAML."""
    return read_marked(text, "")[0]


def read_marked(text: str | bytes, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping that `text` holds, and the line of every key, by dotted name. Pure. Raises ConfigError that begins
    with `name`, unless it is "", and the line."""
    builder = _built(text, name)
    if builder.root is None:
        return {}, {}
    if not isinstance(builder.root, dict):
        where = f"{name}: " if name else ""
        raise ConfigError(f"{where}a configuration is a mapping of keys, found {type(builder.root).__name__}")
    return builder.root, builder.lines


def read_value(text: str) -> Any:
    """The one value that `text` holds: a scalar, a list or a mapping. Pure. Raises ConfigError."""
    return _built(text, "").root


def _built(text: str | bytes, name: str) -> _Builder:
    import yaml

    where = f"{name}: " if name else ""
    if len(text) > TEXT_BYTES_MAX:
        raise ConfigError(f"{where}the file has {len(text)} bytes; a configuration has at most {TEXT_BYTES_MAX}")
    builder, line = _Builder(), 0
    try:
        for event in _events(text):
            line = event.start_mark.line + 1
            _take(builder, event, line)
    except ConfigError as wrong:
        raise ConfigError(f"{name}:{line}: {wrong}" if name else str(wrong)) from None
    except yaml.MarkedYAMLError as wrong:
        found = str(wrong.problem_mark.line + 1) if wrong.problem_mark else ""
        begin = f"{name}:{found}: not YAML:" if name else f"not YAML:{f' line {found}:' if found else ''}"
        at = f" after {shorten(builder.where())}" if builder.where() else ""
        raise ConfigError(f"{begin} {str(wrong.problem)[:200]}{at}") from None
    except (yaml.YAMLError, UnicodeError, ValueError) as wrong:
        at = f" after {shorten(builder.where())}" if builder.where() else ""
        reason = " ".join(str(wrong).split())[:200]
        raise ConfigError(f"{where}not YAML{at}: {reason}") from None
    return builder


def _events(text: str | bytes) -> Iterator[Any]:
    import yaml

    # The C parser reads a megabyte in milliseconds; the Python one stands in where the wheel was built without.
    return yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _take(builder: _Builder, event: Any, line: int) -> None:
    import yaml

    where = builder.where() or "the file"
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
        raise ConfigError(f"{where}: anchors and aliases are not allowed; write the value out")
    if getattr(event, "tag", None) not in (None, "!"):
        raise ConfigError(f"{where}: the tag {shorten(event.tag)} is not allowed; write plain values")
    match event:
        case yaml.ScalarEvent():
            builder.scalar(event.value, plain=event.implicit[0], line=line)
        case yaml.MappingStartEvent():
            builder.begin({})
        case yaml.SequenceStartEvent():
            builder.begin([])
        case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
            builder.stack.pop()
        case yaml.DocumentStartEvent() if builder.nodes:
            raise ConfigError("the file holds more than one document")
