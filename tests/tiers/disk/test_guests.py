"""Blocks and writes that stay in a segment of another class: no two things in one place, and no place lost."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import lmdb
import pytest

from kvtier.bench.tiers.class_store import NOW, ClassStore, name_of, new_block
from kvtier.retention.terms import PRIORITY
from kvtier.tiers.disk.allocator import Promise
from kvtier.tiers.disk.bad_places import DAY_S
from kvtier.tiers.disk.class_report import class_report
from kvtier.tiers.disk.drain import Drain, evict, lodge
from kvtier.tiers.disk.extents import Extent, clear_slots
from kvtier.tiers.disk.guests import extent_of, guests_in
from kvtier.tiers.disk.records import RESERVED, SLOT_ALIGN, Entry, SlotReservation
from kvtier.tiers.disk.trials import Trial, begin_trials, drop_unreadable, end_trial
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall

CLASSES = (1, 3, 8)
SEGMENTS, UNITS = 8, 50
"""Neither is a segment a whole number of slots of each class, nor a slot one of another's."""


@pytest.fixture(autouse=True)
def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine stops here."""
    environment = lmdb.open
    monkeypatch.setattr(lmdb, "open", lambda *args, **kwargs: environment(*args, **kwargs | {"sync": False}))


@pytest.mark.parametrize("seed", range(20))
def test_clear_slots_are_those_that_nothing_overlaps(seed: int) -> None:
    rng = random.Random(seed)
    slot_cls, slots = rng.randint(1, 9), rng.randint(0, 12)
    extents = [Extent(rng.randrange(110), rng.randint(1, 12)) for _ in range(rng.randrange(8))]
    taken = {slot for extent in extents for slot in extent.slots(slot_cls)}
    assert clear_slots(extents, slot_cls, slots) == sum(slot not in taken for slot in range(slots))
    for extent in extents:
        units = range(extent.first, extent.first + extent.units)
        assert set(extent.slots(slot_cls)) == {unit // slot_cls for unit in units}


def holders(store: ClassStore) -> list[tuple[int, Extent]]:
    """Where the blocks and the writes lie."""
    with store.index.reading() as txn:
        entries = [Entry.decode(name, raw) for name, raw in store.index.layout.entries(txn)]
    writes = [SlotReservation.decode(key, raw) for key, raw in store.index.rows(RESERVED)]
    return sorted((held.segment, extent_of(held)) for held in [*entries, *writes])


def check(store: ClassStore) -> None:
    """The index agrees with itself, and no two things overlap."""
    store.index.check()
    for (segment, place), (other, after) in pairwise(holders(store)):
        assert segment != other or place.first + place.units <= after.first


class Life:
    """Random work on a store; `writes` are under way, as (reservation, number)."""

    def __init__(self, path: Path, seed: int) -> None:
        self.store = ClassStore(path, SEGMENTS, UNITS * SLOT_ALIGN)
        self.rng = random.Random(seed)
        self.writes: list[tuple[SlotReservation, int]] = []
        self.trials: list[Trial] = []
        self.number = 0
        self.drains = [Drain(), Drain()]  # of two processes

    def step(self) -> None:
        self.store.drain = self.rng.choice(self.drains)
        todo = (self.put, self.put, self.put, self.retain, self.release, self.begin, self.end, self.drop, self.trial)
        self.rng.choice((*todo, self.restart))()

    def _some(self) -> tuple[int, int]:
        return self.rng.choice(CLASSES), self.rng.randrange(max(0, self.number - 300), self.number + 1)

    def put(self) -> None:
        """Blocks of one transaction push out none of their own, so they want space of other classes."""
        slot_cls, count = self.rng.choice(CLASSES), self.rng.randrange(1, 120)
        chosen = range(self.number, self.number + count // slot_cls)
        self.number = chosen.stop
        for _ in range(self.rng.randrange(1, 60)):
            results = self.store.transact(lambda txn: {self.store.try_put(txn, (slot_cls, one)) for one in chosen})
            assert results <= {None, Stored.STORED, Stored.PRESENT, Stored.FULL}
            if None not in results:
                return

    def retain(self) -> None:
        names = [name_of(self._some()) for _ in range(60)]
        self.store.transact(lambda txn: txn.retain(names, Wall(NOW + 3600), None, NOW))

    def release(self) -> None:
        names = [name_of((cls, number)) for cls in CLASSES for number in range(self.number) if self.rng.random() < 0.5]
        self.store.transact(lambda txn: txn.release_retained(names))

    def begin(self) -> None:
        if len(self.writes) < 12:
            found = self.store.transact(lambda txn: txn.reserve_slots(self.rng.choice(CLASSES), self.rng.randrange(4)))
            self.writes += [(slot, self.number + 1 + place) for place, slot in enumerate(found)]
            self.number += len(found)

    def end(self) -> None:
        if self.writes:
            slot, number = self.writes.pop(self.rng.randrange(len(self.writes)))
            block = new_block((slot.slot_class, number))
            if self.rng.random() < 0.5:
                self.store.transact(lambda txn: txn.publish(slot, block, NOW))
            else:
                self.store.transact(lambda txn: txn.release(slot))

    def drop(self) -> None:
        names = [name_of(self._some()) for _ in range(10)]
        self.store.transact(lambda txn: txn.drop_all(names))

    def trial(self) -> None:
        if self.trials:
            trial, sound = self.trials.pop(), self.rng.random() < 0.8
            self.store.transact(lambda txn: end_trial(txn, trial, sound=sound))
            return
        name = name_of(self._some())
        ((raw, _),) = self.store.index.find([name])
        if raw is not None:
            begun = [self.store.transact(lambda txn: drop_unreadable(txn, name, raw, 2, NOW))]
        else:
            begun = list(self.store.transact(lambda txn: begin_trials(txn, Wall(NOW + DAY_S))))
        self.trials += [one for one in begun if isinstance(one, Trial)]

    def restart(self) -> None:
        """As after a kill: what was under way is taken back, and what was known is forgotten."""
        if self.rng.random() < 0.2:
            self.drains[0] = Drain()
            held = [slot for slot, _number in self.writes] + [
                one for trial in self.trials for one in trial.reservations
            ]
            self.store.transact(lambda txn: [txn.release(slot) for slot in held])
            self.writes, self.trials = [], []


def live(path: Path, seed: int, steps: int) -> int:
    """Returns how many guests were seen."""
    life, seen = Life(path, seed), 0
    for _ in range(steps):
        life.step()
        check(life.store)
        with life.store.index.reading() as txn:
            seen += len(guests_in(txn))
    for slot, _number in life.writes:
        life.store.transact(lambda txn, slot=slot: txn.release(slot), drain=False)  # type: ignore[misc]
    for trial in life.trials:
        life.store.transact(lambda txn, trial=trial: end_trial(txn, trial, sound=True), drain=False)  # type: ignore[misc]
    classes = {one["slot_bytes"] // SLOT_ALIGN: one["used_bytes"] for one in class_report(life.store.index)}
    held = [place.units for _segment, place in holders(life.store)]
    for slot_cls in CLASSES:
        assert classes.get(slot_cls, 0) == sum(units for units in held if units == slot_cls) * SLOT_ALIGN
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_nothing_overlaps_and_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    assert live(tmp_path / "index", seed, 150) > 20


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 110))
def test_nothing_overlaps_and_nothing_is_lost_for_long(tmp_path: Path, seed: int) -> None:
    assert live(tmp_path / "index", seed, 2000) > 100


def test_a_guest_whose_class_has_the_segment_again_leaves_its_number_to_the_write_that_has_it(tmp_path: Path) -> None:
    """A write of another class is a guest with that number, and its reservation must not be written over."""
    store = ClassStore(tmp_path / "index", 1, UNITS * SLOT_ALIGN)

    def give_segment(giver: int, taker: int) -> None:
        store.transact(lambda txn: txn.segments.drain(0, giver, Promise(taker, PRIORITY)), drain=False)
        store.transact(lambda txn: lodge(txn, txn.reservations.all()), drain=False)
        assert store.class_of(0) == taker

    for number in range(3):
        assert store.put((1, number)) is Stored.STORED
    kept = [name_of((1, 1))]
    store.transact(lambda txn: txn.retain(kept, Wall(NOW + 3600), None, NOW), drain=False)
    store.transact(lambda txn: txn.segments.drain(0, 1, Promise(3, PRIORITY)), drain=False)
    store.transact(lambda txn: evict(txn, [name_of((1, number)) for number in range(3)], NOW), drain=False)
    assert store.class_of(0) == 3 and store.resident(1, range(3)) == 1
    writes = store.transact(lambda txn: txn.reserve_slots(3, 5), drain=False)
    write = next(one for one in writes if one.slot == 1)
    store.transact(lambda txn: [txn.release(one) for one in writes if one is not write], drain=False)
    give_segment(3, 1)
    store.transact(lambda txn: txn.release_retained(kept), drain=False)
    check(store)

    def put(number: int) -> Stored | None:
        return store.transact(lambda txn: store.try_put(txn, (1, number)), drain=False)

    for number in range(10, 60):
        assert put(number) is Stored.STORED
        check(store)
    assert not store.resident(1, [1])
    assert store.transact(lambda txn: txn.publish(write, new_block((3, 0)), NOW), drain=False) is Stored.STORED
    check(store)


def test_blocks_in_a_third_classs_segment_leave_for_a_class_that_can_store_nothing(tmp_path: Path) -> None:
    """They lie in nobody's way but the one's that has no slot, and neither class's segments are to be had."""
    store = ClassStore(tmp_path / "index", 1, UNITS * SLOT_ALIGN)
    for number in range(UNITS):
        assert store.put((1, number)) is Stored.STORED
    slots = {number: store.place_of((1, number))[1] for number in range(UNITS)}
    kept = [name_of((1, number)) for number, slot in slots.items() if slot not in (3, 4, 5)]
    store.transact(lambda txn: txn.retain(kept, Wall(NOW + 3600), None, NOW))
    assert store.put((3, 0)) is Stored.STORED
    assert store.class_of(0) == 3 and store.resident(1, range(UNITS)) == UNITS - 3
    assert store.put((8, 0)) is Stored.FULL
    store.transact(lambda txn: txn.release_retained(kept))
    assert store.put((8, 0)) is Stored.STORED
    check(store)
