"""Waiting for space: no wake-up is lost, and those who wait do not wake one another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

import kvtier
from kvtier import put as put_module
from kvtier.clock import SystemClock
from kvtier.manager.space import SpaceSignal
from kvtier.testing import MemoryTier, chain_of, payloads_of, sample_namespace
from kvtier.tiers.protocol import Sealed, Stored

BLOCK = 4096
NS = sample_namespace(BLOCK)


@pytest.mark.parametrize("step", ["may_free", "create_future"])
async def test_space_that_is_freed_while_a_wait_begins_ends_it(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step between the comparison and the wait, another thread frees space."""
    clock, loop = SystemClock(), asyncio.get_running_loop()

    def freed() -> None:
        thread = threading.Thread(target=signal.notify)
        thread.start()
        thread.join()

    def may_free() -> bool:
        if step == "may_free":
            freed()
        return True

    signal = SpaceSignal(clock, may_free)
    signal.open(loop)
    create = loop.create_future

    def create_future() -> asyncio.Future[None]:
        if step == "create_future":
            freed()
        return create()

    version = signal.version
    with monkeypatch.context() as patched:
        patched.setattr(loop, "create_future", create_future)
        assert await asyncio.wait_for(signal.wait(clock.monotonic() + 5, version), 2)
    assert not signal._waiters


async def test_a_wait_that_ends_leaves_nothing() -> None:
    clock = SystemClock()
    signal = SpaceSignal(clock, lambda: True)
    signal.open(asyncio.get_running_loop())
    assert not await signal.wait(clock.monotonic() + 0.01, signal.version)
    waiting = asyncio.create_task(signal.wait(clock.monotonic() + 10, signal.version))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not signal._waiters


class Slow(MemoryTier):
    """A write takes 50 ms."""

    async def write(self, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        await asyncio.sleep(0.05)
        return await super().write(blocks, deadline)


async def test_puts_that_wait_do_not_wake_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen puts wait for the queue of a slow tier: each tries again when the tier has answered, no oftener."""
    rounds, advance = 0, put_module.Put._advance

    def counted(self: put_module.Put) -> int | None:
        nonlocal rounds
        rounds += 1
        return advance(self)

    monkeypatch.setattr(put_module.Put, "_advance", counted)
    clock = SystemClock()
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 64 * BLOCK}}})
    async with kvtier.aopen(config, NS, clock=clock, tiers=[Slow(NS, clock)]) as cache:
        chains = [chain_of(NS, 24, seed=seed) for seed in range(16)]
        began = time.monotonic()
        stored = await asyncio.gather(*(cache.put(c, payloads_of(c, BLOCK), timeout=30) for c in chains))
        answers = (time.monotonic() - began) / 0.05 * 2 + 16  # of two writers, and the pins undone in between
        assert stored == [24] * 16
        assert rounds <= 16 * (2 * answers)
        cache.check()
