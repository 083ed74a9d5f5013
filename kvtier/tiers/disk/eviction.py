"""The line to leave: which block goes first, class by class, inside one LMDB write transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from kvtier.tiers.disk.quota import scope_in
from kvtier.tiers.disk.records import ORDER, Entry, number_key, order_parts, order_start, rows

SCAN_LINES_MAX = 8192
"""Lines that one search reads: milliseconds below the write lock."""

FORGET_S = 600.0
FLOORS_MAX = 4096
ANY = b""
"""Instead of a scope."""


class SearchFloors:
    """By class and scope, the line before which a search found nothing that may leave. One process's memory, from one
    transaction to the next; on the writer thread.

    It is forgotten when something that was passed over may leave after all: a promise ends, a commit fails. What other
    processes do cannot be seen from here and is found FORGET_S later: until then a block that one of them puts before
    the line may lose its parent.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[int, bytes], bytes] = {}
        self._until = float("inf")

    def at(self, slot_cls: int, scope: bytes, now: float) -> bytes:
        """Where to begin the search."""
        if now > self._until:
            self.clear()
        return self._lines.get((slot_cls, scope)) or order_start(slot_cls)

    def raise_to(self, line: bytes, scope: bytes, until: float) -> None:
        """Nothing before this line may leave, before the time `until`."""
        if len(self._lines) >= FLOORS_MAX:
            self.clear()
        self._lines[order_parts(line)[0], scope] = line
        self._until = min(self._until, until)

    def lower_to(self, line: bytes, scope: bytes) -> None:
        """A block of the scope has this line now."""
        slot_cls = order_parts(line)[0]
        for place in ((slot_cls, scope), (slot_cls, ANY)):
            if line < self._lines.get(place, b""):
                self._lines[place] = line

    def clear(self) -> None:
        """Forget everything."""
        self._lines.clear()
        self._until = float("inf")


class EvictionOrder:
    """The lines of `order`: one per entry, coldest first."""

    def __init__(self, txn: Any, floors: SearchFloors) -> None:
        self._txn = txn
        self._floors = floors
        self._cursor = txn.cursor()
        self._only: int | None = None  # the class of all lines, where there is but one and that is known

    def add(self, name: bytes, entry: Entry) -> None:
        """The block's line, by its rank and depth."""
        line = entry.order_key()
        self._txn.put(line, name)
        self._floors.lower_to(line, scope_in(name))
        if entry.slot_class != self._only:
            self._only = None

    def remove(self, key: bytes) -> None:
        """Take out a line."""
        self._txn.delete(key)

    def leaving(
        self, slot_cls: int, now: float, kept_until: Callable[[bytes], float], scope: bytes = ANY
    ) -> tuple[bytes, bytes] | None:
        """The first line of a class, and of a scope if one is given, whose block is not kept at `now`, as (key, name).

        None if there is none, or none among the next SCAN_LINES_MAX: the next search goes on behind them.
        """
        start = self._floors.at(slot_cls, scope, now)
        passed, until = b"", now + FORGET_S
        for key, name in islice(rows(self._txn, number_key(ORDER, slot_cls), start), SCAN_LINES_MAX):
            if scope == ANY or scope_in(name) == scope:
                kept = kept_until(name)
                if kept <= now:
                    if passed:
                        self._floors.raise_to(key, scope, until)
                    return key, name
                until = min(until, kept)
            passed = key
        if passed:
            self._floors.raise_to(passed, scope, until)
        return None

    def leaving_scope(
        self, scope: bytes, now: float, kept_until: Callable[[bytes], float]
    ) -> tuple[bytes, bytes] | None:
        """The coldest such line of a scope among all classes."""
        found = [line for cls in self._classes() if (line := self.leaving(cls, now, kept_until, scope)) is not None]
        return min(found, key=lambda line: order_parts(line[0])[1], default=None)

    def _classes(self) -> Iterator[int]:
        key = self._seek(order_start(0))
        while key is not None:
            slot_cls = order_parts(key)[0]
            yield slot_cls
            key = self._seek(order_start(slot_cls + 1))

    def coldest(self, slot_cls: int) -> tuple[bytes, bytes] | None:
        """The first line of a class, kept or not, as (key, name)."""
        key = self._seek(order_start(slot_cls))
        return (key, self._cursor.value()) if key is not None and order_parts(key)[0] == slot_cls else None

    def lines(self) -> Iterator[tuple[bytes, bytes]]:
        """All lines."""
        return rows(self._txn, ORDER)

    def lines_in(self, slot_cls: int, segment: int) -> list[tuple[bytes, bytes]]:
        """The lines of a class whose blocks lie in one segment. Reads all lines of the class."""
        found = []
        for key, name in rows(self._txn, ORDER, order_start(slot_cls)):
            parts = order_parts(key)
            if parts[0] != slot_cls:
                break
            if parts[2] == segment:
                found.append((key, name))
        return found

    def rival(self, slot_cls: int) -> int | None:
        """Another class that should give a segment to this one: one whose hottest block is colder than our coldest or,
        if we have no block at all, the one that holds the coldest."""
        if self._only == slot_cls:
            return None
        coldest = self.coldest(slot_cls)
        own = order_parts(coldest[0])[1] if coldest is not None else None
        best: tuple[int, int] | None = None
        self._only = slot_cls
        key = self._seek(ORDER)
        while key is not None:
            rival, rank, *_ = order_parts(key)
            if rival != slot_cls:
                self._only = None
                if own is not None:
                    rank = self._hottest(rival)
                if (own is None or rank < own) and (best is None or rank < best[0]):
                    best = rank, rival
            key = self._seek(order_start(rival + 1))
        return None if best is None else best[1]

    def _seek(self, start: bytes) -> bytes | None:
        """The first line from `start` on."""
        if not self._cursor.set_range(start):
            return None
        key: bytes = self._cursor.key()
        return key if key.startswith(ORDER) else None

    def _hottest(self, slot_cls: int) -> int:
        """The rank of the last line of a class that has lines."""
        found = self._cursor.set_range(order_start(slot_cls + 1))
        _ = self._cursor.prev() if found else self._cursor.last()
        return order_parts(self._cursor.key())[1]
