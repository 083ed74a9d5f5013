"""How the classes of a G3 store share its segments, for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvtier.tiers.disk.allocator import promises_in
from kvtier.tiers.disk.class_worth import ClassWorth, worths_in
from kvtier.tiers.disk.guests import guests_in
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.records import SEGMENTS, SLOT_ALIGN, Segment, number_of


def class_report(index: Index) -> list[dict[str, Any]]:
    """Per class, by size: its segments, how many of them are emptied for another, bytes of its slots, bytes of those
    that hold a block or a write, and bytes that returned from beyond its end and that were hit before it, within a step
    and as counted of late (0 while the store has one class). A guest counts for its own class. Reads the segments'
    records, and those of all guests."""
    capacity = index.geometry().capacity
    segments = {number_of(key): Segment.decode(raw) for key, raw in index.rows(SEGMENTS)}
    with index.reading() as txn:
        draining, worths, guests = promises_in(txn), worths_in(txn, capacity), guests_in(txn)
    used = Counter[int]()  # units, by class
    for one in segments.values():
        used[one.slot_class] += one.slot_class * one.used
    for segment, place in guests:
        used[segments[segment].slot_class] -= segments[segment].slot_class
        used[place.units] += place.units
    out = []
    for slot_cls in sorted(used.keys() - {0}):
        mine = {number: one for number, one in segments.items() if one.slot_class == slot_cls}
        size, worth = slot_cls * SLOT_ALIGN, worths.get(slot_cls, ClassWorth(slot_cls))
        out.append(
            {
                "slot_bytes": size,
                "segments": len(mine),
                "draining": len(mine.keys() & draining.keys()),
                "bytes": size * sum(one.slots for one in mine.values()),
                "used_bytes": used[slot_cls] * SLOT_ALIGN,
                "gain_bytes": round(worth.gain[0]),
                "loss_bytes": round(worth.loss[0]),
            }
        )
    return out
