"""Work on payloads: beside the loop, reads beside writes, and over before its caller has the memory back."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from kvtier import codec
from kvtier.keyring import Keyring
from kvtier.testing import chain_of
from kvtier.tiers.objects import payload_threads, payload_work
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.payload_threads import INLINE_BYTES, THREADS_MAX, PayloadThreads
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target
from tests.tiers.disk.support.keys import sample_keyring
from tests.tiers.objects.support.replicas import NS, S, Site
from tests.tiers.objects.support.virtual_bucket import Replica, VirtualServer
from tests.tiers.objects.test_compression import CHAIN, SIZE, Fleet, content, read, sealed

pytest.importorskip("zstandard")


@pytest.fixture(autouse=True)
def _all_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_threads, "INLINE_BYTES", 0)


class Held:
    """Steps that end when they may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        self.made: list[int] = []

    def steps(self, count: int = 10) -> Iterator[int]:
        for number in range(count):
            self.begun.release()
            assert self.may_end.wait(60)
            self.made.append(number)
            yield number

    async def all_begun(self, count: int = 1) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.begun.acquire, True, 60)


async def test_a_cancelled_caller_waits_for_the_step_at_hand_only() -> None:
    threads, held = PayloadThreads("test"), Held()
    task = asyncio.create_task(threads.run(held.steps(), 1))
    await held.all_begun()
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    held.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.made == [0]
    threads.close()
    assert await threads.run(held.steps(3), 1) == [0, 1, 2]
    threads.close()


def _run_in_child(threads: PayloadThreads, answer: Connection) -> None:
    async def work() -> list[int]:
        return await asyncio.wait_for(threads.run(iter([7]), 1), 60)

    answer.send(asyncio.run(work()))


async def test_a_forked_child_has_threads_of_its_own() -> None:
    """The copy of a pool counts threads as idle that are not there."""
    threads = PayloadThreads("test")
    assert await threads.run(iter([5]), 1) == [5]
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_run_in_child, args=(threads, theirs))
    child.start()
    theirs.close()
    assert await asyncio.to_thread(ours.poll, 60) and ours.recv() == [7]
    child.join(60)
    threads.close()


async def test_a_caller_whose_work_has_not_begun_is_cancelled_at_once() -> None:
    threads, busy, late = PayloadThreads("test"), Held(), Held()
    count = threads._pool._max_workers
    tasks = [asyncio.create_task(threads.run(busy.steps(1), 1)) for _ in range(count)]
    await busy.all_begun(count)
    last = asyncio.create_task(threads.run(late.steps(), 1))
    await asyncio.sleep(0)
    assert threads._pool._work_queue.qsize() == 1
    last.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await last
    busy.may_end.set()
    assert await asyncio.gather(*tasks) == [[0]] * count and late.made == []
    threads.close()


async def test_small_work_takes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    threads, seen = PayloadThreads("test"), []
    await threads.run((seen.append(threading.current_thread()) for _ in range(2)), INLINE_BYTES - 1)
    assert seen == [threading.current_thread()] * 2
    await threads.run((seen.append(threading.current_thread()) for _ in range(1)), INLINE_BYTES)
    assert seen[2] is not threading.current_thread()
    threads.close()


@pytest.mark.parametrize("mode", ["public", "keyed", "encrypted"])
@pytest.mark.parametrize("compression", ["none", "lossless"])
async def test_no_payload_is_worked_on_by_the_loop(
    site: Site, mode: str, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, names = Fleet(site, mode), []
    make, verify = payload_work.make_unit, payload_work.verify_blocks

    def making(*args: Any) -> Any:
        names.append(threading.current_thread().name)
        return make(*args)

    def verifying(*args: Any) -> Any:
        for each in verify(*args):
            names.append(threading.current_thread().name)
            yield each

    monkeypatch.setattr(payload_work, "make_unit", making)
    monkeypatch.setattr(payload_work, "verify_blocks", verifying)
    one = await fleet.replica(compression)
    await one.write(sealed(site), site.deadline)
    assert await read(one, site) == [True] * len(CHAIN)
    assert len(names) == 2 + len(CHAIN)
    assert {name.rpartition("_")[0] for name in names} == {"kvtier-g4-write", "kvtier-g4-read"}


async def test_a_read_does_not_wait_behind_units_that_are_being_coded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await site.replica(compression="lossless")
    await one.write(sealed(site), site.deadline)
    encode, begun, held = codec.encode_unit, threading.Semaphore(0), threading.Event()

    def slowly(unit: memoryview) -> memoryview | None:
        begun.release()
        assert held.wait(100)
        return encode(unit)

    monkeypatch.setattr(codec, "encode_unit", slowly)
    two = await site.replica(compression="lossless")
    writes = [asyncio.create_task(two.write(sealed(site), site.deadline)) for _ in range(40)]
    for _ in range(min(THREADS_MAX, os.cpu_count() or 1)):
        assert await asyncio.to_thread(begun.acquire, True, 60)
    try:
        async with asyncio.timeout(60):
            assert await read(two, site) == [True] * len(CHAIN)
    finally:
        held.set()
        await asyncio.gather(*writes)


async def test_a_read_does_not_wait_behind_writes_that_keep_to_their_rate(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await site.replica(limits=BucketLimits(concurrency=2))
    chains = [chain_of(NS, S, seed) for seed in range(8)]
    await one.write(sealed(site, chains[0]), site.deadline)

    async def never(count: float) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(one._writer._rate, "take", never)
    writes = [asyncio.create_task(one.write(sealed(site, chain), site.deadline)) for chain in chains[1:]]
    await asyncio.sleep(0.02)
    reading = asyncio.create_task(read(one, site, range(S), chain=chains[0]))
    done, _ = await asyncio.wait({reading}, timeout=60)
    for task in [*writes, reading]:
        task.cancel()
    await asyncio.gather(*writes, reading, return_exceptions=True)
    assert done and reading.result() == [True] * S


@pytest.mark.parametrize("mode", ["public", "keyed"])
async def test_a_purge_that_comes_while_blocks_are_verified_is_kept_to(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = VirtualServer()
    keyring = Keyring.public() if mode == "public" else sample_keyring(1)
    site = type("Site", (), {"clock": server.clock})()
    one = Replica(server, keyring=keyring, compress=True)
    assert await one.writer.write(sealed(site)[:S]) is Stored.STORED
    verify, begun, purged = payload_work.verify_blocks, threading.Event(), threading.Event()

    def verifying(*args: Any) -> Any:
        begun.set()
        assert purged.wait(60)
        return (yield from verify(*args))

    monkeypatch.setattr(payload_work, "verify_blocks", verifying)
    targets = [Target(at, (memoryview(bytearray(SIZE)),)) for at in range(S)]
    entry = one.store.index.get(CHAIN[S - 1])
    reading = asyncio.create_task(one.store.read(CHAIN[:S], 0, entry, targets))
    assert await asyncio.to_thread(begun.wait, 60)
    one.store.purges.hold(CHAIN[0][:16])
    purged.set()
    assert set((await reading).values()) == {Miss.PURGED}


@pytest.mark.parametrize("mode", ["public", "encrypted"])
@pytest.mark.parametrize("compression", ["none", "lossless"])
async def test_cancelled_at_any_point_it_leaves_memory_and_tier_in_order(
    site: Site, mode: str, compression: str
) -> None:
    """After the caller has its memory back nothing writes there; the next call is served."""
    fleet = Fleet(site, mode)
    for turns in range(24):
        one = await fleet.replica(compression)
        writing = asyncio.create_task(one.write(sealed(site)[:S], site.deadline))
        for _ in range(turns):
            await asyncio.sleep(0.0003)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert set(await one.write(sealed(site)[:S], site.deadline)) <= {Stored.STORED, Stored.PRESENT}
        into = [memoryview(bytearray(SIZE)) for _ in range(S)]
        targets = [Target(at, (into[at],)) for at in range(S)]
        two = await fleet.replica(compression)
        reading = asyncio.create_task(two.read(CHAIN[:S], targets, site.deadline))
        for _ in range(turns):
            await asyncio.sleep(0.0003)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        for view in into:
            view[:] = b"?" * SIZE
        results = await read(two, site, range(S), chain=CHAIN[:S])
        assert results == [True] * S
        assert all(view == b"?" * SIZE for view in into)
        await one.evict(None)
        await one.close(site.deadline)
        await two.close(site.deadline)


def test_the_samples_are_such_that_some_blocks_are_coded() -> None:
    assert codec.encode_unit(memoryview(content(CHAIN[0], 0))) is not None
    assert Loaded is not Miss
