"""How many blocks of G2 have each priority."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence

from kvtier.retention.terms import PRIORITY_MAX


class Priorities:
    """Blocks by priority. Counts only. `levels` are the priorities that some block has, ascending."""

    __slots__ = ("_blocks", "levels")

    def __init__(self) -> None:
        self._blocks = [0] * (PRIORITY_MAX + 1)
        self.levels: list[int] = []

    def take(self, priorities: Sequence[int]) -> None:
        """Count blocks of these priorities, most of them equal, in."""
        for priority, blocks in _counted(priorities):
            if not self._blocks[priority]:
                insort(self.levels, priority)
            self._blocks[priority] += blocks

    def give(self, priorities: Sequence[int]) -> None:
        """Count blocks out."""
        for priority, blocks in _counted(priorities):
            self._blocks[priority] -= blocks
            if not self._blocks[priority]:
                self.levels.remove(priority)

    def check(self, priorities: Iterable[int]) -> None:
        """Assert that exactly blocks of these priorities are counted."""
        counted = {priority: blocks for priority, blocks in enumerate(self._blocks) if blocks}
        assert counted == Counter(priorities), "priorities are miscounted"
        assert self.levels == sorted(counted), "priorities are miscounted"


def _counted(priorities: Sequence[int]) -> Iterable[tuple[int, int]]:
    if not priorities:
        return ()
    blocks = priorities.count(priorities[0])
    return ((priorities[0], blocks),) if blocks == len(priorities) else Counter(priorities).items()
