"""Guarantees: blocks whose bytes stay reserved until a time.

Counters only: the owner excludes these blocks from eviction and reports those that are gone. A guarantee is refused
when it is asked for, never broken later. Many blocks are taken in slices: `admit` their number, then `adopt` each.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from kvtier.errors import InvalidRequest
from kvtier.identity.key_map import KeyMap
from kvtier.identity.keys import BlockKey
from kvtier.times import Wall

_SPARE_TIMES = 64


class Guarantees:
    """Blocks whose bytes are reserved until a time, at most `limit_bytes` in all. No lock of its own."""

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        self.limit_blocks = limit_bytes // block_bytes
        self._until = KeyMap[Wall]()
        self._due: list[Wall] = []  # heap of the times of `_at`, and of some that are empty by now
        self._at: dict[Wall, OrderedDict[BlockKey, None]] = {}  # blocks by when they are looked at: never too late
        self._queued = KeyMap[Wall]()  # when each block is looked at
        self._admitted = 0  # blocks that are still to be adopted
        self.refused = 0

    def lacking(self, keys: Iterable[BlockKey]) -> int:
        """How many of these have no guarantee yet."""
        return sum(key not in self._until for key in keys)

    def fits(self, keys: Iterable[BlockKey]) -> bool:
        """Whether `reserve` would take these, with what has not been expired yet."""
        return self.admits(self.lacking(keys))

    def admits(self, blocks: int) -> bool:
        """Whether `admit` would take so many."""
        return not blocks or len(self._until) + self._admitted + blocks <= self.limit_blocks

    def admit(self, blocks: int) -> None:
        """Set aside the budget for so many new blocks, until `settle`. Raises InvalidRequest when that exceeds it;
        nothing has changed then."""
        if not self.admits(blocks):
            self.refused += 1
            raise InvalidRequest(
                f"a guarantee for {blocks} more blocks is refused: {len(self._until)} of {self.limit_blocks} have one"
            )
        self._admitted += blocks

    def settle(self, blocks: int) -> None:
        """So many of the blocks that were admitted have been adopted, or will not be."""
        self._admitted -= blocks

    def reserve(self, keys: list[BlockKey], until: Wall) -> None:
        """Guarantee these blocks until `until` or longer, all of them or none. Raises as `admit`."""
        new = self.lacking(keys)
        self.admit(new)
        for key in keys:
            self.adopt(key, until)
        self.settle(new)

    def until(self, key: BlockKey) -> Wall:
        """When the guarantee of a block ends; -inf if there is none."""
        return self._until.get(key, Wall("-inf"))

    def adopt(self, key: BlockKey, until: Wall) -> None:
        """Guarantee a block until then or longer, whatever the limit."""
        self._until[key] = until = max(until, self.until(key))
        if until < self._queued.get(key, Wall("inf")):
            self._queue(key, until)

    def _queue(self, key: BlockKey, until: Wall) -> None:
        self._unqueue(key)
        self._queued[key] = until
        if until not in self._at:
            if len(self._due) > 2 * len(self._at) + _SPARE_TIMES:  # else those that were given up stay until their time
                self._due = list(self._at)
                heapq.heapify(self._due)
            self._at[until] = OrderedDict()
            heapq.heappush(self._due, until)
        self._at[until][key] = None

    def _unqueue(self, key: BlockKey) -> None:
        at = self._queued.pop(key, None)
        if at is not None:
            del self._at[at][key]
            if not self._at[at]:
                del self._at[at]

    def drop(self, key: BlockKey) -> None:
        """End the guarantee of a block that is gone: purged, expired by max_age, damaged."""
        self._until.pop(key, None)
        self._unqueue(key)

    def due(self, wall_s: Wall) -> bool:
        """Whether `expire` has something to look at."""
        return bool(self._due) and self._due[0] < wall_s

    def expire(self, wall_s: Wall, most: int | None = None) -> list[BlockKey]:
        """End the guarantees whose time is over; returns their blocks. O(log n) for each that ended, or was renewed
        since it was last looked at; looks at `most` of them."""
        ended: list[BlockKey] = []
        while self.due(wall_s) and most != 0:
            keys = self._at.get(self._due[0])
            if not keys:
                heapq.heappop(self._due)  # all of them were dropped
                continue
            most = None if most is None else most - 1
            key = next(iter(keys))
            self._unqueue(key)
            if (until := self._until[key]) < wall_s:
                del self._until[key]
                ended.append(key)
            else:
                self._queue(key, until)
        return ended

    def __len__(self) -> int:
        return len(self._until)

    def check(self) -> None:
        """Assert that each guarantee will be looked at in time."""
        times = set(self._due)
        assert {key: at for at, keys in self._at.items() for key in keys} == self._queued
        assert all(keys and at in times for at, keys in self._at.items()), "a time is lost"
        assert all(self._queued[key] <= until for key, until in self._until.items()), "a guarantee ends too late"
        assert self._queued.keys() == self._until.keys(), "a block is looked at that has no guarantee"
        assert self._admitted >= 0, "more was settled than admitted"
