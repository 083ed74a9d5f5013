"""Blocks that puts under way are to store."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier.identity.key_counts import KeyCounts
from kvtier.identity.keys import BlockKey
from kvtier.manager.slices import slices


class Claims:
    """A block is claimed until each put that claims it is over. `add` and `remove` take the manager's lock for a slice
    at a time; `in` is asked under it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._counts = KeyCounts()

    def add(self, keys: Sequence[BlockKey]) -> None:
        """A put is to store these blocks: until `remove`, nobody else's failure ends their guarantees."""
        for part in slices(keys):
            with self._lock:
                self._counts.add(part)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """That put is over."""
        for part in slices(keys):
            with self._lock:
                self._counts.remove(part)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._counts
