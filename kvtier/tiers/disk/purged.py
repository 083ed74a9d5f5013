"""Purged scopes of a G3 store, in an LMDB write transaction: per scope the time until which its blocks are dead."""

from __future__ import annotations

from typing import Any

from kvtier.retention.lifetime import Lifetime
from kvtier.tiers.disk.records import PURGED_KEY, SCOPED_BYTES, TIME, time_at
from kvtier.times import Wall


class Purged:
    """The tombstones that this transaction looked at: every call of LMDB gives up the interpreter lock."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn
        self._until: dict[bytes, Wall] = {}

    def apply(self, scoped: bytes, before: Wall) -> None:
        """Set the tombstone of namespace ‖ scope, unless a newer one is there."""
        if before > self.until(scoped):
            self._txn.put(PURGED_KEY + scoped, TIME.pack(before))
            self._until[scoped] = before

    def covers(self, name: bytes, life: Lifetime) -> bool:
        """Whether a tombstone covers the block: it was born no later."""
        return life.born <= self.until(name[:SCOPED_BYTES])

    def until(self, scoped: bytes) -> Wall:
        """The tombstone of namespace ‖ scope; -inf where there is none."""
        if scoped not in self._until:
            self._until[scoped] = time_at(self._txn, PURGED_KEY + scoped)
        return self._until[scoped]
