"""LRU with a bonus for blocks that were referenced often: a fixed number of seconds per doubling."""

from __future__ import annotations

from kvtier.identity.keys import BlockKey
from kvtier.policies.parts import levels_in, references_after
from kvtier.policies.run import Run, Stretch
from kvtier.policies.runs import MEMORY_MIN, MEMORY_PER_BLOCK, Ranking
from kvtier.times import Mono


class FrequencyLRU(Ranking):
    """Rank = last reference + `bonus_s` · log2(references). For comparison: the right bonus differs by trace."""

    def __init__(self, capacity: int, bonus_s: float = 60.0) -> None:
        super().__init__(max(MEMORY_PER_BLOCK * capacity, MEMORY_MIN))
        self._bonus_s = bonus_s

    def _cut(self, keys: list[BlockKey], old: list[tuple[Run | None, int]], mono_s: Mono) -> list[Stretch]:
        counts, _ = references_after(old, keys)
        stretches, start = [], 0
        for stop, level in levels_in(counts):
            stretches.append(Stretch(start, stop, len(keys), level, counts))
            start = stop
        return stretches
