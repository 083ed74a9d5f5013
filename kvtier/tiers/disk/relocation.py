"""Guests (`kvtier.tiers.disk.guests`) that go back among blocks of their own size: a small one keeps a whole slot of
the larger size from being used.

    look     for guests that keep more of another class's slots than they are large, by place, in short reads
    search   their names, by the rows of their class, in short reads
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
from itertools import islice
from typing import Any

from kvtier import checksum
from kvtier.tiers.disk.expired import is_over
from kvtier.tiers.disk.extents import Extent, keeps_more
from kvtier.tiers.disk.guests import guests_from, is_guest
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
GUESTS_PER_STEP = 1024
PLACES_MAX = 4096
"""Of one look; the next one begins behind them."""
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
        self._places: dict[int, set[tuple[int, Extent]]] = {}  # by class, of those that are to go back
        self._class, self._next = 0, b""  # the one that is searched, and where in its rows
        self._looks, self._look_from = False, b""
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
        return (self._due or self._looks or bool(self._places)) and not self._waits()

    @property
    def promising(self) -> bool:
        """Whether slots may come free soon."""
        return self.busy or (self._waits() and time.monotonic() < self._patient_until)

    @property
    def known(self) -> bool:
        """Whether there are blocks that are to go back, by the last look."""
        return bool(self._places)

    def _waits(self) -> bool:
        return not all(one.ended for one in self._under_way)

    def step(self, index: Index, wall_s: Wall) -> Callable[[WriteTxn], list[Relocation]] | None:
        """One short read, and what the next transaction has to do by it; `began` takes its result."""
        if self._waits():
            return None
        if self._looks:
            self._look(index)
        elif self._places:
            return self._search(index, wall_s)
        else:
            self._look_in -= 1
            if self._due or self._look_in < 0:
                self._due, self._look_in = False, max(STEPS_PER_LOOK, STEPS_SHARE * self._searched)
                self._searched, self._looks = 0, True
                self._look(index)
        return None

    def began(self, relocations: list[Relocation]) -> None:
        """The transaction is committed. Without a result there is no slot for blocks of this class."""
        self._under_way, self._patient_until = relocations, time.monotonic() + PATIENCE_S
        if not relocations:
            self._end_search()

    def _look(self, index: Index) -> None:
        with index.reading() as txn:
            found, following = misplaced(txn, self._look_from)
        for segment, place in found:
            self._places.setdefault(place.units, set()).add((segment, place))
        self._looks = following is not None and sum(map(len, self._places.values())) < PLACES_MAX
        self._look_from = following or b""

    def _search(self, index: Index, wall_s: Wall) -> Callable[[WriteTxn], list[Relocation]] | None:
        slot_cls, places = next(iter(self._places.items()))
        if slot_cls != self._class:
            self._class, self._next = slot_cls, b""
        found: list[bytes] = []
        self._searched += 1
        with index.reading() as txn:
            some = list(islice(places, BLOCKS_PER_TXN))  # where they are gone, another process has seen to it
            places.difference_update([one for one in some if not is_guest(txn, _slot_of(*one))])
            for seen, (key, name) in enumerate(index.layout.ordered(txn, slot_cls, self._next)):
                if seen == ROWS_PER_STEP or len(found) == BLOCKS_PER_TXN or not places:
                    break
                self._next = key + b"\0"
                _slot_cls, _rank, segment, slot = order_parts(key)
                place = segment, Extent(slot * slot_cls, slot_cls)
                if place in places:
                    places.remove(place)
                    found.append(name)
            else:
                places.clear()
        if not places:
            self._end_search()
        return partial(begin_relocations, names=found, wall_s=wall_s) if found else None

    def _end_search(self) -> None:
        self._places.pop(self._class, None)
        self._next = b""


def _slot_of(segment: int, place: Extent) -> FreeSlot:
    return FreeSlot(place.units, segment, place.first // place.units)


def misplaced(txn: Any, start: bytes = b"") -> tuple[list[tuple[int, Extent]], bytes | None]:
    """The blocks, as (segment, place), that keep more of another class's slots than they are large, by GUESTS_PER_STEP
    rows from the key `start` on; and the key to go on from, None at the end."""
    guests, following = guests_from(txn, start, GUESTS_PER_STEP)
    return [(segment, place) for segment, place in guests if _is_to_go(txn, segment, place)], following


def _is_to_go(txn: Any, segment: int, place: Extent) -> bool:
    raw = txn.get(reserved_key(segment, place.first // place.units))
    writes = raw is not None and SlotReservation.class_of(raw) == place.units
    return not writes and _is_misplaced(txn, segment, place)


def _is_misplaced(txn: Any, segment: int, place: Extent) -> bool:
    slot_cls = Segment.decode(txn.get(number_key(SEGMENTS, segment))).slot_class
    return slot_cls > 0 and keeps_more(place, slot_cls)


def begin_relocations(txn: WriteTxn, names: Sequence[bytes], wall_s: Wall) -> list[Relocation]:
    """Reserve other slots for those of `names` that are guests and not over, as far as there are any."""
    found: list[Relocation] = []
    for name in names:
        entry = txn.find(name)
        if entry is None or not txn.segments.guests.has(entry) or is_over(txn, name, entry, wall_s):
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


def end_relocation(txn: WriteTxn, one: Relocation, copied: Copied) -> bool:
    """Publish a copy, or give its slot back. Whether the block lies there now. One whose bytes were not right is
    dropped, unless it is another write's by now: then what was read was that one's, or a later tenant's."""
    if copied is Copied.DURABLE:
        return txn.relocate(one.name, one.source.serial, one.to)
    txn.release(one.to)
    entry = txn.find(one.name) if copied is Copied.DAMAGED else None
    if entry is not None and entry.serial == one.source.serial:
        txn.drop(one.name)
    return False
