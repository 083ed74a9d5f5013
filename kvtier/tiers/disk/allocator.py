"""Allocates segments and slots in LMDB write transactions, and holds those that this process reserved for later writes.

A segment is cut into slots of one class when a class first needs it, hands out its never-used slots in order, and goes
back to all classes once none of its slots is used. Classes take free slots before never-used ones.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvtier.tiers.disk.bad_places import BadPlace, BadPlaces
from kvtier.tiers.disk.records import (
    FILL,
    FREE,
    SEGMENTS,
    SLOT_ALIGN,
    SPARE,
    Entry,
    FreeSlot,
    Segment,
    SlotReservation,
    free_key,
    free_prefix,
    free_slot,
    number_key,
    number_of,
    reserved_key,
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
        """How many slots of a class the segment has space for. Pure."""
        return self.size_of(segment) // (slot_cls * SLOT_ALIGN)

    def encode(self) -> bytes:
        return _GEOMETRY.pack(self.capacity, self.segment_bytes, self.parts)

    @classmethod
    def decode(cls, raw: bytes) -> Geometry:
        """The inverse of `encode`. Raises struct.error."""
        return cls(*_GEOMETRY.unpack(raw))


class Segments:
    """The segments of a store, `count` of them in use so far. `save` must be called before the commit."""

    def __init__(self, txn: Any, geometry: Geometry, count: int, *, may_grow: Callable[[int], bool]) -> None:
        """`may_grow`: whether a part, by its index, may get segments that no class uses: its volume is not full."""
        self.count = count
        self.next: int | None = None  # the segment that will be the next to be used, if that is not far
        self._txn = txn
        self._geometry = geometry
        self._may_grow = may_grow
        self.bad = BadPlaces(txn)
        self._changed: dict[int, Segment] = {}
        # Cached for this transaction: every call of LMDB gives up the interpreter lock.
        self._without_free: set[int] = set()  # classes without a free slot
        self._fill: dict[int, int | None] = {}  # the segment that a class takes never-used slots from
        self._exhausted = False  # no segment is left to be given to a class

    def save(self) -> None:
        """Write the changed segments; `count` is the caller's to write."""
        for number, segment in self._changed.items():
            self._txn.put(number_key(SEGMENTS, number), segment.encode())

    def take(self, slot_cls: int) -> tuple[int, int] | None:
        """A slot of the class that is not in use, as (segment, slot); None if there is none."""
        return self._take_free(slot_cls) or self._take_fresh(slot_cls)

    def give(self, held: FreeSlot | Entry | SlotReservation) -> None:
        """The slot of these is free again, or set aside; a segment without any use goes back to all classes."""
        record = self._record(held.segment)
        self._changed[held.segment] = replace(record, used=record.used - 1)
        if not self.bad.spoil(held.segment, held.slot_class, held.slot):
            self._txn.put(free_key(held.slot_class, held.segment, held.slot), b"")
            self._without_free.discard(held.slot_class)
        if record.used == 1:
            self._retire(held.segment)

    def hold(self, place: BadPlace) -> list[FreeSlot]:
        """The slots on a bad place, in use from now on; none unless all of them are set aside."""
        record = self._record(place.segment) if place.segment < self.count else None
        if record is None or not record.slot_class:
            return []
        slots = place.slots(record.slot_class)
        if slots.stop > record.fresh or any(self._txn.get(reserved_key(place.segment, slot)) for slot in slots):
            return []
        self._changed[place.segment] = replace(record, used=record.used + len(slots))
        return [FreeSlot(record.slot_class, place.segment, slot) for slot in slots]

    def is_spare(self, segment: int) -> bool:
        """Whether no class uses the segment."""
        return self._record(segment).slot_class == 0

    def resize(self, geometry: Geometry) -> None:
        """Cut the segments to another capacity. No slot beyond it may be held."""
        for key, _ in list(rows(self._txn, FREE)):
            free = free_slot(key)
            if free.slot >= geometry.slots_of(free.segment, free.slot_class):
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
        for place in self.bad.all():
            if place.first * SLOT_ALIGN >= geometry.size_of(place.segment):
                self.bad.remove(place)
        self.count = min(self.count, geometry.segments)
        self._geometry = geometry

    def _record(self, number: int) -> Segment:
        if number not in self._changed:
            self._changed[number] = Segment.decode(self._txn.get(number_key(SEGMENTS, number)))
        return self._changed[number]

    def _retire(self, segment: int) -> None:
        slot_cls = self._changed[segment].slot_class
        for key, _ in list(rows(self._txn, free_prefix(slot_cls, segment))):
            self._txn.delete(key)
        if self._filling(slot_cls) == segment:
            self._txn.delete(number_key(FILL, slot_cls))
            self._fill[slot_cls] = None
        self._changed[segment] = Segment(segment % self._geometry.parts, 0, 0, 0, 0)
        self._txn.put(number_key(SPARE, segment), b"")
        self._exhausted = False

    def _take_free(self, slot_cls: int) -> tuple[int, int] | None:
        if slot_cls in self._without_free:
            return None
        key = next((key for key, _ in rows(self._txn, number_key(FREE, slot_cls))), None)
        if key is None:
            self._without_free.add(slot_cls)
            return None
        self._txn.delete(key)
        free = free_slot(key)
        record = self._record(free.segment)
        self._changed[free.segment] = replace(record, used=record.used + 1)
        return free.segment, free.slot

    def _take_fresh(self, slot_cls: int) -> tuple[int, int] | None:
        while True:
            number = self._filling(slot_cls)
            if number is None or self._record(number).fresh == self._record(number).slots:
                number = self._grow(slot_cls)
                if number is None:
                    return None
                self._txn.put(number_key(FILL, slot_cls), number_key(SEGMENTS, number))
                self._fill[slot_cls] = number
            record = self._record(number)
            self._changed[number] = replace(record, fresh=record.fresh + 1)  # from now on a bad one is set aside
            if not self.bad.spoil(number, slot_cls, record.fresh):
                break
        self._changed[number] = replace(self._changed[number], used=record.used + 1)
        if 2 * record.fresh >= record.slots and self.count < self._geometry.segments:
            self.next = self.count
        return number, record.fresh

    def _filling(self, slot_cls: int) -> int | None:
        """The segment whose never-used slots the class takes next."""
        if slot_cls not in self._fill:
            raw = self._txn.get(number_key(FILL, slot_cls))
            self._fill[slot_cls] = None if raw is None else number_of(raw)
        return self._fill[slot_cls]

    def _grow(self, slot_cls: int) -> int | None:
        """Give the class a segment that none uses."""
        if self._exhausted:
            return None
        parts = self._geometry.parts
        for key, _ in rows(self._txn, SPARE):
            if self._may_grow(number_of(key) % parts) and self._assign(number_of(key), slot_cls):
                self._txn.delete(key)
                return number_of(key)
        following = range(self.count, min(self.count + parts, self._geometry.segments))
        number = next((one for one in following if self._may_grow(one % parts)), None)
        if number is not None and self._assign(number, slot_cls):
            for skipped in range(self.count, number):
                self._changed[skipped] = Segment(skipped % parts, 0, 0, 0, 0)
                self._txn.put(number_key(SPARE, skipped), b"")
            self.count = number + 1
            return number
        self._exhausted = next(rows(self._txn, SPARE), None) is None and not following
        return None

    def _assign(self, number: int, slot_cls: int) -> bool:
        slots = self._geometry.slots_of(number, slot_cls)
        if slots:
            self._changed[number] = Segment(number % self._geometry.parts, slot_cls, slots, 0, 0)
        return slots > 0


class ReservedSlots:
    """This process's reservations that no write uses: for the next write, or to be freed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.writes = 0  # under way now,
        self._moving = 0  # blocks on their way in them,
        self._peak = 0  # and the most of late
        self._held: list[SlotReservation] = []
        self._returned: list[SlotReservation] = []
        self._unused: list[SlotReservation] = []  # returned ones that nothing was written to

    @contextmanager
    def writing(self, count: int) -> Iterator[None]:
        """While inside, so many blocks are on their way to slots."""
        with self._lock:
            self.writes += 1
            self._moving += count
            self._peak = max(self._peak, self._moving)
        try:
            yield
        finally:
            with self._lock:
                self.writes -= 1
                self._moving -= count

    def wants(self, count: int) -> bool:
        """Whether so many more are few enough to reserve: as many are held as were on their way together."""
        return len(self._held) < max(2 * count if count > 1 else 1, self._peak)

    def add(self, reservations: Sequence[SlotReservation]) -> None:
        """Hold these for the next write."""
        with self._lock:
            self._held.extend(reservations)

    def take(self, slot_cls: int, count: int, tick: int) -> list[SlotReservation]:
        """`count` slots of the class, neighbours first; none if there are fewer.

        They get one tick, the current one: blocks in them are neither colder than what was stored since they were
        reserved, nor is a head colder than its tail.
        """
        with self._lock:
            fit = sorted((r for r in self._held if r.slot_class == slot_cls), key=lambda r: (r.segment, r.slot))
            taken = fit[:count] if len(fit) >= count else []
            serials = {one.serial for one in taken}
            self._held = [one for one in self._held if one.serial not in serials]
        return [replace(one, tick=tick) for one in taken]

    def give_back(self, reservations: Sequence[SlotReservation], *, unused: bool = False) -> None:
        """Have these freed by the next transaction. `unused`: nothing was written to them."""
        with self._lock:
            (self._unused if unused else self._returned).extend(reservations)

    def clear(self) -> list[SlotReservation]:
        """Hold none for the next write any more; returns those that were held."""
        with self._lock:
            held, self._held = self._held, []
            self._peak = self._moving
        return held

    def forget(self) -> None:
        """Hold none and free none: they are not this process's any more."""
        with self._lock:
            self._held, self._returned, self._unused = [], [], []
            self._peak = self._moving

    @property
    def has_returned(self) -> bool:
        """Whether some wait to be freed."""
        return bool(self._returned or self._unused)

    def take_returned(self) -> tuple[list[SlotReservation], list[SlotReservation]]:
        """Those to free now, and the unused ones among them apart; the caller gives them back if it fails."""
        with self._lock:
            returned, unused, self._returned, self._unused = self._returned, self._unused, [], []
        return returned, unused
