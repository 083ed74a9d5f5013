"""Places of a segment's file, in units of SLOT_ALIGN, and the slots of any class that they overlap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Extent(NamedTuple):
    """`units` units of a segment, from `first` on."""

    first: int
    units: int

    def slots(self, slot_cls: int) -> range:
        """The slots of a class that it overlaps. Pure."""
        return range(self.first // slot_cls, (self.first + self.units - 1) // slot_cls + 1)


def extent_of_slots(slots: range, slot_cls: int) -> Extent:
    """Where these slots of a class lie. Pure."""
    return Extent(slots.start * slot_cls, len(slots) * slot_cls)


def common(some: range, others: range) -> range:
    """The slots in both. Pure."""
    return range(max(some.start, others.start), min(some.stop, others.stop))


def keeps_more(extent: Extent, slot_cls: int) -> bool:
    """Whether the slots of a class that it overlaps are larger than it is. Pure."""
    return len(extent.slots(slot_cls)) * slot_cls > extent.units


def clear_slots(extents: Iterable[Extent], slot_cls: int, slots: int) -> int:
    """How many of a segment's first `slots` slots of a class overlap none of the extents, in any order. Pure."""
    count = end = 0
    for first, units in (*sorted(extents), Extent(slots * slot_cls, 0)):
        count += max(0, min(first // slot_cls, slots) - -(-end // slot_cls))
        end = max(end, first + units)
    return count
