"""Calls that a tier does not end: given up at the deadline, counted, never in the way of a later call."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

import kvtier
from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace, seal
from kvtier.tiers.breaker import BreakerLimits, Health
from kvtier.tiers.guard import ABANDONED_MAX, Guarded, GuardLimits
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target
from kvtier.times import Mono
from tests.manager.support.stubborn import SHORT, StubbornTier, hurried
from tests.support.waiting import until

BLOCK = 4096
NS = sample_namespace(BLOCK)
KEYS = chain_of(NS, 4)


async def test_a_lookup_that_ignores_cancellation_does_not_outlast_its_deadline() -> None:
    clock = SystemClock()
    tier = StubbornTier(NS, clock)
    guard = Guarded(tier, clock)
    await guard.open()
    tier.stuck = frozenset(["lookup"])
    for count in range(1, 6):
        began = time.monotonic()
        assert await guard.lookup(KEYS, [0], clock.monotonic() + 0.15) == [Miss.LATE]
        assert time.monotonic() - began < 10 and guard.unanswered["lookup"] == count
    assert guard.breaker.health is Health.OUT
    tier.stuck = frozenset()
    await guard.close(clock.monotonic() + 1)


async def test_lookups_that_were_given_up_are_bounded_and_impatience_is_no_failure() -> None:
    clock = VirtualClock()
    tier = StubbornTier(NS, clock)
    guard = Guarded(tier, clock)
    await guard.open()
    tier.stuck = frozenset(["lookup"])
    for _ in range(ABANDONED_MAX + 10):
        assert await guard.lookup(KEYS, [0], clock.monotonic() + 0.001) == [Miss.LATE]
    assert guard.unanswered["lookup"] == len(guard._given_up) == ABANDONED_MAX
    assert guard.breaker.errors == 0
    tier.stuck = frozenset()
    await until(lambda: not guard._given_up)
    assert await guard.lookup(KEYS, [0], clock.monotonic() + 30) == [Miss.ABSENT]
    await guard.close(clock.monotonic() + 1)


class FailingTier(MemoryTier):
    """Answers every write, with failures."""

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        return [Stored.FAILED] * len(blocks)


async def test_writes_that_are_answered_as_failed_open_the_breaker() -> None:
    clock = VirtualClock()
    guard = Guarded(FailingTier(NS, clock), clock)
    await guard.open()
    blocks = seal(KEYS, range(1), BLOCK, clock.wall())
    for _ in range(BreakerLimits().errors_max):
        assert guard.breaker.health is Health.WELL
        assert await guard.write(blocks, clock.monotonic() + 1) == [Stored.FAILED]
    assert guard.breaker.health is Health.OUT
    await guard.close(clock.monotonic() + 1)


class ShortTier(MemoryTier):
    """Leaves the last answer out."""

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        return super().peek(chain, wanted)[:-1]

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono) -> list[Miss | None]:
        return (await super().lookup(chain, wanted, deadline))[:-1]

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        return (await super().read(chain, targets, deadline))[:-1]

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        return (await super().write(blocks, deadline))[:-1]


async def test_answers_that_are_too_few_are_none() -> None:
    clock = VirtualClock()
    guard, later = Guarded(ShortTier(NS, clock), clock), clock.monotonic() + 1
    await guard.open()
    blocks = seal(KEYS, range(4), BLOCK, clock.wall())
    targets = [Target(index, (memoryview(bytearray(BLOCK)),)) for index in range(4)]
    assert await guard.write(blocks, later) == [Stored.FAILED] * 4
    assert await guard.lookup(KEYS, range(4), later) == guard.peek(KEYS, range(4)) == [Miss.ERROR] * 4
    assert await guard.read(KEYS, targets, later) == [Miss.ERROR] * 4
    assert guard.breaker.errors == 4
    await guard.close(later)


async def test_no_change_begins_while_an_earlier_one_may_still_take_effect() -> None:
    """The note of a call that was given up must not replace the note of a later call."""
    clock = VirtualClock()
    tier = StubbornTier(NS, clock)
    guard = Guarded(tier, clock)
    guard.limits = SHORT
    await guard.open()
    tier.stuck = frozenset(["write_note"])
    with pytest.raises(TierError, match="no answer"):
        await guard.ask("write_note", "pin/a", b"old")
    with pytest.raises(TierError, match="still runs"):
        await guard.ask("write_note", "pin/a", b"new")
    tier.stuck = frozenset()
    await until(lambda: not guard._given_up)
    await guard.ask("write_note", "pin/a", b"new")
    await asyncio.sleep(0.05)
    assert await guard.ask("read_notes", "pin/") == {"pin/a": b"new"}


async def test_a_tier_whose_opening_was_given_up_is_not_opened_twice() -> None:
    clock = VirtualClock()
    tier = StubbornTier(NS, clock)
    guard = Guarded(tier, clock)
    guard.limits = SHORT
    tier.stuck = frozenset(["open"])
    with pytest.raises(TierError, match="no answer"):
        await guard.open()
    with pytest.raises(TierError, match="still runs"):
        await guard.open()
    tier.stuck = frozenset(["close"])
    await asyncio.sleep(0.05)
    with pytest.raises(TierError, match="still runs"):
        await guard.open()  # it is being closed
    tier.stuck = frozenset()
    await until(lambda: not guard._given_up)
    await guard.open()
    assert tier._opened


@pytest.mark.parametrize("verb", ["lookup", "evict", "tombstones"])
def test_what_was_given_up_says_nothing_when_its_loop_ends(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = SystemClock()
    tier = StubbornTier(NS, clock)
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 16 * BLOCK}}, "deadlines": {"close": "1s"}})
    keys: list[BlockKey] = list(KEYS)
    with caplog.at_level(logging.ERROR):
        cache = kvtier.open(config, NS, clock=clock, tiers=[tier])
        hurried(cache.manager)
        cache.put(keys, payloads_of(keys, BLOCK))
        tier.stuck = frozenset([verb])
        cache.evict("g2")
        if verb == "evict":
            cache.evict("g3")
        assert cache.match(keys, timeout=0.05) in (0, 4)
        began = time.monotonic()
        cache.close()
        assert time.monotonic() - began < 15
        del cache
        gc.collect()
    assert "destroyed but it is pending" not in caplog.text and "never retrieved" not in caplog.text


@pytest.mark.parametrize(("given_s", "fails"), [(0.001, False), (0.05, True)])
async def test_a_late_read_is_a_failure_only_where_the_tier_was_given_its_time(given_s: float, fails: bool) -> None:
    clock = VirtualClock()
    tier = StubbornTier(NS, clock)
    guard = Guarded(tier, clock)
    guard.limits = GuardLimits(read_s=0.04)
    await guard.open()
    buffer = memoryview(bytearray(BLOCK))
    for _ in range(5):
        tier.stuck = frozenset(["read"])
        reading = asyncio.ensure_future(guard.read(KEYS, [Target(0, (buffer,))], clock.monotonic() + given_s))
        await asyncio.sleep(given_s + 0.1)
        if fails:
            await until(lambda: guard.breaker.errors, "the breaker hears at the deadline")
        assert bool(guard.breaker.errors) is fails
        tier.stuck = frozenset()
        assert len(await reading) == 1
    await guard.close(clock.monotonic() + 1)


async def test_the_failure_of_a_call_whose_caller_was_cancelled_meanwhile_is_nobodys() -> None:
    """Both in one turn of the loop: the exception counts as retrieved."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    clock = SystemClock()
    failed = asyncio.Event()

    class Failing(StubbornTier):
        async def lookup(self, *arguments: object) -> list[Miss | None]:
            failed.set()
            raise OSError(5, "a disk")

    guard = Guarded(Failing(NS, clock), clock)
    await guard.open()
    looking = asyncio.ensure_future(guard.lookup(KEYS, [0], clock.monotonic() + 5))
    await failed.wait()
    looking.cancel()
    await asyncio.wait({looking})
    assert looking.cancelled()
    del looking  # its traceback holds the call
    gc.collect()
    assert reported == []
    await guard.close(clock.monotonic() + 1)


class KeepingTier(MemoryTier):
    """Fails, with a frame that has the caller's memory."""

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        raise OSError(5, "no medium")

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        raise OSError(5, "no medium")


async def test_what_is_logged_of_a_failure_keeps_no_memory_of_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    """A handler may keep its records: G2's memory would stay for as long."""
    clock, memory = VirtualClock(), bytearray(BLOCK)
    with caplog.at_level(logging.DEBUG):
        for verb in ("write", "read"):
            guard = Guarded(KeepingTier(NS, clock), clock)
            await guard.open()
            if verb == "write":
                blocks = seal(KEYS, range(1), BLOCK, clock.wall())
                blocks = [replace(block, pieces=(memoryview(memory),)) for block in blocks]
                await guard.write(blocks, clock.monotonic() + 1)
                del blocks
            else:
                await guard.read(KEYS, [Target(0, (memoryview(memory),))], clock.monotonic() + 1)
            await guard.close(clock.monotonic() + 1)
    assert caplog.text.count("no medium") == 2
    gc.collect()
    memory.append(0)  # BufferError while a view is left


class Stray(MemoryTier):
    """A tier that cancels its own calls, as a client library may that has bounds of its own."""

    stray = frozenset[str]()

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: Mono) -> list[Loaded | Miss]:
        if "read" in self.stray:
            raise asyncio.CancelledError
        return await super().read(chain, targets, deadline)

    async def write(self, blocks: Sequence[Sealed], deadline: Mono) -> list[Stored]:
        if "write" in self.stray:
            raise asyncio.CancelledError
        return await super().write(blocks, deadline)


def test_a_tier_that_cancels_its_own_calls_is_a_miss_and_keeps_no_slot() -> None:
    tier = Stray(NS, SystemClock())
    with kvtier.open(kvtier.Config.parse({"tiers": {"g2": {"capacity": 16 * BLOCK}}}), NS, tiers=[tier]) as cache:
        cache.put(KEYS, payloads_of(KEYS, BLOCK))
        cache.flush()
        cache.evict("g2")
        tier.stray = frozenset({"read", "write"})
        for _ in range(5):
            with cache.get(KEYS) as hit:
                assert len(hit) == 0
        others = chain_of(NS, 4, seed=1)
        assert cache.put(others, payloads_of(others, BLOCK)) == 4
        assert cache.flush().pending == 0
        assert cache.manager.hierarchy.supervisor.restarts.total() == 0, "its failure is an answer"
        assert cache.manager.host.quarantined == 0 and not cache.manager.host.filling()
        cache.check()
