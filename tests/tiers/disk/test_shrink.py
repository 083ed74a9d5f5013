"""A store becomes smaller in slices while it is used: nothing is wrong or lost for good, whatever comes between."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.tiers.class_store import NOW, ClassStore, name_of, new_block
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import allocator, drain, quarantine, recovery, shrink
from kvtier.tiers.disk.allocator import FREE_ROWS_PER_TXN, Promise
from kvtier.tiers.disk.geometry import Geometry
from kvtier.tiers.disk.group_commit import CommitJob
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.records import GEOMETRY_KEY, SLOT_ALIGN, Entry, SlotReservation
from kvtier.tiers.disk.shrink import EVICTIONS_PER_TXN, Shrink
from kvtier.tiers.disk.slab import Slab, SystemCalls
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss, Stored
from kvtier.times import Wall
from tests.support.waiting import until
from tests.tiers.disk.support.store import BLOCK, get, opened, put, shrunk, slabs
from tests.tiers.disk.support.subprocesses import ROOT, environment, program

NAMESPACE = sample_namespace(BLOCK)
SEGMENT = 16
"""Blocks of a segment."""
LARGE, SMALL = 96, 40
"""Blocks that a store has room for: six segments, two and a half."""


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SEGMENT_BYTES_SMALL", SEGMENT * BLOCK)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "EVICTIONS_PER_TXN", 8)
    monkeypatch.setattr(allocator, "FREE_ROWS_PER_TXN", 12)


def stop_after(patch: pytest.MonkeyPatch, steps: int, before: Callable[[int], None] = lambda number: None) -> None:
    """Let a process do so many steps, with `before` each."""
    real = Shrink.due_jobs

    def due_jobs(self: Shrink, index: Index | None) -> list[CommitJob[Any]]:
        if self.busy and self.steps == steps:
            self.stop()
        if self.busy:
            before(self.steps)
        return real(self, index)

    patch.setattr(Shrink, "due_jobs", due_jobs)


async def fill(tier: DiskTier, blocks: int, seed: int) -> None:
    """Put more than there is room for; it has as many blocks then."""
    for number in range(2 + blocks // 32):
        assert set(await put(tier, chain_of(NAMESPACE, 32, seed + number))) == {Stored.STORED}
    assert tier.usage().blocks == blocks, "slots are lost"


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in slabs(path))


@pytest.mark.usefixtures("small_segments", "small_slices")
async def test_a_kill_between_two_slices_loses_no_slot_and_leaves_no_block_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the store before each step is what a process that is killed there leaves. It goes on to shrink, or has
    the old capacity, whole."""
    path, clock, copies = tmp_path / "g3", VirtualClock(), list[Path]()
    async with opened(path, LARGE, clock=clock) as tier:
        await fill(tier, LARGE, 1)

    def copy(number: int) -> None:
        copies.append(tmp_path / f"killed{number}")
        subprocess.run(["cp", "-r", path, copies[-1]], check=True)

    with monkeypatch.context() as patch:
        stop_after(patch, 1000, copy)
        async with opened(path, SMALL, clock=clock) as tier:
            await shrunk(tier)
            assert tier.usage().blocks == SMALL and size_of(path) == SMALL * BLOCK
    assert len(copies) > 15
    larger = 0
    for number, left in enumerate(copies):
        again = left.with_suffix(".grown")
        if number % 3 == 0:
            subprocess.run(["cp", "-r", left, again], check=True)
        async with opened(left, SMALL, clock=clock) as tier:
            with tier._store.index.reading() as txn:  # what an earlier release goes by
                larger += Geometry.decode(txn.get(GEOMETRY_KEY)).capacity == LARGE * BLOCK
            await shrunk(tier)
            assert tier.usage().blocks == SMALL and size_of(left) == SMALL * BLOCK
            await fill(tier, SMALL, 40)
        if number % 3 == 0:
            async with opened(again, LARGE, clock=clock) as tier:
                assert not tier._store.shrink.active and tier.usage().blocks >= SMALL
                tier.check()
                await fill(tier, LARGE, 80)
    assert larger == len(copies), "it has the old capacity until nothing lies beyond the new one"


async def test_no_transaction_of_a_store_that_shrinks_works_on_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped, taken = Counter[int](), Counter[allocator.Segments]()
    drop, trim = WriteTxn.drop, allocator.Segments._take_back

    def dropping(self: WriteTxn, name: bytes) -> bool:
        dropped[self.tick] += 1
        return drop(self, name)

    def taking(self: allocator.Segments, segment: int, slot: int) -> bool:
        taken[self] += 1
        return trim(self, segment, slot)

    clock, blocks = VirtualClock(), 2048
    async with opened(tmp_path / "g3", blocks, clock=clock) as tier:
        for seed in range(2):
            await put(tier, chain_of(NAMESPACE, 1024, seed))
        assert tier.usage().blocks == blocks
    monkeypatch.setattr(WriteTxn, "drop", dropping)
    monkeypatch.setattr(allocator.Segments, "_take_back", taking)
    async with opened(tmp_path / "g3", 600, clock=clock) as tier:
        assert not dropped, "it is open before a block leaves"
        await shrunk(tier)
        tier.check()
        assert dropped.total() >= blocks - 600
    assert max(dropped.values()) <= EVICTIONS_PER_TXN
    assert taken.total() >= blocks - 600 and max(taken.values()) <= FREE_ROWS_PER_TXN + 1


@pytest.mark.usefixtures("small_segments", "small_slices")
async def test_a_store_is_used_while_it_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks beyond the capacity are read until they leave. What is put takes slots within it."""
    path, clock, chain = tmp_path / "g3", VirtualClock(), chain_of(NAMESPACE, LARGE)
    async with opened(path, LARGE, clock=clock) as tier:
        assert set(await put(tier, chain)) == {Stored.STORED}
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        async with opened(path, SMALL, clock=clock) as tier:
            index = tier._store.index
            for seed in range(1, 9):
                new = chain_of(NAMESPACE, 4, seed)
                assert await put(tier, new) == [Stored.STORED] * 4
                assert all(index.geometry().holds(*place) for place in places(tier, new))
                assert set(await get(tier, chain)) <= {True, Miss.ABSENT}
                tier.check()
            beyond = (await get(tier, chain))[SMALL:]
            assert beyond.count(True) >= LARGE - SMALL - 3 * 8, "they went for others"
    reads = Counter[object]()
    async with opened(path, SMALL, clock=clock) as tier:
        while tier._store.shrink.active:
            reads.update(await get(tier, chain))
        assert set(reads) <= {True, Miss.ABSENT, Miss.RACED}
        await fill(tier, SMALL, 20)


@pytest.mark.usefixtures("small_segments", "small_slices")
async def test_another_process_opens_a_store_that_shrinks_and_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "g3", VirtualClock()
    async with opened(path, LARGE, clock=clock) as tier:
        await fill(tier, LARGE, 100)
    stop_after(monkeypatch, 3)
    async with opened(path, SMALL, clock=clock) as tier:
        index = tier._store.index
        process = subprocess.Popen(
            program("concurrent_writer", path, 2.0, 1), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
        )
        try:
            while process.poll() is None:
                assert set(await put(tier, chain_of(NAMESPACE, 4, 7))) <= {Stored.STORED, Stored.PRESENT}
                assert set(await get(tier, chain_of(NAMESPACE, 4, 7))) <= {True, Miss.ABSENT, Miss.RACED}
                await asyncio.sleep(0.01)
            assert process.returncode == 0, process.communicate()[1]
        finally:
            process.kill()
            process.communicate()
        assert index.reach().capacity == index.geometry().capacity == SMALL * BLOCK >= size_of(path)
        await fill(tier, SMALL, 1 << 20)


@pytest.mark.usefixtures("small_segments")
async def test_retained_blocks_beyond_the_capacity_leave_with_their_records(tmp_path: Path) -> None:
    path, clock, chain = tmp_path / "g3", VirtualClock(), chain_of(NAMESPACE, LARGE)
    async with opened(path, LARGE, clock=clock) as tier:
        await put(tier, chain)
        assert all(await tier.retain(chain, Wall(clock.wall() + 1000)))
    async with opened(path, SMALL, clock=clock) as tier:
        await shrunk(tier)
        assert await get(tier, chain) == [True] * SMALL + [Miss.ABSENT] * (LARGE - SMALL)
        assert len(await tier.retained()) == SMALL
        assert set(await put(tier, chain_of(NAMESPACE, 4, 2))) == {Stored.FULL}, "what is left is retained still"


@pytest.mark.usefixtures("small_segments")
async def test_a_store_grows_again_while_it_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, in the same process: beyond what it had, and to less."""
    monkeypatch.setattr(shrink, "EVICTIONS_PER_TXN", 8)
    path, clock = tmp_path / "g3", VirtualClock()
    async with opened(path, LARGE, clock=clock) as tier:
        await fill(tier, LARGE, 1)
    for number, blocks in enumerate((SMALL + 20, LARGE, LARGE + 30)):
        with monkeypatch.context() as patch:
            stop_after(patch, 4)
            async with opened(path, SMALL, clock=clock) as tier:
                for _ in range(1000):
                    if tier._store.shrink._stopped:
                        break
                    await asyncio.sleep(0.01)
                tier._store.shrink._stopped = False
                patch.undo()
                assert await tier.resize(blocks * BLOCK, 0.0)
                await shrunk(tier)
                assert tier._store.index.reach().capacity == blocks * BLOCK
                await fill(tier, blocks, 20 * number)


@pytest.mark.usefixtures("small_segments")
async def test_a_file_that_cannot_be_cut_is_cut_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "RETRY_S", 0.05)
    path, clock, fails = tmp_path / "g3", VirtualClock(), [True]
    async with opened(path, LARGE, clock=clock) as tier:
        await fill(tier, LARGE, 1)
    truncate = os.truncate

    def refused(file: Path, size: int) -> None:
        if fails[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        truncate(file, size)

    monkeypatch.setattr(os, "truncate", refused)
    async with opened(path, SMALL, clock=clock) as tier:
        await asyncio.sleep(0.5)
        assert tier._store.shrink.active and size_of(path) == LARGE * BLOCK
        await fill(tier, SMALL, 60)
        fails[0] = False
        await shrunk(tier)
        assert size_of(path) == SMALL * BLOCK


@pytest.mark.usefixtures("small_segments")
async def test_a_store_with_a_budget_that_goes_out_of_use_while_it_shrinks_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer thread asks how much the next step will do, at any moment."""
    monkeypatch.setattr(quarantine, "PROBE_FIRST_S", 0.05)
    monkeypatch.setattr(Shrink, "due_jobs", lambda self, index: [])  # it shrinks on
    path, clock = tmp_path / "g3", VirtualClock()
    async with opened(path, LARGE, clock=clock) as tier:
        await fill(tier, LARGE, 1)
    async with opened(path, SMALL, clock=clock) as tier:
        store = tier._store
        store.limit_writes(tier, 1e15, time.monotonic)
        await until(lambda: store.room.busy, "it shrinks")
        for _ in range(5):
            store.quarantine("for the test")
            assert not store.room.busy and store.room.evictions() == 0
            await until(lambda: store.index_in_use is not None, "it is in use again")
            await until(lambda: store.room.busy, "it shrinks on")
        assert set(await put(tier, chain_of(NAMESPACE, 4, 7))) == {Stored.STORED}


KEPT = Wall(NOW + 100)


def places(tier: DiskTier, chain: Any) -> list[tuple[int, int, int]]:
    """(class, segment, slot) of each block that is here."""
    names = [NAMESPACE.digest + key for key in chain]
    found = zip(names, tier._store.index.find(names), strict=True)
    entries = [Entry.decode(name, raw) for name, (raw, _) in found if raw is not None]
    return [(entry.slot_class, entry.segment, entry.slot) for entry in entries]


class Shrinking:
    """An index without payload, and the steps by which it becomes smaller."""

    def __init__(self, path: Path, segments: int, segment_bytes: int) -> None:
        (path / "slab").mkdir()
        self.classes = ClassStore(path / "index", segments, segment_bytes)
        self.index = self.classes.index
        slab = Slab([path], lambda segment: self.index.geometry().size_of(segment), SystemCalls())
        self.shrink = Shrink(slab, path, lambda: True)

    def resize(self, capacity: int) -> None:
        self.index.transact(lambda txn: txn.resize(capacity))
        self.shrink.begin(self.index)

    def step(self) -> None:
        """As the writer thread does it."""
        self.shrink._due_at = 0.0
        for job in self.shrink.due_jobs(self.index):
            assert job.future.set_running_or_notify_cancel()
            job.future.set_result(self.index.transact(job.work))

    def finish(self, *, drain: bool = True) -> bool:
        for _ in range(500):
            if not self.shrink.active:
                return True
            self.step()
            self.classes.transact(lambda txn: None, drain=drain)
        return False


def test_what_is_written_or_set_aside_beyond_the_capacity_holds_a_store_up_until_it_ends(tmp_path: Path) -> None:
    """A reservation, and a bad place under trial; then a place is forgotten, as are the slots."""
    store = Shrinking(tmp_path, 4, 8 * SLOT_ALIGN)
    for number in range(30):
        assert store.classes.put((1, number)) is Stored.STORED

    def reserve(txn: WriteTxn) -> SlotReservation:
        slot = txn.reserve(new_block((1, 100)), NOW)
        assert isinstance(slot, SlotReservation)
        return slot

    written, bad = store.index.transact(reserve), store.index.transact(reserve)
    assert (written.segment, bad.segment) == (3, 3)

    def spoil(txn: WriteTxn) -> None:
        txn.segments.bad.add(bad.segment, 1, bad.slot, 0, Wall(0.0))
        txn.release(bad)

    store.index.transact(spoil)
    store.resize(12 * SLOT_ALIGN)
    assert not store.finish()
    store.index.check()
    assert store.classes.resident(1, range(30)) == 12 and store.index.reach().capacity == 32 * SLOT_ALIGN
    store.index.transact(lambda txn: txn.publish(written, new_block((1, 100)), NOW))
    assert store.finish()
    store.index.check()
    assert store.index.reach().capacity == 12 * SLOT_ALIGN and store.index.bad_places() == 0
    assert store.classes.resident(1, [100]) == 0
    store.resize(32 * SLOT_ALIGN)
    for number in range(200, 240):
        assert store.classes.put((1, number)) is Stored.STORED
    assert store.index.usage()[0] == 32
    store.index.check()


@pytest.mark.parametrize("seed", range(4))
def test_traffic_of_two_sizes_while_the_capacity_changes(tmp_path: Path, seed: int) -> None:
    """Segments that drain for another size, guests in them, retained blocks: the books are right after each change, and
    with its first capacity the store holds as much as it did."""
    rng, segments, segment = random.Random(seed), 6, 16
    whole = segments * segment * SLOT_ALIGN
    store = Shrinking(tmp_path, segments, segment * SLOT_ALIGN)
    classes, retained, numbers = store.classes, set[bytes](), iter(range(10**6))

    def use(count: int) -> None:
        slot_cls = rng.choice((1, 1, 4))
        for _ in range(count):
            access = slot_cls, next(numbers)
            if classes.put(access) is Stored.STORED and rng.random() < 0.05:
                names = [name_of(access)]
                store.index.transact(partial(WriteTxn.retain, names=names, until=KEPT, served=None, wall_s=NOW))
                retained.update(names)

    for _ in range(6):
        use(70)
        store.resize(rng.randrange(2 * segment * SLOT_ALIGN, whole, SLOT_ALIGN))
        for _ in range(rng.randrange(30)):
            if rng.random() < 0.7:
                store.step()
            else:
                use(4)
        store.index.check()
        if rng.random() < 0.5:
            store.index.transact(lambda txn: txn.release_retained(list(retained)))
            assert store.finish()
            assert store.index.reach() == store.index.geometry()
            store.index.check()
        if rng.random() < 0.5:
            store.resize(whole)
            store.index.check()
    store.index.transact(lambda txn: txn.release_retained(list(retained)))
    store.resize(whole)
    assert store.finish()
    for number in range(2 * segments * segment):
        assert classes.put((1, 10**7 + number)) is Stored.STORED
    store.index.check()
    assert store.index.usage()[1] >= whole - segment * SLOT_ALIGN, "slots are lost"


def test_a_segment_beyond_the_capacity_drains_for_no_other_size(tmp_path: Path) -> None:
    store = Shrinking(tmp_path, 4, 8 * SLOT_ALIGN)
    for number in range(32):
        assert store.classes.put((1, number)) is Stored.STORED
    store.resize(20 * SLOT_ALIGN)
    drains = [store.index.transact(lambda txn, one=one: txn.segments.drain(one, 1, Promise(4, 50))) for one in range(4)]
    assert drains == [True, True, True, False]


def test_a_segment_that_drains_and_lies_partly_beyond_the_capacity_does_not_hold_a_store_up(tmp_path: Path) -> None:
    """Where nobody drains it further, as while the capacity is changed by hand."""
    store = Shrinking(tmp_path, 4, 8 * SLOT_ALIGN)
    for number in range(32):
        assert store.classes.put((1, number)) is Stored.STORED
    assert store.index.transact(lambda txn: txn.segments.drain(2, 1, Promise(4, 50)))
    store.resize(20 * SLOT_ALIGN)
    assert store.finish(drain=False)
    assert store.index.reach() == store.index.geometry() and store.classes.draining() == [2]
    store.index.check()
    for _ in range(2 * drain.STEPS_PER_LOOK):
        store.classes.transact(lambda txn: None)
    assert store.classes.resident(1, range(32)) == 16 and store.classes.class_of(2) == 4
    store.resize(32 * SLOT_ALIGN)
    for number in range(100, 164):
        assert store.classes.put((1, number)) is Stored.STORED
    assert store.index.usage()[0] == 32, "slots are lost"
    store.index.check()


def test_a_guest_within_the_capacity_on_a_slot_that_is_cut_does_not_hold_a_store_up(tmp_path: Path) -> None:
    store = Shrinking(tmp_path, 4, 8 * SLOT_ALIGN)
    for number in range(32):
        assert store.classes.put((1, number)) is Stored.STORED
    everything = [name_of((1, number)) for number in range(32)]
    (kept,) = [name for number, name in enumerate(everything) if store.classes.place_of((1, number)) == (2, 4)]
    store.index.transact(partial(WriteTxn.retain, names=[kept], until=KEPT, served=None, wall_s=NOW))
    assert store.index.transact(lambda txn: txn.segments.drain(2, 1, Promise(4, 50)))
    store.index.transact(lambda txn: drain.evict(txn, everything, NOW))
    store.index.transact(lambda txn: None)
    assert store.classes.class_of(2) == 4 and store.classes.draining() == []
    for number in range(2):  # the second one comes past the guest
        store.classes.transact(lambda txn, number=number: store.classes.try_put(txn, (4, number)), drain=False)  # type: ignore[misc]
    store.resize(22 * SLOT_ALIGN)
    assert store.finish(drain=False)
    store.index.check()
    assert store.index.find([kept])[0][0] is not None
    store.resize(32 * SLOT_ALIGN)
    store.index.check()


def test_a_segment_that_was_to_be_filled_and_is_cut_now_hands_out_no_slot(tmp_path: Path) -> None:
    """It has never-used slots by what its class remembers, and has handed out more than it has by now."""
    store = Shrinking(tmp_path, 4, 8 * SLOT_ALIGN)
    store.resize(20 * SLOT_ALIGN)
    accesses = [*((1, number) for number in range(8)), (4, 0), (4, 1), *((1, number) for number in range(8, 12))]
    for access in accesses:
        assert store.classes.put(access) is Stored.STORED
    assert store.index.transact(lambda txn: txn.segments.drain(1, 4, Promise(1, 50)))
    store.index.transact(lambda txn: txn.drop_all([name_of((4, 0)), name_of((4, 1))]))
    assert store.classes.put((1, 100)) is Stored.STORED
    assert store.classes.place_of((1, 100)) == (1, 0), "its class fills another segment"
    store.resize(32 * SLOT_ALIGN)
    store.resize(18 * SLOT_ALIGN)
    for number in range(101, 120):
        assert store.classes.put((1, number)) is Stored.STORED
        store.index.check()
    assert store.finish()
    store.resize(32 * SLOT_ALIGN)
    for number in range(200, 232):
        assert store.classes.put((1, number)) is Stored.STORED
    store.index.check()
    assert store.index.usage()[0] == 32


def test_a_segment_too_short_for_its_size_goes_to_another_with_the_guests_that_are_within(tmp_path: Path) -> None:
    """They stay: puts of the other size waited for them to leave."""
    store = Shrinking(tmp_path, 1, 16 * SLOT_ALIGN)
    classes, kept = store.classes, [name_of((3, 0))]
    assert classes.put((3, 0)) is Stored.STORED
    store.index.transact(partial(WriteTxn.retain, names=kept, until=KEPT, served=None, wall_s=NOW))
    assert store.index.transact(lambda txn: txn.segments.drain(0, 3, Promise(5, 50)))
    store.index.transact(lambda txn: drain.evict(txn, kept, NOW))
    assert classes.class_of(0) == 5
    store.resize(4 * SLOT_ALIGN)
    assert store.finish()
    for _ in range(100):
        if found := classes.transact(lambda txn: classes.try_put(txn, (1, 0))):
            break
    assert found is Stored.STORED and classes.class_of(0) == 1
    assert classes.resident(3, [0]) == 1
    store.index.check()
