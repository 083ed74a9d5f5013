"""The mark of a damaged index, by which the processes that use a store let go of it, so that one can repair it.

    PART 0/DAMAGED      empty; there from when a process finds damage until one that uses the store alone has checked it

A process that finds the mark closes the index and the slab files, gives up the lock, and takes it again exclusively,
or after the mark is gone. A process alone checks the index, replaces it where its structure is wrong, and removes the
mark.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvtier.tiers.fsync import sync_directory

_NAME = "DAMAGED"


def is_marked(part: Path) -> bool:
    """Whether the mark is there. Raises OSError where that cannot be told."""
    try:
        (part / _NAME).lstat()
    except FileNotFoundError:
        return False
    return True


def mark(part: Path) -> None:
    """Set the mark, durably. Where it cannot be written the others find the damage by themselves."""
    with contextlib.suppress(OSError):
        os.close(os.open(part / _NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        sync_directory(part)


def unmark(part: Path) -> None:
    """Remove the mark. The caller uses the store alone and has checked its index. Raises OSError."""
    (part / _NAME).unlink(missing_ok=True)
    sync_directory(part)
