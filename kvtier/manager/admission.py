"""Decides which blocks are worth a write below G2: wanted often enough, of prompts that are long enough.

A write wears the disk and takes its time from reads; most blocks are never wanted again. With `threshold` n a block
goes down when the n-th request has stored or found it. That costs the hits of blocks that were wanted again only after
they had left G2: `kvtier bench retention` shows how many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.identity.keys import BlockKey
from kvtier.identity.recent_keys import RecentKeys

BLOCKS_MAX = 1 << 18


class Admission:
    """Counts requests per block, for the latest BLOCKS_MAX blocks or so. Under the manager's lock; O(1) per block."""

    def __init__(self, threshold: int = 1, blocks_min: int = 0, blocks_max: int = BLOCKS_MAX) -> None:
        """`threshold`: requests that must have wanted a block; `blocks_min`: length of a prompt below which it stays in
        G2."""
        self._wanted = RecentKeys(blocks_max)
        self.refused = 0
        self.change(threshold, blocks_min)

    def change(self, threshold: int, blocks_min: int) -> None:
        """Other bounds from now on; what was counted stays."""
        self._threshold, self._blocks_min = threshold, blocks_min
        self.active = threshold > 1 or blocks_min > 1

    def want(self, keys: Iterable[BlockKey]) -> None:
        """A request stored or found these blocks."""
        if self._threshold <= 1:
            return
        counts = self._wanted
        for key in keys:
            counts.put(key, (counts.get(key) or 0) + 1)

    def admits(self, chain: Sequence[BlockKey], index: int) -> bool:
        """Whether this block of a prompt that has grown to `chain` may go down."""
        if len(chain) < self._blocks_min:
            return False
        return self._threshold <= 1 or (self._wanted.get(chain[index]) or 0) >= self._threshold
