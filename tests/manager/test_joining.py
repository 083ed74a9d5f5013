"""A tier that does not open when the cache does joins it later, and has missed nothing."""

from __future__ import annotations

import asyncio
import time

import pytest

import kvtier
from kvtier.errors import ConfigError, TierError
from kvtier.events import Events
from kvtier.identity.keys import scope_of_key
from kvtier.retention.terms import Depth
from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, chain_of, payloads_of
from kvtier.testing.memory import MemoryStore
from kvtier.tiers.breaker import Health
from tests.manager.support.stubborn import StubbornTier, has_ended
from tests.manager.test_housekeeping import BLOCK, KEYS, NS, SLOW_S, opened, put, until

CLOSED = [Fault("open", "error")]


def g4(clock: VirtualClock, stride: int = 1) -> MemoryTier:
    return MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=stride)


async def joined(cache: kvtier.AsyncCache, clock: VirtualClock, name: str) -> None:
    clock.advance(60)
    await until(lambda: name in cache.manager.lower)
    await has_ended(f"{name} open")


async def tried(cache: kvtier.AsyncCache, clock: VirtualClock, pause_s: float) -> None:
    """After so long G3 is tried again, without success."""
    before = clock.monotonic()
    clock.advance(pause_s)
    await until(lambda: cache.manager.lower.out["g3"].next_try > before + pause_s)


async def served(cache: kvtier.AsyncCache, keys: list[bytes], tier: str) -> None:
    """All of them come from that tier, byte by byte."""
    await cache.evict("g2")
    async with cache.get(keys) as hit:
        assert [bytes(block) for block in hit.blocks] == payloads_of(keys, BLOCK)
        assert set(hit.tiers) == {tier}


@pytest.mark.parametrize("late", ["g3", "g4", "both"])
@pytest.mark.parametrize("stride", [1, 4])
async def test_a_tier_that_opens_later_joins_warm(late: str, stride: int) -> None:
    """Whichever is missing: blocks go down through all that are there, and come back from each."""
    clock, warm, store = VirtualClock(), list(chain_of(NS, 8, seed=1)), MemoryStore.empty()
    async with opened(clock, [MemoryTier(NS, clock, store=store)]) as cache:
        await put(cache, warm)
        await cache.flush()
    near, deep = FaultyTier(MemoryTier(NS, clock, store=store)), FaultyTier(g4(clock, stride))
    near.faults, deep.faults = (list(CLOSED) if late in (name, "both") else [] for name in ("g3", "g4"))
    names = {"g3": ["g4"], "g4": ["g3"], "both": []}[late]
    async with opened(clock, [near, deep]) as cache:
        assert list(cache.manager.lower) == names
        await put(cache)
        flushed = await cache.flush()
        assert flushed.durable == dict.fromkeys(names, 8) and flushed.pending == 0
        near.faults.clear()
        deep.faults.clear()
        for name in ("g3", "g4"):
            await joined(cache, clock, name)
        assert list(cache.manager.lower) == ["g3", "g4"] and cache.stats()["tasks"]["out"] == {}
        await served(cache, warm, "g3")
        fresh = list(chain_of(NS, 8, seed=2))
        await put(cache, fresh)
        flushed = await cache.flush()
        assert flushed.pending == 0 and set(flushed.durable) == {"g3", "g4"}
        await served(cache, fresh, "g3")
        await cache.evict("g3")
        await served(cache, fresh, "g4")
        assert not cache.manager.hierarchy.supervisor.restarts
        await until(lambda: not any(slot.pins for slot in cache.manager.host.index.values()))
        cache.check()


async def test_it_is_tried_at_growing_intervals_and_says_when() -> None:
    clock = VirtualClock()
    faulty = FaultyTier(MemoryTier(NS, clock), list(CLOSED))
    async with opened(clock, [faulty]) as cache:
        for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
            stats = cache.stats()
            assert stats["g3"] == {"health": "out"}
            assert stats["tasks"]["out"]["g3"] == f"not open: g3: open: injected; next try in {pause_s} s"
            tries = faulty.hits[CLOSED[0]]
            await tried(cache, clock, pause_s)
            assert faulty.hits[CLOSED[0]] == tries + 1
        assert not stats["tasks"]["restarts"]


@pytest.mark.parametrize("kind", ["hang", "stubborn", "crash"])
async def test_an_opening_that_does_not_answer_is_ended_before_the_next(kind: str) -> None:
    clock = VirtualClock()
    tier = StubbornTier(NS, clock)
    tier.stuck = frozenset(["open"] if kind == "stubborn" else [])
    faulty = FaultyTier(tier, [Fault("open", kind)] if kind != "stubborn" else [])
    async with opened(clock, [faulty]) as cache:
        guard = cache.manager.lower.every()[0].inner
        for _ in range(3):
            await tried(cache, clock, 60)
        assert not cache.manager.lower
        faulty.faults.clear()
        tier.stuck = frozenset()
        await until(lambda: not guard._given_up)
        await joined(cache, clock, "g3")
        assert cache.manager.lower["g3"].health is Health.WELL
        await put(cache)
        assert (await cache.flush()).durable == {"g3": 8}


async def test_what_was_purged_meanwhile_is_never_served_by_it() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    async with opened(clock, [MemoryTier(NS, clock, store=store)]) as cache:
        await put(cache)
        await cache.flush()
    clock.advance(10)
    near = FaultyTier(MemoryTier(NS, clock, store=store), [*CLOSED, Fault("purge", "error", times=2)])
    deep = g4(clock)
    async with opened(clock, [near, deep]) as cache:
        with pytest.raises(TierError, match="not open"):
            await cache.purge()
        clock.advance(10)
        near.faults.remove(CLOSED[0])
        for tries in (1, 2):
            await tried(cache, clock, 60)
            assert near.hits[near.faults[0]] == tries
            assert "g3" not in cache.manager.lower, "it has not taken the purge yet"
        await joined(cache, clock, "g3")
        assert await cache.match(KEYS) == 0 and not store.entries
        async with cache.get(KEYS) as hit:
            assert len(hit) == 0
        await cache.purge()
        assert not any(tier.owed for tier in cache.manager.lower.every())


async def test_a_purge_of_elsewhere_reaches_a_tier_that_opens_after_it_was_learned() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    async with opened(clock, [MemoryTier(NS, clock, store=store)]) as cache:
        await put(cache)
        await cache.flush()
    clock.advance(10)
    near, deep = FaultyTier(MemoryTier(NS, clock, store=store), list(CLOSED)), g4(clock)
    async with opened(clock, [near, deep]) as cache:
        await deep.purge(scope_of_key(KEYS[0]), clock.wall())
        await cache.manager._purger.sync()
        near.faults.clear()
        await joined(cache, clock, "g3")
        assert await cache.match(KEYS) == 0 and not store.entries


async def test_pins_events_and_saved_state_reach_it() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    near = FaultyTier(MemoryTier(NS, clock, store=store), list(CLOSED))
    async with opened(clock, [MemoryTier(NS, clock, store=store)]) as cache:
        await cache.pins.create("old", KEYS[:1], "1h")
    async with opened(clock, [near]) as cache:
        events = Events()
        await cache.pins.delete("old")
        cache.manager.subscribe(events)
        await cache.pins.create("docs", KEYS[:2], "1h")
        await put(cache)
        near.faults.clear()
        await joined(cache, clock, "g3")
        await put(cache, chain_of(NS, 4, seed=1))
        await put(cache)
        await cache.flush()
        assert {change.tier for change in events.take()} == {"g2", "g3"}
        await until(lambda: any(name.endswith("pin/docs") for name in store.notes))
        assert await near.retained() != {}
    async with opened(clock, [MemoryTier(NS, clock, store=store)]) as cache:
        assert [pin.name for pin in await cache.pins.list()] == ["docs"]


async def test_a_mistake_in_the_configuration_still_ends_the_start() -> None:
    clock = VirtualClock()

    class Misconfigured(MemoryTier):
        async def open(self) -> None:
            raise ConfigError("tiers.g3.path is empty")

    with pytest.raises(ConfigError, match="is empty"):
        async with opened(clock, [Misconfigured(NS, clock)]):
            pass


async def test_a_cache_closes_while_a_tier_of_its_own_opens() -> None:
    clock = VirtualClock()
    tier = StubbornTier(NS, clock)
    faulty = FaultyTier(tier, list(CLOSED))
    async with opened(clock, [faulty]) as cache:
        guard = cache.manager.lower.every()[0].inner
        faulty.faults.clear()
        tier.stuck = frozenset(["open"])
        clock.advance(60)
        await asyncio.sleep(0.02)
        began = time.monotonic()
    assert time.monotonic() - began < SLOW_S
    tier.stuck = frozenset()
    await until(lambda: not guard._given_up)
    assert not tier._opened
