"""Blocks and writes that had to stay in a segment when it went to another class, by place.

    meta key, after the "m"                            value
    "guest"                                            u64: how many there are
    "guest" ‖ segment (u32 be)                         u32: those of the segment
    "guest" ‖ segment (u32 be) ‖ unit (u32 be)         u32: its units

A unit is SLOT_ALIGN bytes. A slot that overlaps a guest is set aside, and comes back when the guest leaves. No slot
becomes a guest's again: the block that follows it is of the segment's class.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import islice
from typing import Any

from kvtier.tiers.disk.extents import Extent
from kvtier.tiers.disk.records import META, Entry, FreeSlot, SlotReservation, rows

GUEST_KEY = META + b"guest"

_ALL = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_SEGMENT = struct.Struct(f">{len(GUEST_KEY)}sI")
_PLACE = struct.Struct(f">{len(GUEST_KEY)}sII")

Held = FreeSlot | Entry | SlotReservation


def extent_of(held: Held) -> Extent:
    """Where the slot of these lies."""
    return Extent(held.slot * held.slot_class, held.slot_class)


def guests_in(txn: Any, segment: int | None = None) -> list[tuple[int, Extent]]:
    """(segment, place) of each guest, of one segment or of all."""
    return _places(rows(txn, GUEST_KEY if segment is None else _SEGMENT.pack(GUEST_KEY, segment)))


def guests_from(txn: Any, start: bytes, most: int) -> tuple[list[tuple[int, Extent]], bytes | None]:
    """The guests of all segments in the first `most` rows from the key `start` on, empty at first, and the key to go on
    from; None at the end."""
    found = list(islice(rows(txn, GUEST_KEY, start), most))
    return _places(found), found[-1][0] + b"\0" if len(found) == most else None


def _places(found: Iterable[tuple[bytes, bytes]]) -> list[tuple[int, Extent]]:
    places = ((_PLACE.unpack(key), raw) for key, raw in found if len(key) == _PLACE.size)
    return [(number, Extent(first, _U32.unpack(raw)[0])) for (_, number, first), raw in places]


def is_guest(txn: Any, held: Held) -> bool:
    """Whether what holds the slot is one."""
    return bool(txn.get(_key(held)) == _U32.pack(held.slot_class))


class Guests:
    """The guests of a store in one write transaction; every change is written at once."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn
        raw = txn.get(GUEST_KEY)
        self.count: int = 0 if raw is None else _ALL.unpack(raw)[0]

    def of(self, segment: int) -> int:
        """How many the segment has."""
        raw = self._txn.get(_SEGMENT.pack(GUEST_KEY, segment)) if self.count else None
        return 0 if raw is None else int(_U32.unpack(raw)[0])

    def has(self, held: Held) -> bool:
        """Whether it is one."""
        return self.count > 0 and is_guest(self._txn, held)

    def add(self, held: Held) -> None:
        """Its slot's segment goes to another class, and it stays."""
        if self._txn.put(_key(held), _U32.pack(held.slot_class), overwrite=False):
            self._change(held.segment, 1)

    def remove(self, held: Held) -> None:
        """It leaves. Does nothing if it is none."""
        if self.has(held):
            self._txn.delete(_key(held))
            self._change(held.segment, -1)

    def first_on(self, segment: int, place: Extent) -> Extent | None:
        """The first of the segment's guests that lies on the place."""
        if not self.of(segment):
            return None
        cursor, prefix = self._txn.cursor(), _SEGMENT.pack(GUEST_KEY, segment)
        ahead = cursor.set_range(_PLACE.pack(GUEST_KEY, segment, place.first + 1))
        there = cursor.prev() if ahead else cursor.last()  # the last one that begins before or with the place
        while there and (key := cursor.key()) <= _PLACE.pack(GUEST_KEY, segment, place.first + place.units - 1):
            if len(key) == _PLACE.size and key.startswith(prefix):
                guest = Extent(_PLACE.unpack(key)[2], _U32.unpack(cursor.value())[0])
                if guest.first + guest.units > place.first:
                    return guest
            there = cursor.next()
        return None

    def _change(self, segment: int, by: int) -> None:
        for key, code, count in (
            (GUEST_KEY, _ALL, self.count + by),
            (_SEGMENT.pack(GUEST_KEY, segment), _U32, self.of(segment) + by),
        ):
            if count:
                self._txn.put(key, code.pack(count))
            else:
                self._txn.delete(key)
        self.count += by


def _key(held: Held) -> bytes:
    return _PLACE.pack(GUEST_KEY, held.segment, extent_of(held).first)
