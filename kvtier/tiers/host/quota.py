"""How many bytes each scope may hold in a tier, and how many of all are promised.

Counters only: the owner asks before it takes a block in, and tells what went. A promise is refused when it is asked
for, never broken later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier.errors import InvalidRequest
from kvtier.identity.keys import BlockKey, Scope, scope_of_key


class Quota:
    """Bytes per scope in one tier, at most `limit_bytes` each (0: no bound). O(1) per verb; no lock of its own."""

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        self._limit_blocks = limit_bytes // block_bytes if limit_bytes else None
        self._block_bytes = block_bytes
        self._blocks: Counter[Scope] = Counter()
        self.refused = 0

    def full(self, key: BlockKey) -> bool:
        """Whether the block's scope is at its limit: one of the same scope must leave first."""
        return self._limit_blocks is not None and self._blocks[scope_of_key(key)] >= self._limit_blocks

    def take(self, key: BlockKey) -> None:
        """Count a block in. The owner has asked whether its scope is full."""
        if self._limit_blocks is not None:
            self._blocks[scope_of_key(key)] += 1

    def give(self, key: BlockKey) -> None:
        """Count a block out. Raises ValueError if its scope has none: the owner's books are wrong."""
        if self._limit_blocks is None:
            return
        scope = scope_of_key(key)
        if not self._blocks[scope]:
            raise ValueError("a block left a scope that holds none")
        self._blocks[scope] -= 1
        if not self._blocks[scope]:
            del self._blocks[scope]

    def used(self, scope: Scope) -> int:
        """Bytes the scope holds."""
        return self._blocks[scope] * self._block_bytes

    def check(self, resident: Iterable[BlockKey]) -> None:
        """Assert that exactly these blocks are counted, and no scope beyond its limit."""
        if self._limit_blocks is not None:
            assert self._blocks == Counter(scope_of_key(key) for key in resident), "quota and tier disagree"
            assert all(n <= self._limit_blocks for n in self._blocks.values())


class Guarantees:
    """Blocks whose bytes are reserved until a time, at most `limit_bytes` of them. No lock of its own."""

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        self.limit_blocks = limit_bytes // block_bytes
        self._until: dict[BlockKey, float] = {}
        self.refused = 0

    def fits(self, keys: Iterable[BlockKey]) -> bool:
        """Whether `reserve` would take these, with what has not been expired yet."""
        return len(self._until) + sum(key not in self._until for key in keys) <= self.limit_blocks

    def reserve(self, keys: list[BlockKey], until: float) -> None:
        """Keep these blocks until `until` or longer, all of them or none.

        Raises InvalidRequest when the promised bytes would exceed the budget; nothing has changed then.
        """
        if not self.fits(keys):
            self.refused += 1
            new = sum(key not in self._until for key in keys)
            raise InvalidRequest(
                f"a guarantee for {new} more blocks is refused: {len(self._until)} of {self.limit_blocks} are promised"
            )
        for key in keys:
            self._until[key] = max(until, self._until.get(key, until))

    def held(self, key: BlockKey, now: float) -> bool:
        """Whether this block must not be evicted at `now`."""
        until = self._until.get(key)
        return until is not None and until >= now

    def until(self, key: BlockKey) -> float:
        """When the promise for a block ends; -inf if there is none."""
        return self._until.get(key, float("-inf"))

    def adopt(self, key: BlockKey, until: float) -> None:
        """Take over a promise that an earlier process made: beyond the limit, too."""
        self._until[key] = max(until, self.until(key))

    def drop(self, key: BlockKey) -> None:
        """The block is gone (purged, expired by max_age, damaged): nothing is owed any more."""
        self._until.pop(key, None)

    def expire(self, now: float) -> list[BlockKey]:
        """Forget promises that have ended; gives their blocks. O(n): call it now and then."""
        ended = [key for key, until in self._until.items() if until < now]
        for key in ended:
            del self._until[key]
        return ended

    def __len__(self) -> int:
        return len(self._until)
