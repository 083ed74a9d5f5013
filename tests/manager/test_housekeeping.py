"""Background work outlives a tier that fails or does not answer, and its own death at any await."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

import kvtier
from kvtier.errors import TierError
from kvtier.identity.keys import Scope
from kvtier.manager.hierarchy import ManagerLimits
from kvtier.retention.terms import Depth
from kvtier.testing import (
    Fault,
    FaultyTier,
    MemoryTier,
    VirtualClock,
    chain_of,
    payloads_of,
    sample_namespace,
)
from kvtier.testing.memory import MemoryStore
from kvtier.tiers.breaker import Health
from kvtier.tiers.host.pins import Hold
from kvtier.tiers.protocol import Tier
from kvtier.times import Mono
from tests.manager.support.stubborn import Killed, StubbornTier, hurried, kill
from tests.support.waiting import until

BLOCK = 4096
NS = sample_namespace(BLOCK)
CONFIG = kvtier.Config.parse({"tiers": {"g2": {"capacity": 64 * BLOCK}}, "deadlines": {"close": "1s"}})
KEYS = chain_of(NS, 8)
SCOPE = Scope(KEYS[0][:16])
SLOW_S = 15.0
"""A loaded machine's time for a call that is given up after 0.1 s; a tier that does not answer takes for ever."""


@asynccontextmanager
async def opened(
    clock: VirtualClock, tiers: Sequence[Tier], killing: tuple[str, Killed] | None = None
) -> AsyncIterator[kvtier.AsyncCache]:
    """A cache whose housekeeping runs every 5 ms, over tiers that are given 0.1 s."""
    cache = kvtier.aopen(CONFIG, NS, clock=clock, tiers=tiers)
    manager = hurried(cache.manager)
    limits = ManagerLimits(housekeeping_s=0.005, tombstones_s=0.005, close_s=1.0, lookup_s=1.0)
    manager.hierarchy.limits = manager._limits = limits
    if killing is not None:
        kill(manager.hierarchy.supervisor, *killing)
    async with cache:
        yield cache


async def put(cache: kvtier.AsyncCache, keys: Sequence[bytes] = KEYS) -> None:
    assert await cache.put(keys, payloads_of(list(keys), BLOCK)) == len(keys)


BACKGROUND_VERBS = [
    "purge", "tombstones", "drop_made_after", "retain", "retained", "release_retained", "read_notes", "write_note",
    "pin", "pins", "unpin",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["error", "crash", "hang", "stubborn"])
@pytest.mark.parametrize("verb", BACKGROUND_VERBS)
async def test_no_verb_of_a_tier_ends_housekeeping(verb: str, kind: str) -> None:
    """Leases that were forgotten are found, which only housekeeping does; and once the tier is well, it is used."""
    clock = VirtualClock()
    tier = StubbornTier(NS, clock)
    faulty = FaultyTier(tier, [Fault(verb, kind)] if kind != "stubborn" else [])
    tier.stuck = frozenset([verb] if kind == "stubborn" else [])
    async with opened(clock, [faulty]) as cache:
        await put(cache)
        cache.manager.protection.retainer.ask(KEYS)
        cache.manager.hierarchy._drop_below = {"g3"}
        try:
            await cache.pins.create("docs", KEYS[:2], "1h")
            await cache.pins.delete("docs")
            await cache.purge("another tenant")
        except TierError:
            assert verb == "purge"
        await cache.get(KEYS)  # forgotten at once
        await until(lambda: not any(slot.pins for slot in cache.manager.host.index.values()))
        assert not cache.manager.hierarchy.supervisor.restarts
        tier.stuck = frozenset()
        faulty.faults.clear()
        clock.advance(60)  # the breaker's time is over
        await until(lambda: not cache.manager._purger.owed() and not cache.manager.hierarchy._drop_below)
        assert await cache.match(KEYS) == 8
        cache.check()


@pytest.mark.parametrize("kind", ["crash", "hang", "stubborn"])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_purge_that_one_tier_fails_reaches_the_others_and_is_tried_again(kind: str, others: int) -> None:
    clock = VirtualClock()
    tier = StubbornTier(NS, clock)
    faulty = FaultyTier(tier, [])
    deep = MemoryTier(NS, clock, name="g4", depth=Depth.G4)
    async with opened(clock, [faulty, deep][: 1 + others]) as cache:
        await put(cache)
        await cache.flush()
        faulty.faults = [Fault("purge", kind)] if kind != "stubborn" else []
        tier.stuck = frozenset(["purge"] if kind == "stubborn" else [])
        began = time.monotonic()
        with pytest.raises(TierError):
            await cache.purge()
        assert time.monotonic() - began < SLOW_S
        assert len(tier.store.entries) == 8, "G3 itself was not purged"
        assert len(deep.store.entries) == 0
        assert cache.manager.prefix(KEYS) == 0, "G2's tombstone does not wait"
        async with cache.get(KEYS) as hit:
            assert len(hit) == 0, "a block from below that G2 knows to be purged"
        faulty.faults.clear()
        tier.stuck = frozenset()
        clock.advance(60)
        await until(lambda: not tier.store.entries and not cache.manager._purger.owed())
        assert await cache.match(KEYS) == 0


@pytest.mark.parametrize("kind", ["crash", "hang", "stubborn"])
async def test_an_evict_without_an_answer_is_bounded(kind: str) -> None:
    clock = VirtualClock()
    tier = StubbornTier(NS, clock)
    tier.stuck = frozenset(["evict"] if kind == "stubborn" else [])
    async with opened(clock, [FaultyTier(tier, [Fault("evict", kind)] if kind != "stubborn" else [])]) as cache:
        await put(cache)
        began = time.monotonic()
        assert await cache.evict("g3") == 0
        assert time.monotonic() - began < SLOW_S
        assert cache.manager.lower["g3"].inner.breaker.errors > 0
        tier.stuck = frozenset()


class Counted(StubbornTier):
    """Counts how often it was closed."""

    closed = 0

    async def close(self, deadline: Mono) -> None:
        self.closed += 1
        await super().close(deadline)


@pytest.mark.parametrize("kind", ["error", "crash", "hang", "stubborn"])
async def test_a_tier_that_does_not_open_is_left_out_and_closed_when_it_does(kind: str) -> None:
    clock = VirtualClock()
    tier = Counted(NS, clock)
    tier.stuck = frozenset(["open"] if kind == "stubborn" else [])
    deep = MemoryTier(NS, clock, name="g4", depth=Depth.G4)
    faulty = FaultyTier(tier, [Fault("open", kind)] if kind != "stubborn" else [])
    async with opened(clock, [faulty, deep]) as cache:
        assert list(cache.manager.lower) == ["g4"]
        await put(cache)
        assert (await cache.flush()).durable == {"g4": 8}
        if kind == "stubborn":
            before, tier.stuck = tier.closed, frozenset()
            await until(lambda: tier.closed > before)  # the open that was given up; another may have begun by now


ABSORBED = ["write failed", "lookup failed"]
"""Logged where an error costs one answer of a tier, not the task."""

PERIODIC = "housekeeping"
TASKS = [PERIODIC, "g3 write-behind", "g4 write-behind", "g4 strides"]


@pytest.mark.parametrize("task", TASKS)
async def test_a_task_that_is_killed_at_any_await_is_restarted_and_the_cache_lives(
    task: str, caplog: pytest.LogCaptureFixture
) -> None:
    for at in range(100):
        clock, g3, g4 = VirtualClock(), MemoryStore.empty(), MemoryStore.empty()
        slow = [Fault("*", "slow", seconds=0.0)]  # every verb waits once
        tiers = [
            FaultyTier(MemoryTier(NS, clock, store=g3), slow),
            FaultyTier(MemoryTier(NS, clock, store=g4, name="g4", depth=Depth.G4, stride=4), slow),
        ]
        killed = Killed(at)
        async with opened(clock, tiers, (task, killed)) as cache:
            supervisor = cache.manager.hierarchy.supervisor
            await put(cache)
            await cache.flush(timeout=30)
            if task == PERIODIC:
                await until(lambda: killed.struck or killed.runs >= 2)  # noqa: B023
            struck = killed.struck
            killed.struck = True
            absorbed = lambda: any(answer in caplog.text for answer in ABSORBED)  # noqa: E731
            await until(lambda: not struck or supervisor.restarts or absorbed())  # noqa: B023
            if struck and not absorbed():
                assert supervisor.restarts == {task: 1}
            caplog.clear()
            fresh = chain_of(NS, 8, seed=1)
            await asyncio.sleep(0.12 if struck else 0)
            await put(cache, fresh)
            flushed = await cache.flush(timeout=30)
            assert flushed.pending == 0
            await cache.evict("g2")
            async with cache.get(fresh) as hit:
                assert [bytes(block) for block in hit.blocks] == payloads_of(fresh, BLOCK)
            await cache.flush(timeout=30)
            await until(lambda: not any(slot.pins for slot in cache.manager.host.index.values()))
            cache.check()
        if not struck:
            assert at > 1, "it was never killed"
            return
    raise AssertionError("more than a hundred awaits?")


async def test_three_deaths_of_housekeeping_make_every_block_a_miss_until_it_lives_again() -> None:
    clock = VirtualClock()
    async with opened(clock, [MemoryTier(NS, clock)]) as cache:
        await put(cache)
        await cache.flush()
        train = cache.manager.host.policy.train_steps
        cache.manager.host.policy.train_steps = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        await until(lambda: cache.manager.hierarchy.service.health is Health.OUT)
        assert await cache.match(KEYS) == 0 and cache.manager.prefix(KEYS) == 0
        async with cache.get(KEYS) as hit:
            assert len(hit) == 0 and hit.miss == "breaker"
        stats = cache.stats()
        assert stats["g2"]["health"] == "out" and "ZeroDivisionError" in stats["tasks"]["out"]["g2"]
        assert stats["tasks"]["restarts"]["housekeeping"] >= 3
        cache.manager.host.policy.train_steps = train  # type: ignore[method-assign]
        await until(lambda: cache.manager.hierarchy.service.health is Health.WELL)
        assert await cache.match(KEYS) == 8 and cache.stats()["tasks"]["out"] == {}


async def test_a_task_that_keeps_dying_takes_its_tier_out_until_a_probe() -> None:
    clock = VirtualClock()
    async with opened(clock, [MemoryTier(NS, clock)]) as cache:
        await put(cache)
        await cache.flush()
        queue = cache.manager.demoter.queues["g3"]
        take, queue._take = queue._take, lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        await put(cache, chain_of(NS, 4, seed=1))
        await until(lambda: cache.manager.lower["g3"].health is Health.OUT)
        await cache.evict("g2")
        assert await cache.match(KEYS) == 0
        assert "write-behind" in cache.stats()["tasks"]["out"]["g3"]
        queue._take = take  # type: ignore[method-assign]
        await until(lambda: not queue.pending())
        clock.advance(1)
        assert await cache.match(KEYS) == 8
        assert cache.stats()["g3"]["health"] == "well"


async def test_uses_that_come_while_others_are_passed_on_wait_for_the_next_pass() -> None:
    """An engine that uses blocks faster than the tiers take it kept housekeeping from reading purges, for good."""
    clock, passed = VirtualClock(), list[int]()
    tier = MemoryTier(NS, clock)
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[tier]) as cache:
        await put(cache)
        await cache.flush()
        keeping = cache.manager._housekeeping

        def touch(keys: Sequence[bytes], wall_s: float) -> None:
            passed.append(len(keys))
            if len(passed) < 1000:
                keeping.record_use(KEYS, clock.wall())

        tier.touch = touch  # type: ignore[method-assign, assignment]
        keeping.record_use(KEYS, clock.wall())
        assert await keeping.flush_uses() and sum(passed) == len(KEYS)
        assert await keeping.flush_uses() and sum(passed) == 2 * len(KEYS)


async def test_all_uses_of_a_chain_are_passed_on_though_others_come_meanwhile() -> None:
    """Else its head would have an earlier use below than its tail, until the next pass, and leave before it."""
    clock, passed = VirtualClock(), set[bytes]()
    tier = MemoryTier(NS, clock)
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[tier]) as cache:
        keeping, chain, others = cache.manager._housekeeping, chain_of(NS, 256, seed=1), chain_of(NS, 512, seed=2)

        def touch(keys: Sequence[bytes], wall_s: float) -> None:
            if not passed:
                keeping.record_use(others, clock.wall())
            passed.update(keys)

        tier.touch = touch  # type: ignore[method-assign, assignment]
        keeping.record_use(chain, clock.wall())
        assert await keeping.flush_uses() and passed == set(chain)
        assert await keeping.flush_uses() and passed == {*chain, *others}
        assert not await keeping.flush_uses()


def test_a_forgotten_lease_that_another_thread_takes_meanwhile_is_no_error() -> None:
    """A reservation looks for such leases, on the engine's thread."""

    class Contended(deque[Sequence[Hold]]):
        def __len__(self) -> int:
            seen = super().__len__()
            self.clear()  # by another thread, as soon as it was looked at
            return seen

    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 64 * BLOCK}}})
    with kvtier.open(config, NS, tiers=[]) as cache:
        keeping = cache.manager._housekeeping
        keeping._forgotten = Contended([()])
        keeping.unpin_forgotten()
        keeping._forgotten = deque()
        assert cache.put(KEYS, payloads_of(KEYS, BLOCK)) == 8
