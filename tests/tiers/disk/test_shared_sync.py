"""Writes share fdatasyncs: each is covered by one that began after it ended, and none outlives one that failed."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from kvtier.clock import SystemClock
from kvtier.identity.keys import BlockKey
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.disk.io_scheduler import IOScheduler
from kvtier.tiers.disk.shared_sync import SharedSyncs
from kvtier.tiers.disk.slab import SystemCalls
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Miss, Stored
from tests.tiers.disk.support.store import BLOCK, get, opened, put

NAMESPACE = sample_namespace(BLOCK)
PUTS = 16
WAIT_S = 20.0


class StandIn:
    """A store whose syncs wait for `free`, and end with what `outcomes` has next, if anything."""

    def __init__(self, outcomes: list[Exception]) -> None:
        self.failed: list[Exception] = []
        self.io = IOScheduler(4, 3, "test", self.failed.append)
        self.slab = self
        self.free, self.began = threading.Semaphore(0), threading.Semaphore(0)
        self.told: list[str] = []
        self._outcomes = outcomes

    @contextmanager
    def moving(self) -> Iterator[None]:
        yield

    def quarantine(self, reason: str) -> None:
        self.told.append(reason)

    def sync(self, segment: int) -> None:
        self.told.append(f"sync {segment}")
        self.began.release()
        assert self.free.acquire(timeout=WAIT_S)
        if self._outcomes:
            raise self._outcomes.pop(0)


async def three_rounds(store: StandIn) -> tuple[SharedSyncs, list[Exception | None]]:
    """One request; two while its sync runs; one while theirs does."""
    syncs = SharedSyncs(store)  # type: ignore[arg-type]
    futures: list[Future[Exception | None]] = []
    for count in (1, 2, 1):
        futures += [syncs.request(7) for _ in range(count)]
        if len(futures) == 1:
            assert await asyncio.to_thread(store.began.acquire, timeout=WAIT_S)
            continue
        store.free.release()
        assert await asyncio.to_thread(store.began.acquire, timeout=WAIT_S)
    store.free.release()
    outcomes = [await asyncio.wrap_future(future) for future in futures]
    await asyncio.to_thread(store.io.stop)
    return syncs, outcomes


async def test_who_comes_while_a_sync_runs_waits_for_the_next() -> None:
    store = StandIn([])
    syncs, outcomes = await three_rounds(store)
    assert outcomes == [None] * 4 and syncs.failures == 0
    assert store.told == ["sync 7"] * 3


async def test_a_failed_sync_takes_the_store_out_before_anybody_hears_of_it() -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    store = StandIn([error])
    syncs, outcomes = await three_rounds(store)
    assert outcomes == [error, None, None, None] and syncs.failures == 1
    assert store.told[:2] == ["sync 7", f"fdatasync of segment 7: {error}"] and not store.failed


async def test_an_unexpected_error_ends_no_later_sync() -> None:
    error = ZeroDivisionError()
    store = StandIn([error])
    _syncs, outcomes = await three_rounds(store)
    assert outcomes == [error, None, None, None] and store.failed == [error]
    store = StandIn([])
    store.free.release()
    assert await asyncio.wrap_future(SharedSyncs(store).request(3)) is None  # type: ignore[arg-type]
    await asyncio.to_thread(store.io.stop)


class HeldCalls(SystemCalls):
    """The kernel's calls; the first fdatasync waits until `ready`, and fails with `number`, if that is given."""

    def __init__(self, number: int = 0) -> None:
        self.ready = threading.Event()
        self.syncs = 0
        self._number = number

    def fdatasync(self, fd: int) -> None:
        first, self.syncs = self.syncs == 0, self.syncs + 1
        if first:
            assert self.ready.wait(WAIT_S)
            if self._number:
                raise OSError(self._number, os.strerror(self._number))
        super().fdatasync(fd)


async def until(true: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it does not come to that")


async def begin(tier: DiskTier, calls: HeldCalls, chains: list[list[BlockKey]]) -> list[asyncio.Future[list[Stored]]]:
    """Puts of chains: the first is in its sync, which is held, and the others wait for the next."""
    puts = [asyncio.ensure_future(put(tier, chains[0]))]
    await until(lambda: calls.syncs == 1)
    puts += [asyncio.ensure_future(put(tier, chain)) for chain in chains[1:]]
    await until(lambda: len(tier._store.syncs._waiting.get(0, ())) == len(chains) - 1)
    return puts


async def test_single_puts_at_once_share_their_syncs(tmp_path: Path) -> None:
    calls, chains = HeldCalls(), [chain_of(NAMESPACE, 1, seed) for seed in range(PUTS)]
    async with opened(tmp_path / "g3", 64, clock=SystemClock(), calls=calls) as tier:
        puts = await begin(tier, calls, chains)
        calls.ready.set()
        assert await asyncio.gather(*puts) == [[Stored.STORED]] * PUTS
        assert calls.syncs == 2, "one that was under way, and one for all the others"
        for chain in chains:
            assert await get(tier, chain) == [True]


async def test_a_write_beside_a_failed_sync_is_not_stored(tmp_path: Path) -> None:
    """The failed one may have lost its pages, too, and the kernel tells that once. ENOSPC leaves the store in use."""
    calls, chains = HeldCalls(errno.ENOSPC), [chain_of(NAMESPACE, 1, seed) for seed in range(2)]
    async with opened(tmp_path / "g3", 64, clock=SystemClock(), calls=calls) as tier:
        puts = await begin(tier, calls, chains)
        calls.ready.set()
        assert await asyncio.gather(*puts) == [[Stored.FULL], [Stored.FAILED]]
        assert calls.syncs == 2, "the control: the second one succeeded"
        assert [await get(tier, chain) for chain in chains] == [[Miss.ABSENT]] * 2
        tier._store.volumes._volumes[0].try_at = 0.0
        assert [await put(tier, chain) for chain in chains] == [[Stored.STORED]] * 2
        await tier.flush(tier._clock.monotonic() + 60)
        assert not tier._store.index.has_reservations()


async def test_writes_that_are_cancelled_in_a_sync_leave_the_others_alone(tmp_path: Path) -> None:
    calls, chains = HeldCalls(), [chain_of(NAMESPACE, 1, seed) for seed in range(3)]
    async with opened(tmp_path / "g3", 64, clock=SystemClock(), calls=calls) as tier:
        puts = await begin(tier, calls, chains)
        puts[0].cancel()
        puts[1].cancel()
        await asyncio.wait(puts[:2])
        calls.ready.set()
        assert await puts[2] == [Stored.STORED]
        assert await get(tier, chains[2]) == [True]
        await tier.flush(tier._clock.monotonic() + 60)
        assert not tier._store.index.has_reservations()
