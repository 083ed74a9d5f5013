"""Empties segments for a class that is worth more there: chosen and searched in short reads, emptied in slices.

    choose    from whom and how much (`kvtier.tiers.disk.gifts`), when a transaction marked a demand
    survey    which segments of that class can be emptied, and which of them hold the least: its rows in `order`
    sweep     blocks of the chosen segments, ROWS_PER_STEP rows at a time; each find is evicted by the next transaction

Below the write lock there is one bounded slice of evictions per transaction. A draining segment is marked in the index,
so its free slots do not go back to its class; the next sweep takes up what another one left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kvtier.errors import CorruptError
from kvtier.retention.terms import Depth
from kvtier.tiers.disk.allocator import Geometry, Promise, promises_in
from kvtier.tiers.disk.bad_places import BadPlaces, sound_slots
from kvtier.tiers.disk.class_worth import ClassWorth, step_of, worths_in
from kvtier.tiers.disk.gifts import Gift, gifts
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.records import (
    BLOCKS,
    COUNTERS_KEY,
    GEOMETRY_KEY,
    ORDER,
    RESERVED,
    RETAINED_KEY,
    SEGMENTS,
    TIME,
    Counters,
    Entry,
    Segment,
    number_key,
    number_of,
    order_parts,
    priority_in,
    rows,
    segment_in,
    tick_in,
)
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.times import Wall

ROWS_PER_STEP = 1024
"""Rows read in one transaction: about a millisecond."""
EVICTIONS_PER_TXN = 64
STEPS_PER_LOOK = 256
"""Steps without a demand between two looks for segments that another process left draining."""
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
    next: bytes = RETAINED_KEY
    rows: int = 0
    busy: set[int] = field(default_factory=set)  # hold a block that must stay
    warmth: Counter[int] = field(default_factory=Counter)

    @property
    def giver(self) -> int:
        return self.gifts[0].giver


class Drain:
    """The emptying of segments by one process. On the writer thread; it looks only while the demand is there."""

    def __init__(self) -> None:
        self._survey: _Survey | None = None
        self._sweeps: list[int] = []  # classes whose rows are to be searched
        self._next = b""  # where in the first of them
        self._takers: set[int] = set()  # classes that the draining segments are promised to
        self._look_in = 0  # steps
        self._found = 0  # blocks, by this sweep
        self._stopped = False
        self.stuck = False
        """Whether the last sweep found nothing to evict in segments that are in use all the same: by writes."""

    def stop(self) -> None:
        """Do nothing any more; what is draining stays so for the next process. From any thread."""
        self._stopped = True

    @property
    def busy(self) -> bool:
        """Whether the next step has something to do."""
        return not self._stopped and (self._survey is not None or bool(self._sweeps))

    def serves(self, index: Index, slot_cls: int) -> bool:
        """Whether space for the class may come: its demand was not looked at, or segments are drained for it."""
        surveyed = self._survey is not None and self._survey.taker == slot_cls
        return surveyed or index.demand.must(slot_cls) or (bool(self._sweeps) and slot_cls in self._takers)

    def step(self, index: Index, wall_s: Wall) -> Work | None:
        """One short read, and what the next transaction has to do by it. Raises what reading a damaged index raises."""
        if self._stopped:
            return None
        if self._sweeps:
            return self._sweep(index, wall_s)
        if self._survey is not None:
            return self._read_on(index, wall_s)
        self._look_in -= 1
        if index.demand.waits or self._look_in < 0:
            self._look_in = STEPS_PER_LOOK
            self._choose(index)
        return None

    # Choosing.

    def _choose(self, index: Index) -> None:
        with index.reading() as txn:
            if not (index.demand.waits and self.stuck):
                self._begin_sweep(txn)
            self.stuck = False
            if self._sweeps:
                return
            geometry = Geometry.decode(txn.get(GEOMETRY_KEY))
            now = Counters.decode(txn.get(COUNTERS_KEY)).tick
            worths = worths_in(txn, geometry.capacity)
        for slot_cls, priority, must in index.demand.take() if worths else ():  # the next transaction begins to count
            taker = worths.pop(slot_cls, ClassWorth(slot_cls))
            found = gifts(taker, list(worths.values()), step_of(geometry), geometry.capacity, now, must=must)
            worths[slot_cls] = taker
            if found:
                self._survey = _Survey(slot_cls, priority, must, found)
                return
            if must:
                index.demand.refuse(slot_cls, now + 2, must=True)

    # Surveying.

    def _read_on(self, index: Index, wall_s: Wall) -> Work | None:
        survey = self._survey
        assert survey is not None
        with index.reading() as txn:
            if survey.next.startswith(RETAINED_KEY):
                self._read_retained(txn, survey, wall_s)
                return None
            prefix = number_key(ORDER, survey.giver)
            chunk = list(islice(rows(txn, prefix, survey.next), ROWS_PER_STEP))
            survey.rows += len(chunk)
            for key, name in chunk:
                _class, rank, segment, _slot = order_parts(key)
                survey.warmth[segment] += 1 + tick_in(rank)
                if priority_in(rank) > survey.priority and _is_live(txn, name, wall_s):
                    survey.busy.add(segment)
            if len(chunk) == ROWS_PER_STEP:
                survey.next = chunk[-1][0] + b"\0"
                return None
            return self._pick(index, txn, survey)

    def _read_retained(self, txn: Any, survey: _Survey, wall_s: Wall) -> None:
        chunk = list(islice(rows(txn, RETAINED_KEY, survey.next), ROWS_PER_STEP))
        for key, until in chunk:
            if TIME.unpack(until)[0] > wall_s and (entry := _entry(txn, key[len(RETAINED_KEY) :])) is not None:
                survey.busy.add(entry.segment)
        survey.next = chunk[-1][0] + b"\0" if len(chunk) == ROWS_PER_STEP else number_key(ORDER, survey.giver)

    def _pick(self, index: Index, txn: Any, survey: _Survey) -> Work | None:
        """The segments that hold the least among those that can be emptied and have a sound slot for the taker. One
        that writes or trials have slots in is taken only where there is no other, and one at a time: who knows when
        they end."""
        geometry, bad = Geometry.decode(txn.get(GEOMETRY_KEY)), BadPlaces(txn)
        written = {number_of(key[:5]) for key, _ in rows(txn, RESERVED)}
        promised = promises_in(txn).keys()
        busy = survey.busy | promised
        free = [
            number
            for number, record in ((number_of(key), Segment.decode(raw)) for key, raw in rows(txn, SEGMENTS))
            if record.slot_class == survey.giver and number not in busy
            if sound_slots(bad.of(number), survey.taker, geometry.slots_of(number, survey.taker))
        ]
        free.sort(key=lambda number: survey.warmth[number])
        gift = survey.gifts.pop(0)
        idle = [number for number in free if number not in written]
        picked = idle[: max(1, gift.size // geometry.segment_bytes)] or ([] if promised else free[:1])
        if not picked and survey.gifts:
            survey.next = number_key(ORDER, survey.giver)
            survey.warmth.clear()
            return None
        self._survey = None
        if not picked:
            now = Counters.decode(txn.get(COUNTERS_KEY)).tick
            until = now + 2 + survey.rows // ROWS_PER_TXN_REFUSED
            index.demand.refuse(survey.taker, until, must=survey.must)
            return None
        promise = Promise(survey.taker, survey.priority)
        self._sweeps, self._next, self._found, self._takers = [gift.giver], b"", 0, {survey.taker}

        def begin(txn: WriteTxn) -> None:
            for segment in picked:
                txn.segments.drain(segment, gift.giver, promise)
            if gift.level is not None:
                txn.worths.answered(survey.taker, gift.level)

        return begin

    # Sweeping.

    def _begin_sweep(self, txn: Any) -> None:
        """Search the classes of the draining segments from their coldest rows on."""
        promises = promises_in(txn)
        classes = {Segment.decode(txn.get(number_key(SEGMENTS, number))).slot_class for number in promises}
        self._sweeps, self._next, self._found = sorted(classes), b"", 0
        self._takers = {promise.slot_class for promise in promises.values()}

    def _sweep(self, index: Index, wall_s: Wall) -> Work | None:
        found: list[bytes] = []
        with index.reading() as txn:
            draining = set(promises_in(txn))
            prefix = number_key(ORDER, self._sweeps[0])
            for seen, (key, name) in enumerate(rows(txn, prefix, self._next)):
                if seen == ROWS_PER_STEP or len(found) == EVICTIONS_PER_TXN:
                    break
                self._next = key + b"\0"
                if segment_in(key) in draining:
                    found.append(name)
            else:
                self._sweeps, self._next = self._sweeps[1:], b""
                if not draining:
                    self._sweeps = []
                used = [number for number in draining if Segment.decode(txn.get(number_key(SEGMENTS, number))).used]
                self.stuck = bool(used) and not self._found and not found and not self._sweeps
            self._found += len(found)
        return (lambda txn: evict(txn, found, wall_s)) if found else None


def evict(txn: WriteTxn, names: Iterable[bytes], wall_s: Wall) -> None:
    """Evict those of `names` that lie in draining segments. A segment with a block that must stay is kept whole."""
    draining = txn.segments.draining
    for name in names:
        entry = txn.find(name)
        if entry is None or entry.segment not in draining:
            continue
        dear = priority_in(entry.rank) > draining[entry.segment].priority and txn.is_servable(name, entry.life, wall_s)
        if dear or txn.must_stay(name, wall_s):
            txn.keep(entry.segment)
        elif txn.drop(name):
            txn.left(name, entry)


def _entry(txn: Any, name: bytes) -> Entry | None:
    raw = txn.get(BLOCKS + name)
    try:
        return None if raw is None else Entry.decode(name, raw)
    except CorruptError:
        return None


def _is_live(txn: Any, name: bytes, wall_s: Wall) -> bool:
    entry = _entry(txn, name)
    return entry is not None and entry.life.servable(Depth.G3, wall_s)
