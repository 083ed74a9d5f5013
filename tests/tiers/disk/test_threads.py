"""The threads of a store outlive an exception at any call they make: it costs one batch, and is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey
from kvtier.supervisor import FAILURES_MAX
from kvtier.testing import chain_of, payload_of, sample_namespace, seal
from kvtier.tiers.disk.io_scheduler import IOScheduler
from kvtier.tiers.disk.slab import SystemCalls
from kvtier.tiers.disk.store import THREADS
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target
from tests.support.waiting import eventually

BLOCK = 4096
NS = sample_namespace(BLOCK)
FAR_S = 20.0


class Raising(SystemCalls):
    """Raises, as no device would, in calls of that name while `times` lasts."""

    call, times = "", 0

    def __getattribute__(self, name: str) -> Any:
        if name == self_call(self) and object.__getattribute__(self, "times") > 0:
            self.times -= 1
            raise RuntimeError(f"injected into {name}")
        return super().__getattribute__(name)


def self_call(calls: Raising) -> str:
    return str(object.__getattribute__(calls, "call"))


class Heard:
    """A service that writes down why it was tripped."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def trip(self, reason: str) -> None:
        self.reasons.append(reason)

    def succeeded(self) -> None: ...


@asynccontextmanager
async def opened(path: Path, calls: Raising, heard: Heard, blocks: int = 64) -> AsyncIterator[DiskTier]:
    tier = DiskTier([path], blocks * BLOCK, NS, clock=SystemClock(), calls=calls)
    tier.report_to(heard)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close(SystemClock().monotonic() + FAR_S)


async def put(tier: DiskTier, chain: Sequence[BlockKey]) -> list[Stored]:
    clock = SystemClock()
    return await tier.write(seal(chain, range(len(chain)), BLOCK, clock.wall()), clock.monotonic() + FAR_S)


async def get(tier: DiskTier, chain: Sequence[BlockKey]) -> list[bool | Miss]:
    buffers = [bytearray(BLOCK) for _ in chain]
    targets = [Target(index, (memoryview(buffer),)) for index, buffer in enumerate(buffers)]
    results = await tier.read(chain, targets, SystemClock().monotonic() + FAR_S)
    return [
        result if isinstance(result, Miss) else isinstance(result, Loaded) and buffer == payload_of(key, BLOCK)
        for key, buffer, result in zip(chain, buffers, results, strict=True)
    ]


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
async def test_a_write_that_raises_anything_stores_nothing_and_the_next_is_well(tmp_path: Path, call: str) -> None:
    calls, heard = Raising(), Heard()
    async with opened(tmp_path / "g3", calls, heard) as tier:
        calls.call = call
        for seed in range(THREADS + 2):  # more than there are threads
            calls.times = 1
            chain = chain_of(NS, 1, seed)
            assert await put(tier, chain) == [Stored.FAILED]
            assert await get(tier, chain) == [Miss.ABSENT], "it was published unwritten"
            assert await put(tier, chain) == [Stored.STORED] and await get(tier, chain) == [True]
        assert tier.restarts() == {"g3 io": THREADS + 2}
        assert len(heard.reasons) == THREADS + 3 - FAILURES_MAX and "injected" in heard.reasons[0]
        tier.check()


async def test_a_read_that_raises_anything_is_an_error_and_the_next_is_well(tmp_path: Path) -> None:
    calls, heard = Raising(), Heard()
    async with opened(tmp_path / "g3", calls, heard) as tier:
        chain = chain_of(NS, 1)
        assert await put(tier, chain) == [Stored.STORED]
        calls.call = "preadv"
        for _ in range(THREADS + 2):
            calls.times = 1
            assert await get(tier, chain) == [Miss.ERROR]
            assert await get(tier, chain) == [True]
        assert tier.restarts() == {"g3 io": THREADS + 2}


@pytest.mark.parametrize("verb", ["_commit", "_rest"])
async def test_the_committing_thread_goes_on_and_its_jobs_fail(tmp_path: Path, verb: str) -> None:
    heard = Heard()
    async with opened(tmp_path / "g3", Raising(), heard) as tier:
        store, kept = tier._store, chain_of(NS, 4)
        assert await put(tier, kept) == [Stored.STORED] * 4
        seam = {"_commit": "_commit", "_rest": "_idle"}[verb]
        well, failed = getattr(store._writer, seam), threading.Event()

        def raising(*_: object) -> bool:
            setattr(store._writer, seam, well)
            failed.set()
            raise RuntimeError("injected")

        setattr(store._writer, seam, raising)
        if verb == "_commit":
            with pytest.raises(TierError, match="injected"):
                await put(tier, chain_of(NS, 4, 1))
        assert failed.wait(5)
        assert await put(tier, chain_of(NS, 4, 2)) == [Stored.STORED] * 4
        assert await get(tier, kept) == [True] * 4
        assert tier.restarts() == {"g3 writer": 1} and not heard.reasons
        tier.check()


async def test_a_subscriber_that_raises_costs_no_committed_job_its_result(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", Raising(), Heard(), blocks=8) as tier:
        tier.subscribe(lambda keys, stored: 1 / 0)  # type: ignore[arg-type, return-value]
        for seed in range(4):
            chain = chain_of(NS, 4, seed)
            assert await put(tier, chain) == [Stored.STORED] * 4
            assert await get(tier, chain) == [True] * 4
        assert tier.restarts()["g3 writer"] >= 1
        tier.check()


async def test_a_thread_that_cannot_be_started_is_an_error_not_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = IOScheduler(2, 1, "test-io", lambda error: 0.0)
    done: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: exec("raise RuntimeError('no thread')"))
        with pytest.raises(Exception, match="no thread"):
            scheduler.read([lambda: done.append(1)])
    await scheduler.read([lambda: done.append(2)]).wait()
    assert done == [2]
    scheduler.stop()


def test_an_idle_step_that_raises_is_not_called_again() -> None:
    errors: list[Exception] = []

    def failed(error: Exception) -> float:
        errors.append(error)
        return 0.0

    scheduler = IOScheduler(2, 1, "test-io", failed)
    step: Callable[[], bool] = lambda: bool(1 / 0)  # noqa: E731
    scheduler.when_idle(step)
    assert eventually(lambda: errors)
    time.sleep(0.02)
    assert len(errors) == 1 and len(scheduler._threads) == 1 and scheduler._threads[0].is_alive()
    scheduler.stop()
