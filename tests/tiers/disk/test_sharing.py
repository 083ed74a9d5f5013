"""Several processes on one directory: no slot held twice, none lost, and nobody waits for a frozen neighbour."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.testing import VirtualClock, chain_of, sample_namespace, seal
from kvtier.tiers.disk import dead_owners
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss, Stored
from tests.tiers.disk.support.concurrent_writer import CAPACITY, CHAINS
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put, slabs
from tests.tiers.disk.support.subprocesses import ROOT, environment, program

NAMESPACE = sample_namespace(BLOCK)


def neighbour(path: Path, seconds: float, seed: int, *more: str) -> subprocess.Popen[str]:
    words = program("concurrent_writer", path, seconds, seed, *more)
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=pipe, stderr=pipe, text=True)


def _storm(path: Path, seconds: float) -> None:
    """Eight processes, some of which are killed and replaced."""
    rng = random.Random(4)
    end = time.monotonic() + seconds
    running = {seed: neighbour(path, seconds, seed) for seed in range(8)}
    killed = 0
    finished = []
    try:
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.2, 0.6))
            seed = rng.choice(list(running))
            running[seed].kill()
            running.pop(seed).communicate()
            killed += 1
            running[100 + killed] = neighbour(path, max(0.5, end - time.monotonic()), 100 + killed)
        finished = [(process, *process.communicate(timeout=60)) for process in running.values()]
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    for process, _out, wrong in finished:
        assert process.returncode == 0, wrong
    seen = [json.loads(out) for _process, out, _wrong in finished]
    assert sum(one.get("read", 0) for one in seen) > 10, "hardly a block was read"
    assert sum(one.get("stored", 0) for one in seen) > 10, "hardly a block was stored"
    assert killed >= seconds / 2


@pytest.mark.parametrize("seconds", [5.0, pytest.param(60.0, marks=[pytest.mark.long, pytest.mark.timeout(240)])])
async def test_eight_processes_with_kills_among_them(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "g3"
    _storm(path, seconds)
    async with opened(path, CAPACITY) as tier:
        tier.check()
        assert not tier._store.index.has_reservations()
        for chain in CHAINS:
            assert set(await get(tier, chain)) <= {True, Miss.ABSENT, Miss.EXPIRED}
        fresh = chain_of(NAMESPACE, CAPACITY, seed=99)
        assert await put(tier, fresh) == [Stored.STORED] * CAPACITY, "a slot was lost for ever"
    assert sum(file.stat().st_size for file in slabs(path)) <= CAPACITY * BLOCK


async def test_a_frozen_writer_stalls_neither_readers_nor_flush_nor_close(tmp_path: Path) -> None:
    path = tmp_path / "g3"
    chain, other = chain_of(NAMESPACE, 6, 50), chain_of(NAMESPACE, 6, 51)
    clock = SystemClock()
    async with opened(path, CAPACITY, clock=clock) as tier:
        await put(tier, chain)
    frozen = neighbour(path, 1.0, 1, "stop")
    try:
        assert frozen.stdout is not None
        assert frozen.stdout.readline() == "stopped\n"
        tier = DiskTier([path], CAPACITY * BLOCK, NAMESPACE, clock=clock)
        began = time.monotonic()
        await tier.open()
        assert await get(tier, chain) == [True] * 6
        assert tier.peek(chain, range(6)) == [None] * 6
        blocks = seal(other, range(6), BLOCK, clock.wall())
        assert await tier.write(blocks, clock.monotonic() + 0.3) == [Stored.FAILED] * 6
        with pytest.raises(TierError, match="deadline"):
            await tier.flush(clock.monotonic() + 0.3)
        await tier.close(clock.monotonic() + 0.3)
        assert time.monotonic() - began < 20
        with pytest.raises(TierError, match="still being closed"):
            await tier.open()
        frozen.send_signal(signal.SIGCONT)
        for _ in range(600):
            try:
                async with opened(path, CAPACITY, clock=clock) as tier:
                    assert set(await get(tier, chain)) <= {True, Miss.ABSENT}
                    assert await get(tier, other) == [Miss.ABSENT] * 6, "a write that was given up is visible"
                break
            except TierError:
                time.sleep(0.05)
        else:
            raise AssertionError("the store did not come back")
    finally:
        frozen.kill()
        frozen.communicate()


async def test_slots_of_the_living_cost_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that writes for minutes holds some all the time."""
    monkeypatch.setattr(dead_owners, "RECLAIM_EVERY_S", 0.0)
    async with opened(tmp_path / "g3", 64) as tier:
        store = tier._store
        await store.submit(lambda txn: txn.reserve_slots(1, 20)).result()
        assert store.index.has_reservations()
        assert store._dead_owners.due_jobs(store.index) == []


async def test_slots_of_the_dead_come_back_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer thread never rests. A commit frees a bounded number of them."""
    monkeypatch.setattr(dead_owners, "RECLAIM_EVERY_S", 0.05)
    monkeypatch.setattr(dead_owners, "SLOTS_PER_COMMIT_MAX", 8)
    async with opened(tmp_path / "g3", 64) as tier:
        store = tier._store
        dead = replace(store.owner, pid=1, started=0)

        def die(txn: WriteTxn) -> None:
            txn.reservations._owner, mine = dead, txn.reservations._owner
            txn.reserve_slots(1, 20)
            txn.reservations._owner = mine

        await store.submit(die).result()
        counts = [20]
        monkeypatch.setattr(store, "_rest", lambda: pytest.fail("it rested"))
        monkeypatch.setattr(store._writer, "_idle", lambda: pytest.fail("it rested"))
        end = time.monotonic() + 10
        pending = store.submit(lambda txn: txn.reservations.all())
        while counts[-1] and time.monotonic() < end:
            following = store.submit(lambda txn: txn.reservations.all())
            counts.append(sum(one.owner == dead for one in await pending.result()))
            pending = following
        monkeypatch.undo()
        assert counts[-1] == 0
        assert {before - after for before, after in pairwise(counts)} <= {0, 4, 8}


async def test_two_tiers_of_one_process_share_a_store(tmp_path: Path) -> None:
    clock = VirtualClock()
    path = tmp_path / "g3"
    one, two = (DiskTier([path], CAPACITY * BLOCK, NAMESPACE, clock=clock) for _ in range(2))
    await one.open()
    await two.open()
    await put(one, CHAINS[0])
    await one.close(clock.monotonic() + FAR_S)
    assert await get(two, CHAINS[0]) == [True] * 6
    await two.close(clock.monotonic() + FAR_S)
