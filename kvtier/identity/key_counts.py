"""How often blocks are named, for as many as there are."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.identity.key_map import KeyMap
from kvtier.identity.keys import BlockKey


class KeyCounts:
    """A block is in it as often as it was added, less as often as it was removed, and never less than not at all."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = KeyMap[int]()

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Each of these once more."""
        counts = self._counts
        for key in keys:
            counts[key] = counts.get(key, 0) + 1

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Each of these once less."""
        counts = self._counts
        for key in keys:
            if left := counts.pop(key, 1) - 1:
                counts[key] = left

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        """Different blocks."""
        return len(self._counts)
