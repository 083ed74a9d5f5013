"""Guarantees: blocks whose bytes stay reserved until a time.

Counters only: the owner excludes these blocks from eviction and reports those that are gone. A guarantee is refused
when it is asked for, never broken later. Many blocks are taken in slices: `admit` their number, then `adopt` each.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from kvtier.errors import InvalidRequest
from kvtier.identity.key_map import KeyMap
from kvtier.identity.keys import BlockKey
from kvtier.times import Wall

_SPARE_TIMES = 64
_LOOKED_AT_ONCE = 1024
"""Blocks in one table, at most: one of 100,000 stops its owner for 3 ms when it grows."""


class _Look:
    """Blocks that are looked at at one time."""

    __slots__ = ("at", "keys")

    def __init__(self, at: Wall) -> None:
        self.at = at
        self.keys: dict[BlockKey, None] = {}


class Guarantees:
    """Blocks whose bytes are reserved until a time, at most `limit_bytes` in all. No lock of its own."""

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        self.limit_blocks = limit_bytes // block_bytes
        self._until = KeyMap[Wall]()
        self._due: list[tuple[Wall, int, _Look]] = []  # heap, with their numbers; never too late; some are empty by now
        self._open: dict[Wall, _Look] = {}  # those that have room
        self._looks = 0  # made so far
        self._empty = 0  # of those in `_due`
        self._queued = KeyMap[_Look]()  # where each block is
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
        look = self._queued.get(key)
        if look is None or until < look.at:
            self._queue(key, until)

    def _queue(self, key: BlockKey, until: Wall) -> None:
        self._unqueue(key)
        look = self._open.get(until)
        if look is None or len(look.keys) >= _LOOKED_AT_ONCE:
            if 2 * self._empty > len(self._due) + _SPARE_TIMES:  # else those that were given up stay until their time
                self._due = [due for due in self._due if due[-1].keys]
                heapq.heapify(self._due)
                self._empty = 0
            look = self._open[until] = _Look(until)
            self._looks += 1
            heapq.heappush(self._due, (until, self._looks, look))
        look.keys[key] = None
        self._queued[key] = look

    def _unqueue(self, key: BlockKey) -> None:
        look = self._queued.pop(key, None)
        if look is not None:
            del look.keys[key]
            if not look.keys:
                self._empty += 1
                if self._open.get(look.at) is look:
                    del self._open[look.at]

    def drop(self, key: BlockKey) -> None:
        """End the guarantee of a block that is gone: purged, expired by max_age, damaged."""
        self._until.pop(key, None)
        self._unqueue(key)

    def due(self, wall_s: Wall) -> bool:
        """Whether `expire` has something to look at."""
        return bool(self._due) and self._due[0][0] < wall_s

    def expire(self, wall_s: Wall, most: int | None = None) -> list[BlockKey]:
        """End the guarantees whose time is over; returns their blocks. O(log n) for each that ended, or was renewed
        since it was last looked at; looks at `most` of them."""
        ended: list[BlockKey] = []
        while self.due(wall_s) and most != 0:
            keys = self._due[0][-1].keys
            if not keys:
                heapq.heappop(self._due)
                self._empty -= 1
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
        looks = [look for _, _, look in self._due]
        assert {key: look for look in looks for key in look.keys} == self._queued, "a block is not looked at"
        assert all(at == look.at for at, _, look in self._due) and self._empty == sum(not look.keys for look in looks)
        assert all(self._queued[key].at <= until for key, until in self._until.items()), "a guarantee ends too late"
        assert self._queued.keys() == self._until.keys(), "a block is looked at that has no guarantee"
        assert self._admitted >= 0, "more was settled than admitted"
