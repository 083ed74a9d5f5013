"""Damage at rest that a running process meets: the writer goes on, and one process repairs what several use."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import TierError, TierUnavailable
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.disk import damage_mark, dead_owners, quarantine, store
from kvtier.tiers.disk.damage_mark import is_marked, mark
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.layout import Layout
from kvtier.tiers.disk.records import (
    FREE,
    GEOMETRY_KEY,
    ORDER,
    RESERVED,
    SEGMENTS,
    SHORT_FORMAT,
    SPARE,
    Counters,
)
from kvtier.tiers.disk.tier import DiskTier
from kvtier.times import Wall
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put
from tests.tiers.disk.support.subprocesses import ROOT, environment

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 8)
OTHER = chain_of(NAMESPACE, 8, seed=1)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe and rest ten times as often."""
    monkeypatch.setattr(quarantine, "PROBE_FIRST_S", 0.05)
    monkeypatch.setattr(store, "IDLE_S", 0.05)
    monkeypatch.setattr(damage_mark, "MARK_EVERY_S", 0.05)
    monkeypatch.setattr(dead_owners, "RECLAIM_EVERY_S", 0.1)


def damage(tier: DiskTier, key: bytes, value: bytes) -> None:
    """Put a record into the open index."""
    index = tier._store._state.index
    assert index is not None
    with index._env.begin(write=True) as txn:
        txn.put(key, value)


async def works_again(tier: DiskTier, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if all(one.durable for one in await put(tier, OTHER)) and await get(tier, OTHER) == [True] * 8:
                return
        except (TierError, struct.error):
            pass
        assert time.monotonic() < end, "the tier did not come back"
        await asyncio.sleep(0.02)


RECORDS = {
    "counters": (Layout(SHORT_FORMAT).counters_key, b"short"),
    "geometry": (GEOMETRY_KEY, b""),
    "free": (FREE + b"\0\0\0\1", b""),
    "reserved": (RESERVED + b"\0\0", b"x"),
    "segment": (SEGMENTS + b"\0\0\0\0", b"?"),
    "spare": (SPARE + b"\0", b""),
    "order": (ORDER + b"\0\0\0\1\0", b"name"),
    "entry": (Layout(SHORT_FORMAT).key(NAMESPACE.digest + CHAIN[0]), b"damaged"),
    "note": (b"mpurged" + NAMESPACE.digest + bytes(16), b"!"),
}


@pytest.mark.parametrize("name", RECORDS)
async def test_a_damaged_record_does_not_stop_the_writer(tmp_path: Path, name: str) -> None:
    tier = DiskTier([tmp_path / "g3"], 16 * BLOCK, NAMESPACE, clock=SystemClock())
    await tier.open()
    await put(tier, CHAIN)
    damage(tier, *RECORDS[name])
    await works_again(tier)
    assert tier._store._writer._thread.is_alive()
    await tier.close(tier._clock.monotonic() + FAR_S)


async def test_the_retention_of_a_damaged_entry_ends_with_it(tmp_path: Path) -> None:
    """It would keep the slot of whatever is stored under that name later, which nobody asked to retain."""
    async with opened(tmp_path / "g3", 16) as tier:
        await put(tier, CHAIN)
        assert all(await tier.retain(CHAIN[:1], Wall(tier._clock.wall() + 3600)))
        damage(tier, *RECORDS["entry"])
        await put(tier, CHAIN)
        assert await get(tier, CHAIN) == [True] * 8
        assert not await tier.retained()


@pytest.mark.parametrize("where", ["has_dead_owners", "clear_dead_readers", "transact", "find", "uuid"])
async def test_a_damaged_page_does_not_stop_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whichever of its reads meets it, three times."""
    import lmdb

    tier = DiskTier([tmp_path / "g3"], 16 * BLOCK, NAMESPACE, clock=SystemClock())
    await tier.open()
    await put(tier, CHAIN)
    left = [3]
    real = getattr(Index, where)

    def failing(self: Index, *arguments: object, **named: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            raise lmdb.CorruptedError("mdb_get: MDB_CORRUPTED")
        return real(self, *arguments, **named)

    monkeypatch.setattr(Index, where, failing)
    if where == "uuid":
        tier._store.quarantine("a test")
    end = time.monotonic() + 60
    while left[0] > 0:
        with contextlib.suppress(TierError, lmdb.Error):
            await put(tier, CHAIN)
            await get(tier, CHAIN)
        await asyncio.sleep(2 * store.IDLE_S)  # some reads are made at rest
        assert time.monotonic() < end, "the fault never struck"
    await works_again(tier)
    assert tier._store._writer._thread.is_alive()
    await tier.close(tier._clock.monotonic() + FAR_S)


_NEIGHBOUR = """
import asyncio, json, pathlib, sys
from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.tiers.disk import damage_mark, quarantine, store
from tests.tiers.disk.support.store import BLOCK, get, put
from tests.tiers.disk.test_repair import CHAIN, NAMESPACE, works_again
from kvtier.tiers.disk.tier import DiskTier
from kvtier.times import Wall

quarantine.PROBE_FIRST_S, store.IDLE_S, damage_mark.MARK_EVERY_S = 0.05, 0.05, 0.05

async def main():
    tier = DiskTier([pathlib.Path(sys.argv[1])], 16 * BLOCK, NAMESPACE, clock=SystemClock())
    await tier.open()
    print("open", await get(tier, CHAIN) == [True] * 8, flush=True)
    sys.stdin.readline()
    if sys.argv[2] == "meets":
        try:
            await put(tier, CHAIN)
            print("met nothing", flush=True)
        except TierError as error:
            print("met", flush=True)
    else:
        print("idle", flush=True)
    sys.stdin.readline()
    await works_again(tier)
    print("works", flush=True)
    sys.stdin.readline()
    await tier.close(tier._clock.monotonic() + 60)

asyncio.run(main())
"""


@pytest.mark.parametrize("meets", ["meets", "idle"])
async def test_two_processes_let_go_of_a_damaged_index_and_one_repairs_it(tmp_path: Path, meets: str) -> None:
    """Both, or one alone, meet a record of which nothing can be made."""
    path = tmp_path / "g3"
    tier = DiskTier([path], 16 * BLOCK, NAMESPACE, clock=SystemClock())
    await tier.open()
    await put(tier, CHAIN)
    slab = path / "slab" / "00000000.slab"
    before = slab.stat().st_ino
    with slab.open("rb"):  # holds the inode's number
        words = [sys.executable, "-c", _NEIGHBOUR, str(path), meets]
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*words, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe)
        assert child.stdin is not None and child.stdout is not None
        try:

            async def says() -> bytes:
                assert child.stdout is not None
                return await asyncio.wait_for(child.stdout.readline(), 30)

            assert await says() == b"open True\n"
            damage(tier, Layout(SHORT_FORMAT).counters_key, b"short")
            child.stdin.write(b"\n")
            assert await says() == (b"met\n" if meets == "meets" else b"idle\n")
            with pytest.raises(TierError):
                await put(tier, CHAIN)
            child.stdin.write(b"\n")
            await works_again(tier)
            assert await says() == b"works\n"
            await works_again(tier)
            tier.check()
            assert not is_marked(path)
            assert slab.stat().st_ino != before, "repair makes new files: an old descriptor must not reach new blocks"
            assert (path / "index.damaged").exists()
            child.stdin.write(b"\n")
            assert await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
    await tier.close(tier._clock.monotonic() + FAR_S)


async def test_a_mark_without_damage_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "g3"
    async with opened(path) as tier:
        await put(tier, CHAIN)
    mark(path)
    async with opened(path) as tier:
        assert not is_marked(path)
        assert await get(tier, CHAIN) == [True] * 8


async def test_a_marked_store_in_use_is_not_joined(tmp_path: Path) -> None:
    path = tmp_path / "g3"
    code = """if True:
        import fcntl, os, struct, sys
        fd = os.open(sys.argv[1], os.O_RDWR)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
        print("locked", flush=True)
        sys.stdin.read()
    """
    async with opened(path) as tier:
        await put(tier, CHAIN)
    mark(path)
    words = [sys.executable, "-c", code, str(path / "LOCK")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        assert await asyncio.to_thread(child.stdout.readline) == b"locked\n"
        tier = DiskTier([path], 16 * BLOCK, NAMESPACE, clock=SystemClock())
        with pytest.raises(TierUnavailable, match="let go"):
            await tier.open()
        child.stdin.close()
        child.wait()
    async with opened(path) as again:
        assert await get(again, CHAIN) == [True] * 8


async def test_serials_of_two_indexes_differ(tmp_path: Path) -> None:
    """A reservation of an index that was replaced must not end one of its successor."""
    serials = set()
    for name in "abc":
        async with opened(tmp_path / name) as tier:
            with tier._store.index.reading() as txn:
                serials.add(Counters.decode(txn.get(Layout(SHORT_FORMAT).counters_key)).serial >> 32)
    assert len(serials) == 3
