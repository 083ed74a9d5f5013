"""Purges through whole caches: G2, G3 and G4 of several replicas, whatever their clocks and their bucket do."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import kvtier
from kvtier.errors import KVTierError, TierError
from kvtier.identity.keys import Scope, scope_of
from kvtier.manager.write_behind import WriteBehind
from kvtier.testing import MemoryTier, chain_of, payloads_of
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.objects import purge_log
from kvtier.times import Wall
from tests.tiers.objects.support.caches import NS, Fleet, fail, found, learn, put
from tests.tiers.objects.support.inline import inline_tier
from tests.tiers.objects.support.virtual_bucket import VirtualBucket, VirtualServer


@pytest.fixture(params=[False, True], ids=["keyless", "keyed"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Fleet:
    if request.param:
        pytest.importorskip("cryptography")
    return Fleet(tmp_path, request.param)


async def test_a_purge_covers_adapters_in_every_tier(fleet: Fleet) -> None:
    chains = [
        chain_of(NS, 8, seed, scope)
        for seed, scope in enumerate([scope_of("t"), scope_of("t", b"lora"), scope_of("t", isolated="x")])
    ]
    other = chain_of(NS, 8, 9, scope_of("u", b"lora"))
    async with fleet.open("a") as cache:
        for chain in [*chains, other]:
            await put(cache, chain)
        fleet.clock.advance(1)
        await cache.purge("t")
        for evicted in ("", "g2", "g3"):
            if evicted:
                await cache.evict(evicted)
            assert [await found(cache, chain) for chain in chains] == [[]] * 3
            assert len(await found(cache, other)) == 8


async def test_new_blocks_of_a_purged_tenant_are_stored_in_every_tier_at_once(fleet: Fleet) -> None:
    chain = chain_of(NS, 8, 1, scope_of("t"))
    async with fleet.open("a") as cache:
        for _ in range(3):
            await put(cache, chain)
            fleet.clock.advance(1)
            await cache.purge("t")
            assert await found(cache, chain) == []
            fleet.clock.advance(1)
        await put(cache, chain)
        for evicted, tier in (("g2", "g3"), ("g3", "g4")):
            await cache.evict("g2")
            if evicted == "g3":
                await cache.evict("g3")
            assert await found(cache, chain) == [tier] * 8


@pytest.mark.parametrize("purger", ["itself", "another"])
@pytest.mark.parametrize("ahead_s", [5.0, 250.0])
async def test_a_writer_whose_clock_is_ahead_brings_nothing_back(fleet: Fleet, ahead_s: float, purger: str) -> None:
    chain, other = chain_of(NS, 8, 1, scope_of("t")), chain_of(NS, 8, 2, scope_of("u"))
    async with fleet.open("a") as one, fleet.open("b", ahead_s) as ahead:
        for each in (chain, other):
            await put(ahead, each)
        assert await found(one, chain) == ["g4"] * 8
        assert (await one.flush()).pending == 0
        fleet.clock.advance(1)
        await (ahead if purger == "itself" else one).purge("t")
        await learn(fleet, one)
        for evicted in ("", "g2", "g3"):
            if evicted:
                await one.evict(evicted)
            assert await found(one, chain) == [], "in what was copied while it was right, too"
        assert len(await found(one, other)) == 8


async def test_what_was_purged_elsewhere_does_not_come_back_with_the_bucket_away(fleet: Fleet) -> None:
    chain, other = chain_of(NS, 8, 1, scope_of("t")), chain_of(NS, 8, 2, scope_of("u"))
    async with fleet.open("a") as one, fleet.open("b") as two:
        for each in (chain, other):
            await put(one, each)
        fleet.clock.advance(1)
        await two.purge("t")
        await learn(fleet, one)
    shutil.move(fleet.root / "bucket", fleet.root / "gone")
    (fleet.root / "bucket").write_text("not a directory")
    async with fleet.open("a") as again:
        assert await found(again, chain) == [] and await found(again, other) == ["g3"] * 8
        await put_g3(again, chain)
    (fleet.root / "bucket").unlink()
    shutil.move(fleet.root / "gone", fleet.root / "bucket")
    async with fleet.open("a") as back:
        assert await found(back, chain) == ["g3"] * 8, "stored in the outage, behind the purge that was read before it"
        await back.evict("g2")
        await back.evict("g3")
        assert await found(back, chain) == []


async def test_a_purge_counts_although_another_was_read_that_is_not_in_force_here_yet(fleet: Fleet) -> None:
    chain = chain_of(NS, 8, 1, scope_of("t"))
    async with fleet.open("a") as one, fleet.open("b", g3=False) as two:
        await two.purge("t")
        fleet.clock.advance(1)
        await put(two, chain)  # behind that purge
        fleet.clock.advance(50)
        assert await found(one, chain) == ["g4"] * 8  # the log was read, and its new entry not taken over
        await one.purge("t")
        await two.evict("g2")
        await learn(fleet, two)
        for cache in (one, two):
            assert await found(cache, chain) == []


async def put_g3(cache: kvtier.AsyncCache, keys: Sequence[bytes]) -> None:
    assert await cache.put(keys, payloads_of(list(keys), 4096)) == len(keys)
    await cache.flush(timeout=2)


async def test_a_purge_that_the_bucket_does_not_take_raises_and_is_made_up_for(fleet: Fleet) -> None:
    chain = chain_of(NS, 8, 1, scope_of("t"))
    async with fleet.open("a") as one:
        await put(one, chain)
        await put(one, chain_of(NS, 4, 5))
        await one.purge("another")
        log = next((fleet.root / "bucket").glob("ctl/*/log"))
        log.chmod(0o500)
        tier = one.manager.lower["g4"].inner.inner
        create, tier._store.bucket.create = tier._store.bucket.create, fail  # type: ignore[attr-defined]
        fleet.clock.advance(1)
        with pytest.raises(KVTierError):
            await one.purge("t")
        assert await found(one, chain) == [], "dropped here in any case"
        log.chmod(0o700)
        tier._store.bucket.create = create  # type: ignore[attr-defined]
        await learn(fleet, one)
        await learn(fleet, one)
    async with fleet.open("b", g3=False) as two:
        assert await found(two, chain) == []
        assert {scope_of("t")[:8]} <= {scope[:8] for scope in await two.manager.lower["g4"].tombstones()}


async def test_a_log_that_was_cut_while_a_replica_was_away_takes_its_g4_out(fleet: Fleet) -> None:
    chain, other = chain_of(NS, 8, 1, scope_of("t")), chain_of(NS, 8, 2, scope_of("u"))
    async with fleet.open("a") as one:
        for each in (chain, other):
            await put(one, each)
        fleet.clock.advance(1)
        await one.purge("t")
    for entry in (fleet.root / "bucket").glob("ctl/*/log/*"):
        entry.unlink()
    async with fleet.open("a") as again:
        assert await found(again, chain) == [] and await found(again, other) == ["g3"] * 8
        await again.evict("g2")
        await again.evict("g3")
        assert await found(again, other) == [], "G4 is not believed"
        assert again.stats()["g4"]["counters"]["purge_log_faults"] >= 1


@pytest.mark.parametrize("tenant", ["u", "t"])
async def test_a_purge_that_failed_hides_no_other_of_the_same_number(fleet: Fleet, tenant: str) -> None:
    """The log gives the number of the entry that could not be written to another replica's purge."""
    async with fleet.open("a") as one, fleet.open("b", g3=False) as two:
        await two.purge("first")
        await learn(fleet, one)
        tier = one.manager.lower["g4"].inner.inner
        create, tier._store.bucket.create = tier._store.bucket.create, fail  # type: ignore[attr-defined]
        with pytest.raises(KVTierError):
            await one.purge(tenant)
        fleet.clock.advance(1)
        chain = chain_of(NS, 8, 1, scope_of("t"))
        assert await one.put(chain, payloads_of(chain, 4096)) == 8
        await learn(fleet, one)
        fleet.clock.advance(1)
        await two.purge("t")
        tier._store.bucket.create = create  # type: ignore[attr-defined]
        await learn(fleet, one)
        await learn(fleet, one)
        assert await found(one, chain) == []
        await one.evict("g2")
        assert await found(one, chain) == []


async def test_what_is_stored_after_a_purge_was_made_up_for_is_kept(fleet: Fleet) -> None:
    """New blocks are behind the entry as soon as it is written, not when the log is read again twenty seconds later."""
    chain = chain_of(NS, 8, 1, scope_of("t"))
    async with fleet.open("a") as one:
        tier = one.manager.lower["g4"].inner.inner
        create, tier._store.bucket.create = tier._store.bucket.create, fail  # type: ignore[attr-defined]
        with pytest.raises(KVTierError):
            await one.purge("t")
        tier._store.bucket.create = create  # type: ignore[attr-defined]
        await learn(fleet, one)
        fleet.clock.advance(1)
        await put(one, chain)
        await learn(fleet, one)
        for served in ("g2", "g3", "g4"):
            assert await found(one, chain) == [served] * 8
            for name in ("g2", "g3")[: 1 + (served == "g3")]:
                await one.evict(name)


class SlowList(VirtualBucket):
    """Its next listing, of the names of when it was asked for, is answered once `go` is set."""

    go: asyncio.Event | None = None

    def __init__(self, server: VirtualServer) -> None:
        super().__init__(server)
        self.asked = asyncio.Event()

    async def _answering(self, verb: str, name: str) -> None:
        go, self.go = (self.go, None) if verb == "list" else (None, self.go)
        if go is not None:
            self.asked.set()
            await go.wait()


class Near(MemoryTier):
    """A tier that does something before it tells its tombstones."""

    async def before(self) -> None:
        pass

    async def tombstones(self) -> Mapping[Scope, Wall]:
        await self.before()
        return await super().tombstones()


async def test_a_purge_after_the_listing_that_counts_is_not_taken_for_proven() -> None:
    """A look at the log joins a listing that began before it, and the log is read on until all tiers have answered."""
    server = VirtualServer()
    bucket, near = SlowList(server), Near(NS, server.clock)
    (g4, _), (other, _) = inline_tier(NS, server, 2, bucket=bucket), inline_tier(NS, server, 2)
    await other.open()
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 32 * 4096}}})
    async with kvtier.aopen(config, NS, clock=server.clock, tiers=[near, g4]) as cache:
        hierarchy, purger = cache.manager.hierarchy, cache.manager._purger
        await purger.sync()
        server.clock.advance(50)
        listed, bucket.go = server.clock.monotonic(), (go := asyncio.Event())
        looking = asyncio.ensure_future(g4._ready())
        await bucket.asked.wait()
        server.clock.advance(1)
        await other.purge(scope_of("t"), server.clock.wall())
        server.clock.advance(1)

        async def read_on() -> None:
            go.set()
            await looking
            for _ in range(100):
                await asyncio.sleep(0)  # G4 has answered
            await g4._store.refresh()  # the sweeper's

        near.before = read_on  # type: ignore[method-assign]
        await purger._sync(None)
        assert (hierarchy.position, hierarchy.proven_at <= listed) == (0, True)
        del near.before
        await purger.sync()
        assert (hierarchy.position, hierarchy.proven_at) == (1, server.clock.monotonic())
    await other.close(server.clock.monotonic())


@asynccontextmanager
async def held_up(queue: WriteBehind) -> AsyncIterator[asyncio.Event]:
    """Nothing is taken out of the queue but what is being written. The event: something waits for that."""
    take, waiting, free = queue.rate.take, asyncio.Event(), asyncio.Event()

    async def wait(size: float) -> None:
        waiting.set()
        await free.wait()
        await take(size)

    queue.rate.take = wait  # type: ignore[method-assign]
    yield waiting
    free.set()


async def test_what_waits_to_be_written_stays_purged_when_its_purge_is_forgotten(fleet: Fleet) -> None:
    """G2 forgets purges that every tier has; a block that waits for a slow tier has no position yet."""
    chain = chain_of(NS, 8, 1, scope_of("t"))
    async with fleet.open("a", g3=False) as cache:
        async with held_up(cache.manager.demoter.queues["g4"]) as waiting:
            assert await cache.put(chain, payloads_of(chain, 4096)) == 8
            await waiting.wait()
            for tenant in ("t", "another"):
                fleet.clock.advance(1)
                await cache.purge(tenant)
            await cache.manager._purger.forget()
            assert len(cache.manager.host.refusals.tombstones) == 1
        assert (await cache.flush()).pending == 0
        assert await found(cache, chain) == [], "written at the position after its purge"
        fleet.clock.advance(1)
        await put(cache, chain)
        await cache.evict("g2")
        assert await found(cache, chain) == ["g4"] * 8


async def test_what_a_clock_that_is_behind_stores_after_a_purge_is_served(fleet: Fleet) -> None:
    """G2 refuses what was made before the time at which it learned of a purge, by its own clock; a tier that has the
    purge knows better."""
    chain = chain_of(NS, 8, 1, scope_of("t"))
    async with fleet.open("a") as one, fleet.open("b", -5.0) as behind:
        await put(one, chain)
        await behind.purge("t")
        await learn(fleet, one)
        fleet.clock.advance(1)
        await put(behind, chain)
        one.manager._housekeeping._waited_s = 1e9
        await one.manager._housekeeping.run()
        assert await found(one, chain) == ["g4"] * 8


async def test_what_waits_to_be_written_below_the_logs_floor_is_not_taken_for_new(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names the latest purged tenants only; a replica that was away for more has nothing that counts."""
    monkeypatch.setattr(purge_log, "TENANTS_MAX", 4)
    monkeypatch.setattr(purge_log, "SNAPSHOT_EVERY", 8)
    chain = chain_of(NS, 8, 1, scope_of("t"))
    async with fleet.open("a", g3=False) as away, fleet.open("b", g3=False) as here:
        async with held_up(away.manager.demoter.queues["g4"]) as waiting:
            assert await away.put(chain, payloads_of(chain, 4096)) == 8
            await waiting.wait()
            for tenant in ["t", *(f"another {number}" for number in range(32))]:
                fleet.clock.advance(1)
                await here.purge(tenant)
            await learn(fleet, away)
            assert await found(away, chain) == []
        assert (await away.flush()).pending == 0
        for cache in (away, here):
            await learn(fleet, cache)
            assert await found(cache, chain) == [], "written at the floor"


async def test_no_purge_is_missed_where_what_is_below_the_logs_floor_cannot_be_dropped(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log does not name its tenant any more, and G3 does not evict: what it has is not served, then or later."""
    monkeypatch.setattr(purge_log, "TENANTS_MAX", 4)
    monkeypatch.setattr(purge_log, "SNAPSHOT_EVERY", 8)
    chain = chain_of(NS, 8, 1, scope_of("t"))
    async with fleet.open("a") as away, fleet.open("b", g3=False) as here:
        await put(away, chain)
        for tenant in ["t", *(f"another {number}" for number in range(32))]:
            fleet.clock.advance(1)
            await here.purge(tenant)
        near = away.manager.lower["g3"].inner.inner

        async def fails(keys: object) -> int:
            raise OSError(5, "no medium")

        monkeypatch.setattr(near, "evict", fails)
        for _ in range(2):
            await learn(fleet, away)
        assert not away.manager.hierarchy.log_memory, "the next process would take its G3 for clean"
        assert await found(away, chain) == [], "a purged block of G3 is served"
        monkeypatch.undo()
        await learn(fleet, away)
        assert away.manager.hierarchy.log_memory and await found(away, chain) == []
        fleet.clock.advance(1)
        await put(away, chain)
        await away.evict("g2")
        assert len(await found(away, chain)) == 8


async def test_a_g3_that_joins_after_the_logs_floor_has_passed_it_by_is_emptied_first(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica knows the log to its end by then, though not what G3 missed."""
    monkeypatch.setattr(purge_log, "TENANTS_MAX", 4)
    monkeypatch.setattr(purge_log, "SNAPSHOT_EVERY", 8)
    chain = chain_of(NS, 8, 1, scope_of("t"))
    async with fleet.open("a") as away:
        await put(away, chain)
    with monkeypatch.context() as out:

        async def fails(tier: DiskTier) -> None:
            raise TierError("g3", "open", "no medium")

        out.setattr(DiskTier, "open", fails)
        back = fleet.open("a")
        await back.__aenter__()
        async with fleet.open("b", g3=False) as here:
            for tenant in ["t", *(f"another {number}" for number in range(32))]:
                fleet.clock.advance(1)
                await here.purge(tenant)
        await learn(fleet, back)
    async with asyncio.timeout(60):
        while back.manager.lower.out:
            fleet.clock.advance(1)
            await asyncio.sleep(0.01)
        assert list(back.manager.lower) == ["g3", "g4"]
        assert await found(back, chain) == [], "a purged block of G3 is served"
        await back.close()
