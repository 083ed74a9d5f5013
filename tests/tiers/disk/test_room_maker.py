"""Room for a class is made step by step, and not at all where the budget for writes is spent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtier.bench.tiers.class_store import NOW, ClassStore
from kvtier.tiers.disk.records import SLOT_ALIGN
from kvtier.tiers.disk.reserved_slots import ReservedSlots
from kvtier.tiers.disk.room_maker import RoomMaker
from kvtier.tiers.disk.shrink import Shrink
from kvtier.tiers.disk.slab import Slab, SystemCalls


def room_of(path: Path, may_write: Callable[[], bool]) -> RoomMaker:
    """Of a store that does not shrink."""
    shrink = Shrink(Slab([path], lambda segment: 0, SystemCalls()), path, may_write)
    return RoomMaker(ReservedSlots(), shrink, lambda: NOW, may_write, lambda some: None)


def test_a_spent_budget_makes_no_room_and_keeps_no_thread_busy(tmp_path: Path) -> None:
    store, allowed = ClassStore(tmp_path / "index", 8, 64 * SLOT_ALIGN), [True]
    room = room_of(tmp_path, lambda: allowed[0])
    store.run((1, number) for number in range(8 * 64))
    while not store.draining():
        store.transact(lambda txn: store.try_put(txn, (64, 0)), drain=False)
        assert room.serves(store.index, 64)
        for job in room.due_jobs(store.index):
            store.transact(job.work, drain=False)
    assert room.busy
    allowed[0] = False
    assert room.due_jobs(store.index) == []
    assert not room.busy, "it would be asked again at once, for ever"
    assert not room.serves(store.index, 64)
    allowed[0] = True
    while store.draining():
        for job in room.due_jobs(store.index):
            store.transact(job.work, drain=False)
    assert store.resident(1, range(8 * 64)) == 7 * 64


def test_no_step_is_taken_without_an_index_or_after_the_end(tmp_path: Path) -> None:
    store = ClassStore(tmp_path / "index", 8, 64 * SLOT_ALIGN)
    room = room_of(tmp_path, lambda: True)
    store.run((1, number) for number in range(8 * 64))
    store.transact(lambda txn: store.try_put(txn, (64, 0)), drain=False)
    assert room.due_jobs(None) == [] and not room.busy
    room.stop()
    for _ in range(100):
        assert room.due_jobs(store.index) == [] and not room.busy
    assert store.draining() == []
