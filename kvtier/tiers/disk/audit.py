"""The invariants of a G3 index, checked over all its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvtier.errors import CorruptError
from kvtier.tiers.disk.allocator import UNFILLED_KEY, promises_in, unfilled_in
from kvtier.tiers.disk.bad_places import BadPlaces, bad_places
from kvtier.tiers.disk.extents import Extent
from kvtier.tiers.disk.geometry import Geometry, reach_in
from kvtier.tiers.disk.guests import Guests, extent_of, guests_in
from kvtier.tiers.disk.layout import Layout
from kvtier.tiers.disk.quota import scope_in, shares_of
from kvtier.tiers.disk.records import (
    BLOCKS,
    FREE,
    ORDER,
    PURGED_KEY,
    RESERVED,
    RETAINED_KEY,
    SEGMENTS,
    SLOT_ALIGN,
    SPARE,
    TIME,
    Counters,
    Entry,
    FreeSlot,
    Segment,
    SlotReservation,
    free_slot,
    number_of,
    order_parts,
    rows,
)

Rows = list[tuple[bytes, bytes]]
PASSES_MAX = 4


class Sliced(Protocol):
    """The part of `kvtier.tiers.disk.index.Index` that is used here."""

    def reading(self) -> AbstractContextManager[Any]: ...
    @property
    def layout(self) -> Layout: ...
    def slices(self, prefix: bytes, look: Callable[[Any, Rows], None]) -> set[int]: ...


def audit(index: Sliced) -> None:
    """Assert that every slot has exactly one use and that the counters count them.

    - an entry has one row in `order`, and a row in `order` one entry
    - no slot is held by two of: entries, reservations, the free list, the never-used rest of its segment
    - every slot handed out once is held by one of them or set aside for a bad place or a guest: none is lost, but free
      ones of a draining segment; a segment that is draining has a class
    - a guest is an entry or a reservation, and no other one overlaps it
    - segments fit the capacity, or the earlier one of a store that shrinks
    - blocks, bytes and uses are counted right, and scopes' bytes where they are counted

    Reads in slices, each a transaction of its own, so that it neither keeps pages from being used again nor readers
    waiting. A pass is exact if nothing was written meanwhile. Otherwise it compares tables of different times: then an
    error is what every one of PASSES_MAX passes finds.
    """
    wrong: set[str] | None = None
    for _ in range(PASSES_MAX):
        passed = _Pass(index)
        wrong = passed.wrong if passed.exact or wrong is None else wrong & passed.wrong
        if passed.exact or not wrong:
            break
    assert not wrong, "; ".join(sorted(wrong)[:10])


class _Pass:
    """One pass over all tables. `wrong`: what does not hold, `exact`: whether nothing was written meanwhile."""

    def __init__(self, index: Sliced) -> None:
        self.wrong: set[str] = set()
        self._layout = index.layout
        self._holders: dict[tuple[int, int], str] = {}  # of each slot of its segment's class, as (segment, slot)
        self._guests: dict[tuple[int, Extent], str] = {}  # by place, what holds it; "" until that is known
        self._segments: dict[int, Segment] = {}
        self._spare: set[int] = set()
        self._scopes = Counter[bytes]()
        self._blocks = self._ordered = 0
        tables = {SEGMENTS: self._see_segments, SPARE: self._see_spare, BLOCKS: self._see_entries}
        seen: set[int] = set()
        with index.reading() as txn:
            seen.add(txn.id())
            self._guests = dict.fromkeys(guests_in(txn), "")
            self._expect(Guests(txn).count == len(self._guests), "guests are counted wrong")
        for table, look in (tables | {ORDER: self._see_order, RESERVED: self._see_reserved}).items():
            seen |= index.slices(table, look)
        used = Counter(segment for segment, _place in (*self._holders, *self._guests))
        for table, look in {FREE: self._see_free, PURGED_KEY: self._see_times, RETAINED_KEY: self._see_times}.items():
            seen |= index.slices(table, look)
        with index.reading() as txn:
            seen.add(txn.id())
            self._see_guests()
            self._see_bad_places(txn)
            counters = Counters.decode(txn.get(self._layout.counters_key))
            reach = reach_in(txn)
            shares = shares_of(txn)
            draining = promises_in(txn).keys()
            self._unfilled = [unfilled_in(key) for key, _ in rows(txn, UNFILLED_KEY)]
        self.exact = len(seen) == 1
        if self.exact:
            self._compare_counts(counters, shares)
            self._compare_slots(draining)
        self._compare_segments(counters, reach, used)
        for number in draining:
            right = number in self._segments and self._segments[number].slot_class > 0
            self._expect(right, f"segment {number} is draining and has no class")

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.add(otherwise)

    def _see_segments(self, _txn: Any, some: Rows) -> None:
        self._segments |= {number_of(key): Segment.decode(raw) for key, raw in some}

    def _see_spare(self, _txn: Any, some: Rows) -> None:
        self._spare |= {number_of(key) for key, _ in some}

    def _see_entries(self, txn: Any, some: Rows) -> None:
        for key, raw in some:
            written = name = key[len(BLOCKS) :]
            try:
                name = self._layout.full(txn, written)
                entry = Entry.decode(name, raw)
            except CorruptError as error:
                self.wrong.add(f"{name.hex()}: {error}")
                continue
            self._hold(entry, "an entry")
            self._blocks += 1
            self._scopes[scope_in(name)] += entry.slot_bytes
            self._expect(txn.get(entry.order_key()) == written, f"an entry has no row in the order: {name.hex()}")

    def _see_order(self, txn: Any, some: Rows) -> None:
        for key, written in some:
            here = txn.get(BLOCKS + written) is not None
            self._expect(here, f"a row in the order without a block: {order_parts(key)}")
            self._ordered += 1

    def _see_reserved(self, _txn: Any, some: Rows) -> None:
        for key, raw in some:
            self._hold(SlotReservation.decode(key, raw), "a reservation")

    def _see_free(self, _txn: Any, some: Rows) -> None:
        for key, _ in some:
            self._hold(free_slot(key), "the free list")

    def _hold(self, held: FreeSlot | Entry | SlotReservation, holder: str) -> None:
        guest, place = (held.segment, extent_of(held)), (held.segment, held.slot)
        if guest in self._guests and holder != "the free list":
            self._expect(not self._guests[guest], f"guest {guest} is {self._guests[guest]} and {holder}")
            self._guests[guest] = holder
            return
        self._expect(place not in self._holders, f"slot {place} is held by {self._holders.get(place)} and {holder}")
        self._holders[place] = holder
        record = self._segments.get(held.segment)
        right = record is not None and record.slot_class == held.slot_class
        self._expect(right, f"slot {place} of {holder} has the wrong class")
        self._expect(record is None or held.slot < record.fresh, f"slot {place} of {holder} was never handed out")

    def _see_guests(self) -> None:
        """The slots that they overlap are set aside, and so are those of a reservation's number."""
        for (segment, place), holder in self._guests.items():
            self._expect(bool(holder), f"guest {place} of segment {segment} is no entry and no reservation")
            slot_cls, fresh = self._cut(segment)
            overlapped = place.slots(slot_cls) if slot_cls else ()
            for slot in overlapped:
                by = self._holders.get((segment, slot), "a guest")
                self._expect(by == "a guest", f"slot {(segment, slot)} of {by} overlaps a guest")
            number = [place.first // place.units] if holder == "a reservation" else []
            for slot in (*overlapped, *number):
                if slot < fresh:
                    self._holders.setdefault((segment, slot), "a guest")

    def _cut(self, segment: int) -> tuple[int, int]:
        """(class, fresh) of a segment."""
        record = self._segments.get(segment)
        return (0, 0) if record is None else (record.slot_class, record.fresh)

    def _see_bad_places(self, txn: Any) -> None:
        """The slots on them, as far as they were handed out and nothing holds them, are set aside."""
        places = bad_places(txn)
        counted = BadPlaces(txn).units
        self._expect(sum(place.units for place in places) == counted, "bad places are counted wrong")
        for place in places:
            slot_cls, fresh = self._cut(place.segment)
            for slot in place.extent.slots(slot_cls) if slot_cls else ():
                if slot < fresh:
                    self._holders.setdefault((place.segment, slot), "a bad place")

    def _see_times(self, _txn: Any, some: Rows) -> None:
        for key, raw in some:
            self._expect(len(raw) == TIME.size, f"a time of {len(raw)} bytes: {key!r}")

    def _compare_counts(self, counters: Counters, shares: dict[bytes, int] | None) -> None:
        blocks, size = self._blocks, self._scopes.total()
        self._expect(self._ordered == blocks, f"{self._ordered} rows in the order for {blocks} blocks")
        counted = (counters.blocks, counters.slot_bytes)
        self._expect((blocks, size) == counted, f"{blocks} blocks, {size} bytes, counted as {counted}")
        self._expect(shares is None or shares == self._scopes, "scopes hold other bytes than were counted")

    def _compare_slots(self, draining: Container[int]) -> None:
        handed_out = sum(record.fresh for number, record in self._segments.items() if number not in draining)
        held = sum(segment not in draining for segment, _slot in self._holders)
        self._expect(held == handed_out, f"{handed_out - held} slots are lost")

    def _compare_segments(self, counters: Counters, reach: Geometry, used: Counter[int]) -> None:
        whole = set(self._segments) == set(range(counters.segments))
        self._expect(whole, "segment records and their counter disagree")
        self._expect(counters.segments <= reach.segments, "more segments than the capacity has space for")
        for number, record in self._segments.items():
            uses = used[number]
            self._expect(not self.exact or record.used == uses, f"segment {number} counts {record.used} uses of {uses}")
            spare = number in self._spare
            self._expect((record.slot_class == 0) == spare, f"segment {number} is both spare and in use, or neither")
            size = record.slots * record.slot_class * SLOT_ALIGN
            self._expect(size <= reach.size_of(number), f"segment {number} is longer than its file")
            self._expect(record.fresh <= record.slots, f"segment {number} has handed out more slots than it has")
        for slot_cls, number in self._unfilled:
            right = number not in self._segments or self._segments[number].slot_class == slot_cls
            self._expect(right, f"segment {number} has never-used slots of another class")
