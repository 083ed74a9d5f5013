"""How many blocks each scope may hold in G2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier.identity.keys import BlockKey, Scope, scope_of_key


class Quota:
    """Blocks per scope in one tier, at most a share of its slots each. Counts only: the owner asks before it takes a
    block in, and reports each that leaves. O(1) per verb but `resize`; no lock of its own."""

    def __init__(self, share: float, slots: int) -> None:
        """`share` 0: no bound."""
        self._share = share
        self._limit_blocks = self._limit_in(slots)
        self._blocks: Counter[Scope] = Counter()
        self._beyond: set[Scope] = set()
        self.refused = 0

    @property
    def limited(self) -> bool:
        """Whether there is a limit: else nothing is counted."""
        return self._limit_blocks is not None

    def _limit_in(self, slots: int) -> int | None:
        return max(1, int(self._share * slots)) if self._share else None

    def resize(self, slots: int) -> None:
        """The tier has another number of slots. Scopes that hold more than their share are `beyond` it until blocks of
        theirs leave."""
        self._limit_blocks = self._limit_in(slots)
        self._beyond = {scope for scope in self._blocks if self.over(scope)}

    def beyond(self) -> list[Scope]:
        """Scopes that hold more than a share that was lowered."""
        self._beyond = {scope for scope in self._beyond if self.over(scope)}
        return list(self._beyond)

    def over(self, scope: Scope) -> bool:
        """Whether a scope holds more than the limit."""
        return self._limit_blocks is not None and self._blocks[scope] > self._limit_blocks

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
            assert set(self.beyond()) == {scope for scope, n in self._blocks.items() if n > self._limit_blocks}
