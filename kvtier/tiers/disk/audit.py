"""The invariants of a G3 index, checked over all its tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvtier.tiers.disk.allocator import Geometry
from kvtier.tiers.disk.bad_places import BadPlace, BadPlaces, bad_places
from kvtier.tiers.disk.quota import scope_in, shares_of
from kvtier.tiers.disk.records import (
    BLOCKS,
    COUNTERS_KEY,
    FREE,
    GEOMETRY_KEY,
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


def audit(txn: Any) -> None:
    """Assert, in a read transaction, that every slot has exactly one use and that the counters count them.

    - an entry has one row in `order`, and a row in `order` one entry
    - no slot is held by two of: entries, reservations, the free list, the never-used rest of its segment
    - every slot handed out once is held by one of them or set aside for a bad place: none is lost
    - segments fit the geometry; blocks, bytes and uses are counted right, and scopes' bytes where they are counted
    """
    counters = Counters.decode(txn.get(COUNTERS_KEY))
    holders = _Holders({number_of(key): Segment.decode(raw) for key, raw in rows(txn, SEGMENTS)})
    _check_entries(txn, holders, counters)
    for key, raw in rows(txn, RESERVED):
        holders.add(SlotReservation.decode(key, raw), "a reservation")
    used = Counter(segment for segment, _slot in holders.slots)
    for key, _ in rows(txn, FREE):
        holders.add(free_slot(key), "the free list")
    for prefix in (PURGED_KEY, RETAINED_KEY):
        for _, raw in rows(txn, prefix):
            TIME.unpack(raw)
    places = bad_places(txn)
    assert sum(place.units for place in places) == BadPlaces(txn).units, "bad places are counted wrong"
    for place in places:
        holders.add_set_aside(place)
    _check_segments(txn, holders, counters, used)


class _Holders:
    """The holder of each slot, as (segment, slot)."""

    def __init__(self, segments: dict[int, Segment]) -> None:
        self.segments = segments
        self.slots: dict[tuple[int, int], str] = {}

    def add(self, held: FreeSlot | Entry | SlotReservation, holder: str) -> None:
        place = (held.segment, held.slot)
        assert place not in self.slots, f"slot {place} is held by {self.slots[place]} and {holder}"
        record = self.segments[held.segment]
        assert record.slot_class == held.slot_class, f"slot {place} of {holder} has the wrong class"
        assert held.slot < record.fresh, f"slot {place} of {holder} was never handed out"
        self.slots[place] = holder

    def add_set_aside(self, place: BadPlace) -> None:
        """The slots on a bad place, as far as they were handed out and nothing holds them."""
        record = self.segments.get(place.segment)
        if record is not None and record.slot_class:
            for slot in place.slots(record.slot_class):
                if slot < record.fresh:
                    self.slots.setdefault((place.segment, slot), "a bad place")


def _check_entries(txn: Any, holders: _Holders, counters: Counters) -> None:
    blocks, scopes = 0, Counter[bytes]()
    for key, raw in rows(txn, BLOCKS):
        name = key[len(BLOCKS) :]
        entry = Entry.decode(name, raw)
        holders.add(entry, "an entry")
        blocks += 1
        scopes[scope_in(name)] += entry.slot_bytes
        assert txn.get(entry.order_key()) == name, "an entry has no row in the order"
    ordered = 0
    for key, name in rows(txn, ORDER):
        assert txn.get(BLOCKS + name) is not None, f"a row in the order without a block: {order_parts(key)}"
        ordered += 1
    assert ordered == blocks, f"{ordered} rows in the order for {blocks} blocks"
    counted = (counters.blocks, counters.slot_bytes)
    assert (blocks, scopes.total()) == counted, f"{blocks} blocks, {scopes.total()} bytes, counted as {counted}"
    shares = shares_of(txn)
    assert shares is None or shares == scopes, "scopes hold other bytes than were counted"


def _check_segments(txn: Any, holders: _Holders, counters: Counters, used: Counter[int]) -> None:
    geometry = Geometry.decode(txn.get(GEOMETRY_KEY))
    spare = {number_of(key) for key, _ in rows(txn, SPARE)}
    segments = holders.segments
    assert set(segments) == set(range(counters.segments)), "segment records and their counter disagree"
    assert counters.segments <= geometry.segments, "more segments than the capacity has space for"
    for number, record in segments.items():
        assert record.used == used[number], f"segment {number} counts {record.used} uses of {used[number]}"
        assert (record.slot_class == 0) == (number in spare), f"segment {number} is both spare and in use, or neither"
        assert record.slots * record.slot_class * SLOT_ALIGN <= geometry.size_of(number)
        assert record.fresh <= record.slots
    handed_out = sum(record.fresh for record in segments.values())
    assert len(holders.slots) == handed_out, f"{handed_out - len(holders.slots)} slots are lost"
