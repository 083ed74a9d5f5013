"""Names of LoRA adapters by what their files hold when an engine loads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kvtier.errors import KVTierError
from kvtier.identity.weights import fingerprint

T = TypeVar("T")


def adapter_name(folder: Path) -> str:
    """Fingerprint of an adapter's files; "" where they cannot be read."""
    try:
        return fingerprint(folder)
    except (KVTierError, OSError):
        return ""


def signature_of(folder: Path) -> tuple[Any, ...]:
    """Names, sizes, inodes and times of an adapter's files; () where it is no local directory."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in stats)


def named_while(folder: Path, load: Callable[[], T]) -> tuple[T, str]:
    """What `load` returns, and the name of the files that it read: "" where they changed meanwhile."""
    before = signature_of(folder)
    loaded = load()
    name = adapter_name(folder) if before else ""
    return loaded, name if signature_of(folder) == before else ""
