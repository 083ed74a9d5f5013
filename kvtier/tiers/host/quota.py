"""How many blocks each scope may hold in G2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier.identity.keys import BlockKey, Scope, scope_of_key


class Quota:
    """Blocks per scope in one tier, at most `limit_blocks` each (None: no bound). Counts only: the owner asks before it
    takes a block in, and reports each that leaves. O(1) per verb; no lock of its own."""

    def __init__(self, limit_blocks: int | None) -> None:
        self._limit_blocks = limit_blocks
        self._blocks: Counter[Scope] = Counter()
        self.refused = 0

    @property
    def limited(self) -> bool:
        """Whether there is a limit: else nothing is counted."""
        return self._limit_blocks is not None

    def full(self, key: BlockKey) -> bool:
        """Whether the block's scope is at its limit: one of the same scope must leave first."""
        return self._limit_blocks is not None and self._blocks[scope_of_key(key)] >= self._limit_blocks

    def take(self, key: BlockKey) -> None:
        """Count a block in. The owner has asked whether its scope is full."""
        if self._limit_blocks is not None:
            self._blocks[scope_of_key(key)] += 1

    def give(self, key: BlockKey) -> None:
        """Count a block out. Raises ValueError if its scope has none: the owner has miscounted."""
        if self._limit_blocks is None:
            return
        scope = scope_of_key(key)
        if not self._blocks[scope]:
            raise ValueError("a block left a scope that holds none")
        self._blocks[scope] -= 1
        if not self._blocks[scope]:
            del self._blocks[scope]

    def check(self, resident: Iterable[BlockKey]) -> None:
        """Assert that exactly these blocks are counted, and no scope beyond its limit."""
        if self._limit_blocks is not None:
            assert self._blocks == Counter(map(scope_of_key, resident)), "quota and tier disagree"
            assert all(n <= self._limit_blocks for n in self._blocks.values())
