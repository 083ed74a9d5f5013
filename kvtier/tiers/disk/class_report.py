"""How the classes of a G3 store share its segments, for people."""

from __future__ import annotations

from typing import Any

from kvtier.tiers.disk.allocator import promises_in
from kvtier.tiers.disk.class_worth import ClassWorth, worths_in
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.records import SEGMENTS, SLOT_ALIGN, Segment, number_of


def class_report(index: Index) -> list[dict[str, Any]]:
    """Per class, by size: its segments, how many of them are emptied for another, bytes of its slots, bytes of those
    that hold a block or a write, and bytes that returned from beyond its end and that were hit before it, within a step
    and as counted of late (0 while the store has one class). Reads the segments' records."""
    capacity = index.geometry().capacity
    segments = {number_of(key): Segment.decode(raw) for key, raw in index.rows(SEGMENTS)}
    with index.reading() as txn:
        draining, worths = promises_in(txn), worths_in(txn, capacity)
    out = []
    for slot_cls in sorted({one.slot_class for one in segments.values()} - {0}):
        mine = {number: one for number, one in segments.items() if one.slot_class == slot_cls}
        size, worth = slot_cls * SLOT_ALIGN, worths.get(slot_cls, ClassWorth(slot_cls))
        out.append(
            {
                "slot_bytes": size,
                "segments": len(mine),
                "draining": len(mine.keys() & draining.keys()),
                "bytes": size * sum(one.slots for one in mine.values()),
                "used_bytes": size * sum(one.used for one in mine.values()),
                "gain_bytes": round(worth.gain[0]),
                "loss_bytes": round(worth.loss[0]),
            }
        )
    return out
