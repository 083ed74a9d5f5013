"""LRU with a bonus for blocks that were referenced often: a fixed number of seconds per doubling."""

from __future__ import annotations

from kvtier.identity.keys import BlockKey
from kvtier.policies.order import Run
from kvtier.policies.runs import MEMORY_MIN, MEMORY_PER_BLOCK, Ranking, level_borders, level_of, references_after
from kvtier.times import Mono


class FrequencyLRU(Ranking):
    """Rank = last reference + `bonus_s` · log2(references). For comparison: the right bonus differs by trace."""

    def __init__(self, capacity: int, bonus_s: float = 60.0) -> None:
        super().__init__(max(MEMORY_PER_BLOCK * capacity, MEMORY_MIN))
        self._bonus_s = bonus_s

    def _cut(self, keys: list[BlockKey], old: list[tuple[Run | None, int]], mono_s: Mono) -> list[Run]:
        counts, _ = references_after(old, keys)
        borders = level_borders(counts)
        runs = []
        for start, stop in zip(borders, borders[1:] + [len(keys)], strict=True):
            run = Run(keys[start:stop], start, self._tick, mono_s)
            run.counts = counts[start:stop]
            run.level = level_of(run.counts[0])
            runs.append(run)
        return runs
