"""Guarantees: blocks whose bytes stay reserved until a time.

Counters only: the owner excludes these blocks from eviction and reports those that are gone. A guarantee is refused
when it is asked for, never broken later.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.errors import InvalidRequest
from kvtier.identity.keys import BlockKey


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
