"""A larger capacity for a store in use, once no other process uses it."""

from __future__ import annotations

import logging
from pathlib import Path

from kvtier.errors import TierUnavailable
from kvtier.tiers.disk.directory import DirectoryLock
from kvtier.tiers.disk.faults import unavailable
from kvtier.tiers.disk.geometry import Geometry
from kvtier.tiers.disk.index import Index, map_bytes_for

log = logging.getLogger(__name__)


class CapacityGrowth:
    """Of a store that this process has open. On its writer thread, but for `want` and `why_not`."""

    def __init__(self, path: Path, lock: DirectoryLock) -> None:
        self.why_not = ""
        """Why the last try failed; empty where none did."""
        self._path = path
        self._lock = lock
        self._wanted = 0

    def want(self, capacity_bytes: int) -> None:
        """Have this capacity, if it is larger, instead of what was wanted before. From any thread."""
        self._wanted, self.why_not = capacity_bytes, ""

    def step(self, index: Index, geometry: Geometry) -> Geometry:
        """The geometry from now on: another one if a larger capacity is wanted and no other process uses the store.
        Waits for none of them. Where the index cannot be as large, nothing changes and `why_not` says why; nothing is
        tried until it is wanted again. Raises what a transaction raises."""
        wanted = self._wanted
        if wanted <= geometry.capacity or not self._lock.try_exclusive():
            return geometry
        try:
            try:
                with unavailable(self._path):
                    index.enlarge(map_bytes_for(wanted))
            except TierUnavailable as error:
                self._wanted, self.why_not = 0, str(error)
                log.warning("g3: %s keeps its capacity: %s", self._path, error)
                return geometry
            index.transact(lambda txn: txn.resize(wanted))
            return index.geometry()
        finally:
            self._lock.share()
