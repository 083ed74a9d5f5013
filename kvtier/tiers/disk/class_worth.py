"""How much the bytes of each class are worth: hits that it would lose with fewer, returns that it would keep with more.

    meta key, after the "m"     value
    "worth"                     f64: bytes stored and hit in all classes since the store has several
    "worth" ‖ class (u32 be)    ClassWorth

Kept in the index, since a store's processes see different parts of its traffic. Counting begins when a class wants
space and there is a second one. A block that returns after it left would have been kept if its class had had as many
bytes more as left since (its depth beyond the end); one that is hit would have been lost with as many fewer as were to
leave before it. Both counts fade with the store's traffic, e-fold per capacity.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvtier.tiers.disk.ages import AGES_MAX, Ages
from kvtier.tiers.disk.geometry import Geometry
from kvtier.tiers.disk.ghosts import Ghosts
from kvtier.tiers.disk.records import META, RESERVED, SEGMENTS, SLOT_ALIGN, Segment, SlotReservation, rows

WORTH_KEY = META + b"worth"
LEVELS = (1, 4, 12, 32)
"""Depths at which worth is counted, in steps."""
STEPS = 32
"""Steps per capacity; a step is at least a segment."""

_CLASS = struct.Struct(">I")
_TRAFFIC = struct.Struct("<d")
_WORTH = struct.Struct(f"<QQd{len(LEVELS)}d{len(LEVELS)}dI{AGES_MAX}Q{AGES_MAX}Q")


def step_of(geometry: Geometry) -> int:
    """Bytes of a step. Pure."""
    return max(geometry.segment_bytes, geometry.capacity // STEPS)


@dataclass
class ClassWorth:
    """Of one class. `gain[n]`: bytes that returned from at most LEVELS[n] steps beyond the end; `loss[n]`: bytes that
    were hit within as many before it; both as of `faded`. `left` and `stored`: bytes in all."""

    slot_class: int
    left: int = 0
    stored: int = 0
    faded: float = 0.0
    gain: list[float] = field(default_factory=lambda: [0.0] * len(LEVELS))
    loss: list[float] = field(default_factory=lambda: [0.0] * len(LEVELS))
    ages: Ages = field(default_factory=lambda: Ages([], []))

    @property
    def slot_bytes(self) -> int:
        return self.slot_class * SLOT_ALIGN

    def fade(self, traffic: float, capacity: int) -> None:
        """Let the counts fade until the store's traffic is `traffic`."""
        factor = math.exp(min(0.0, (self.faded - traffic) / capacity))
        self.gain = [one * factor for one in self.gain]
        self.loss = [one * factor for one in self.loss]
        self.faded = traffic

    def encode(self) -> bytes:
        pad = [0] * (AGES_MAX - len(self.ages.starts))
        return _WORTH.pack(
            self.left, self.stored, self.faded, *self.gain, *self.loss, len(self.ages.starts),
            *self.ages.starts, *pad, *self.ages.sizes, *pad,
        )  # fmt: skip

    @classmethod
    def decode(cls, slot_cls: int, raw: bytes) -> ClassWorth:
        """The inverse of `encode`; another length, from another version, is a class of which nothing is known."""
        if len(raw) != _WORTH.size:
            return cls(slot_cls)
        left, stored, faded, *values = _WORTH.unpack(raw)
        levels = len(LEVELS)
        gain, loss, (count, *ages) = values[:levels], values[levels : 2 * levels], values[2 * levels :]
        return cls(slot_cls, left, stored, faded, gain, loss, Ages(ages[:count], ages[AGES_MAX : AGES_MAX + count]))


class ClassWorths:
    """The worth of all classes, as this transaction leaves it. `save` must be called before the commit."""

    def __init__(self, txn: Any, geometry: Geometry, ghosts: Ghosts, *, begin: bool) -> None:
        """Nothing may be changed yet. `begin`: count from now on."""
        self._txn = txn
        self._geometry = geometry
        self._ghosts = ghosts
        raw = txn.get(WORTH_KEY)
        self.counted = raw is not None
        self._traffic = 0.0 if raw is None else _TRAFFIC.unpack(raw)[0]
        self._of: dict[int, ClassWorth] = {}
        if begin and not self.counted:
            self._begin()

    def _begin(self) -> None:
        """Reads the segments' records and the reservations, once in a store's life."""
        self.counted = True
        used = Counter[int]()
        for _key, raw in rows(self._txn, SEGMENTS):
            segment = Segment.decode(raw)
            used[segment.slot_class] += segment.used
        used.subtract(SlotReservation.class_of(raw) for _key, raw in rows(self._txn, RESERVED))
        for slot_cls, blocks in used.items():
            if slot_cls:
                self._get(slot_cls).ages.add(0, blocks * slot_cls * SLOT_ALIGN)

    def placed(self, slot_cls: int, tick: int) -> None:
        """A block of the class has a row of this tick."""
        if self.counted:
            self._get(slot_cls).ages.add(tick, slot_cls * SLOT_ALIGN)

    def removed(self, slot_cls: int, tick: int) -> None:
        """It has it no more."""
        if self.counted:
            self._get(slot_cls).ages.remove(tick, slot_cls * SLOT_ALIGN)

    def hit(self, slot_cls: int, tick: int) -> None:
        """A block that was last used at `tick` was used."""
        if self.counted:
            worth = self._get(slot_cls)
            self._traffic += worth.slot_bytes
            self._count(worth, worth.loss, worth.ages.depth(tick), worth.slot_bytes)

    def stored(self, name: bytes, slot_cls: int) -> None:
        """A block came."""
        if self.counted:
            worth = self._get(slot_cls)
            self._traffic += worth.slot_bytes
            worth.stored += worth.slot_bytes
            ghost = self._ghosts.take(name, slot_cls, self._blocks(slot_cls))
            if ghost is not None:
                mark, stands_for = ghost
                self._count(worth, worth.gain, worth.left - mark, stands_for * worth.slot_bytes)

    def evicted(self, name: bytes, slot_cls: int) -> None:
        """A block had to leave."""
        if self.counted:
            worth = self._get(slot_cls)
            worth.left += worth.slot_bytes
            self._ghosts.add(name, slot_cls, self._blocks(slot_cls), worth.left)

    def answered(self, slot_cls: int, level: int) -> None:
        """The class gets the LEVELS[level] steps that it gained by: it is expected to be hit there as often, until the
        hits show it or the expectation has faded."""
        if self.counted:
            worth = self._get(slot_cls)
            served, steps = worth.gain[level], LEVELS[level]
            worth.gain = [max(0.0, one - served) for one in worth.gain]
            shares = (min(1.0, one / steps) for one in LEVELS)
            worth.loss = [one + served * share for one, share in zip(worth.loss, shares, strict=True)]

    def save(self) -> None:
        """Write what changed."""
        if self.counted and self._of:
            self._txn.put(WORTH_KEY, _TRAFFIC.pack(self._traffic))
        for slot_cls, worth in self._of.items():
            self._txn.put(WORTH_KEY + _CLASS.pack(slot_cls), worth.encode())

    def _count(self, worth: ClassWorth, counts: list[float], depth: int, size: int) -> None:
        step = step_of(self._geometry)
        for level, steps in enumerate(LEVELS):
            if depth <= steps * step:
                counts[level] += size

    def _blocks(self, slot_cls: int) -> int:
        return self._geometry.capacity // (slot_cls * SLOT_ALIGN)

    def _get(self, slot_cls: int) -> ClassWorth:
        if slot_cls not in self._of:
            raw = self._txn.get(WORTH_KEY + _CLASS.pack(slot_cls), default=b"")
            worth = self._of[slot_cls] = ClassWorth.decode(slot_cls, raw)
            worth.fade(self._traffic, self._geometry.capacity)
        return self._of[slot_cls]


def worths_in(txn: Any, capacity: int) -> dict[int, ClassWorth]:
    """The worth of every class by class, as of now; none while the store has one class."""
    raw = txn.get(WORTH_KEY)
    found = {}
    for key, value in rows(txn, WORTH_KEY) if raw is not None else ():
        if key != WORTH_KEY:
            (slot_cls,) = _CLASS.unpack(key[len(WORTH_KEY) :])
            found[slot_cls] = ClassWorth.decode(slot_cls, value)
            found[slot_cls].fade(_TRAFFIC.unpack(raw)[0], capacity)
    return found
