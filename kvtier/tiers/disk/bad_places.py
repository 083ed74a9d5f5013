"""Places of slab files that failed alone: recorded in the index, whatever segments are cut into, and kept out of use.

    meta key, after the "m"                         value
    "bad"                                           u64: units of all places
    "bad" ‖ segment u32 ‖ unit u32 (big-endian)     units u32, tries u32, since f64

A unit is SLOT_ALIGN bytes. A slot that overlaps a place is *set aside*: once it was handed out it is neither free nor
used. It comes back when a trial of the place succeeds: its bytes are written, synced and read back under a reservation,
which the place's other slots, other processes and a crash respect like any other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from kvtier.tiers.disk.extents import Extent
from kvtier.tiers.disk.records import META, SLOT_ALIGN, rows
from kvtier.times import Wall

BAD_KEY = META + b"bad"
TRIES_PER_DAY = 3
DAY_S = 86_400.0
BAD_SHARE = 0.01
"""Of the capacity: beyond it the device is to blame, not its places."""

_UNITS = struct.Struct("<Q")
_PLACE = struct.Struct(f">{len(BAD_KEY)}sII")
_TRIES = struct.Struct("<IId")


class BadPlace(NamedTuple):
    """Units `first` … of a segment. It was tried `tries` times in the day that began at `since`."""

    segment: int
    first: int
    units: int
    tries: int
    since: Wall

    @property
    def key(self) -> bytes:
        return _PLACE.pack(BAD_KEY, self.segment, self.first)

    @classmethod
    def decode(cls, key: bytes, raw: bytes) -> BadPlace:
        """The inverse of `key` and `encode`. Raises struct.error."""
        _prefix, segment, first = _PLACE.unpack(key)
        units, tries, since = _TRIES.unpack(raw)
        return cls(segment, first, units, tries, since)

    def encode(self) -> bytes:
        return _TRIES.pack(self.units, self.tries, self.since)

    def is_due(self, wall_s: Wall) -> bool:
        """Whether it may be tried again: tries are spread over the day. A clock set back begins a new one. Pure."""
        return not 0 <= wall_s - self.since < self.tries * DAY_S / TRIES_PER_DAY

    def after_tries(self, count: int, wall_s: Wall) -> BadPlace:
        """With so many more tries. Pure."""
        if 0 <= wall_s - self.since < DAY_S:
            return self._replace(tries=self.tries + count)
        return self._replace(tries=count, since=wall_s)

    @property
    def extent(self) -> Extent:
        return Extent(self.first, self.units)


def bad_places(txn: Any, segment: int | None = None) -> list[BadPlace]:
    """The recorded places, of one segment or of all."""
    prefix = BAD_KEY if segment is None else _PLACE.pack(BAD_KEY, segment, 0)[:-4]
    return [BadPlace.decode(key, raw) for key, raw in rows(txn, prefix) if len(key) == _PLACE.size]


class BadPlaces:
    """The bad places of a store in one write transaction; every change is written at once."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn
        raw = txn.get(BAD_KEY)
        self.units: int = 0 if raw is None else _UNITS.unpack(raw)[0]
        self._places: dict[int, list[BadPlace]] = {}  # by segment, as far as they were looked at

    def of(self, segment: int) -> list[BadPlace]:
        """Those of a segment."""
        if not self.units:
            return []
        if segment not in self._places:
            self._places[segment] = bad_places(self._txn, segment)
        return self._places[segment]

    def all(self) -> list[BadPlace]:
        """Those of all segments."""
        return bad_places(self._txn) if self.units else []

    def beyond(self, size_of: Callable[[int], int], first: int, most: int) -> list[BadPlace]:
        """Up to `most` that lie wholly behind the `size_of` their segment, of the segments from `first` on."""
        found = rows(self._txn, BAD_KEY, _PLACE.pack(BAD_KEY, first, 0)) if self.units else iter(())
        places = (BadPlace.decode(*row) for row in found)
        return list(islice((one for one in places if one.first * SLOT_ALIGN >= size_of(one.segment)), most))

    def spoil(self, segment: int, slot_cls: int, slot: int) -> bool:
        """Whether a slot overlaps one of them."""
        return any(slot in place.extent.slots(slot_cls) for place in self.of(segment))

    def add(self, segment: int, slot_cls: int, slot: int, tries: int, wall_s: Wall) -> BadPlace:
        """Record a slot, or that it failed again."""
        first = slot * slot_cls
        known = next((one for one in self.of(segment) if one.first == first and one.units == slot_cls), None)
        if known is not None:
            return self.put(known.after_tries(tries, wall_s))
        place = BadPlace(segment, first, slot_cls, tries, wall_s)
        self._count(slot_cls)
        return self.put(place)

    def put(self, place: BadPlace) -> BadPlace:
        """Write a place's record."""
        self._txn.put(place.key, place.encode())
        self._places.pop(place.segment, None)
        return place

    def remove(self, place: BadPlace) -> None:
        """The place can be used again. Does nothing if it is not recorded."""
        if self._txn.delete(place.key):
            self._count(-place.units)
            self._places.pop(place.segment, None)

    def _count(self, units: int) -> None:
        self.units += units
        if self.units:
            self._txn.put(BAD_KEY, _UNITS.pack(self.units))
        else:
            self._txn.delete(BAD_KEY)

    def may_add(self, slot_cls: int, slots: int, capacity: int) -> bool:
        """Whether the share of bad places stays small enough, with more slots of a class, for them to be the places'
        own fault. One slot always is."""
        return (self.units + slots * slot_cls) * SLOT_ALIGN <= max(slot_cls * SLOT_ALIGN, capacity * BAD_SHARE)
