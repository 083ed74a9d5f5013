"""Empties segments for a class that is worth more there: chosen and searched in short reads, emptied in slices.

    choose    from whom and how much (`kvtier.tiers.disk.gifts`), when a transaction marked a demand
    survey    which segments of that class have room beside what must stay, and which of them hold the least
    sweep     blocks of the chosen segments, ROWS_PER_STEP rows at a time; each find is evicted by the next transaction,
              or becomes a guest (`kvtier.tiers.disk.guests`) if it must stay
    lodge     writes that do not end become guests, too; guests that need not stay leave where their place is wanted
    relocate  guests that keep more than their own bytes from the class go back to their own (`relocation`)

Below the write lock there is one bounded slice of evictions per transaction. A draining segment is marked in the index,
so its free slots do not go back to its class; the next sweep takes up what another one left.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from kvtier.errors import CorruptError
from kvtier.retention.terms import Depth
from kvtier.tiers.disk.allocator import Promise, promises_in
from kvtier.tiers.disk.bad_places import bad_places
from kvtier.tiers.disk.class_worth import ClassWorth, step_of, worths_in
from kvtier.tiers.disk.expired import is_over
from kvtier.tiers.disk.extents import Extent, clear_slots, keeps_more
from kvtier.tiers.disk.geometry import Geometry, geometry_in
from kvtier.tiers.disk.gifts import Gift, gifts
from kvtier.tiers.disk.guests import GUEST_KEY, extent_of, guests_from, is_guest
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.records import (
    RESERVED,
    RETAINED_KEY,
    SEGMENTS,
    TIME,
    Counters,
    Entry,
    FreeSlot,
    Segment,
    SlotReservation,
    number_key,
    number_of,
    order_parts,
    priority_in,
    rows,
    segment_in,
    tick_in,
    time_at,
)
from kvtier.tiers.disk.relocation import Relocations, misplaced
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.times import Wall

ROWS_PER_STEP = 1024
RETAINED_PER_STEP = 256
"""Rows, and retained blocks with their entries, read in one transaction: one or two milliseconds."""
EVICTIONS_PER_TXN = 64
STEPS_PER_LOOK = 256
"""Steps without a demand between two looks for segments that another process left draining."""
LOOKS_AT_WRITES = 32
"""Looks for which a drain waits for writes in its segments to end: some hundredths of a second."""
ROWS_PER_TXN_REFUSED = 64
"""After a survey found nothing, demands are passed over in one transaction for every so many rows that it read."""

Work = Callable[[WriteTxn], object]


@dataclass
class _Survey:
    """What is known of the segments of a class, after reading its rows up to `next`."""

    taker: int
    priority: int
    must: bool
    gifts: list[Gift]
    classes: dict[int, int]
    """Of all segments."""
    next: bytes = RETAINED_KEY
    """Where to go on: among the retained blocks, then the guests, then the rows of each giver."""
    rows: int = 0
    stays: dict[int, array[int]] = field(default_factory=lambda: defaultdict(lambda: array("I")))
    """By segment, first unit and units of each block that must stay."""
    lodged: dict[int, list[Extent]] = field(default_factory=lambda: defaultdict(list))
    """By segment, the guests."""
    warmth: Counter[int] = field(default_factory=Counter)
    guests: list[bytes] = field(default_factory=list)
    """The coldest blocks that lie in the taker's segments and need not stay, EVICTIONS_PER_TXN at most."""
    strays: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    """The same, by segment, in those of a third class."""

    @property
    def giver(self) -> int:
        return self.gifts[0].giver

    def go_on(self) -> None:
        """Read the rows of the next giver."""
        del self.gifts[0]
        self.next = b""
        self.warmth.clear()


class Drain:
    """The emptying of segments by one process. On the writer thread; it looks only while the demand is there."""

    def __init__(self) -> None:
        self._survey: _Survey | None = None
        self._sweeps: list[int] = []  # classes whose rows are to be searched
        self._next = b""  # where in the first of them
        self._takers: set[int] = set()  # classes that the draining segments are promised to
        self._look_in = 0  # steps
        self._found = 0  # blocks, by this sweep
        self._patience = LOOKS_AT_WRITES
        self._stopped = False
        self.relocations = Relocations()
        self.stuck = False
        """Whether the last sweep found nothing to evict in segments that are in use all the same: by writes."""

    def stop(self) -> None:
        """Do nothing any more; what is draining stays so for the next process. From any thread."""
        self._stopped = True

    @property
    def busy(self) -> bool:
        """Whether the next step has something to do."""
        return not self._stopped and (self._survey is not None or bool(self._sweeps) or self.relocations.busy)

    def serves(self, index: Index, slot_cls: int) -> bool:
        """Whether space for the class may come: its demand was not looked at, segments are drained for it, or guests go
        back."""
        surveyed = self._survey is not None and self._survey.taker == slot_cls
        comes = surveyed or slot_cls in self._takers or self.relocations.promising
        return comes or index.demand.must(slot_cls)

    def step(self, index: Index, wall_s: Wall) -> Work | None:
        """One short read, and what the next transaction has to do by it: a list of relocations as its result is
        `relocations.began`'s, and the caller's to carry out. Raises what reading a damaged index raises."""
        if self._stopped:
            return None
        if self._sweeps:
            return self._sweep(index, wall_s)
        if self._survey is not None:
            return self._read_on(index, wall_s)
        waits = self.relocations.promising  # where slots come free, no further segment is wanted yet
        begin = self.relocations.step(index, wall_s)
        if begin is not None or waits:
            return begin
        self._look_in -= 1
        if index.demand.waits or self._look_in < 0:
            self._look_in = STEPS_PER_LOOK
            return self._look(index)
        return None

    # Choosing.

    def _look(self, index: Index) -> Work | None:
        """Sweep what is draining, wait for writes there, or answer a demand."""
        waits, stuck, self.stuck = index.demand.waits, self.stuck, False
        with index.reading() as txn:
            promises = promises_in(txn)
            self._takers = {promise.slot_class for promise in promises.values()}
            if promises and not (waits and stuck):
                self._begin_sweep(txn, promises)
                return None
            writes = _writes_in(txn, promises) if promises and self._patience <= 0 else []
            geometry = geometry_in(txn)
            now = Counters.decode(txn.get(index.layout.counters_key)).tick
            worths = worths_in(txn, geometry.capacity)
            classes = {number_of(key): Segment.decode(raw).slot_class for key, raw in rows(txn, SEGMENTS)}
        if promises:
            self._patience -= 1
            if self._patience < 0:
                self.stuck = len(writes) == EVICTIONS_PER_TXN  # then the next look finds more of them
                self._patience = 0 if self.stuck else LOOKS_AT_WRITES
                return partial(lodge, writes=writes)
        for slot_cls, priority, must in index.demand.take() if worths else ():  # the next transaction begins to count
            taker = worths.pop(slot_cls, ClassWorth(slot_cls))
            found = gifts(taker, list(worths.values()), step_of(geometry), geometry.capacity, now, must=must)
            worths[slot_cls] = taker
            if found:
                self._survey = _Survey(slot_cls, priority, must, found, classes)
                return None
            if must:
                index.demand.refuse(slot_cls, now + 2, must=True)
        return None

    # Surveying.

    def _read_on(self, index: Index, wall_s: Wall) -> Work | None:
        survey = self._survey
        assert survey is not None
        with index.reading() as txn:
            if survey.next.startswith(RETAINED_KEY):
                self._read_retained(index, txn, survey, wall_s)
                return None
            if survey.next.startswith(GUEST_KEY):
                guests, following = guests_from(txn, survey.next, ROWS_PER_STEP)
                for segment, place in guests:
                    survey.lodged[segment].append(place)
                survey.next = following or b""
                return None
            chunk = list(islice(index.layout.ordered(txn, survey.giver, survey.next), ROWS_PER_STEP))
            survey.rows += len(chunk)
            for key, name in chunk:
                slot_cls, rank, segment, slot = order_parts(key)
                survey.warmth[segment] += 1 + tick_in(rank)
                if priority_in(rank) > survey.priority and _is_live(index, txn, name, wall_s):
                    survey.stays[segment].extend((slot * slot_cls, slot_cls))
                    continue
                owner = survey.classes.get(segment, slot_cls)
                if not survey.must or owner == slot_cls:
                    continue
                found = survey.guests if owner == survey.taker else survey.strays[segment]
                if len(found) < EVICTIONS_PER_TXN and time_at(txn, RETAINED_KEY + name) <= wall_s:
                    found.append(name)
            if len(chunk) == ROWS_PER_STEP:
                survey.next = chunk[-1][0] + b"\0"
                return None
            around = _Around.of(index, txn, self.relocations)
        return self._pick(index, survey, around, wall_s)

    def _read_retained(self, index: Index, txn: Any, survey: _Survey, wall_s: Wall) -> None:
        chunk = list(islice(rows(txn, RETAINED_KEY, survey.next), RETAINED_PER_STEP))
        for key, until in chunk:
            if TIME.unpack(until)[0] > wall_s and (entry := _entry(index, txn, key[len(RETAINED_KEY) :])) is not None:
                survey.stays[entry.segment].extend(extent_of(entry))
        survey.next = chunk[-1][0] + b"\0" if len(chunk) == RETAINED_PER_STEP else GUEST_KEY

    def _pick(self, index: Index, survey: _Survey, around: _Around, wall_s: Wall) -> Work | None:
        """The segments that hold the least among those that have room for the taker beside what must stay. One that
        writes or trials have slots in is taken only where there is no other, and one at a time: who knows when they
        end."""
        if survey.guests:
            return self._evict_guests(survey.guests, survey, wall_s)
        promised = around.promised
        self._takers = {promise.slot_class for promise in promised.values()}
        gift, picked = survey.gifts[0], self._segments_to_drain(survey, around)
        if not picked and len(survey.gifts) > 1:
            survey.go_on()
            return None
        if not picked and not promised:
            for segment, strays in survey.strays.items():
                if strays and _has_room(survey, around, segment, guests=False):
                    return self._evict_guests(strays, survey, wall_s)
        self._survey = None
        if not picked:
            if not promised:
                until = around.tick + 2 + survey.rows // ROWS_PER_TXN_REFUSED
                index.demand.refuse(survey.taker, until, must=survey.must)
            return None
        promise = Promise(survey.taker, survey.priority)
        self._sweeps, self._next, self._found = [gift.giver], b"", 0
        self._takers.add(survey.taker)
        self._patience = LOOKS_AT_WRITES

        def begin(txn: WriteTxn) -> None:
            for segment in picked:
                txn.segments.drain(segment, gift.giver, promise)
            if gift.level is not None:
                txn.worths.answered(survey.taker, gift.level)

        return begin

    def _evict_guests(self, names: Sequence[bytes], survey: _Survey, wall_s: Wall) -> Work:
        self._survey = None
        return lambda txn: evict_guests(txn, names, survey.priority, wall_s)

    def _segments_to_drain(self, survey: _Survey, around: _Around) -> list[int]:
        promised, written = around.promised, around.written
        mine = [one for one, slot_cls in survey.classes.items() if slot_cls == survey.giver and one not in promised]
        mine.sort(key=lambda segment: survey.warmth[segment])
        wanted = max(1, survey.gifts[0].size // around.geometry.segment_bytes)

        def some(segments: Sequence[int], most: int) -> list[int]:
            found = list(islice((one for one in segments if _has_room(survey, around, one)), most))
            if len(found) < most and not around.guests_go:
                found += _to_clear(survey, around, mine, segments, found, most)
            return found

        picked = some([segment for segment in mine if segment not in written], wanted)
        return picked if picked or promised else some([segment for segment in mine if segment in written], 1)

    # Sweeping.

    def _begin_sweep(self, txn: Any, promises: Iterable[int]) -> None:
        """Search the classes of the draining segments from their coldest rows on."""
        classes = {Segment.decode(txn.get(number_key(SEGMENTS, number))).slot_class for number in promises}
        self._sweeps, self._next, self._found = sorted(classes), b"", 0

    def _sweep(self, index: Index, wall_s: Wall) -> Work | None:
        found: list[bytes] = []
        with index.reading() as txn:
            draining = set(promises_in(txn))
            slot_cls = self._sweeps[0]
            for seen, (key, name) in enumerate(index.layout.ordered(txn, slot_cls, self._next)):
                if seen == ROWS_PER_STEP or len(found) == EVICTIONS_PER_TXN:
                    break
                self._next = key + b"\0"
                if segment_in(key) in draining and not is_guest(txn, FreeSlot(slot_cls, *order_parts(key)[2:])):
                    found.append(name)
            else:
                self._sweeps, self._next = self._sweeps[1:], b""
                if not draining:
                    self._sweeps = []
                self.relocations.look_soon()
                used = [number for number in draining if Segment.decode(txn.get(number_key(SEGMENTS, number))).used]
                self.stuck = bool(used) and not self._found and not found and not self._sweeps
            self._found += len(found)
        return (lambda txn: evict(txn, found, wall_s)) if found else None


def _written(txn: Any) -> dict[int, list[Extent]]:
    """By segment, the slots that writes and trials have."""
    found = defaultdict[int, list[Extent]](list)
    for key, raw in rows(txn, RESERVED):
        reserved = SlotReservation.decode(key, raw)
        found[reserved.segment].append(extent_of(reserved))
    return found


def _writes_in(txn: Any, segments: Iterable[int]) -> list[SlotReservation]:
    """The first EVICTIONS_PER_TXN writes and trials in the segments that are no guests."""
    found = (SlotReservation.decode(*row) for one in segments for row in rows(txn, number_key(RESERVED, one)))
    return list(islice((write for write in found if not is_guest(txn, write)), EVICTIONS_PER_TXN))


class _Around(NamedTuple):
    """What else decides, read in one short transaction. `written`, `bad`: by segment, the slots that writes and trials
    have, and bad places; `guests_go`: whether some guests are to go back, which makes room."""

    tick: int
    geometry: Geometry
    promised: Mapping[int, Promise]
    written: Mapping[int, Sequence[Extent]]
    bad: Mapping[int, Sequence[Extent]]
    guests_go: bool

    @classmethod
    def of(cls, index: Index, txn: Any, relocations: Relocations) -> _Around:
        bad = defaultdict[int, list[Extent]](list)
        for place in bad_places(txn):
            bad[place.segment].append(place.extent)
        tick = Counters.decode(txn.get(index.layout.counters_key)).tick
        guests_go = relocations.known or bool(misplaced(txn)[0])
        return cls(tick, geometry_in(txn), promises_in(txn), _written(txn), bad, guests_go)


def _has_room(
    survey: _Survey, around: _Around, segment: int, *, guests: bool = True, cleared: bool = False
) -> bool:  # fmt: skip
    """Whether a slot of the taker lies clear of what must stay in a segment, its bad places, writes and `guests`.
    `cleared`: once what would be relocated of that is gone."""
    stays = iter(survey.stays.get(segment, ()))
    extents = [Extent(first, units) for first, units in zip(stays, stays, strict=True)]
    if cleared:
        extents = [one for one in extents if not keeps_more(one, survey.taker)]
    extents += [*around.bad.get(segment, ()), *around.written.get(segment, ())]
    extents += survey.lodged.get(segment, ()) if guests else ()
    return clear_slots(extents, survey.taker, around.geometry.slots_of(segment, survey.taker)) > 0


def _to_clear(
    survey: _Survey, around: _Around, mine: Sequence[int], among: Sequence[int], picked: Sequence[int], wanted: int
) -> list[int]:
    """Further segments, `among` the giver's `mine`, until `wanted` are picked: each has room for the taker once blocks
    that must stay have gone to the segments that are left, where there are slots for them. Those with the fewest."""
    stays = {segment: len(survey.stays.get(segment, ())) // 2 for segment in mine}
    slots = {segment: around.geometry.slots_of(segment, survey.giver) for segment in mine}
    space = sum(slots[one] - stays[one] for one in mine) - sum(slots[one] for one in picked)
    found: list[int] = []
    for segment in sorted(set(among) - set(picked), key=lambda one: (stays[one], survey.warmth[one])):
        if len(picked) + len(found) == wanted or space < slots[segment]:
            break
        if _has_room(survey, around, segment, cleared=True):
            space -= slots[segment]
            found.append(segment)
    return found


def evict(txn: WriteTxn, names: Iterable[bytes], wall_s: Wall) -> None:
    """Evict those of `names` that lie in draining segments; those that must stay become guests."""
    draining = txn.segments.draining
    for name in names:
        entry = txn.find(name)
        if entry is None or entry.segment not in draining:
            continue
        if _must_stay(txn, name, entry, draining[entry.segment].priority, wall_s):
            txn.segments.guests.add(entry)
        elif txn.drop(name):
            txn.left(name, entry.slot_class)


def evict_guests(txn: WriteTxn, names: Iterable[bytes], priority: int, wall_s: Wall) -> None:
    """Evict those of `names` that are guests and need not stay."""
    for name in names:
        entry = txn.find(name)
        if entry is None or not txn.segments.guests.has(entry) or _must_stay(txn, name, entry, priority, wall_s):
            continue
        if txn.drop(name):
            txn.left(name, entry.slot_class)


def lodge(txn: WriteTxn, writes: Iterable[SlotReservation]) -> None:
    """Those of the writes that have not ended, and lie in draining segments, become guests."""
    for write in writes:
        txn.segments.lodge(write)


def _must_stay(txn: WriteTxn, name: bytes, entry: Entry, priority: int, wall_s: Wall) -> bool:
    """Whether a block does not leave for one of that priority."""
    dear = priority_in(entry.rank) > priority and not is_over(txn, name, entry, wall_s)
    return dear or txn.must_stay(name, wall_s)


def _entry(index: Index, txn: Any, name: bytes) -> Entry | None:
    raw = txn.get(index.layout.key(name))
    try:
        return None if raw is None else Entry.decode(name, raw)
    except CorruptError:
        return None


def _is_live(index: Index, txn: Any, name: bytes, wall_s: Wall) -> bool:
    entry = _entry(index, txn, name)
    return entry is not None and entry.life.ends(Depth.G3) >= wall_s  # as in `is_over`
