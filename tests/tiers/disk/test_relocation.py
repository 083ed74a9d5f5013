"""Guests go back among blocks of their own size: the same bytes at any moment, and whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey, scope_of_key
from kvtier.testing import VirtualClock
from kvtier.tiers.data_keys import DataKeys
from kvtier.tiers.disk import idle_work, quarantine, recovery
from kvtier.tiers.disk.guests import guests_in
from kvtier.tiers.disk.records import Entry, SlotReservation
from kvtier.tiers.disk.relocation import (
    Copied,
    Relocation,
    copy_block,
    end_relocation,
    misplaced,
)
from kvtier.tiers.disk.slab import DRAFT, Slab
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss, Stored
from tests.support.waiting import until
from tests.tiers.disk.support.bad_medium import BadMedium
from tests.tiers.disk.support.crash_mixed import CAPACITY as CAPACITY_OF_KILLED
from tests.tiers.disk.support.crash_mixed import both as opened_both
from tests.tiers.disk.support.crash_relocation import KEPT as KEPT_OF_KILLED
from tests.tiers.disk.support.keys import sample_keys
from tests.tiers.disk.support.store import get, opened, put
from tests.tiers.disk.support.subprocesses import program, run
from tests.tiers.disk.test_classes import CAPACITY, FULL_SMALL, LARGE, SEGMENT, SMALL, fill, keys

KEPT = FULL_SMALL[::8]
"""One on each larger slot."""
Meanwhile = Callable[["Scene", Relocation], None]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SEGMENT_BYTES_SMALL", SEGMENT)
    monkeypatch.setattr(quarantine, "PROBE_FIRST_S", 0.005)


@contextlib.asynccontextmanager
async def two_sizes(path: Path, clock: VirtualClock, **options: Any) -> AsyncIterator[tuple[DiskTier, DiskTier]]:
    """One store, for small blocks and for larger ones."""
    async with (
        opened(path, CAPACITY // SMALL, block_bytes=SMALL, clock=clock, **options) as small,
        opened(path, CAPACITY // LARGE, block_bytes=LARGE, clock=clock, **options) as large,
    ):
        yield small, large


class Scene:
    """A store full of small blocks, of which KEPT are retained. `run` stores larger ones, and calls `meanwhile` on an
    I/O thread, before or after the first copy."""

    def __init__(self, small: DiskTier, large: DiskTier, medium: BadMedium, path: Path) -> None:
        self.small, self.large, self.medium, self.path = small, large, medium, path
        self.copied: list[Relocation] = []
        self.loop = asyncio.get_running_loop()

    def transact(self, work: Callable[[WriteTxn], object]) -> None:
        self.small._store.submit(work).future.result(10)

    def wait(self, verb: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await verb

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(10)

    async def run(self, monkeypatch: pytest.MonkeyPatch, meanwhile: Meanwhile, *, before: bool, count: int = 4) -> None:
        def copy(slab: Slab, one: Relocation) -> Copied:
            self.copied.append(one)
            first = len(self.copied) == 1
            if first and before:
                meanwhile(self, one)
            done = copy_block(slab, one)
            if first and not before:
                meanwhile(self, one)
            return done

        monkeypatch.setattr(idle_work, "copy_block", copy)
        await fill(self.small, FULL_SMALL)
        assert all(await self.small.retain(KEPT, until=self.small._clock.wall() + 3600))
        for index in range(count):
            with contextlib.suppress(TierError):  # it may be opened anew
                await put(self.large, keys(LARGE, count), [index])
        await until(lambda: bool(self.copied) and all(one.ended for one in self.copied), "copies end")

    def place_of(self, name: bytes) -> tuple[int, int]:
        ((raw, _),) = self.small._store.index.find([name])
        assert raw is not None
        entry = Entry.decode(name, raw)
        return entry.segment, entry.slot

    async def settled(self) -> None:
        """Nothing is reserved for good, and the index agrees with itself."""
        store = self.small._store
        await until(lambda: store.index_in_use is not None, "it is in use")
        store.reserved.return_held()
        store._writer.wake()
        await until(lambda: not store.index.has_reservations(), "a slot was leaked")
        self.small.check()


async def scene(
    path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Meanwhile, *, before: bool = False,
    encryption: DataKeys | None = None, count: int = 4,
) -> tuple[Relocation, bool | Miss]:  # fmt: skip
    """What was copied first, and what a read of it says in the end. All other retained blocks are served."""
    medium, clock = BadMedium(), VirtualClock()
    async with two_sizes(path, clock, calls=medium, keys=encryption) as (small, large):
        here = Scene(small, large, medium, path)
        await here.run(monkeypatch, meanwhile, before=before, count=count)
        await here.settled()
        one = here.copied[0]
        found = dict(zip(KEPT, await get(small, KEPT), strict=True))
        mine = found.pop(key_of(one))
        assert set(found.values()) == {True}, found
        await here.settled()
        return one, mine


def key_of(one: Relocation) -> BlockKey:
    return next(key for key in KEPT if one.name.endswith(key))


def entries_at_the_end(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """Of blocks whose copies were published or given up, as that left them."""
    seen: list[Entry] = []

    def end(txn: WriteTxn, one: Relocation, copied: Copied) -> bool:
        moved = end_relocation(txn, one, copied)
        entry = txn.find(one.name)
        assert entry is not None
        seen.append(entry)
        return moved

    monkeypatch.setattr(idle_work, "end_relocation", end)
    return seen


def nothing(scene: Scene, one: Relocation) -> None:
    pass


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_guest_is_read_from_its_new_slot_and_the_old_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    medium, clock = BadMedium(), VirtualClock()
    encryption = sample_keys() if encrypted else None
    async with two_sizes(tmp_path / "g3", clock, calls=medium, keys=encryption) as (small, large):
        here = Scene(small, large, medium, tmp_path / "g3")
        await here.run(monkeypatch, nothing, before=True)

        def are_back() -> bool:
            with small._store.index.reading() as txn:
                return not misplaced(txn)[0] and not guests_in(txn)

        await until(are_back, "the last of them are copied")
        for one in here.copied:
            assert here.place_of(one.name) == (one.to.segment, one.to.slot)
        await until(lambda: small.counters()["relocated_blocks"] == len(here.copied), "they are counted")
        assert await get(small, KEPT) == [True] * len(KEPT)
        assert True in await get(large, keys(LARGE, 4))
        until_then = await small.retained()
        assert set(until_then) == set(KEPT), "they are still retained"
        await here.settled()


async def test_a_block_that_is_evicted_meanwhile_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(scene: Scene, one: Relocation) -> None:
        scene.transact(lambda txn: txn.drop(one.name))

    assert (await scene(tmp_path / "g3", monkeypatch, drop))[1] is Miss.ABSENT


async def test_a_source_that_another_block_has_by_now_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot was given away before the copy read it. The bytes are another's, and it is nobody's damage."""

    def replace(scene: Scene, one: Relocation) -> None:
        scene.transact(lambda txn: txn.drop(one.name))
        file = scene.small._store.slab.path_of(one.source.segment)
        with file.open("r+b") as slab:
            slab.seek(one.source.offset)
            slab.write(b"\x55" * SMALL)
        assert scene.wait(put(scene.small, FULL_SMALL, [FULL_SMALL.index(key_of(one))])) == [Stored.STORED]

    assert (await scene(tmp_path / "g3", monkeypatch, replace, before=True))[1] is True


async def test_a_block_that_is_stored_anew_meanwhile_stays_where_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[tuple[int, int]] = []

    def store_anew(scene: Scene, one: Relocation) -> None:
        scene.transact(lambda txn: txn.drop(one.name))
        assert scene.wait(put(scene.small, FULL_SMALL, [FULL_SMALL.index(key_of(one))])) == [Stored.STORED]
        places.append(scene.place_of(one.name))

    seen = entries_at_the_end(monkeypatch)
    one, found = await scene(tmp_path / "g3", monkeypatch, store_anew)
    assert found is True
    assert places == [(seen[0].segment, seen[0].slot)] != [(one.to.segment, one.to.slot)]


async def test_a_use_meanwhile_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[int] = []

    def use(scene: Scene, one: Relocation) -> None:
        scene.transact(lambda txn: txn.renew(one.name, [scene.small._clock.wall()], txn.tick))
        ((raw, _),) = scene.small._store.index.find([one.name])
        assert raw is not None
        ranks.append(Entry.decode(one.name, raw).rank)

    seen = entries_at_the_end(monkeypatch)
    one, found = await scene(tmp_path / "g3", monkeypatch, use)
    assert found is True
    assert (seen[0].segment, seen[0].slot) == (one.to.segment, one.to.slot)
    assert seen[0].rank == ranks[0] > one.source.rank


async def test_a_purge_meanwhile_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medium, clock = BadMedium(), VirtualClock()
    async with two_sizes(tmp_path / "g3", clock, calls=medium) as (small, large):

        def purge(scene: Scene, one: Relocation) -> None:
            scene.wait(scene.small.purge(scope_of_key(KEPT[0]), clock.wall()))

        here = Scene(small, large, medium, tmp_path / "g3")
        await here.run(monkeypatch, purge, before=False)
        await here.settled()
        assert not {True} & set(await get(small, FULL_SMALL))


async def test_damage_at_the_source_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(scene: Scene, one: Relocation) -> None:
        file = scene.small._store.slab.path_of(one.source.segment)
        with file.open("r+b") as slab:
            slab.seek(one.source.offset + 100)
            slab.write(b"\x55")

    assert (await scene(tmp_path / "plain", monkeypatch, damage, before=True))[1] is Miss.ABSENT
    found = (await scene(tmp_path / "encrypted", monkeypatch, damage, before=True, encryption=sample_keys()))[1]
    assert found is Miss.CORRUPT, "who has the key finds it out"


@pytest.mark.parametrize("verb", ["read", "write", "sync"])
async def test_a_device_that_fails_leaves_the_guest_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def fail(scene: Scene, one: Relocation) -> None:
        if verb == "read":
            scene.medium.unreadable = {(f"{one.source.segment:08x}.slab", one.source.slot)}
        elif verb == "write":
            scene.medium.unwritable = {(f"{one.to.segment:08x}.slab", one.to.slot)}
        else:
            scene.medium.sync_fails = 1

    _one, found = await scene(tmp_path / "g3", monkeypatch, fail, before=True)
    assert found is (Miss.CORRUPT if verb == "read" else True)


async def test_a_reader_on_its_way_to_the_old_slot_was_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds a larger block's bytes there, looks again, and gets its own."""
    reading, go_on = threading.Event(), threading.Event()
    results: list[Future[list[bool | Miss]]] = []
    old: list[Relocation] = []
    read = Slab.read

    def held(self: Slab, segment: int, offset: int, pieces: Sequence[memoryview]) -> None:
        mine = old and (segment, offset) == (old[0].source.segment, old[0].source.offset)
        if mine and threading.current_thread() is not copier and not reading.is_set():
            reading.set()
            assert go_on.wait(10)
        read(self, segment, offset, pieces)

    copier: threading.Thread | None = None

    def begin_to_read(scene: Scene, one: Relocation) -> None:
        nonlocal copier
        copier = threading.current_thread()
        old.append(one)
        results.append(asyncio.run_coroutine_threadsafe(get(scene.small, [key_of(one)]), scene.loop))
        assert reading.wait(10)

    monkeypatch.setattr(Slab, "read", held)
    medium, clock = BadMedium(), VirtualClock()
    async with two_sizes(tmp_path / "g3", clock, calls=medium) as (small, large):
        here = Scene(small, large, medium, tmp_path / "g3")
        running = asyncio.ensure_future(here.run(monkeypatch, begin_to_read, before=False))
        await until(lambda: bool(old) and old[0].ended, "the first is copied")
        file = small._store.slab.path_of(old[0].source.segment)
        with file.open("r+b") as slab:  # as the slot's next tenant does
            slab.seek(old[0].source.offset)
            slab.write(b"\x55" * SMALL)
        go_on.set()
        assert await asyncio.wrap_future(results[0]) == [True]
        await running
        await here.settled()


async def test_where_no_thread_can_be_started_guests_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: idle_work.IdleWork) -> None:
        raise TierError("g3", "io", "no thread can be started")

    monkeypatch.setattr(idle_work.IdleWork, "wake", fail)
    monkeypatch.setattr(idle_work.IdleWork, "preallocate", lambda self, segment: None)
    clock = VirtualClock()
    async with two_sizes(tmp_path / "g3", clock) as (small, large):
        await fill(small, FULL_SMALL)
        await small.retain(KEPT, until=clock.wall() + 3600)
        for index in range(3):
            await put(large, keys(LARGE, 3), [index])
        await until(lambda: not small._store.index.has_reservations(), "a slot was leaked")
        assert await get(small, KEPT) == [True] * len(KEPT)


async def test_closing_gives_back_the_slot_of_a_copy_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the process lives no other one takes it for a dead one's."""
    begun, stops = threading.Event(), threading.Event()

    def slow(slab: Slab, one: Relocation) -> Copied:
        begun.set()
        stops.wait(60)
        time.sleep(0.3)  # while the rest is closed
        return copy_block(slab, one)

    clock, copy_block = VirtualClock(), idle_work.copy_block
    monkeypatch.setattr(idle_work, "copy_block", slow)
    stop = idle_work.IdleWork.stop
    monkeypatch.setattr(idle_work.IdleWork, "stop", lambda self: (stop(self), stops.set()))
    async with two_sizes(tmp_path / "g3", clock) as (small, large):
        await fill(small, FULL_SMALL)
        await small.retain(KEPT, until=clock.wall() + 3600)
        await asyncio.wait_for(put(large, keys(LARGE, 1)), 60)
        await until(begun.is_set, "a copy is made")
    assert nothing_is_reserved(tmp_path / "g3")


def nothing_is_reserved(path: Path) -> bool:
    store = Store.visit([path])
    try:
        return not store.index.has_reservations()
    finally:
        store.release(10)


async def test_a_copy_that_is_begun_while_the_store_is_closed_gives_its_slot_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction that reserved it was under way then."""
    clock, idle = VirtualClock(), list[idle_work.IdleWork]()
    relocate = idle_work.IdleWork.relocate

    def late(self: idle_work.IdleWork, some: Sequence[Relocation]) -> None:
        if some:
            idle.append(self)
            self.stop()
            small._store.io.stop()
        relocate(self, some)

    monkeypatch.setattr(idle_work.IdleWork, "relocate", late)
    async with two_sizes(tmp_path / "g3", clock) as (small, large):
        await fill(small, FULL_SMALL)
        await small.retain(KEPT, until=clock.wall() + 3600)
        await asyncio.wait_for(put(large, keys(LARGE, 1)), 60)
        await until(lambda: bool(idle), "copies are begun")
        await until(lambda: not small._store.index.has_reservations(), "a slot was leaked")


async def test_a_copy_whose_slot_was_taken_back_meanwhile_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is opened anew between the look for a copy and its beginning, and another block has the slot."""
    medium, clock, asked = BadMedium(), VirtualClock(), list[bool]()
    moving = Store.moving

    def opened_anew_before(self: Store) -> contextlib.AbstractContextManager[None]:
        if self.idle._relocations and threading.current_thread().name.startswith("kvtier-g3-io") and not asked:
            asked.append(True)
            self.quarantine("for the test")
            deadline = threading.Event()
            while self.index_in_use is None:
                deadline.wait(0.005)
            self.submit(lambda txn: txn.reclaim()).future.result(10)
            taken = self.submit(lambda txn: txn.reserve_slots(1, 64)).future.result(10)
            for one in taken:
                self.slab.write(one.segment, one.offset, [memoryview(b"U" * SMALL)])
            written.extend(taken)
        return moving(self)

    def relocate_next(self: idle_work.IdleWork) -> None:
        begin(self)
        over.append(bool(written))

    written, over = list[SlotReservation](), list[bool]()
    begin = idle_work.IdleWork._relocate_next
    monkeypatch.setattr(idle_work.IdleWork, "_relocate_next", relocate_next)
    monkeypatch.setattr(Store, "moving", opened_anew_before)
    async with two_sizes(tmp_path / "g3", clock, calls=medium) as (small, large):
        here, store = Scene(small, large, medium, tmp_path / "g3"), small._store
        await fill(small, FULL_SMALL)
        assert all(await small.retain(KEPT, until=clock.wall() + 3600))
        with contextlib.suppress(TierError):
            await put(large, keys(LARGE, 1))
        await until(lambda: True in over, "the slots are another's now")
        for one in written:
            raw = bytearray(SMALL)
            store.slab.read(one.segment, one.offset, [memoryview(raw)])
            assert raw == b"U" * SMALL, "written over"
        store.give_back(written)
        await here.settled()


async def test_closing_gives_back_what_was_to_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_work.IdleWork, "wake", lambda self: None)  # the disk is never idle
    clock = VirtualClock()
    async with two_sizes(tmp_path / "g3", clock) as (small, large):
        await fill(small, FULL_SMALL)
        await small.retain(KEPT, until=clock.wall() + 3600)
        idle = small._store.idle
        putting = asyncio.ensure_future(put(large, keys(LARGE, 1)))
        await until(lambda: bool(idle._relocations), "copies are to be made")
        await asyncio.wait_for(putting, 10)  # it waits for them, but not long
        assert small._store.index.has_reservations()
        assert await get(small, KEPT) == [True] * len(KEPT)
    store = Store.visit([tmp_path / "g3"])
    try:
        assert not store.index.has_reservations()
    finally:
        store.release(10)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hit", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
async def test_a_kill_at_any_point_of_a_copy_loses_nothing(tmp_path: Path, hit: int) -> None:
    done = run(program("crash_relocation", tmp_path / "g3", hit), 120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    clock = VirtualClock(1_800_000_001.0)
    async with opened_both(tmp_path / "g3", clock, BadMedium(), CAPACITY_OF_KILLED) as (small, large):
        small.check()
        assert not small._store.index.has_dead_owners()
        assert await get(small, KEPT_OF_KILLED) == [True] * len(KEPT_OF_KILLED)
        assert set(await small.retained()) == set(KEPT_OF_KILLED)
        large.check()


class Forgetting(BadMedium):
    """Knows what the device would lose with its power: what was written since the last sync of each file."""

    def __init__(self, *, syncs: bool) -> None:
        super().__init__()
        self._syncs = syncs
        self._lock = threading.Lock()
        self._before: list[tuple[str, int, bytes]] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            file = Path(f"/proc/self/fd/{fd}").resolve()
            with file.open("rb") as now:
                now.seek(offset)
                self._before.append((file.name, offset, now.read(sum(map(len, buffers)))))
            return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            if self._syncs:
                name = Path(f"/proc/self/fd/{fd}").resolve().name
                self._before = [one for one in self._before if one[0] != name]

    def image(self, store: Path, target: Path) -> None:
        """The store as it would be found after the power was lost now."""
        with self._lock:
            shutil.copytree(store, target)
            for name, offset, before in reversed(self._before):
                if name == DRAFT:
                    continue
                with (target / "slab" / name).open("r+b") as file:
                    file.seek(offset)
                    file.write(before)


@pytest.mark.parametrize("syncs", [True, False])
async def test_power_that_is_lost_right_after_a_copy_was_published_takes_nothing_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syncs: bool
) -> None:
    """Without syncs it does: the control."""
    medium, clock, images = Forgetting(syncs=True), VirtualClock(), list[Path]()
    ended = idle_work.IdleWork._relocated

    def photograph(self: idle_work.IdleWork, one: Relocation, done: Future[None]) -> None:
        images.append(tmp_path / f"image{len(images)}")
        medium.image(tmp_path / "g3", images[-1])
        ended(self, one, done)

    def begin(scene: Scene, one: Relocation) -> None:
        medium._syncs = syncs

    monkeypatch.setattr(idle_work.IdleWork, "_relocated", photograph)
    async with two_sizes(tmp_path / "g3", clock, calls=medium) as (small, large):
        here = Scene(small, large, medium, tmp_path / "g3")
        await here.run(monkeypatch, begin, before=True, count=1)
        await here.settled()
    found = set[bool | Miss]()
    for image in images[:4]:
        async with opened(image, CAPACITY // SMALL, block_bytes=SMALL, clock=clock) as small:
            found |= set(await get(small, KEPT))
    assert images and found == ({True} if syncs else {True, Miss.CORRUPT})
