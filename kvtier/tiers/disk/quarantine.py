"""Quarantine: after an error that leaves the index or a file in doubt a store is out of use until it is opened anew."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import TierError
from kvtier.tiers.disk.faults import NO_SPACE
from kvtier.tiers.disk.index import Index

log = logging.getLogger(__name__)

PROBE_FIRST_S, PROBE_LAST_S = 0.5, 30.0
LET_GO_S = 0.1, 0.5
FREE_BYTES_MIN = 1 << 20
"""A commit that fails with less than this on the volume failed for want of space."""


class Quarantine:
    """A store's index while it is in use; while it is not, the reason, and when to probe. Thread-safe."""

    def __init__(self, index: Index, path: Path) -> None:
        self.index: Index | None = index  # None while quarantined
        self.damaged = False  # whether the index must be checked before it is used again
        self._path = path
        self._reason = ""
        self._stale: Index | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._moving = 0
        self._probe_at = 0.0
        self._probe_wait_s = PROBE_FIRST_S

    def usable(self, operation: str = "use") -> Index:
        """The index. Raises TierError while quarantined."""
        index = self.index
        if index is None:
            raise TierError("g3", operation, f"{self._path} is quarantined: {self._reason}")
        return index

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While inside, blocks may be read from or written to slots: no probe is due. Raises TierError."""
        with self._lock:
            self.usable()
            self._moving += 1
        try:
            yield
        finally:
            with self._lock:
                self._moving -= 1

    def begin(self, reason: str, *, damaged: bool = False, rest_s: float = 0.0) -> None:
        """Take the store out of use, for `rest_s` at least, or renew the reason. Does nothing once it is closed."""
        with self._lock:
            if self._closed:
                return
            if self.index is not None:
                self._probe_wait_s = PROBE_FIRST_S
                log.warning("g3: %s: quarantined: %s", self._path, reason)
            self._probe_wait_s = max(self._probe_wait_s, rest_s)
            self._reason = reason
            self.damaged |= damaged
            self._probe_at = time.monotonic() + self._probe_wait_s
            # The writer thread may be inside a transaction: it closes the index before it opens the next one.
            self._stale, self.index = self.index or self._stale, None

    def probe_due(self) -> bool:
        """Whether to try to open the store now; if so, the old index is closed. Blocks move no more, and none begins to
        while the store is quarantined."""
        with self._lock:
            if self.index or self._closed or self._moving or time.monotonic() < self._probe_at:
                return False
            stale, self._stale = self._stale, None
        if stale is not None:
            stale.close()
        return True

    def probe_failed(self, error: Exception) -> None:
        """Wait twice as long before the next probe."""
        with self._lock:
            self._reason = str(error) or type(error).__name__
            self._probe_wait_s = min(2 * self._probe_wait_s, PROBE_LAST_S)
            self._probe_at = time.monotonic() + self._probe_wait_s

    def let_go(self, error: Exception) -> None:
        """Probe again after a short random wait: the others that use the store let go of it, too."""
        with self._lock:
            self._reason = str(error)
            self._probe_at = time.monotonic() + random.uniform(*LET_GO_S)

    def end(self, index: Index) -> None:
        """Take the store into use again, with a new index."""
        with self._lock:
            self.index, self._reason, self.damaged = index, "", False
        log.warning("g3: %s: in use again", self._path)

    def close(self) -> None:
        """Close the index, for good. No transaction may run. Idempotent."""
        with self._lock:
            self._closed, self._reason = True, "it is closed"
            index, self.index, self._stale = self.index or self._stale, None, None
        if index is not None:
            index.close()


def is_full(path: Path, error: Exception) -> bool:
    """Whether a commit failed with `error` of LMDB since the volume had no space for it, or the user's quota is spent,
    which only the error tells."""
    if any(os.strerror(number) in str(error) for number in NO_SPACE):
        return True
    try:
        status = os.statvfs(path)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < FREE_BYTES_MIN
