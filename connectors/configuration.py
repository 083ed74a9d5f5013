"""An engine's configuration as text for a namespace: everything it holds, minus what is known not to change the KV.

An unknown field counts, so a setting that a later release of the engine brings is another namespace and never another
model's KV. Neutral fields are named by shell patterns over dotted names.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

_VALUE_CHARS = 48
_DEPTH = 8
_SECRET = ("key", "token", "secret", "password", "credential")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

CHECKPOINT_NEUTRAL = (
    "*_name_or_path", "*transformers_version", "*use_cache", "*output_attentions", "*output_hidden_states",
    "*return_dict", "*id2label", "*label2id",
)  # fmt: skip
"""Fields of a checkpoint's configuration that say how it was saved or is run, not what it computes."""


def canonical(value: Any) -> str:
    """Plain data as JSON, equal for equal data."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def digest16(value: Any) -> str:
    """A digest of plain data for a name, in 16 hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def described(sections: Mapping[str, Any], neutral: Sequence[str]) -> str:
    """Canonical JSON {dotted name: value} of all fields of the sections but the neutral ones. Pure.

    Long values, paths, secrets and free mappings (which may hold any of them) appear as digests. A neutral pattern
    covers what lies below its name, too.
    """
    parts = ((name, part) for section, value in sections.items() for name, part in _leaves(value, section, neutral, 0))
    return canonical({name: _shown(name, _plain(value, 0)) for name, value in parts})


def _leaves(
    value: Any, name: str, neutral: Sequence[str], depth: int, *, opened: bool = False
) -> Iterator[tuple[str, Any]]:
    """The values of an object's fields, by dotted name. `opened`: mappings are fields, too, as in a checkpoint's
    configuration and in a section."""
    if any(fnmatchcase(name, pattern) for pattern in neutral):
        return
    opened = opened or _is_checkpoints(value)
    below = _parts_of(value) if depth < _DEPTH else None
    if not below or (isinstance(value, Mapping) and depth and not opened):
        yield name, value
        return
    for key, part in below.items():
        yield from _leaves(part, f"{name}.{key}", neutral, depth + 1, opened=opened)


def _is_checkpoints(value: Any) -> bool:
    return hasattr(value, "to_diff_dict") and not isinstance(value, type)


def _parts_of(value: Any) -> Mapping[Any, Any] | None:
    """The fields of an object; None for a value that is one."""
    if isinstance(value, Mapping):
        return value
    if value is None or isinstance(value, str | bytes | bool | int | float | enum.Enum | type) or callable(value):
        return None
    if _is_checkpoints(value):
        own: Mapping[str, Any] = value.to_dict()
        return own
    if is_dataclass(value):
        return {spec.name: getattr(value, spec.name, None) for spec in fields(value)}
    if isinstance(value, Sequence | AnySet) or not hasattr(value, "__dict__"):
        return None
    return dict(vars(value))


def _plain(value: Any, depth: int) -> Any:
    """Data that JSON can hold, the same in every process for equal values."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, AnySet):
        return sorted((_plain(item, depth + 1) for item in value), key=canonical)
    if isinstance(value, Sequence):
        return [_plain(item, depth + 1) for item in value]
    if depth >= _DEPTH and not isinstance(value, Mapping):  # objects may refer to each other in a circle
        return type(value).__qualname__
    parts = _parts_of(value)
    if parts is None:  # torch.dtype and its like; an address in a text would differ by process
        return _ADDRESS.sub("", str(value))
    plain = {str(key): _plain(item, depth + 1) for key, item in parts.items()}
    return plain if isinstance(value, Mapping) else {"type": type(value).__qualname__, **plain}


def _shown(name: str, value: Any) -> Any:
    """Short plain values as they are, anything else as a digest."""
    if isinstance(value, str):
        secret = any(word in name.rpartition(".")[2] for word in _SECRET)
        return f"#{digest16(value)}" if value and (secret or len(value) > _VALUE_CHARS or "/" in value) else value
    if isinstance(value, dict | list):
        return value if not value or _is_short(value) else f"#{digest16(value)}"
    return value


def _is_short(value: Any) -> bool:
    return isinstance(value, list) and len(text := canonical(value)) <= _VALUE_CHARS and "/" not in text
