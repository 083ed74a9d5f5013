"""Guarantees: blocks whose bytes stay reserved until a time.

Counters only: the owner excludes these blocks from eviction and reports those that are gone. A guarantee is refused
when it is asked for, never broken later.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.errors import InvalidRequest
from kvtier.identity.keys import BlockKey
from kvtier.times import Wall


class Guarantees:
    """Blocks whose bytes are reserved until a time, at most `limit_bytes` in all. No lock of its own."""

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        self.limit_blocks = limit_bytes // block_bytes
        self._until: dict[BlockKey, Wall] = {}
        self.refused = 0

    def fits(self, keys: Iterable[BlockKey]) -> bool:
        """Whether `reserve` would take these, with what has not been expired yet."""
        return len(self._until) + sum(key not in self._until for key in keys) <= self.limit_blocks

    def reserve(self, keys: list[BlockKey], until: Wall) -> None:
        """Guarantee these blocks until `until` or longer, all of them or none.

        Raises InvalidRequest when that would exceed the budget; nothing has changed then.
        """
        if not self.fits(keys):
            self.refused += 1
            new = sum(key not in self._until for key in keys)
            raise InvalidRequest(
                f"a guarantee for {new} more blocks is refused: {len(self._until)} of {self.limit_blocks} have one"
            )
        for key in keys:
            self._until[key] = max(until, self._until.get(key, until))

    def until(self, key: BlockKey) -> Wall:
        """When the guarantee of a block ends; -inf if there is none."""
        return self._until.get(key, Wall("-inf"))

    def adopt(self, key: BlockKey, until: Wall) -> None:
        """Take over a guarantee that an earlier process gave: beyond the limit, too."""
        self._until[key] = max(until, self.until(key))

    def drop(self, key: BlockKey) -> None:
        """End the guarantee of a block that is gone: purged, expired by max_age, damaged."""
        self._until.pop(key, None)

    def expire(self, wall_s: Wall) -> list[BlockKey]:
        """End the guarantees whose time is over; returns their blocks. O(n): call it now and then."""
        ended = [key for key, until in self._until.items() if until < wall_s]
        for key in ended:
            del self._until[key]
        return ended

    def __len__(self) -> int:
        return len(self._until)
