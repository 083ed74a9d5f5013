"""The mark of a damaged index, by which the processes that use a store let go of it, so that one can repair it.

    PART 0/DAMAGED      empty; there from when a process finds damage until one that uses the store alone has checked it

A process that finds the mark closes the index and the slab files, gives up the lock, and takes it again exclusively,
or after the mark is gone. A process alone checks the index, replaces it where its structure is wrong, and removes the
mark.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from kvtier.tiers.disk.directory import is_there
from kvtier.tiers.fsync import sync_directory

MARK_EVERY_S = 1.0

_NAME = "DAMAGED"


def is_marked(part: Path) -> bool:
    """Whether the mark is there. Raises OSError where that cannot be told."""
    return is_there(part / _NAME)


class MarkWatch:
    """Looks for the mark of a store now and then. Not thread-safe."""

    def __init__(self, part: Path) -> None:
        self._part = part
        self._look_at = 0.0

    def is_seen(self) -> bool:
        """Whether the mark is there; False where that cannot be told, and for MARK_EVERY_S after the last look."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + MARK_EVERY_S
        try:
            return is_marked(self._part)
        except OSError:
            return False


def mark(part: Path) -> None:
    """Set the mark, durably. Where it cannot be written the others find the damage by themselves."""
    with contextlib.suppress(OSError):
        os.close(os.open(part / _NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        sync_directory(part)


def unmark(part: Path) -> None:
    """Remove the mark. The caller uses the store alone and has checked its index. Raises OSError."""
    (part / _NAME).unlink(missing_ok=True)
    sync_directory(part)
