"""Writes share fdatasyncs: each is covered by one that began after it ended, and none outlives one that failed."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import types
from collections.abc import Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey
from kvtier.retention.terms import BUILTIN
from kvtier.testing import chain_of, sample_namespace, seal
from kvtier.tiers.disk import write
from kvtier.tiers.disk.io_scheduler import IOScheduler
from kvtier.tiers.disk.shared_sync import SharedSyncs
from kvtier.tiers.disk.slab import SystemCalls
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Miss, Stored
from kvtier.times import Mono
from tests.support.waiting import until
from tests.tiers.disk.support.store import BLOCK, get, opened, put

T = TypeVar("T")
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


async def begin(tier: DiskTier, calls: HeldCalls, chains: list[list[BlockKey]]) -> list[asyncio.Future[list[Stored]]]:
    """Puts of chains: the first is in its sync, which is held, and the others wait for the next."""
    puts = [asyncio.ensure_future(put(tier, chains[0]))]
    await until(lambda: calls.syncs == 1)
    puts += [asyncio.ensure_future(put(tier, chain)) for chain in chains[1:]]
    await until(lambda: len(tier._store.syncs._waiting.get(0, ())) == len(chains) - 1)
    return puts


class HeldWrite(HeldCalls):
    """The first write waits until `ready`; syncs wait for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = self.written = 0
        self._lock = threading.Lock()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.begun += 1
            first = self.begun == 1
        assert not first or self.ready.wait(WAIT_S)
        moved = super().pwritev(fd, buffers, offset)
        with self._lock:
            self.written += 1
        return moved

    def fdatasync(self, fd: int) -> None:
        self.syncs += 1
        os.fdatasync(fd)


async def test_the_sync_of_a_put_begins_when_its_last_write_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "RUN_BYTES", BLOCK)  # a job for each block
    calls, chain = HeldWrite(), chain_of(NAMESPACE, 4)
    async with opened(tmp_path / "g3", 64, clock=SystemClock(), calls=calls) as tier:
        putting = asyncio.ensure_future(put(tier, chain))
        await until(lambda: calls.written == 3)
        await asyncio.sleep(0.02)
        assert calls.begun == 4 and calls.syncs == 0
        calls.ready.set()
        assert await putting == [Stored.STORED] * 4
        assert calls.syncs == 1
        assert await get(tier, chain) == [True] * 4


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


async def test_a_write_whose_sync_hangs_ends_at_its_deadline(tmp_path: Path) -> None:
    calls, chain = HeldCalls(), chain_of(NAMESPACE, 2)
    async with opened(tmp_path / "g3", 64, clock=SystemClock(), calls=calls) as tier:
        now = tier._clock.monotonic()
        blocks = seal(chain, range(2), BLOCK, tier._clock.wall(), BUILTIN["24h"])
        async with asyncio.timeout(WAIT_S / 2):
            assert await tier.write(blocks, Mono(now + 0.2)) == [Stored.FAILED] * 2
        assert calls.syncs == 1 and not calls.ready.is_set(), "the control: it hangs still"
        calls.ready.set()
        assert await put(tier, chain) == [Stored.STORED] * 2
        assert await get(tier, chain) == [True] * 2
        await tier.flush(tier._clock.monotonic() + 60)
        assert not tier._store.index.has_reservations()


async def test_after_an_error_of_the_device_none_of_those_under_way_is_there(tmp_path: Path) -> None:
    """Neither the one whose sync failed nor those that joined the next: it is of a store that is out of use."""
    calls, chains = HeldCalls(errno.EIO), [chain_of(NAMESPACE, 2, seed) for seed in range(3)]
    async with opened(tmp_path / "g3", 64, clock=SystemClock(), calls=calls) as tier:
        puts = await begin(tier, calls, chains)
        calls.ready.set()
        first, *others = await asyncio.gather(*puts, return_exceptions=True)
        assert first == [Stored.FAILED] * 2
        assert all(isinstance(other, TierError) for other in others), others
        await until(lambda: tier._store.index_in_use is not None)
        assert [await get(tier, chain) for chain in chains] == [[Miss.ABSENT] * 2] * 3
        assert [await put(tier, chain) for chain in chains] == [[Stored.STORED] * 2] * 3
        assert [await get(tier, chain) for chain in chains] == [[True] * 2] * 3


@types.coroutine
def cancelled_at(work: Coroutine[Any, Any, T], number: int) -> Generator[Any, Any, T]:
    """The result of `work`, whose task is cancelled where it waits for the `number`-th time."""
    step, waits = partial(work.send, None), 0
    while True:
        try:
            awaited = step()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        waits += 1
        if waits == number:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            yield awaited
        except BaseException as error:
            step = partial(work.throw, error)
        else:
            step = partial(work.send, None)


async def test_a_write_may_be_cancelled_wherever_it_waits(tmp_path: Path) -> None:
    """One beside it is stored all the same, and no slot is lost."""
    async with opened(tmp_path / "g3", 64, clock=SystemClock()) as tier:

        async def put_cancelled(chain: list[BlockKey], number: int) -> list[Stored]:
            return await cancelled_at(put(tier, chain, parents=True), number)

        number, ended = 0, False
        while not ended:
            number += 1
            one, other = (chain_of(NAMESPACE, 3, 2 * number + place) for place in range(2))
            mine = asyncio.ensure_future(put_cancelled(one, number))
            assert await put(tier, other, parents=True) == [Stored.STORED] * 3
            ended = await asyncio.gather(mine, return_exceptions=True) == [[Stored.STORED] * 3]
            assert await get(tier, other) == [True] * 3
            assert await get(tier, one) in ([True] * 3, [Miss.ABSENT] * 3)
            assert set(await put(tier, one, parents=True)) <= {Stored.STORED, Stored.PRESENT}
            assert await get(tier, one) == [True] * 3
        assert number >= 4, "it waits for its slots, its writes with their sync, and its publication"
        await tier.flush(tier._clock.monotonic() + 60)
        assert not tier._store.index.has_reservations()
