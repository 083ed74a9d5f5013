"""Which guests go back, to which slots: decided in the index alone, without a byte that is copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.tiers.class_store import NOW, ClassStore, name_of, new_block
from kvtier.tiers.disk import eviction, guests, relocation
from kvtier.tiers.disk.extents import Extent
from kvtier.tiers.disk.records import SLOT_ALIGN, Entry, FreeSlot, SlotReservation
from kvtier.tiers.disk.relocation import (
    Copied,
    Relocation,
    Relocations,
    begin_relocations,
    end_relocation,
    misplaced,
)
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall


def guests_of_two(path: Path) -> tuple[ClassStore, list[bytes]]:
    """A store with small guests in segments of larger blocks, none of which has gone back."""
    store = ClassStore(path, 8, 256 * SLOT_ALIGN)
    store.run((1, number) for number in range(8 * 256))
    kept = [name_of((1, number)) for number in range(0, 8 * 256, 64)]
    store.transact(lambda txn: txn.retain(kept, Wall(NOW + 3600), None, NOW), drain=False)
    return store, kept


def test_two_processes_that_copy_one_block_leave_it_in_one_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, kept = guests_of_two(tmp_path / "index")
    monkeypatch.setattr(relocation, "begin_relocations", lambda txn, names, wall_s: [])  # but for the test's own
    for number in range(4):
        store.put((64, number))
    with store.index.reading() as txn:
        assert {place.units for _segment, place in misplaced(txn)[0]} == {1}
    begun = [store.transact(lambda txn: begin_relocations(txn, kept, NOW), drain=False) for _ in range(2)]
    pairs = [(one, other) for one in begun[0] for other in begun[1] if one.name == other.name]
    assert pairs
    for one, other in pairs:
        assert (one.to.segment, one.to.slot) != (other.to.segment, other.to.slot)
        store.transact(lambda txn, other=other: end_relocation(txn, other, Copied.DURABLE), drain=False)
        store.transact(lambda txn, one=one: end_relocation(txn, one, Copied.DURABLE), drain=False)
        store.index.check()
        ((raw, _),) = store.index.find([one.name])
        assert raw is not None
        entry = Entry.decode(one.name, raw)
        assert (entry.segment, entry.slot) == (other.to.segment, other.to.slot)
    for one in begun[0] + begun[1]:
        store.transact(lambda txn, one=one: end_relocation(txn, one, Copied.FAILED), drain=False)
    assert not store.index.has_reservations()
    store.index.check()


def test_a_spent_budget_copies_nothing(tmp_path: Path) -> None:
    store, kept = guests_of_two(tmp_path / "index")
    with store.index.reading() as txn:
        assert misplaced(txn) == ([], None)

    def spent(txn: WriteTxn) -> None:
        txn.budget.allows = lambda size: False  # type: ignore[method-assign]
        entry = txn.find(kept[0])
        assert entry is not None
        assert txn.reserve_other(kept[0], entry, NOW) is None

    store.transact(spent, drain=False)
    before = store.index.balance().written
    store.transact(lambda txn: txn.reserve_other(kept[0], txn.find(kept[0]), NOW), drain=False)  # type: ignore[arg-type]
    assert store.index.balance().written - before >= SLOT_ALIGN, "a copy counts as written"


def test_a_copy_pushes_out_nothing_that_is_worth_more(tmp_path: Path) -> None:
    """Nor does it make its class want space of another."""
    store, kept = guests_of_two(tmp_path / "index")
    everything = [name_of((1, number)) for number in range(8 * 256)]
    store.transact(lambda txn: txn.retain(everything, Wall(NOW + 3600), None, NOW), drain=False)

    def reserve(txn: WriteTxn) -> object:
        entry = txn.find(kept[0])
        assert entry is not None
        return txn.reserve_other(kept[0], entry, NOW)

    assert store.transact(reserve, drain=False) is None
    assert not store.index.demand.waits


def test_looks_for_guests_come_to_all_of_them_in_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that lie well may be many, and the first ones."""
    store = ClassStore(tmp_path / "index", 2, 8192 * SLOT_ALIGN)

    def add(txn: WriteTxn) -> None:
        for number in range(700):
            txn.segments.guests.add(FreeSlot(8, 0, number))
        for number in range(1000, 3000):
            txn.segments.guests.add(FreeSlot(1, 0, 5000 + number))

    store.put((8, 0))
    store.transact(add, drain=False)
    monkeypatch.setattr(relocation, "GUESTS_PER_STEP", 256)
    monkeypatch.setattr(relocation, "PLACES_MAX", 512)
    reads, rows = list[int](), guests.rows

    def counted(txn: Any, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        reads.append(0)
        for row in rows(txn, prefix, start):
            reads[-1] += 1
            yield row

    monkeypatch.setattr(guests, "rows", counted)
    relocations, found = Relocations(), set[tuple[int, Extent]]()
    for _ in range(6):
        relocations.look_soon()
        while not relocations.known:
            relocations.step(store.index, NOW)
        while relocations._looks:
            relocations.step(store.index, NOW)
        places = relocations._places[1]
        assert len(places) <= 512 + 256
        found |= places
        while relocations.known:  # none of them has a block
            assert relocations.step(store.index, NOW) is None
    assert {place.first for _segment, place in found} == set(range(6000, 8000))
    assert max(reads) == 256


def test_a_search_for_a_victim_does_not_begin_anew_where_a_retained_block_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each copy costs puts a search over all that is retained."""
    monkeypatch.setattr(eviction, "SCAN_ROWS_MAX", 64)
    store = ClassStore(tmp_path / "index", 8, 64 * SLOT_ALIGN)
    store.run((1, number) for number in range(8 * 64))
    kept = [name_of((1, number)) for number in range(256)]
    store.transact(lambda txn: txn.retain(kept, Wall(NOW + 3600), None, NOW), drain=False)
    assert store.put((1, 1000)) is Stored.STORED, "the search came past them"

    def begin(txn: WriteTxn) -> Relocation:
        entry = txn.find(kept[0])
        assert entry is not None
        to = txn.reserve_other(kept[0], entry, NOW)
        assert to is not None
        return Relocation(kept[0], entry, to)

    one = store.transact(begin, drain=False)
    assert store.transact(lambda txn: txn.relocate(one.name, one.source.serial, one.to), drain=False)
    for number in range(1001, 1003):  # the first takes the slot that is free now
        assert store.transact(lambda txn, number=number: store.try_put(txn, (1, number)), drain=False) is Stored.STORED
    store.transact(lambda txn: txn.release_retained(kept), drain=False)
    store.run((1, number) for number in range(2000, 2512))
    assert store.resident(1, range(256)) == 0, "it may leave once it is retained no more"
    store.index.check()


def test_guests_take_no_segment_that_the_larger_size_could_have(tmp_path: Path) -> None:
    """Else a put that needs all there is but for their slots waits for ever: it holds nothing between two tries, so the
    segment that is free meanwhile becomes the guests', and theirs is emptied for it again."""
    store = ClassStore(tmp_path / "index", 4, 16 * SLOT_ALIGN)
    for number in range(3):
        assert store.put((3, number)) is Stored.STORED
    kept = [name_of((3, number)) for number in range(3)]
    store.transact(lambda txn: txn.retain(kept, Wall(NOW + 3600), None, NOW))

    def put(txn: WriteTxn) -> list[Stored]:
        slots = [txn.reserve(new_block((5, number)), NOW) for number in range(10)]
        waits = txn.order.cut_short or store.drain.serves(store.index, 5)
        if Stored.FULL in slots and waits:
            for slot in slots:
                if isinstance(slot, SlotReservation):
                    txn.release(slot, refund=True)
            return []
        return [
            txn.publish(slot, new_block((5, number)), NOW) if isinstance(slot, SlotReservation) else slot
            for number, slot in enumerate(slots)
        ]

    found: list[Stored] = []
    for _ in range(200):
        if found := store.transact(put):
            break
        for _ in range(12):  # copies are made before it tries again
            store.transact(lambda txn: None)
    assert found == [Stored.STORED] * 10
    assert store.resident(3, range(3)) == 3
    store.index.check()
