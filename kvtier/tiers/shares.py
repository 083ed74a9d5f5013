"""What each scope holds of a G3 store, and which of its blocks leaves first, inside one LMDB write transaction.

    meta key, after the "m"     value
    "shares"                    empty: scopes are counted in this store
    "shares" ‖ scope (16)       u64: slot bytes that the scope's blocks occupy, in all namespaces

Counting begins when a process first bounds scopes, and goes on in every process that uses the store from then on.
"""

from __future__ import annotations

import struct
from collections import Counter
from itertools import islice
from typing import Any

from kvtier.block import NAMESPACE_BYTES, SCOPE_BYTES
from kvtier.tiers.entry import META, ORDER, SLOT_ALIGN, Entry, number_key, order_parts, order_start, rows

SHARES_KEY = META + b"shares"
SCAN_LINES_MAX = 8192  # of the line to leave, in one search: milliseconds below the write lock
FLOORS_MAX = 4096
_BYTES = struct.Struct("<Q")

Floors = dict[tuple[int, bytes], int]
"""By class and scope: a tick that no block of theirs is colder than. It may outlive a transaction that was committed:
blocks only grow warmer, and new ones are as warm as their parents."""


def scope_in(name: bytes) -> bytes:
    """The scope that a block's full name names. Pure."""
    return name[NAMESPACE_BYTES : NAMESPACE_BYTES + SCOPE_BYTES]


class Shares:
    """Bytes per scope, as this transaction leaves them. `save` must be called before the commit."""

    def __init__(self, txn: Any, floors: Floors) -> None:
        self._txn = txn
        self._floors = floors
        self._counted = txn.get(SHARES_KEY) is not None
        self._bytes: Counter[bytes] = Counter()
        self._known: set[bytes] = set()

    def begin(self) -> None:
        """Count what is there, unless that was done: reads the whole line to leave, once in a store's life."""
        if self._counted:
            return
        for key, name in rows(self._txn, ORDER):
            self._bytes[scope_in(name)] += order_parts(key)[0] * SLOT_ALIGN
        self._known.update(self._bytes)
        self._counted = True

    def of(self, scope: bytes) -> int:
        """Bytes that the scope's blocks occupy."""
        if scope not in self._known:
            raw = self._txn.get(SHARES_KEY + scope)
            self._bytes[scope] = 0 if raw is None else _BYTES.unpack(raw)[0]
            self._known.add(scope)
        return self._bytes[scope]

    def add(self, name: bytes, entry: Entry) -> None:
        """A block was stored."""
        if self._counted:
            place = entry.slot_class, scope_in(name)
            self._change(place[1], entry.slot_class * SLOT_ALIGN)
            if self._floors.get(place, 0) > entry.tick:
                self._floors[place] = entry.tick

    def remove(self, name: bytes, slot_cls: int) -> None:
        """A block left."""
        if self._counted:
            self._change(scope_in(name), -slot_cls * SLOT_ALIGN)

    def _change(self, scope: bytes, size: int) -> None:
        self._bytes[scope] = max(0, self.of(scope) + size)

    def coldest(self, scope: bytes) -> tuple[bytes, bytes] | None:
        """The line, and the name, of the scope's block that leaves first. None if it has none, or none among the next
        SCAN_LINES_MAX lines of a class: the next search goes on behind them."""
        found = [line for slot_cls in self._classes() if (line := self._first(scope, slot_cls)) is not None]
        return min(found, key=lambda line: order_parts(line[0])[1], default=None)

    def _classes(self) -> list[int]:
        classes: list[int] = []
        following = order_start(0)
        while (key := next((key for key, _ in rows(self._txn, ORDER, following)), None)) is not None:
            classes.append(order_parts(key)[0])
            following = order_start(classes[-1] + 1)
        return classes

    def _first(self, scope: bytes, slot_cls: int) -> tuple[bytes, bytes] | None:
        start = order_start(slot_cls, self._floors.get((slot_cls, scope), 0))
        found, last = None, start
        for key, name in islice(rows(self._txn, number_key(ORDER, slot_cls), start), SCAN_LINES_MAX):
            last = key
            if scope_in(name) == scope:
                found = key, name
                break
        if len(self._floors) >= FLOORS_MAX:
            self._floors.clear()
        self._floors[slot_cls, scope] = order_parts(last)[1]
        return found

    def save(self) -> None:
        """Write what was counted."""
        if self._counted and self._known:
            self._txn.put(SHARES_KEY, b"")
        for scope in self._known:
            size = self._bytes[scope]
            if size:
                self._txn.put(SHARES_KEY + scope, _BYTES.pack(size))
            else:
                self._txn.delete(SHARES_KEY + scope)


def shares_of(txn: Any) -> dict[bytes, int] | None:
    """Bytes by scope, as they are counted; None if they are not."""
    if txn.get(SHARES_KEY) is None:
        return None
    return {key[len(SHARES_KEY) :]: _BYTES.unpack(raw)[0] for key, raw in rows(txn, SHARES_KEY) if key != SHARES_KEY}
