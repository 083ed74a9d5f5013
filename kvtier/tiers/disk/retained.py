"""Retained blocks of a G3 store, in an LMDB write transaction: exempt from eviction until a time."""

from __future__ import annotations

from typing import Any

from kvtier.tiers.disk.records import RETAINED_KEY, TIME, rows, time_at
from kvtier.times import Wall


class Retained:
    """Names of retained blocks, and until when."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn
        self._any = next(rows(txn, RETAINED_KEY), None) is not None

    def until(self, name: bytes) -> Wall:
        """Before which time the block must not be evicted; -inf if it may be."""
        return time_at(self._txn, RETAINED_KEY + name) if self._any else Wall("-inf")

    def set(self, name: bytes, until: Wall) -> None:
        """Retain the block until then."""
        self._txn.put(RETAINED_KEY + name, TIME.pack(until))
        self._any = True

    def forget(self, name: bytes) -> bool:
        """Retain the block no more. Whether it was."""
        return self._any and bool(self._txn.delete(RETAINED_KEY + name))
