"""Purges without end: what the manager remembers of them is bounded, and what they covered does not come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

import kvtier
from kvtier.errors import TierError
from kvtier.identity.keys import Scope, scope_of, tenant_of
from kvtier.manager import purge as purge_module
from kvtier.put import Put
from kvtier.retention.marks import mark_below
from kvtier.retention.ranges import ChainTerms, RequestTerms
from kvtier.retention.terms import BUILTIN, Depth
from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace
from kvtier.tiers.protocol import Tier
from kvtier.times import Wall

BLOCK = 512
NS = sample_namespace(BLOCK)
SCOPE = scope_of("tenant")
CHAIN = list(chain_of(NS, 4, scope=SCOPE))
MANY = 64


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge_module, "_APPLIED", 4)


@asynccontextmanager
async def opened(clock: VirtualClock, tiers: Sequence[Tier]) -> AsyncIterator[kvtier.AsyncCache]:
    """Its housekeeping runs when it is asked to."""
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 32 * 4096}}})
    async with kvtier.aopen(config, NS, clock=clock, tiers=tiers) as cache:
        yield cache
        cache.check()


async def tended(cache: kvtier.AsyncCache) -> None:
    """A pass of housekeeping that asks the tiers for the purges of elsewhere."""
    cache.manager._housekeeping._waited_s = 1e9
    await cache.manager._housekeeping.run()


async def purges(cache: kvtier.AsyncCache, clock: VirtualClock, count: int = MANY) -> None:
    for number in range(count):
        clock.advance(0.1)
        await cache.manager.purge([scope_of(f"other {number} {clock.wall()}")])
    clock.advance(0.1)


def remembered(cache: kvtier.AsyncCache) -> int:
    return len(cache.manager.host.refusals.tombstones)


def both(clock: VirtualClock) -> list[MemoryTier]:
    return [MemoryTier(NS, clock), MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=2)]


async def test_purges_without_end_take_no_memory() -> None:
    clock = VirtualClock()
    tiers = both(clock)
    async with opened(clock, tiers) as cache:
        counts = []
        for _ in range(10):
            await purges(cache, clock, 8)
            await tended(cache)
            counts.append(remembered(cache))
        assert max(counts) <= 16 and not cache.manager._purger.owed()
        assert len(tiers[0].store.tombstones) == 80, "the tiers remember them"
        before = remembered(cache)
        await tended(cache)
        await tended(cache)
        assert remembered(cache) <= before, "they are not learned again"


async def test_a_purge_of_elsewhere_is_still_learned() -> None:
    clock = VirtualClock()
    near, deep = tiers = both(clock)
    async with opened(clock, tiers) as cache:
        await cache.put(CHAIN, payloads_of(CHAIN, BLOCK))
        at = clock.wall()
        await purges(cache, clock)
        await tended(cache)
        await deep.purge(SCOPE, at)  # older than all that is forgotten
        await tended(cache)
        assert await cache.match(CHAIN) == 0
        assert (await near.tombstones())[tenant_of(SCOPE)] == at, "every tier has it"


async def test_what_was_begun_before_a_forgotten_purge_is_not_stored() -> None:
    clock = VirtualClock()
    async with opened(clock, both(clock)) as cache:
        manager = cache.manager
        of = ChainTerms(RequestTerms(BUILTIN["24h"]), NS.block_tokens)
        put = Put(manager, CHAIN, payloads_of(CHAIN, BLOCK), of, start=0, wait=False, request_id="")
        fresh = list(chain_of(NS, 4, scope=scope_of("another")))
        slots, _ = manager.reserve(fresh, 0, 4, BUILTIN["24h"])
        clock.advance(1)
        await manager.purge([SCOPE, scope_of("another")])
        for _ in range(3):
            await purges(cache, clock)
            await tended(cache)
        assert tenant_of(SCOPE) not in manager.host.refusals.tombstones
        assert tenant_of(scope_of("another")) in manager.host.refusals.tombstones, "some of its slots are being filled"
        assert await asyncio.to_thread(put.step) is None
        manager.commit(fresh, slots, [slot.generation for slot in slots])
        assert await cache.match(CHAIN) == await cache.match(fresh) == 0
        clock.advance(1)
        for chain in (CHAIN, fresh):
            assert await cache.put(chain, payloads_of(chain, BLOCK)) == 4 == await cache.match(chain)
        await tended(cache)
        assert tenant_of(scope_of("another")) not in manager.host.refusals.tombstones


async def test_a_purge_that_a_tier_lacks_is_not_forgotten() -> None:
    clock = VirtualClock()
    near, deep = both(clock)
    faulty = FaultyTier(near, [])
    async with opened(clock, [faulty, deep]) as cache:
        await cache.put(CHAIN, payloads_of(CHAIN, BLOCK))
        await cache.flush()
        clock.advance(1)
        faulty.faults = [Fault("purge", "error")]
        with pytest.raises(TierError):
            await cache.manager.purge([SCOPE])
        for _ in range(3):
            with pytest.raises(TierError):
                await purges(cache, clock, 1)
        known: dict[Scope, float] = dict(cache.manager.host.refusals.tombstones)
        for _ in range(3):
            await tended(cache)
            await cache.manager._purger.forget()  # which a pass leaves out while pins cannot be read
        assert known == cache.manager.host.refusals.tombstones
        async with cache.get(CHAIN) as hit:
            assert len(hit) == 0
        faulty.faults.clear()
        clock.advance(60)
        await tended(cache)
        assert not cache.manager._purger.owed() and not near.store.entries
        await purges(cache, clock)
        await tended(cache)
        assert remembered(cache) < MANY


@pytest.mark.parametrize("fault", ["purge", "open"])
async def test_more_purges_than_can_be_remembered_for_a_tier_are_refused_whole(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was taken is never forgotten; one that is refused has changed nothing, and is taken when the tier is
    back."""
    monkeypatch.setattr(purge_module, "OWED_MAX", 16)
    clock = VirtualClock()
    near, far = both(clock)
    faulty = FaultyTier(far, [Fault(fault, "error")])
    async with opened(clock, [near, faulty]) as cache:
        lower = cache.manager.lower
        taken = []
        for number in range(40):
            clock.advance(0.1)
            with pytest.raises(TierError) as raised:
                await cache.manager.purge([scope_of(f"tenant {number}")])
            if "wait" not in str(raised.value):
                taken.append(tenant_of(scope_of(f"tenant {number}")))
        assert len(taken) == 16 and set(await near.tombstones()) == set(taken)
        assert all(len(tier.owed) <= 16 for tier in lower.every()) and remembered(cache) <= 16
        assert await cache.put(CHAIN, payloads_of(CHAIN, BLOCK)) == 4
        with pytest.raises(TierError, match=r"g4: purge: .* wait"):
            await cache.manager.purge([SCOPE])
        assert await cache.match(CHAIN) == 4, "it was refused, and dropped something"
        with pytest.raises(TierError):
            await cache.manager.purge([taken[3]])  # anew: it takes no more memory
        faulty.faults.clear()
        clock.advance(100)
        async with asyncio.timeout(10):
            while lower.out or any(tier.owed for tier in lower.every()):
                await tended(cache)
                await asyncio.sleep(0.01)
        assert set(taken) <= set(await far.tombstones())
        await cache.manager.purge([SCOPE])
        assert await cache.match(CHAIN) == 0


@pytest.mark.parametrize("verb", ["purge", "tombstones"])
async def test_nothing_of_a_tenant_is_found_in_a_tier_that_owes_its_purge(verb: str) -> None:
    """The tier would say that it has the blocks, and each request would wait for a load that brings nothing."""
    clock = VirtualClock()
    near, deep = both(clock)
    faulty = FaultyTier(near, [])
    other = list(chain_of(NS, 4, scope=scope_of("another")))
    async with opened(clock, [faulty, deep]) as cache:
        for chain in (CHAIN, other):
            await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        clock.advance(1)
        faulty.faults = [Fault(verb, "error")]
        if verb == "purge":
            with pytest.raises(TierError):
                await cache.manager.purge([SCOPE])
        else:  # another process's
            await deep.purge(SCOPE, clock.wall())
            await tended(cache)
        await cache.evict("g2")
        assert await cache.match(CHAIN) == 0, "an old block was found"
        assert await cache.match(other) == 4
        clock.advance(1)
        assert await cache.put(CHAIN, payloads_of(CHAIN, BLOCK)) == 4 == await cache.match(CHAIN)
        await cache.flush()
        await cache.evict("g2")
        assert await cache.match(CHAIN) == 4, "the other tier has confirmed it"
        faulty.faults.clear()
        clock.advance(60)
        await tended(cache)
        assert not cache.manager._purger.owed() and not near.store.entries.keys() & {NS.digest + key for key in CHAIN}


async def test_of_two_purges_of_elsewhere_the_later_reaches_every_tier() -> None:
    clock = VirtualClock()
    near, far = both(clock)
    async with opened(clock, [near, far]) as cache:
        later, earlier = clock.wall() + 10, clock.wall()
        await near.purge(SCOPE, later)
        await far.purge(SCOPE, earlier)
        await tended(cache)
        assert [(await tier.tombstones())[tenant_of(SCOPE)] for tier in (near, far)] == [later, later]


async def test_a_purge_that_the_log_does_not_have_takes_effect_once() -> None:
    """Another process of this machine gave it the number that it expected; the log may give it to another purge."""
    clock, tenant = VirtualClock(), tenant_of(SCOPE)
    async with opened(clock, both(clock)) as cache:
        purger, hierarchy = cache.manager._purger, cache.manager.hierarchy
        hierarchy.position, guess = 3, {tenant: mark_below(5)}
        now = {tenant: None}  # all that is taken in before it takes force
        assert purger._local(guess, {}) == now
        purger._in_force.update(guess)
        assert purger._local(guess, {}) == {}, "it is in force"
        assert purger._local(guess, guess) == now, "the log has it now, and with it what came before"
        assert purger._local({tenant: mark_below(3)}, {}) == {}, "it was read"
        hierarchy.position = 0


async def test_what_begins_behind_a_purge_that_a_tier_owes_is_stored() -> None:
    """While the tier fails, each pass of housekeeping has the purge once more: so often the blocks of the tenant's
    later requests would be dropped that wait for a copy."""

    class Watcher:
        def purge(self, scopes: Mapping[Scope, Wall]) -> None:
            told.extend(scopes)

    clock, told, watcher = VirtualClock(), list[Scope](), Watcher()
    near, deep = both(clock)
    async with opened(clock, [FaultyTier(near, [Fault("purge", "error")]), deep]) as cache:
        manager = cache.manager
        with manager.lock:
            manager.hierarchy.work.watch(watcher)
        at = clock.wall()
        clock.advance(1)
        with pytest.raises(TierError):
            await manager.purge([SCOPE])
        assert told == [tenant_of(SCOPE)]
        work = manager.hierarchy.begin(Wall("-inf"))
        for _ in range(3):
            await manager._housekeeping.run()
        await deep.purge(SCOPE, at)  # elsewhere, and before: that purge covers it
        await tended(cache)
        assert manager._purger.owed()
        assert told == [tenant_of(SCOPE)] and not work.lost(CHAIN)
        with pytest.raises(TierError):
            await manager.purge([SCOPE])
        assert work.lost(CHAIN), "another one in the same moment"


async def test_a_purge_that_is_cancelled_is_carried_out() -> None:
    """At any turn, the very first included: what it covers leaves G2, and it is forgotten in its time."""
    clock = VirtualClock()
    async with opened(clock, both(clock)) as cache:
        refusals, free = cache.manager.host.refusals, len(cache.manager.host._free)
        for turns in range(1, 30):
            await cache.put(CHAIN, payloads_of(CHAIN, BLOCK))
            await cache.flush()
            clock.advance(1)
            purging = asyncio.ensure_future(cache.manager.purge([SCOPE]))
            for _ in range(turns):
                await asyncio.sleep(0)
            over = purging.done()
            purging.cancel()
            with suppress(asyncio.CancelledError):
                await purging
            await cache.flush()
            for _ in range(3):
                clock.advance(1)
                await tended(cache)
            assert len(cache.manager.host._free) == free, f"cancelled after {turns} turns: its blocks are still here"
            assert not refusals.dropping and not refusals.tombstones, f"after {turns} turns"
            if over:
                break
        assert over and turns > 3


async def test_no_purge_of_elsewhere_is_forgotten_before_a_tier_owes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of housekeeping ends while a purge, or a tier that joins, learns of it."""
    clock = VirtualClock()
    near, deep = both(clock)
    faulty = FaultyTier(near, [])
    async with opened(clock, [faulty, deep]) as cache:
        purger = cache.manager._purger
        await cache.put(CHAIN, payloads_of(CHAIN, BLOCK))
        await cache.flush()
        clock.advance(1)
        await deep.purge(SCOPE, clock.wall())
        clock.advance(1)
        faulty.faults = [Fault("purge", "error")]
        learning = asyncio.ensure_future(purger.sync())
        while not learning.done():
            await purger.forget()
            await asyncio.sleep(0)
        await learning
        await purger.forget()
        assert tenant_of(SCOPE) in cache.manager.host.refusals.tombstones, "g3 lacks it"
        await cache.manager.promoter.load(CHAIN, {"g3": range(4)}, clock.monotonic() + 5)
        assert await cache.match(CHAIN) == 0
