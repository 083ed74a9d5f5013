"""The line to leave: which block goes first, class by class, inside one LMDB write transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtier.tiers.entry import ORDER, Entry, order_parts, order_start, rows


class Order:
    """The lines of `order`: one per entry, coldest first."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn
        self._cursor = txn.cursor()
        self._only: int | None = None  # the class of all lines, where there is but one and that is known

    def add(self, name: bytes, entry: Entry) -> None:
        """The block's line, by its tick and depth."""
        self._txn.put(entry.order_key(), name)
        if entry.slot_class != self._only:
            self._only = None

    def remove(self, key: bytes) -> None:
        """Take out a line."""
        self._txn.delete(key)

    def coldest(self, slot_cls: int) -> tuple[bytes, bytes] | None:
        """The first line of a class, as (key, name)."""
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
            rival, tick, *_ = order_parts(key)
            if rival != slot_cls:
                self._only = None
                if own is not None:
                    tick = self._hottest(rival)
                if (own is None or tick < own) and (best is None or tick < best[0]):
                    best = tick, rival
            key = self._seek(order_start(rival + 1))
        return None if best is None else best[1]

    def _seek(self, start: bytes) -> bytes | None:
        """The first line from `start` on."""
        if not self._cursor.set_range(start):
            return None
        key: bytes = self._cursor.key()
        return key if key.startswith(ORDER) else None

    def _hottest(self, slot_cls: int) -> int:
        """The tick of the last line of a class that has lines."""
        found = self._cursor.set_range(order_start(slot_cls + 1))
        _ = self._cursor.prev() if found else self._cursor.last()
        return order_parts(self._cursor.key())[1]
