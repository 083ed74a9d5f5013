"""Guests (`kvtier.tiers.disk.guests`) that go back among blocks of their own size: a small one keeps a whole slot of
the larger size from being used.

    search   blocks that keep more of another class's slots than they are large, in short reads
    begin    another slot for each, free or of a block of its class that leaves for it (transaction)
    copy     the bytes are read, checked, written and synced, while the disk is idle
    end      the entry names the new slot, and the old one is free (transaction)

Until its end the block lies, and is read, where it was; a crash leaves it there, and a reservation of a dead owner. The
new entry has a serial of its own: who still reads the old slot, and finds other bytes, was overtaken, as by a write. An
encrypted block is copied as it lies: nothing in it depends on the place.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from kvtier import checksum
from kvtier.tiers.disk.extents import Extent, keeps_more
from kvtier.tiers.disk.guests import extent_of, guests_in, is_guest
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.records import (
    SEGMENTS,
    Entry,
    FreeSlot,
    Segment,
    SlotReservation,
    number_key,
    order_parts,
    reserved_key,
)
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.times import Wall

BLOCKS_PER_TXN = 16
"""Blocks that are on their way at once: each holds a slot, and may push out a block for it."""
ROWS_PER_STEP = 1024
"""Rows read in one transaction: about a millisecond."""
GUESTS_PER_LOOK = 1024
STEPS_PER_LOOK, STEPS_SHARE = 256, 16
"""Steps between two looks for guests that another process, or an earlier one, left; and so many times as many as the
last search took: one that finds no slot costs little."""
PATIENCE_S = 1.0
"""For so long a put waits for copies: on a busy disk none is made."""


@dataclass(slots=True, eq=False)
class Relocation:
    """A block on its way: `source` is its entry from when it began. `ended`: it is there, or was given up."""

    name: bytes
    source: Entry
    to: SlotReservation
    ended: bool = False


class Copied(Enum):
    """What became of a block's copy."""

    DURABLE = "durable"
    FAILED = "failed"  # the slots say why to the next who reads or writes them
    DAMAGED = "damaged"  # the source is not what was stored


class Relocations:
    """Those of one process, one batch at a time. On the writer thread; `Relocation.ended` is set on any."""

    def __init__(self) -> None:
        self._classes: list[int] = []  # whose rows are to be searched
        self._next = b""  # where in the first of them
        self._due = False
        self._look_in = self._searched = 0  # steps
        self._under_way: list[Relocation] = []
        self._patient_until = 0.0

    def look_soon(self) -> None:
        """There may be new guests."""
        self._due = True

    @property
    def busy(self) -> bool:
        """Whether the next step has something to do."""
        return (self._due or bool(self._classes)) and not self._waits()

    @property
    def promising(self) -> bool:
        """Whether slots may come free soon."""
        return self.busy or (self._waits() and time.monotonic() < self._patient_until)

    def _waits(self) -> bool:
        return not all(one.ended for one in self._under_way)

    def step(self, index: Index, wall_s: Wall) -> Callable[[WriteTxn], list[Relocation]] | None:
        """One short read, and what the next transaction has to do by it; `began` takes its result."""
        if self._waits():
            return None
        if self._classes:
            return self._search(index, wall_s)
        self._look_in -= 1
        if self._due or self._look_in < 0:
            self._due, self._look_in = False, max(STEPS_PER_LOOK, STEPS_SHARE * self._searched)
            self._searched, self._next = 0, b""
            with index.reading() as txn:
                self._classes = sorted(misplaced(txn))
        return None

    def began(self, relocations: list[Relocation]) -> None:
        """The transaction is committed. Without a result there is no slot for blocks of this class."""
        self._under_way, self._patient_until = relocations, time.monotonic() + PATIENCE_S
        if not relocations:
            self._classes, self._next = self._classes[1:], b""

    def _search(self, index: Index, wall_s: Wall) -> Callable[[WriteTxn], list[Relocation]] | None:
        found: list[bytes] = []
        self._searched += 1
        with index.reading() as txn:
            if not misplaced(txn):
                self._classes = []
                return None
            rows_of_class = index.layout.ordered(txn, self._classes[0], self._next)
            for seen, (key, name) in enumerate(rows_of_class):
                if seen == ROWS_PER_STEP or len(found) == BLOCKS_PER_TXN:
                    break
                self._next = key + b"\0"
                slot_cls, _rank, segment, slot = order_parts(key)
                held = FreeSlot(slot_cls, segment, slot)
                if is_guest(txn, held) and _is_misplaced(txn, segment, extent_of(held)):
                    found.append(name)
            else:
                self._classes, self._next = self._classes[1:], b""
        return partial(begin_relocations, names=found, wall_s=wall_s) if found else None


def misplaced(txn: Any) -> set[int]:
    """The classes of blocks that keep more of another class's slots than they are large, by the first GUESTS_PER_LOOK
    guests."""
    found = set[int]()
    for segment, place in guests_in(txn, most=GUESTS_PER_LOOK):
        raw = txn.get(reserved_key(segment, place.first // place.units))
        writes = raw is not None and SlotReservation.class_of(raw) == place.units
        if not writes and _is_misplaced(txn, segment, place):
            found.add(place.units)
    return found


def _is_misplaced(txn: Any, segment: int, place: Extent) -> bool:
    slot_cls = Segment.decode(txn.get(number_key(SEGMENTS, segment))).slot_class
    return slot_cls > 0 and keeps_more(place, slot_cls)


def begin_relocations(txn: WriteTxn, names: Sequence[bytes], wall_s: Wall) -> list[Relocation]:
    """Reserve other slots for those of `names` that are guests and may be served, as far as there are any."""
    found: list[Relocation] = []
    for name in names:
        entry = txn.find(name)
        if entry is None or not txn.segments.guests.has(entry) or not txn.is_servable(name, entry, wall_s):
            continue
        to = txn.reserve_other(name, entry, wall_s)
        if to is None:
            break
        found.append(Relocation(name, entry, to))
    return found


def copy_block(slab: Slab, one: Relocation) -> Copied:
    """Copy a block's bytes, as they lie, to its other slot; the caller syncs. Blocks on the device. Raises OSError."""
    source, view = one.source, memoryview(mmap.mmap(-1, one.source.slot_bytes))
    slab.read(source.segment, source.offset, [view])
    if source.encryption is None and not checksum.matches(source.digest, [view[: source.length]]):
        return Copied.DAMAGED
    slab.write(one.to.segment, one.to.offset, [view])
    return Copied.DURABLE


def end_relocation(txn: WriteTxn, one: Relocation, copied: Copied) -> None:
    """Publish a copy, or give its slot back. A block whose bytes were not right is dropped, unless it is another
    write's by now: then what was read was that one's, or a later tenant's."""
    if copied is Copied.DURABLE:
        txn.relocate(one.name, one.source.serial, one.to)
        return
    txn.release(one.to)
    entry = txn.find(one.name) if copied is Copied.DAMAGED else None
    if entry is not None and entry.serial == one.source.serial:
        txn.drop(one.name)
