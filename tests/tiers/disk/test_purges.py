"""A purge is in force at once and for good: on a full volume, over a crash, and however many there are."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.identity.keys import Scope, scope_of, tenant_of
from kvtier.retention.marks import POSITIONS, is_refused, mark_below, refused
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import purge_log, purged, removals
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.purge_log import ALL, PurgeLog
from kvtier.tiers.disk.purged import Purged
from kvtier.tiers.disk.records import PURGED_KEY, SCOPED_BYTES
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Miss, Stored
from kvtier.times import Wall
from tests.tiers.disk.support.damage import flip
from tests.tiers.disk.support.store import BLOCK, get, opened, put

NAMESPACE = sample_namespace(BLOCK)
TENANT = tenant_of(scope_of("tenant"))
CHAIN = chain_of(NAMESPACE, 4, scope=TENANT)
PURGED = ([Miss.PURGED] * 4, [Miss.ABSENT] * 4)


async def commit(tier: DiskTier) -> None:
    """One transaction."""
    await tier._store.submit(lambda txn: None).result()


def no_space(*_: Any, **__: Any) -> None:
    raise lmdb.MapFullError("no page left")


async def test_a_purge_needs_no_space_in_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "g3", VirtualClock()
    async with opened(path, clock=clock) as tier:
        await put(tier, CHAIN)
        with monkeypatch.context() as full:
            full.setattr(Index, "transact", no_space)
            assert await tier.purge(TENANT, clock.wall()) == 0
            assert await get(tier, CHAIN) == [Miss.PURGED] * 4
            assert (await tier.tombstones())[TENANT] == clock.wall()
            assert tier._store.index.purges.pending()
        clock.advance(1.0)
        assert await put(tier, CHAIN[:1]) == [Stored.STORED]  # a younger block
        assert not tier._store.index.purges.pending(), "the index has it now"
        assert await get(tier, CHAIN) in ([True, *[Miss.PURGED] * 3], [True, *[Miss.ABSENT] * 3])


async def test_a_purge_outlives_the_process_that_could_not_commit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "g3", VirtualClock()
    async with opened(path, clock=clock) as tier:
        await put(tier, CHAIN)
        log = PurgeLog(path / "PURGES")  # as another process does, which ends then
        log.record(tier._prefix + TENANT, clock.wall())
        log.close()
        assert await get(tier, CHAIN) == [Miss.PURGED] * 4, "a running process does not see it"
    async with opened(path, clock=clock) as tier:
        assert await get(tier, CHAIN) in PURGED
        clock.advance(1.0)
        assert await put(tier, CHAIN) == [Stored.STORED] * 4


def test_a_record_that_fails_its_check_is_none(tmp_path: Path) -> None:
    log = PurgeLog(tmp_path / "PURGES")
    for number in range(3):
        log.record(bytes([number + 1]) * 48, Wall(number))
    flip(tmp_path / "PURGES", 64 * 2 + 5)
    again = PurgeLog(tmp_path / "PURGES")
    assert again.pending() == {bytes([1]) * 48: 0.0, bytes([3]) * 48: 2.0}
    again.settle({bytes([1]) * 48: Wall(0), bytes([3]) * 48: Wall(1)})
    assert log.pending() == again.pending() == {bytes([3]) * 48: 2.0}, "a newer purge was forgotten"


@pytest.mark.parametrize("earlier", [0.0, 1.0])
def test_a_purge_whose_sync_failed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: float
) -> None:
    """A failed sync is told once: the next one saves nothing that was written before it. So for an earlier purge of the
    same tenant, which that record covers."""
    log = PurgeLog(tmp_path / "PURGES")
    log.prepare()
    disk = bytearray((tmp_path / "PURGES").read_bytes())
    dirty: list[tuple[int, bytes]] = []
    pwrite, fails = os.pwrite, [True, False]

    def write(fd: int, data: bytes, offset: int) -> int:
        dirty.append((offset, data))
        return pwrite(fd, data, offset)

    def sync(_: int) -> None:
        if fails.pop(0):
            dirty.clear()  # they count as written
            raise OSError(errno.EIO, "lost")
        for offset, data in dirty:
            disk[offset : offset + len(data)] = data

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="lost"):
        log.record(bytes(SCOPED_BYTES - 1) + b"1", Wall(5.0))
    log.record(bytes(SCOPED_BYTES - 1) + b"1", Wall(5.0 - earlier))
    (tmp_path / "PURGES").write_bytes(disk)  # the machine loses its power
    assert PurgeLog(tmp_path / "PURGES").pending() == {bytes(SCOPED_BYTES - 1) + b"1": 5.0}


@pytest.mark.parametrize("restarted", [False, True])
def test_a_purge_is_in_a_file_whose_name_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """Who made the file may have failed, or ended, before its folder was synced."""
    fails, synced = [True], []

    def sync(path: Path) -> None:
        if fails.pop() if fails else False:
            raise OSError(errno.EIO, "lost")
        synced.append(path)

    monkeypatch.setattr(purge_log, "sync_directory", sync)
    log = PurgeLog(tmp_path / "PURGES")
    with pytest.raises(OSError, match="lost"):
        log.prepare()
    if restarted:
        log = PurgeLog(tmp_path / "PURGES")
    for _ in range(2):
        log.record(bytes(SCOPED_BYTES), Wall(5.0))
    assert synced == [tmp_path]


def test_nobody_waits_for_the_sync_of_another_purge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another purge, nor the writer's thread, which clears records below every put. A file that is closed
    meanwhile stays open for it."""
    log, gate, syncing, sync = PurgeLog(tmp_path / "PURGES"), threading.Event(), threading.Event(), os.fsync
    log.prepare()

    def slow(fd: int) -> None:
        if threading.current_thread() is first:
            syncing.set()
            assert gate.wait(10)
        sync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    failed = list[BaseException]()

    def record() -> None:
        try:
            log.record(bytes([1]) * 48, Wall(1))
        except BaseException as error:
            failed.append(error)

    first = threading.Thread(target=record)
    first.start()
    assert syncing.wait(10)

    def others() -> None:
        log.record(bytes([2]) * 48, Wall(2))
        log.settle({bytes([2]) * 48: Wall(2)})
        log.close()

    second = threading.Thread(target=others)
    second.start()
    second.join(5)
    waited = second.is_alive()
    gate.set()
    first.join()
    second.join()
    assert not waited and not failed
    assert log._fd < 0 and PurgeLog(tmp_path / "PURGES").pending() == {bytes([1]) * 48: 1.0}


def test_a_purge_outlives_that_another_process_makes_the_file_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where neither could make it when it opened the store, on a full volume."""
    log, other, write = PurgeLog(tmp_path / "PURGES"), PurgeLog(tmp_path / "PURGES"), os.pwrite
    meanwhile = threading.Thread(target=other.record, args=(bytes([2]) * 48, Wall(2)))
    waiting = [meanwhile]

    def overtaken(fd: int, data: bytes, offset: int) -> int:
        if waiting:
            waiting.pop().start()
            meanwhile.join(0.5)  # it may have to wait for this one
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", overtaken)
    log.record(bytes([1]) * 48, Wall(1))
    meanwhile.join()
    assert log.pending() == {bytes([1]) * 48: 1.0, bytes([2]) * 48: 2.0}


def test_a_purge_that_the_failed_sync_of_another_one_has_lost_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells each descriptor once of what was lost since it was opened."""
    log, opened, closed = PurgeLog(tmp_path / "PURGES"), os.open, os.close
    log.prepare()
    losses, told, asked, failed, outcomes = [0], dict[int, int](), threading.Event(), threading.Event(), list[str]()

    def open_(*args: Any) -> int:
        fd = opened(*args)
        told[fd] = losses[0]
        return fd

    def close(fd: int) -> None:
        told.pop(fd, None)
        closed(fd)

    def sync(fd: int) -> None:
        if threading.current_thread() is second:
            asked.set()
            assert failed.wait(10)
        else:
            second.start()
            assert asked.wait(10)
            losses[0] += 1
        if told.get(fd, 0) < losses[0]:
            told[fd] = losses[0]
            failed.set()
            raise OSError(errno.EIO, "lost")

    def record() -> None:
        try:
            log.record(bytes([2]) * 48, Wall(2))
            outcomes.append("durable")
        except OSError as error:
            outcomes.append(str(error.errno))

    second = threading.Thread(target=record)
    for name, call in (("open", open_), ("close", close), ("fsync", sync)):
        monkeypatch.setattr(os, name, call)
    with pytest.raises(OSError, match="lost"):
        log.record(bytes([1]) * 48, Wall(1))
    second.join()
    assert outcomes == [str(errno.EIO)]


def test_a_purge_is_in_force_here_where_somebody_has_removed_the_file(tmp_path: Path) -> None:
    """The next transaction carries it into the index all the same."""
    log = PurgeLog(tmp_path / "PURGES")
    log.prepare()
    (tmp_path / "PURGES").unlink()
    log.record(bytes([1]) * 48, Wall(1))
    assert log.pending() == {bytes([1]) * 48: 1.0}


def test_a_reader_that_is_overtaken_hides_no_purge(tmp_path: Path) -> None:
    """One thread has read the old records; it goes on while another one keeps the new ones."""
    read, overtaken = threading.Event(), threading.Event()

    class Interrupted(PurgeLog):
        armed = False

        def _records(self) -> Iterator[tuple[int, bytes, Wall]]:
            found = list(super()._records())
            if threading.current_thread() is slow:
                read.set()
                assert overtaken.wait(10)
            return iter(found)

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if self.armed and threading.current_thread() is not slow:
                overtaken.set()
                slow.join()

    other = PurgeLog(tmp_path / "PURGES")
    other.record(bytes([1]) * 48, Wall(1))
    log = Interrupted(tmp_path / "PURGES")
    slow = threading.Thread(target=log.pending)
    slow.start()
    assert read.wait(10)
    other.record(bytes([2]) * 48, Wall(2))
    Interrupted.armed = True
    assert len(log.pending()) == 2
    assert len(log.pending()) == 2, "a purge is not seen"


def test_a_purge_that_follows_a_change_within_one_reading_of_the_clock_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some machines have a clock that stands still for milliseconds."""
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5)
    log, one, next_one = PurgeLog(tmp_path / "PURGES"), bytes([1]) * SCOPED_BYTES, bytes([2]) * SCOPED_BYTES
    log.record(one, Wall(1))
    log.settle({one: Wall(1)})
    assert log.pending() == {}
    log.record(next_one, Wall(2))
    assert log.pending() == {next_one: 2.0}


def test_a_purge_behind_a_change_that_a_failed_sync_took_back_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "PURGES"
    log, names = PurgeLog(path), [bytes([number]) * SCOPED_BYTES for number in range(3)]
    log.record(names[0], Wall(1))
    durable = path.read_bytes()
    log.record(names[1], Wall(2))
    assert log.pending().keys() == {*names[:2]}
    path.write_bytes(durable)
    log.record(names[2], Wall(3))
    assert log.pending().keys() == {names[0], names[2]}


def test_a_log_that_cannot_be_opened_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that was opened anew when there was no descriptor to spare served what had been purged."""
    PurgeLog(tmp_path / "PURGES").record(b"x" * 48, Wall(3))

    def no_descriptor(*_: Any) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as busy:
        busy.setattr(os, "open", no_descriptor)
        log = PurgeLog(tmp_path / "PURGES")
        with pytest.raises(OSError, match="too many"):
            log.pending()
    assert log.pending() == {b"x" * 48: 3.0}


def test_a_log_that_another_process_makes_later_is_read(tmp_path: Path) -> None:
    log = PurgeLog(tmp_path / "PURGES")
    assert log.pending() == {}
    PurgeLog(tmp_path / "PURGES").record(b"x" * 48, Wall(3))
    assert log.pending() == {b"x" * 48: 3.0}


def test_a_log_that_is_closed_under_a_purge_stays_open_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor might be another file's by then, into which the record was written."""
    log, descriptors = PurgeLog(tmp_path / "PURGES"), list[int]()
    log.prepare()
    write, fd = os.pwrite, log._fd

    def close_first(to: int, data: bytes, offset: int) -> int:
        log.close()
        descriptors.append(to)
        return write(to, data, offset)

    monkeypatch.setattr(os, "pwrite", close_first)
    log.record(b"x" * 48, Wall(3))
    monkeypatch.undo()
    assert set(descriptors) == {fd} and log._fd < 0
    with pytest.raises(OSError, match="closed"):
        log.record(b"x" * 48, Wall(4))
    assert PurgeLog(tmp_path / "PURGES").pending() == {b"x" * 48: 3.0}


def test_a_full_log_covers_the_whole_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge_log, "RECORDS", 5)
    log = PurgeLog(tmp_path / "PURGES")
    for number in range(1, 5):
        log.record(bytes([number]) * 48, Wall(number))
    assert len(log.pending()) == 4
    log.record(b"x" * 48, Wall(3))
    assert log.pending() == {ALL: 4.0}
    assert (tmp_path / "PURGES").stat().st_size == 5 * 64


def test_a_purge_that_is_asked_for_twice_is_durable_when_either_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync of the first call may not have ended yet; it is asked for again where it takes long."""
    log, synced = PurgeLog(tmp_path / "PURGES"), list[int]()
    log.prepare()
    monkeypatch.setattr(os, "fsync", synced.append)
    for number in range(1, 3):
        log.record(b"x" * 48, Wall(3))
        assert len(synced) == number


async def test_what_the_purge_log_has_refused_is_remembered_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that the next process knows what it owes the log: nothing else does."""
    monkeypatch.setattr(purged, "TOMBSTONES_MAX", 16)
    monkeypatch.setattr(purged, "FOLDED_PER_COMMIT_MAX", 4)
    monkeypatch.setattr(removals, "SCAN_FIRST_S", 0.0)
    monkeypatch.setattr(removals, "SCAN_EVERY_S", 0.0)
    reads, rows = Counter[bytes](), Index.rows

    def counted(self: Index, prefix: bytes) -> list[tuple[bytes, bytes]]:
        reads[prefix] += 1
        return rows(self, prefix)

    async with opened(tmp_path / "g3", 64) as tier:
        owed = [tenant_of(scope_of(f"owed {number}")) for number in range(20)]
        for number, scope in enumerate(owed):
            await tier.purge(scope, refused(Wall(POSITIONS + number)))
        monkeypatch.setattr(Index, "rows", counted)
        for _ in range(6):
            await commit(tier)
        assert reads[PURGED_KEY] <= 2, "they are read again with each transaction"
        for number in range(20, 100):
            await tier.purge(scope_of(str(number)), mark_below(number))
        for _ in range(6):
            await commit(tier)
        left = await tier.tombstones()
        assert set(owed) <= set(left) and all(is_refused(left[scope]) for scope in owed)
        assert len(left) - len(owed) <= 16 + 4, "tombstones grow for ever"


async def test_tombstones_are_bounded_and_what_they_covered_stays_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purged, "TOMBSTONES_MAX", 16)
    monkeypatch.setattr(removals, "SCAN_FIRST_S", 0.0)
    monkeypatch.setattr(removals, "SCAN_EVERY_S", 0.0)
    clock = VirtualClock()
    async with opened(tmp_path / "g3", 64, clock=clock) as tier:
        old = chain_of(NAMESPACE, 2, seed=7)
        await put(tier, old)
        scopes = [scope_of(str(number)) for number in range(80)]
        for scope in scopes:
            clock.advance(1.0)
            await tier.purge(scope, clock.wall())
        for _ in range(3):
            await commit(tier)
        young = chain_of(NAMESPACE, 2, seed=8)
        assert await put(tier, young) == [Stored.STORED] * 2
        left = await tier.tombstones()
        assert 0 < len(left) <= 16, "tombstones grow for ever"
        assert set(left) == set(map(tenant_of, scopes[-len(left) :])), "the older ones go first"
        index = tier._store.index
        assert index.is_purged(tier._prefix + scopes[0], Wall(clock.wall() - 79)), "a purge was forgotten"
        assert not index.is_purged(tier._prefix + scope_of("never"), clock.wall())
        assert await get(tier, young) == [True] * 2
        assert await get(tier, old) in ([Miss.PURGED] * 2, [Miss.ABSENT] * 2), "what was born before is dead, too"
        ticks = tier._store.tick
        assert await tier.purge(Scope(scopes[0]), Wall(clock.wall() - 79)) == 0
        assert tier._store.tick == ticks, "a purge that is covered is written again"


class Rows(dict[bytes, bytes]):
    """A write transaction's rows, without an index."""

    def put(self, key: bytes, value: bytes) -> None:
        self[key] = value

    def delete(self, key: bytes) -> bool:
        return self.pop(key, None) is not None


@pytest.mark.parametrize("marks", [(7.0, 5.0), (5.0, 7.0, 6.0), (7.0, 7.0)])
def test_an_older_purge_that_comes_late_brings_nothing_back(marks: tuple[float, ...]) -> None:
    """Replicas' purges come in any order: the latest mark counts, and one tombstone is one."""
    txn, name = Rows({purged.COUNT_KEY: bytes(4)}), b"n" * SCOPED_BYTES
    for mark in marks:
        Purged(txn, {}).apply(name, Wall(mark))
    assert Purged(txn, {}).until(name) == 7.0 and txn[purged.COUNT_KEY] == (1).to_bytes(4, "little")
    assert Purged(txn, {name: Wall(6.0)}).covers(name, Wall(6.5))
