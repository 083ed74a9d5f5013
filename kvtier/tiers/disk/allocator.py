"""How a store's capacity is cut, and which slots nobody holds: inside one LMDB write transaction.

A segment is cut into slots of one class when a class first needs it, hands out its never-used slots in order, and goes
back to all classes once none of its slots is used. Classes take free slots before never-used ones.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvtier.tiers.disk.records import (
    FILL,
    FREE,
    SEGMENTS,
    SLOT_ALIGN,
    SPARE,
    Segment,
    free_key,
    free_parts,
    number_key,
    number_of,
    rows,
)

_GEOMETRY = struct.Struct("<QQI")


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a store's capacity is cut: segments of equal size, the last one shorter, dealt over the parts in turn."""

    capacity: int
    segment_bytes: int
    parts: int

    @property
    def segments(self) -> int:
        return -(-self.capacity // self.segment_bytes)

    def size_of(self, segment: int) -> int:
        """Length of the segment's file; the sizes of all segments add up to at most `capacity`. Pure."""
        size = min(self.segment_bytes, self.capacity - segment * self.segment_bytes)
        return max(0, size) // SLOT_ALIGN * SLOT_ALIGN

    def slots_of(self, segment: int, slot_cls: int) -> int:
        """How many slots of a class the segment has room for. Pure."""
        return self.size_of(segment) // (slot_cls * SLOT_ALIGN)

    def encode(self) -> bytes:
        return _GEOMETRY.pack(self.capacity, self.segment_bytes, self.parts)

    @classmethod
    def decode(cls, raw: bytes) -> Geometry:
        """The inverse of `encode`. Raises struct.error."""
        return cls(*_GEOMETRY.unpack(raw))


class Segments:
    """The segments of a store, `count` of them in use so far. `save` must be called before the commit."""

    def __init__(self, txn: Any, geometry: Geometry, count: int, *, may_grow: bool) -> None:
        self.count = count
        self.soon: int | None = None  # the segment that will be the next to be used, if that is not far
        self._txn = txn
        self._geometry = geometry
        self._may_grow = may_grow
        self._changed: dict[int, Segment] = {}
        # What was found out once in this transaction: every question to LMDB gives up the interpreter lock.
        self._without_free: set[int] = set()  # classes without a free slot
        self._fill: dict[int, int | None] = {}  # the segment that a class takes never-used slots from
        self._grown_out = False  # no segment is left to be given to a class

    def save(self) -> None:
        """Write what was kept in memory, all but `count`, which is the caller's to keep."""
        for number, segment in self._changed.items():
            self._txn.put(number_key(SEGMENTS, number), segment.encode())

    def take(self, slot_cls: int) -> tuple[int, int] | None:
        """A slot of the class that nobody holds, as (segment, slot)."""
        return self._take_free(slot_cls) or self._take_fresh(slot_cls)

    def give(self, slot_cls: int, segment: int, slot: int) -> None:
        """A slot is free again; a segment without any use goes back to all classes."""
        record = self._record(segment)
        self._changed[segment] = replace(record, used=record.used - 1)
        self._txn.put(free_key(slot_cls, segment, slot), b"")
        self._without_free.discard(slot_cls)
        if record.used == 1:
            self._retire(segment)

    def is_spare(self, segment: int) -> bool:
        """Whether no class uses the segment."""
        return self._record(segment).slot_class == 0

    def resize(self, geometry: Geometry) -> None:
        """Cut the segments to another capacity. No slot beyond it may be held."""
        for key in list(self._beyond(geometry)):
            self._txn.delete(key)
        for number in range(self.count):
            record = self._record(number)
            if record.slot_class:
                slots = geometry.slots_of(number, record.slot_class)
                self._changed[number] = replace(record, slots=slots, fresh=min(record.fresh, slots))
        for number in range(geometry.segments, self.count):
            del self._changed[number]
            self._txn.delete(number_key(SEGMENTS, number))
            self._txn.delete(number_key(SPARE, number))
        self.count = min(self.count, geometry.segments)
        self._geometry = geometry

    def _beyond(self, geometry: Geometry) -> Iterator[bytes]:
        """Keys of free slots that the geometry has no room for."""
        for key, _ in rows(self._txn, FREE):
            slot_cls, segment, slot = free_parts(key)
            if slot >= geometry.slots_of(segment, slot_cls):
                yield key

    def _record(self, number: int) -> Segment:
        if number not in self._changed:
            self._changed[number] = Segment.decode(self._txn.get(number_key(SEGMENTS, number)))
        return self._changed[number]

    def _retire(self, segment: int) -> None:
        slot_cls = self._changed[segment].slot_class
        for key in list(self._free_keys(slot_cls, segment)):
            self._txn.delete(key)
        if self._filling(slot_cls) == segment:
            self._txn.delete(number_key(FILL, slot_cls))
            self._fill[slot_cls] = None
        self._changed[segment] = Segment(segment % self._geometry.parts, 0, 0, 0, 0)
        self._txn.put(number_key(SPARE, segment), b"")
        self._grown_out = False

    def _free_keys(self, slot_cls: int, segment: int) -> Iterator[bytes]:
        for key, _ in rows(self._txn, FREE, free_key(slot_cls, segment, 0)):
            if free_parts(key)[:2] != (slot_cls, segment):
                return
            yield key

    def _take_free(self, slot_cls: int) -> tuple[int, int] | None:
        if slot_cls in self._without_free:
            return None
        key = next((key for key, _ in rows(self._txn, FREE, free_key(slot_cls, 0, 0))), None)
        if key is None or free_parts(key)[0] != slot_cls:
            self._without_free.add(slot_cls)
            return None
        self._txn.delete(key)
        _cls, segment, slot = free_parts(key)
        record = self._record(segment)
        self._changed[segment] = replace(record, used=record.used + 1)
        return segment, slot

    def _take_fresh(self, slot_cls: int) -> tuple[int, int] | None:
        number = self._filling(slot_cls)
        if number is None or self._record(number).fresh == self._record(number).slots:
            number = self._grow(slot_cls)
            if number is None:
                return None
            self._txn.put(number_key(FILL, slot_cls), number_key(SEGMENTS, number))
            self._fill[slot_cls] = number
        record = self._record(number)
        self._changed[number] = replace(record, fresh=record.fresh + 1, used=record.used + 1)
        if 2 * record.fresh >= record.slots and self.count < self._geometry.segments:
            self.soon = self.count
        return number, record.fresh

    def _filling(self, slot_cls: int) -> int | None:
        """The segment whose never-used slots the class takes next."""
        if slot_cls not in self._fill:
            raw = self._txn.get(number_key(FILL, slot_cls))
            self._fill[slot_cls] = None if raw is None else number_of(raw)
        return self._fill[slot_cls]

    def _grow(self, slot_cls: int) -> int | None:
        """Give the class a segment that nobody uses."""
        if not self._may_grow or self._grown_out:
            return None
        for key, _ in rows(self._txn, SPARE):
            if self._assign(number_of(key), slot_cls):
                self._txn.delete(key)
                return number_of(key)
        number: int = self.count
        if number < self._geometry.segments and self._assign(number, slot_cls):
            self.count += 1
            return number
        self._grown_out = next(rows(self._txn, SPARE), None) is None and number >= self._geometry.segments
        return None

    def _assign(self, number: int, slot_cls: int) -> bool:
        slots = self._geometry.slots_of(number, slot_cls)
        if slots:
            self._changed[number] = Segment(number % self._geometry.parts, slot_cls, slots, 0, 0)
        return slots > 0
