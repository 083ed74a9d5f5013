"""How a G3 store's capacity is cut into segments.

    meta key, after the "m"    value
    "geometry"                 capacity u64, segment bytes u64, parts u32
    "shrinks"                  u64: the capacity, while that in "geometry" is an earlier, larger one

A store *shrinks* from when it gets a smaller capacity until nothing lies beyond that. Meanwhile its segments and files
keep the lengths that the earlier one gave them, which is their *reach*; no slot beyond the capacity is handed out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

from kvtier.tiers.disk.records import GEOMETRY_KEY, META, SLOT_ALIGN

SHRINKS_KEY = META + b"shrinks"

_GEOMETRY = struct.Struct("<QQI")
_CAPACITY = struct.Struct("<Q")


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

    def holds(self, slot_cls: int, segment: int, slot: int) -> bool:
        """Whether the slot lies within the capacity. Pure."""
        return slot < self.slots_of(segment, slot_cls)

    def encode(self) -> bytes:
        return _GEOMETRY.pack(self.capacity, self.segment_bytes, self.parts)

    @classmethod
    def decode(cls, raw: bytes) -> Geometry:
        """The inverse of `encode`. Raises struct.error."""
        return cls(*_GEOMETRY.unpack(raw))


def reach_in(txn: Any) -> Geometry:
    """How far segments and their files may reach: beyond the capacity while the store shrinks. Raises struct.error."""
    return Geometry.decode(txn.get(GEOMETRY_KEY))


def geometry_in(txn: Any) -> Geometry:
    """The store's geometry: where slots are handed out. Raises struct.error."""
    reach, raw = reach_in(txn), txn.get(SHRINKS_KEY)
    return reach if raw is None else replace(reach, capacity=min(_CAPACITY.unpack(raw)[0], reach.capacity))


def put_capacity(txn: Any, capacity: int) -> Geometry:
    """Give the store another capacity; it shrinks where that is smaller than its reach. Returns its geometry."""
    reach = reach_in(txn)
    geometry = replace(reach, capacity=capacity)
    if capacity < reach.capacity:
        txn.put(SHRINKS_KEY, _CAPACITY.pack(capacity))
    else:
        put_reach(txn, geometry)
    return geometry


def put_reach(txn: Any, geometry: Geometry) -> None:
    """Segments and files reach no further than this: the store does not shrink."""
    txn.put(GEOMETRY_KEY, geometry.encode())
    txn.delete(SHRINKS_KEY)
