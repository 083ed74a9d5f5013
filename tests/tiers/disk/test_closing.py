"""A store is given back whatever goes wrong while it is opened or closed: no thread, descriptor or lock is left."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import TierError
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import recovery, store
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.slab import SystemCalls
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.guard import Guarded
from kvtier.tiers.protocol import Stored
from tests.support.waiting import eventually, until
from tests.tiers.disk.support.store import BLOCK, get, opened, put

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 4)


def tier_at(path: Path, calls: SystemCalls | None = None) -> DiskTier:
    return DiskTier([path], 16 * BLOCK, NAMESPACE, clock=VirtualClock(), calls=calls)


def left() -> list[str]:
    """Threads of stores, and stores that count as open."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier-g3")]
    return threads + [str(each.parts[0]) for each in store.open_stores._stores.values()]


def nothing_left() -> None:
    assert eventually(lambda: not left()), left()


class Sticking(SystemCalls):
    """Its files cannot be closed without an error, as those of a network file system at its quota."""

    def close(self, fd: int) -> None:
        super().close(fd)
        raise OSError(errno.EIO, "injected into close")


async def test_a_file_whose_close_fails_keeps_nothing_open(tmp_path: Path) -> None:
    tier = tier_at(tmp_path, Sticking())
    await tier.open()
    assert set(await put(tier, CHAIN)) == {Stored.STORED}
    await tier.close(tier._clock.monotonic() + 5)
    nothing_left()
    async with opened(tmp_path) as again:
        assert await get(again, CHAIN) == [True] * len(CHAIN)


@pytest.mark.parametrize(("owner", "verb"), [(Index, "close"), (store.RoomMaker, "stop"), (store.IOScheduler, "stop")])
async def test_a_part_that_fails_to_close_keeps_no_other_open(
    tmp_path: Path, owner: type, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., None] = getattr(owner, verb)

    def failing(*arguments: object) -> None:
        real(*arguments)
        raise RuntimeError("injected")

    tier = tier_at(tmp_path)
    await tier.open()
    assert set(await put(tier, CHAIN)) == {Stored.STORED}
    with monkeypatch.context() as patch:
        patch.setattr(owner, verb, failing)
        await tier.close(tier._clock.monotonic() + 5)
        nothing_left()
    async with opened(tmp_path) as again:
        assert await get(again, CHAIN) == [True] * len(CHAIN)


async def test_it_is_closed_while_all_threads_of_the_loop_are_busy(tmp_path: Path) -> None:
    """And though its close is given up, as a guard does."""
    over = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    tier = tier_at(tmp_path)
    await tier.open()
    busy = asyncio.ensure_future(asyncio.to_thread(over.wait, 20))
    try:
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await tier.close(tier._clock.monotonic() + 5)
        nothing_left()
    finally:
        over.set()
        await busy


async def test_a_store_that_is_out_of_use_is_not_kept_by_a_tier_that_did_not_open(tmp_path: Path) -> None:
    async with opened(tmp_path) as first:
        first._store.quarantine("injected", rest_s=60)
        second = tier_at(tmp_path)
        with pytest.raises(TierError, match="quarantined"):
            await second.open()
        assert first._store.users == 1
        first._store._state._probe_at = 0.0
        first._store._writer.wake()
        await until(lambda: first._store.index_in_use is not None)
    nothing_left()


def slow_attach(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Attaching to a store takes until the second of these is set; the first: it has begun."""
    begun, over = threading.Event(), threading.Event()
    real = store.Store.attach.__func__  # type: ignore[attr-defined]

    def attach(cls: type, *arguments: object) -> store.Store:
        begun.set()
        over.wait(20)
        made: store.Store = real(cls, *arguments)
        return made

    monkeypatch.setattr(store.Store, "attach", classmethod(attach))
    return begun, over


def test_what_opens_after_its_loop_has_ended_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over = slow_attach(monkeypatch)

    async def given_up() -> None:
        asyncio.get_running_loop().set_default_executor(executor)
        opening = asyncio.ensure_future(tier_at(tmp_path).open())
        await until(begun.is_set)
        opening.cancel()
        await asyncio.wait({opening})

    executor = ThreadPoolExecutor(1)
    executor_end, executor.shutdown = executor.shutdown, lambda *_, **__: None  # type: ignore[method-assign]
    asyncio.run(given_up())
    over.set()
    executor_end()
    nothing_left()
    tier = tier_at(tmp_path)
    asyncio.run(tier.open())
    assert tier._store.users == 1
    asyncio.run(tier.close(tier._clock.monotonic() + 5))


async def test_a_store_that_opens_slowly_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on a device that hangs: no other one of the process was opened or closed, and the loop stood still."""
    begun, over, opened_at = threading.Event(), threading.Event(), list[Path]()
    real = recovery.attach

    def attach(parts: Sequence[Path], *arguments: Any) -> recovery.Opened:
        opened_at.append(parts[0])
        if parts[0].name == "slow":
            begun.set()
            over.wait(20)
        return real(parts, *arguments)

    monkeypatch.setattr(recovery, "attach", attach)
    slow, same, other = tier_at(tmp_path / "slow"), tier_at(tmp_path / "slow"), tier_at(tmp_path / "other")
    opening = asyncio.gather(slow.open(), same.open())
    try:
        await until(begun.is_set)
        await asyncio.wait_for(other.open(), 10)
        assert await put(other, CHAIN) == [Stored.STORED] * 4
        await asyncio.wait_for(other.close(other._clock.monotonic() + 5), 10)
        assert not over.is_set() and not opening.done()
    finally:
        over.set()
    await opening
    assert [path.name for path in opened_at] == ["slow", "other"] and slow._store is same._store
    for tier in (slow, same):
        await tier.close(tier._clock.monotonic() + 5)
    nothing_left()


async def test_an_opening_that_is_cancelled_as_it_ends_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the guard, since whoever cancelled it believes that nothing was opened."""
    tier, open_it = tier_at(tmp_path), DiskTier.open

    async def cancelled_as_it_ends(tier: DiskTier) -> None:
        await open_it(tier)
        opening.cancel()

    monkeypatch.setattr(DiskTier, "open", cancelled_as_it_ends)
    opening = asyncio.ensure_future(Guarded(tier, tier._clock).open())
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(lambda: not left())


def fails_to_start(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Threads of this name cannot be started."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


async def test_a_store_that_no_thread_can_close_is_open_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_at(tmp_path / "g3")
    await tier.open()
    assert set(await put(tier, CHAIN)) == {Stored.STORED}
    with monkeypatch.context() as patch:
        fails_to_start(patch, "kvtier-g3-close")
        with pytest.raises(TierError, match="can't start new thread"):
            await tier.close(tier._clock.monotonic() + 1)
    again = tier_at(tmp_path / "g3")
    await again.open()
    assert await get(again, CHAIN) == [True] * 4
    await again.close(again._clock.monotonic() + 5)
    nothing_left()


@pytest.mark.parametrize("name", ["kvtier-g3-open", "kvtier-g3-writer"])
async def test_a_store_that_no_thread_can_open_opens_once_one_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tier = tier_at(tmp_path / "g3")
    with monkeypatch.context() as patch:
        fails_to_start(patch, name)
        with pytest.raises(TierError, match="can't start new thread"):
            await tier.open()
    await tier.open()
    assert set(await put(tier, CHAIN)) == {Stored.STORED}
    await tier.close(tier._clock.monotonic() + 5)
    nothing_left()


async def test_a_verb_that_comes_as_the_last_user_leaves_fails_and_is_not_cancelled(tmp_path: Path) -> None:
    """Its task would end as if somebody had cancelled it."""
    tier = tier_at(tmp_path)
    await tier.open()
    last = tier._store
    assert last is not None
    await tier.close(tier._clock.monotonic() + 5)
    with pytest.raises(TierError, match="closed"):
        await last._writer.submit(lambda txn: None).result(5)


async def test_slots_held_for_later_writes_are_free_once_it_is_closed(tmp_path: Path) -> None:
    """As long as this process lives no other one would take them back."""
    chain = chain_of(NAMESPACE, 16)
    async with opened(tmp_path, 8192) as tier:
        for start in range(0, 16, 4):
            assert set(await put(tier, chain, range(start, start + 4))) == {Stored.STORED}
        assert tier._store.reserved._held, "the control: a stream holds slots"
    left_there = store.Store.visit([tmp_path])
    try:
        assert not left_there.index.has_reservations()
    finally:
        left_there.release(10)
