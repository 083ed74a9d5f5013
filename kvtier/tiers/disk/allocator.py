"""Allocates segments and slots in LMDB write transactions.

A segment is cut into slots of one class when a class first needs it, hands out its never-used slots in order, and goes
back to all classes once none of its slots is used. Classes take free slots before never-used ones. A *draining* segment
hands out no slot; once only guests (`kvtier.tiers.disk.guests`) use it, it goes to the class that it was promised to.

While a store shrinks (`kvtier.tiers.disk.shrink`), no slot beyond its capacity is handed out.

    meta key, after the "m"                        value
    "unfilled" ‖ class (u32 be) ‖ segment (u32 be) empty: has never-used slots, and is not the one that the class fills
    "draining" ‖ segment (u32 be)                  Promise
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

from kvtier.tiers.disk.bad_places import BadPlace, BadPlaces
from kvtier.tiers.disk.demand import Demand
from kvtier.tiers.disk.extents import common, extent_of_slots
from kvtier.tiers.disk.geometry import Geometry
from kvtier.tiers.disk.guests import Guests, Held, extent_of
from kvtier.tiers.disk.records import (
    FILL,
    FREE,
    META,
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
    reserved_in,
    reserved_key,
    rows,
)

UNFILLED_KEY, DRAINING_KEY = META + b"unfilled", META + b"draining"
FREE_ROWS_PER_TXN = 256
"""Rows of emptied segments' free slots, and slots beyond the capacity, that one transaction deletes."""
LOOK_SLOTS, LOOKS_PER_TXN = 64, 32
"""Never-used slots that are looked at together where guests and bad places lie on them, and how often in one
transaction."""

_PROMISE = struct.Struct("<IB")
_U32 = struct.Struct(">I")


class Promise(NamedTuple):
    """Of a draining segment: the class that gets it, and the highest priority of blocks that leave for that."""

    slot_class: int
    priority: int


def _unfilled_prefix(slot_cls: int) -> bytes:
    return UNFILLED_KEY + _U32.pack(slot_cls)


def unfilled_in(key: bytes) -> tuple[int, int]:
    """(class, segment) of an "unfilled" key."""
    return _U32.unpack(key[-8:-4])[0], _U32.unpack(key[-4:])[0]


def promises_in(txn: Any) -> dict[int, Promise]:
    """The draining segments of a store."""
    return {
        _U32.unpack(key[len(DRAINING_KEY) :])[0]: Promise(*_PROMISE.unpack(raw)) for key, raw in rows(txn, DRAINING_KEY)
    }


class Segments:
    """The segments of a store, `count` of them in use so far. `save` must be called before the commit."""

    def __init__(
        self, txn: Any, geometry: Geometry, count: int, demand: Demand, *, may_grow: Callable[[int], bool]
    ) -> None:
        """`may_grow`: whether a part, by its index, may get segments that no class uses: its volume is not full."""
        self.count = count
        self.next: int | None = None  # the segment that will be the next to be used, if that is not far
        self._txn = txn
        self._geometry = geometry
        self._demand = demand
        self._may_grow = may_grow
        self.bad, self.guests = BadPlaces(txn), Guests(txn)
        self._known: dict[int, Segment] = {}
        self._changed: set[int] = set()
        self.draining = promises_in(txn)
        self.short: set[int] = set()  # classes that will soon need a segment, where none is left
        # Cached for this transaction: every call of LMDB gives up the interpreter lock.
        self._without_free: set[int] = set()  # classes without a free slot
        self._without_fresh: set[int] = set()  # without a never-used one, nor a segment that could be theirs
        self._fill: dict[int, int | None] = {}  # the segment that a class takes never-used slots from
        self._exhausted = False  # no segment is left to be given to a class
        self._rows_left = FREE_ROWS_PER_TXN
        self._looks_left = LOOKS_PER_TXN
        self.trimmed = False
        """Whether `trim` has taken anything back."""
        self.cut_short = False
        """Whether a class may have a never-used slot that this transaction did not come to."""

    def save(self) -> None:
        """Write the changed segments; `count` is the caller's to write. Hands over drained ones, in slices."""
        for number, promise in list(self.draining.items()):
            record = self._record(number)
            fits = any(one and self._geometry.slots_of(number, one) for one in (promise.slot_class, record.slot_class))
            if record.used <= self.guests.of(number) and (fits or not record.used):  # else they leave first
                self._hand_over(number)
        for number in self._changed:
            self._txn.put(number_key(SEGMENTS, number), self._known[number].encode())

    def take(self, slot_cls: int, *, grows: bool = True) -> tuple[int, int] | None:
        """A slot of the class that is not in use, as (segment, slot); None if there is none. `grows`: it may be of a
        segment that no class has."""
        return self._take_free(slot_cls) or self._take_fresh(slot_cls, grows)

    def give(self, held: Held) -> None:
        """The slot of these is free again, or set aside; a segment without any use goes back to all classes."""
        self._demand.retry()
        self.guests.remove(held)
        record = self._record(held.segment)
        self._set(held.segment, record._replace(used=record.used - 1))
        self._offer(held.segment, extent_of(held).slots(record.slot_class))
        if record.used == 1 and held.segment not in self.draining:
            self._retire(held.segment)

    def offer_number(self, ended: SlotReservation) -> None:
        """The slot of its segment that has the same number, where that is another one, can be reserved now."""
        if self.guests.has(ended):
            self._offer(ended.segment, range(ended.slot, ended.slot + 1))

    def _offer(self, segment: int, slots: range) -> None:
        """Slots that nobody holds are free, unless they were never used or are set aside."""
        record = self._record(segment)
        clear = self._usable(segment, range(slots.start, min(slots.stop, record.fresh)))
        if clear:
            self._txn.cursor().putmulti([(free_key(record.slot_class, segment, slot), b"") for slot in clear])
            self._without_free.discard(record.slot_class)

    def _usable(self, segment: int, slots: range) -> Sequence[int]:
        """Those of a segment's slots on which neither a bad place nor a guest lies. A guest's reservation takes the
        slot of its number, too: reservations are found by number."""
        bad, guests = self.bad.of(segment), self.guests.of(segment)
        if not slots or (not bad and not guests):
            return slots
        slot_cls = self._record(segment).slot_class
        aside = {slot for place in bad for slot in common(place.extent.slots(slot_cls), slots)}
        if guests:
            left = slots
            while left and (guest := self.guests.first_on(segment, extent_of_slots(left, slot_cls))) is not None:
                on = common(guest.slots(slot_cls), left)
                aside.update(on)
                left = range(on.stop, left.stop)  # over all other guests on those slots
            aside.update(reserved_in(self._txn, segment, slots))
        return [slot for slot in slots if slot not in aside]

    def hold(self, place: BadPlace) -> list[FreeSlot]:
        """The slots on a bad place, in use from now on; none unless all of them are set aside and no guest lies on one,
        or while their segment is draining: it is cut anew soon."""
        record = self._record(place.segment) if place.segment < self.count else None
        if record is None or not record.slot_class or place.segment in self.draining:
            return []
        slots = place.extent.slots(record.slot_class)
        within = slots.stop <= min(record.fresh, self._room_in(place.segment))
        if not within or any(self._txn.get(reserved_key(place.segment, slot)) for slot in slots):
            return []
        if self.guests.first_on(place.segment, extent_of_slots(slots, record.slot_class)) is not None:
            return []
        self._set(place.segment, record._replace(used=record.used + len(slots)))
        return [FreeSlot(record.slot_class, place.segment, slot) for slot in slots]

    def drain(self, segment: int, slot_cls: int, promise: Promise) -> bool:
        """Hand out no more slots of a segment of `slot_cls`; once only guests use it, it is given as promised. False:
        it is another class's by now, or draining, or beyond the capacity."""
        if segment in self.draining or segment >= self.count or self._record(segment).slot_class != slot_cls:
            return False
        if not self._geometry.slots_of(segment, promise.slot_class):
            return False
        self.draining[segment] = promise
        self._txn.put(DRAINING_KEY + _U32.pack(segment), _PROMISE.pack(*promise))
        self._forget_fresh(slot_cls, segment)
        return True

    def lodge(self, write: SlotReservation) -> None:
        """A write in a draining segment becomes a guest, unless it has ended."""
        raw = self._txn.get(write.key) if write.segment in self.draining else None
        if raw is not None and SlotReservation.serial_of(raw) == write.serial:
            self.guests.add(write)

    def take_from(self, victim: Entry | FreeSlot, *, grows: bool = True) -> tuple[int, int] | None:
        """As `take`, where nothing was free, once a block of the class is evicted: its slot, unless it was a guest.

        No guest's is used again at once, even where its class has the segment again: a write of another class may have
        a reservation with the slot's number.
        """
        within = self._geometry.holds(victim.slot_class, victim.segment, victim.slot)
        own = self._record(victim.segment).slot_class == victim.slot_class
        if within and own and not self.guests.has(victim):
            return victim.segment, victim.slot
        self.give(victim)
        return self.take(victim.slot_class, grows=grows)

    def resize(self, geometry: Geometry) -> None:
        """Hand out slots within another capacity. What lies beyond a smaller one is left to `trim`."""
        first = min(self._geometry.capacity, geometry.capacity) // geometry.segment_bytes
        self._geometry = geometry
        for number in range(first, self.count):
            record = self._record(number)
            if record.slot_class:
                slots = max(record.slots, geometry.slots_of(number, record.slot_class))
                if slots != record.slots:
                    self._set(number, record._replace(slots=slots))
                self._remember_fresh(number)
        self._exhausted = False
        self._without_free.clear()
        self._without_fresh.clear()
        self._demand.retry()

    def trim(self) -> bool:
        """Take back slots beyond the capacity that nothing holds, from the last on, as many as one transaction should:
        they are never-used again, and a segment of such slots is none. Whether nothing lies beyond the capacity now."""
        first, before = self._geometry.capacity // self._geometry.segment_bytes, self._rows_left
        clear = all(self._rows_left > 0 and self._trim(number) for number in reversed(range(first, self.count)))
        gone = self.bad.beyond(self._geometry.size_of, first, self._rows_left + 1) if clear else []
        for place in gone[: self._rows_left]:
            self.bad.remove(place)
        self.trimmed = self._rows_left < before or bool(gone)
        return clear and len(gone) <= self._rows_left

    def _trim(self, number: int) -> bool:
        """`trim` of the last segment, or of one that only part of is within the capacity."""
        record, room = self._record(number), self._room_in(number)
        if number in self.draining and record.used <= self.guests.of(number):
            return False  # `save` hands it over, and deletes its free slots for that
        while record.fresh > room and self._rows_left > 0 and self._take_back(number, record.fresh - 1):
            record = record._replace(fresh=record.fresh - 1)
            self._rows_left -= 1
        self._set(number, record._replace(slots=max(record.fresh, room)))
        units = self._geometry.segment_bytes // SLOT_ALIGN
        behind = extent_of_slots(range(self._geometry.size_of(number) // SLOT_ALIGN, units), 1)
        if record.fresh > room or self.guests.first_on(number, behind) is not None:
            return False
        if record.slot_class and not room and not record.used:
            self._forget_fresh(record.slot_class, number)
            self._clear(number)
        if number >= self._geometry.segments:
            self._changed.discard(number)
            self._txn.delete(number_key(SEGMENTS, number))
            self._txn.delete(number_key(SPARE, number))
            self._rows_left -= 1
            self.count = number
        return True

    def _take_back(self, segment: int, slot: int) -> bool:
        """Whether nothing but a bad place or a guest lies on a slot that was used; then it is not free any more. A
        guest within the capacity stays; `_trim` looks for one behind it."""
        slot_cls = self._record(segment).slot_class
        if self._txn.delete(free_key(slot_cls, segment, slot)):
            return True
        if self.guests.first_on(segment, extent_of_slots(range(slot, slot + 1), slot_cls)) is not None:
            return True
        return self.bad.spoil(segment, slot_cls, slot) and self._txn.get(reserved_key(segment, slot)) is None

    def _room_in(self, number: int) -> int:
        """How many slots of the segment may be handed out."""
        record = self._record(number)
        return min(record.slots, self._geometry.slots_of(number, record.slot_class)) if record.slot_class else 0

    def _record(self, number: int) -> Segment:
        if number not in self._known:
            self._known[number] = Segment.decode(self._txn.get(number_key(SEGMENTS, number)))
        return self._known[number]

    def _set(self, number: int, record: Segment) -> None:
        self._known[number] = record
        self._changed.add(number)

    def _clear(self, number: int) -> None:
        """No class has the segment any more."""
        self._set(number, Segment(number % self._geometry.parts, 0, 0, 0, 0))
        self._txn.put(number_key(SPARE, number), b"")
        self._without_fresh.clear()

    def _retire(self, segment: int) -> None:
        """Give an unused segment back to all classes; its own class keeps one with more free slots than one transaction
        should delete, until another class wants it."""
        if self._delete_free(segment):
            self._forget_fresh(self._record(segment).slot_class, segment)
            self._clear(segment)
            self._exhausted = False

    def _hand_over(self, segment: int) -> None:
        """Give a drained segment to the class that it was promised to, once its free slots are deleted."""
        if not self._delete_free(segment, whole=False):
            return
        promise = self.draining.pop(segment)
        self._txn.delete(DRAINING_KEY + _U32.pack(segment))
        own, used = self._record(segment).slot_class, self._record(segment).used
        if self._assign(segment, promise.slot_class, used) or (used and self._assign(segment, own, used)):
            self._remember_fresh(segment)
            self._demand.answered(promise.slot_class)
        else:
            self._clear(segment)

    def _delete_free(self, segment: int, *, whole: bool = True) -> bool:
        """Delete the rows of a segment's free slots: all or, where they are too many, none if `whole`, else some.
        Whether none is left."""
        found, most = rows(self._txn, free_prefix(self._record(segment).slot_class, segment)), self._rows_left
        keys = [key for key, _ in islice(found, most + 1)]
        if whole and len(keys) > most:
            return False
        for key in keys[:most]:
            self._txn.delete(key)
        self._rows_left -= len(keys[:most])
        return len(keys) <= most

    def _forget_fresh(self, slot_cls: int, segment: int) -> None:
        """The class takes no never-used slot from the segment any more."""
        self._txn.delete(_unfilled_prefix(slot_cls) + _U32.pack(segment))
        if self._filling(slot_cls) == segment:
            self._txn.delete(number_key(FILL, slot_cls))
            self._fill[slot_cls] = None

    def _remember_fresh(self, segment: int) -> None:
        """The segment's never-used slots are its class's to take."""
        record = self._record(segment)
        waits = segment not in self.draining and self._filling(record.slot_class) != segment
        self._without_fresh.discard(record.slot_class)
        if self._has_fresh(segment) and waits:
            self._txn.put(_unfilled_prefix(record.slot_class) + _U32.pack(segment), b"")

    def _take_free(self, slot_cls: int) -> tuple[int, int] | None:
        if slot_cls in self._without_free:
            return None
        key = next((key for key, _ in rows(self._txn, number_key(FREE, slot_cls))), None)
        while key is not None and (segment := free_slot(key).segment) in self.draining:
            behind = free_prefix(slot_cls, segment + 1)
            key = next((key for key, _ in rows(self._txn, number_key(FREE, slot_cls), behind)), None)
        if key is None or not self._geometry.holds(*free_slot(key)):  # in the order of places: nor does one behind it
            self._without_free.add(slot_cls)
            return None
        self._txn.delete(key)
        free = free_slot(key)
        record = self._record(free.segment)
        self._set(free.segment, record._replace(used=record.used + 1))
        return free.segment, free.slot

    def _take_fresh(self, slot_cls: int, grows: bool) -> tuple[int, int] | None:
        if slot_cls in self._without_fresh:
            return None
        width = 1
        while True:
            number = self._filling(slot_cls)
            if number is None or not self._has_fresh(number):
                number = self._unfilled(slot_cls)
                if number is None and grows:
                    number = self._grow(slot_cls)
                    self._without_fresh |= {slot_cls} if number is None else set()
                if number is None:
                    return None
                self._txn.put(number_key(FILL, slot_cls), number_key(SEGMENTS, number))
                self._fill[slot_cls] = number
            record, room = self._record(number), self._room_in(number)
            ahead = range(record.fresh, min(room, record.fresh + width))
            if clear := self._usable(number, ahead):
                break
            self._set(number, record._replace(fresh=ahead.stop))  # from now on they are set aside
            self._looks_left -= width == LOOK_SLOTS
            if self._looks_left < 0:
                self.cut_short = True
                return None
            width = LOOK_SLOTS
        record = record._replace(fresh=clear[0])
        self._set(number, record._replace(fresh=record.fresh + 1, used=record.used + 1))
        if 2 * record.fresh >= room:
            if self.count < self._geometry.segments:
                self.next = self.count
            elif not any(True for table in (SPARE, _unfilled_prefix(slot_cls)) for _ in rows(self._txn, table)):
                self.short.add(slot_cls)
        return number, record.fresh

    def _filling(self, slot_cls: int) -> int | None:
        """The segment whose never-used slots the class takes next."""
        if slot_cls not in self._fill:
            raw = self._txn.get(number_key(FILL, slot_cls))
            self._fill[slot_cls] = None if raw is None else number_of(raw)
        return self._fill[slot_cls]

    def _unfilled(self, slot_cls: int) -> int | None:
        """Another segment of the class with never-used slots, which it fills now."""
        prefix = _unfilled_prefix(slot_cls)
        while (key := next((key for key, _ in rows(self._txn, prefix)), None)) is not None:
            self._txn.delete(key)
            number: int = _U32.unpack(key[len(prefix) :])[0]
            if self._has_fresh(number):  # else it was cut since; growing, it is remembered again
                return number
        return None

    def _has_fresh(self, number: int) -> bool:
        return self._record(number).fresh < self._room_in(number)

    def _grow(self, slot_cls: int) -> int | None:
        """Give the class a segment that none uses."""
        if self._exhausted:
            return None
        parts = self._geometry.parts
        for one in self._spare():
            if self._may_grow(one % parts) and self._assign(one, slot_cls):
                self._txn.delete(number_key(SPARE, one))
                return one
        following = range(self.count, min(self.count + parts, self._geometry.segments))
        number = next((one for one in following if self._may_grow(one % parts)), None)
        if number is not None and self._assign(number, slot_cls):
            for skipped in range(self.count, number):
                self._clear(skipped)
            self.count = number + 1
            return number
        self._exhausted = next(self._spare(), None) is None and not following
        return None

    def _spare(self) -> Iterator[int]:
        """Segments within the capacity that no class has."""
        numbers = (number_of(key) for key, _ in rows(self._txn, SPARE))
        return takewhile(lambda number: number < self._geometry.segments, numbers)

    def _assign(self, number: int, slot_cls: int, used: int = 0) -> bool:
        slots = self._geometry.slots_of(number, slot_cls)
        if slots:
            self._set(number, Segment(number % self._geometry.parts, slot_cls, slots, 0, used))
        return slots > 0
