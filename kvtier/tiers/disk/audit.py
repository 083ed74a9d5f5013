"""The invariants of a G3 index, checked over all its tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvtier.tiers.disk.allocator import Geometry
from kvtier.tiers.disk.quota import scope_in, shares_of
from kvtier.tiers.disk.records import (
    BLOCKS,
    FREE,
    ORDER,
    RESERVED,
    SEGMENTS,
    SLOT_ALIGN,
    SPARE,
    Entry,
    Segment,
    SlotReservation,
    free_parts,
    number_of,
    order_parts,
    rows,
)
from kvtier.tiers.disk.write_txn import COUNTERS, COUNTERS_KEY, GEOMETRY_KEY


def audit(txn: Any) -> None:
    """Assert, in a read transaction, that every slot has exactly one use and that the counters count them.

    - an entry has one line in `order`, and a line in `order` one entry
    - no slot is held by two of: entries, reservations, the free list, the never-used rest of its segment
    - every slot handed out once is held by one of them: none is lost
    - segments fit the geometry; blocks, bytes and uses are counted right, and scopes' bytes where they are counted
    """
    geometry = Geometry.decode(txn.get(GEOMETRY_KEY))
    _serial, _tick, blocks, size, segment_count = COUNTERS.unpack(txn.get(COUNTERS_KEY))
    segments = {number_of(key): Segment.decode(raw) for key, raw in rows(txn, SEGMENTS)}
    spare = {number_of(key) for key, _ in rows(txn, SPARE)}
    assert set(segments) == set(range(segment_count)), "segment records and their counter disagree"
    assert segment_count <= geometry.segments, "more segments than the capacity has room for"
    held: dict[tuple[int, int], str] = {}
    used: Counter[int] = Counter()

    def hold(segment: int, slot: int, slot_cls: int, holder: str) -> None:
        place = (segment, slot)
        assert place not in held, f"slot {place} is held by {held[place]} and {holder}"
        record = segments[segment]
        assert record.slot_class == slot_cls, f"slot {place} of {holder} has the wrong class"
        assert slot < record.fresh, f"slot {place} of {holder} was never handed out"
        held[place] = holder

    counted = counted_bytes = 0
    scopes: Counter[bytes] = Counter()
    for key, raw in rows(txn, BLOCKS):
        name = key[len(BLOCKS) :]
        entry = Entry.decode(name, raw)
        hold(entry.segment, entry.slot, entry.slot_class, "an entry")
        used[entry.segment] += 1
        counted += 1
        counted_bytes += entry.slot_class * SLOT_ALIGN
        scopes[scope_in(name)] += entry.slot_class * SLOT_ALIGN
        assert txn.get(entry.order_key()) == name, "an entry has no line in the order"
    lines = 0
    for key, name in rows(txn, ORDER):
        assert txn.get(BLOCKS + name) is not None, f"a line in the order without a block: {order_parts(key)}"
        lines += 1
    assert lines == counted, f"{lines} lines in the order for {counted} blocks"
    assert (counted, counted_bytes) == (blocks, size), f"counters say {blocks} blocks, {size} bytes"
    shares = shares_of(txn)
    assert shares is None or shares == scopes, "scopes hold other bytes than were counted"
    for key, raw in rows(txn, RESERVED):
        reservation = SlotReservation.decode(key, raw)
        hold(reservation.segment, reservation.slot, reservation.slot_class, "a reservation")
        used[reservation.segment] += 1
    for key, _ in rows(txn, FREE):
        slot_cls, segment, slot = free_parts(key)
        hold(segment, slot, slot_cls, "the free list")
    for number, record in segments.items():
        assert record.used == used[number], f"segment {number} counts {record.used} uses of {used[number]}"
        assert (record.slot_class == 0) == (number in spare), f"segment {number} is both spare and in use, or neither"
        assert record.slots * record.slot_class * SLOT_ALIGN <= geometry.size_of(number)
        assert record.fresh <= record.slots
    handed_out = sum(record.fresh for record in segments.values())
    assert len(held) == handed_out, f"{handed_out - len(held)} slots are lost"
