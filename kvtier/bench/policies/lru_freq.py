"""LRU with a bonus for blocks that were referenced often: a fixed number of seconds per doubling."""

from __future__ import annotations

from kvtier.identity.keys import BlockKey
from kvtier.policies.runs import MEMORY_MIN, MEMORY_PER_BLOCK, Ranking, Run, level_borders, level_of, references_after


class FrequencyLRU(Ranking):
    """Rank = last reference + `bonus` seconds · log2(references). For comparison: the right bonus differs by trace."""

    def __init__(self, capacity: int, bonus: float = 60.0) -> None:
        super().__init__(max(MEMORY_PER_BLOCK * capacity, MEMORY_MIN))
        self._bonus = bonus

    def _cut(self, names: list[BlockKey], old: list[tuple[Run | None, int]], now: float) -> list[Run]:
        counts, _ = references_after(old, names)
        borders = level_borders(counts)
        runs = []
        for start, stop in zip(borders, borders[1:] + [len(names)], strict=True):
            run = Run(names[start:stop], start, self._tick, now)
            run.counts = counts[start:stop]
            run.level = level_of(run.counts[0])
            runs.append(run)
        return runs
