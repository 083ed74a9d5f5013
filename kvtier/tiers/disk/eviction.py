"""The order of eviction: which block goes first, class by class, inside one LMDB write transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from kvtier.tiers.disk.allocator import UNFILLED_KEY
from kvtier.tiers.disk.class_worth import ClassWorths
from kvtier.tiers.disk.geometry import Geometry, reach_in
from kvtier.tiers.disk.layout import Layout
from kvtier.tiers.disk.quota import scope_in
from kvtier.tiers.disk.records import (
    FILL,
    FREE,
    ORDER,
    Entry,
    number_key,
    order_parts,
    rows,
    segment_in,
    tick_in,
)
from kvtier.times import Wall

SCAN_ROWS_MAX = 2048
"""Rows of blocks that may not leave which the searches of one transaction pass: milliseconds below the write lock."""

FORGET_S = 600.0
FLOORS_MAX = 4096
ANY = b""
"""Instead of a scope."""


class SearchFloors:
    """By class and scope, the key before which a search found no victim. One process's memory, from one transaction to
    the next; on the writer thread.

    Cleared when a block that was passed over may leave after all: its retention ends, or is to end sooner, its segment
    drains no more, the capacity is another, a commit fails. Other changes by other processes are not seen from here and
    take effect FORGET_S later: until then a block that one of them puts before the floor may lose its parent.
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[int, bytes], bytes] = {}
        self._until = float("inf")
        self._draining: frozenset[int] = frozenset()
        self._capacity = 0

    def begin(self, draining: Collection[int], capacity: int) -> None:
        """A transaction begins, while these segments drain, of a store of that capacity."""
        if not self._draining.issubset(draining) or capacity != self._capacity:
            self.clear()
        self._draining, self._capacity = frozenset(draining), capacity

    def at(self, slot_cls: int, scope: bytes, wall_s: Wall) -> bytes:
        """The key to begin the search at; empty: at the first."""
        set_back = max(wall_s, Wall(0)) < self._until - 2 * FORGET_S  # a write's time may be minutes old
        if wall_s >= self._until or set_back:
            self.clear()
        return self._keys.get((slot_cls, scope), b"")

    def raise_to(self, slot_cls: int, scope: bytes, key: bytes, until: Wall) -> None:
        """No block of them before this key may leave, before the time `until`."""
        if (slot_cls, scope) not in self._keys and len(self._keys) >= FLOORS_MAX:
            self.clear()  # a search that went on from its own keeps what it knows: what it passed before counts, too
        self._keys[slot_cls, scope] = key
        self._until = min(self._until, until)

    def lower_to(self, key: bytes, name: bytes, stays_until: Callable[[bytes], Wall]) -> None:
        """A block has this key now. One that may not leave before a floor is forgotten anyway is passed over like those
        there."""
        if not self._keys:  # nearly always
            return
        slot_cls = order_parts(key)[0]
        for place in ((slot_cls, scope_in(name)), (slot_cls, ANY)):
            if key < self._keys.get(place, b"") and stays_until(name) < self._until:
                self._keys[place] = key

    def clear(self) -> None:
        """Forget everything."""
        self._keys.clear()
        self._until = float("inf")


class EvictionOrder:
    """The rows of `order`: one per entry, coldest first."""

    def __init__(
        self,
        txn: Any,
        layout: Layout,
        geometry: Geometry,
        floors: SearchFloors,
        worths: ClassWorths,
        draining: Collection[int],
        retained_until: Callable[[bytes], Wall],
    ) -> None:
        """`draining`: segments whose slots nobody gets, so that their blocks leave by themselves, and so do those that
        lie beyond the capacity while the store shrinks. `retained_until`:
        before which time a block, by its name, is exempt from eviction."""
        self._txn = txn
        self._layout, self._names = layout, layout.names(txn)
        self._draining = draining
        self._cut = geometry if geometry.capacity < reach_in(txn).capacity else None
        floors.begin(draining, geometry.capacity)
        self._worths = worths
        self._floors = floors
        self._retained_until = retained_until
        self._cursor = txn.cursor()
        self._only: int | None = None  # the class of all segments, where there is but one and that is known
        self._rows_left = SCAN_ROWS_MAX
        self.cut_short = False
        """Whether a search for a slot ended though there may be one: the next transaction goes on with it."""

    def add(self, name: bytes, entry: Entry) -> bytes:
        """The block's row, by its rank and depth. Returns its key."""
        key = self._put(name, entry)
        self._worths.placed(entry.slot_class, tick_in(entry.rank))
        if entry.slot_class != self._only:
            self._only = None
        return key

    def remove(self, key: bytes) -> None:
        """Delete a row."""
        slot_cls, rank, _segment, _slot = order_parts(key)
        self._worths.removed(slot_cls, tick_in(rank))
        self._txn.delete(key)

    def replace(self, key: bytes, name: bytes, entry: Entry) -> bytes:
        """The block of the row `key` has another slot, and is as warm as it was. Returns its new key."""
        self._txn.delete(key)
        return self._put(name, entry)

    def _put(self, name: bytes, entry: Entry) -> bytes:
        key = entry.order_key()
        self._txn.put(key, self._layout.written(name))
        self._floors.lower_to(key, name, self._retained_until)
        return key

    def use(self, key: bytes) -> None:
        """Delete the row of a block that is used and gets another."""
        slot_cls, rank, _segment, _slot = order_parts(key)
        self._worths.hit(slot_cls, tick_in(rank))
        self.remove(key)

    def victim(self, slot_cls: int, wall_s: Wall, scope: bytes = ANY) -> tuple[bytes, bytes] | None:
        """The first row of a class, and of a scope if one is given, whose block is not retained, as (key, name).

        None if there is none, or none that this transaction may look for: the next one goes on behind.
        """
        start = self._floors.at(slot_cls, scope, wall_s)
        floor, until, found = b"", max(wall_s, Wall(0)) + FORGET_S, None  # -inf: while the clock is in doubt
        for key, written in rows(self._txn, number_key(ORDER, slot_cls), start):
            name = self._names(written)
            if scope == ANY or scope_in(name) == scope:
                retained_until = self._retained_until(name)
                if retained_until <= wall_s and (scope != ANY or not self._leaves(key)):
                    found = key, name
                    break
                if retained_until > wall_s:
                    until = min(until, retained_until)
            if not self._rows_left:
                self.cut_short |= scope == ANY
                break
            self._rows_left -= 1
            floor = key + b"\0"
        if floor:
            self._floors.raise_to(slot_cls, scope, floor, until)
        return found

    def _leaves(self, key: bytes) -> bool:
        """Whether the block of a row leaves by itself: its slot would be nobody's."""
        if segment_in(key) in self._draining:
            return True
        slot_cls, _rank, segment, slot = order_parts(key)
        return self._cut is not None and not self._cut.holds(slot_cls, segment, slot)

    def victim_in_scope(self, scope: bytes, wall_s: Wall) -> tuple[bytes, bytes] | None:
        """The coldest such row of a scope among all classes."""
        found = [row for cls in self._classes(ORDER) if (row := self.victim(cls, wall_s, scope)) is not None]
        return min(found, key=lambda row: order_parts(row[0])[1], default=None)

    def _classes(self, table: bytes) -> Iterator[int]:
        """The classes that have rows in a table whose keys go on with the class."""
        start = table
        while self._cursor.set_range(start) and (key := self._cursor.key()).startswith(table):
            slot_cls = int.from_bytes(key[len(table) : len(table) + 4], "big")
            yield slot_cls
            start = table + (slot_cls + 1).to_bytes(4, "big")

    def has_other(self, slot_cls: int) -> bool:
        """Whether another class has segments: with blocks, free slots or never-used ones."""
        if self._only != slot_cls:
            tables = (ORDER, FREE, FILL, UNFILLED_KEY)
            alone = all(one == slot_cls for table in tables for one in self._classes(table))
            self._only = slot_cls if alone else None
        return self._only is None
