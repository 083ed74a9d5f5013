"""Replicas on one bucket: deltas, records of uses, sweeping, pins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from kvtier.errors import InvalidRequest
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.retention.pins import Pin
from kvtier.retention.terms import Terms
from kvtier.testing import chain_of, seal
from kvtier.testing.faults_s3 import FaultyS3, S3Fault, S3Rule
from kvtier.tiers.objects import deltas
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Stored
from tests.tiers.objects.support.replicas import NS, S, Site


async def store(site: Site, tier: ObjectTier, chain: Sequence[BlockKey], ttl: float = 86400) -> None:
    assert all(result.durable for result in await site.store(tier, chain, Terms("t", ttl=ttl)))


def named(site: Site, name: str, chain: Sequence[BlockKey], ttl: float) -> Pin:
    return Pin(name, tuple(chain), site.clock.wall(), site.clock.wall() + ttl)


def strides(site: Site) -> int:
    return sum(p.is_file() and len(p.name) == 64 for p in site.root.rglob("*"))


async def poll(site: Site, tier: ObjectTier) -> None:
    """Let a replica read new deltas: a lookup that finds nothing starts it, in the background."""
    site.clock.advance(deltas.POLL_S + 1)
    await tier.lookup(chain_of(NS, S, seed=99), [0], site.deadline)
    assert tier._background.polling is not None
    await tier._loop.run(asyncio.wait_for(asyncio.shield(tier._background.polling), 30))


async def test_a_delta_lists_full_and_short_strides(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, 3 * S + 2)
    await store(site, one, chain)
    await one.flush(site.deadline)
    await poll(site, two)
    assert two.peek(chain, range(len(chain))) == [None] * len(chain)
    assert all(isinstance(r, Loaded) for r in await site.read(two, chain))


async def test_a_lookup_after_a_delta_needs_no_probe(site: Site) -> None:
    with FaultyS3().running() as server:
        one = await site.replica("s3://bucket/p", options=server.options, client="obstore")
        two = await site.replica("s3://bucket/p", options=server.options, client="obstore")
        chain = chain_of(NS, 64 * S)
        await store(site, one, chain)
        await one.flush(site.deadline)
        await poll(site, two)
        before = server.requests.copy()
        assert await two.lookup(chain, range(len(chain)), site.deadline) == [None] * len(chain)
        assert not server.requests - before, "no probes"
        for tier in site.tiers:
            await tier.close(site.deadline)
        site.tiers.clear()


async def test_a_replica_without_deltas_finds_it_all_the_same(site: Site) -> None:
    """The control: without deltas it takes probes."""
    with FaultyS3().running() as server:
        one = await site.replica("s3://bucket/p", options=server.options, client="obstore")
        chain = chain_of(NS, 64 * S)
        server.rules = [S3Rule("list", S3Fault.EMPTY_200)]
        await store(site, one, chain)
        two = await site.replica("s3://bucket/p", options=server.options, client="obstore")
        server.rules = []
        site.clock.advance(60)
        for name in [name for name in server.objects if "/delta/" in name]:
            del server.objects[name]
        before = server.requests["get"]
        assert await two.lookup(chain, range(len(chain)), site.deadline) == [None] * len(chain)
        assert 8 <= server.requests["get"] - before <= 24, "16, and those of other tasks meanwhile"
        for tier in site.tiers:
            await tier.close(site.deadline)
        site.tiers.clear()


async def test_a_damaged_delta_is_skipped(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await store(site, one, chain)
    await one.flush(site.deadline)
    for path in site.root.rglob("delta/*"):
        path.write_bytes(b"junk")
    await poll(site, two)
    assert two.counters()["learnt_units"] == 0
    assert await two.lookup(chain, range(S), site.deadline) == [None] * S


async def test_more_deltas_than_one_poll_reads_are_read_by_the_next(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "READS_MAX", 2)
    one, two = await site.replica(), await site.replica()
    for seed in range(5):
        await store(site, one, chain_of(NS, S, seed))
        site.clock.advance(1)
        await one.flush(site.deadline)
    for received in (2, 4, 5):
        await poll(site, two)
        assert two.counters()["learnt_units"] == received


async def test_what_another_replica_wrote_can_be_evicted_by_any_of_its_keys(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    evicted, kept = chain_of(NS, 2 * S, seed=1), chain_of(NS, S, seed=2)
    await store(site, one, evicted)
    await store(site, one, kept)
    assert await two.evict([evicted[1]]) == 1
    assert strides(site) == 2, "the object with that block, its neighbours with it"
    assert await two.evict(chain_of(NS, S, seed=3)) == 0
    assert await two.evict(kept) == S and strides(site) == 1


async def sweep_all(tier: ObjectTier) -> None:
    """Two whole walks, whatever place the first began at."""

    async def walk() -> None:
        ends = 0
        while ends < 2:
            ends += await tier._sweeper.page()

    await tier._loop.run(walk())


async def test_replicas_sweep_what_is_dead_and_nothing_else(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    short, long = chain_of(NS, 3 * S, seed=1), chain_of(NS, 3 * S, seed=2)
    tenant = chain_of(NS, S, seed=3, scope=scope_of("tenant"))
    await store(site, one, short, ttl=300)
    await store(site, one, long)
    await store(site, one, tenant)
    assert strides(site) == 7
    await sweep_all(two)
    assert strides(site) == 7, "nothing is dead yet"
    site.clock.advance(330)
    await sweep_all(two)
    assert strides(site) == 7, "a minute's grace for clocks that are behind"
    site.clock.advance(60)
    await sweep_all(two)
    assert strides(site) == 4
    assert two._sweeper.swept.blocks == 3 * S
    assert all(isinstance(r, Loaded) for r in await site.read(two, long))
    assert set(await site.read(two, short)) == {Miss.ABSENT}


async def test_what_slipped_past_a_purge_is_swept(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    tenant = scope_of("tenant")
    chain = chain_of(NS, S, scope=tenant)
    old = seal(chain, range(S), NS.block_bytes, site.clock.wall())
    site.clock.advance(1)
    await one.purge(tenant, site.clock.wall())
    assert await two.write(old, site.deadline) == [Stored.STORED] * S
    assert strides(site) == 1
    await sweep_all(one)
    assert strides(site) == 0


async def test_a_renewed_object_is_not_swept(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await store(site, one, chain, ttl=300)
    for _ in range(3):
        site.clock.advance(200)
        one.touch(chain, site.clock.wall())
        await one.flush(site.deadline)
        await sweep_all(two)
    assert strides(site) == 1


async def heartbeat(tier: ObjectTier) -> None:
    """As the manager does every few seconds, until the background work that it starts has ended."""
    await tier.tombstones()
    for done in (tier._background.writing, tier._background.sweeping):
        if done is not None:
            await tier._loop.run(asyncio.wait_for(asyncio.shield(done), 30))


async def test_uses_reach_the_server_without_a_flush(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    used, idle = chain_of(NS, S, seed=1), chain_of(NS, S, seed=2)
    await store(site, one, used, ttl=300)
    await store(site, one, idle, ttl=300)
    site.clock.advance(100)
    one.touch(used, site.clock.wall())
    await heartbeat(one)
    assert one.counters()["renewed_units"] == 0, "not worth a write yet"
    site.clock.advance(100)
    await heartbeat(one)
    assert one.counters()["renewed_units"] == 1, "the use of a hundred seconds ago"
    site.clock.advance(190)
    assert all(isinstance(r, Loaded) for r in await site.read(two, used))
    assert not any(isinstance(r, Loaded) for r in await site.read(two, idle)), "the control: nobody used it"
    site.clock.advance(15)
    assert not any(isinstance(r, Loaded) for r in await site.read(two, used)), "ttl after its last use"


async def test_blocks_do_not_live_on_because_those_before_them_were_used(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    whole, part = chain_of(NS, S, seed=1), chain_of(NS, S, seed=2)
    await store(site, one, whole, ttl=300)
    await store(site, one, part, ttl=300)
    site.clock.advance(200)
    one.touch([*whole, *part[: S - 1]], site.clock.wall())
    await one.flush(site.deadline)
    site.clock.advance(150)
    assert all(isinstance(r, Loaded) for r in await site.read(two, whole))
    assert not isinstance((await site.read(two, part))[-1], Loaded), "its last block was used 350 seconds ago"


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
async def test_a_use_is_recorded_by_a_copy_not_by_the_bytes(site: Site, client: str) -> None:
    with FaultyS3().running() as server:
        one = await site.replica("s3://bucket/p", options=server.options, client=client)
        chain = chain_of(NS, S)
        await store(site, one, chain, ttl=300)
        await one.flush(site.deadline)
        before = server.requests.copy()
        site.clock.advance(200)
        one.touch(chain, site.clock.wall())
        await one.flush(site.deadline)
        asked = server.requests - before
        assert asked["copy"] == 1 and not asked["put"] and not asked["get"]
        await one.close(site.deadline)
        site.tiers.clear()


async def test_old_deltas_are_swept(site: Site) -> None:
    one = await site.replica()
    await store(site, one, chain_of(NS, S))
    await one.flush(site.deadline)
    [old] = site.root.rglob("delta/*")
    site.clock.advance(2 * deltas.KEEP_S)
    await sweep_all(one)
    assert not old.exists(), "there may be one by which the clock was compared with the server's"


async def test_a_pin_keeps_what_would_expire_for_every_replica(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    kept, lost = chain_of(NS, 2 * S + 1, seed=1), chain_of(NS, S, seed=2)
    await store(site, one, kept, ttl=300)
    await store(site, one, lost, ttl=300)
    await one.pin(named(site, "system-prompt", kept, 10_000))
    site.clock.advance(2000)
    await sweep_all(two)
    assert all(isinstance(r, Loaded) for r in await site.read(two, kept))
    assert set(await site.read(two, lost)) == {Miss.ABSENT}, "the control: what nobody pinned is gone"
    assert await two.pins() == await one.pins() and [pin.name for pin in await two.pins()] == ["system-prompt"]
    site.clock.advance(8100)
    await sweep_all(two)
    assert not any(isinstance(r, Loaded) for r in await site.read(one, kept))
    assert strides(site) == 0 and await one.pins() == []


async def test_a_pin_can_be_extended_and_ended(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await store(site, one, chain, ttl=300)
    await one.pin(named(site, "p", chain, 400))
    await one.pin(named(site, "p", chain, 5000))
    site.clock.advance(1000)
    assert all(isinstance(r, Loaded) for r in await site.read(two, chain))
    assert await two.unpin("p") and not await two.unpin("p")
    site.clock.advance(60)
    assert await site.read(one, chain) == [Miss.EXPIRED] * S


async def test_what_only_a_pin_keeps_is_renewed_before_the_buckets_rule_finds_it_old(site: Site) -> None:
    with FaultyS3().running() as server:
        site.clock.jump_wall(time.time() - site.clock.wall())  # the server has a clock of its own
        one = await site.replica("s3://bucket/p", options=server.options)
        kept, other = chain_of(NS, S, seed=1), chain_of(NS, S, seed=2)
        await store(site, one, kept, ttl=300)
        await store(site, one, other, ttl=86400)
        await one.pin(named(site, "p", kept, 1_000_000))
        site.clock.advance(3600)
        for there in server.objects.values():
            there.modified = site.clock.wall() - 13 * 3600
        await sweep_all(one)
        assert one.counters()["renewed_units"] == 1, "the other is alive by its own terms"
        await one.close(site.deadline)
        site.tiers.clear()


async def test_a_purge_ends_what_a_pin_keeps(site: Site) -> None:
    one = await site.replica()
    tenant = scope_of("tenant")
    chain = chain_of(NS, S, scope=tenant)
    await store(site, one, chain)
    await one.pin(named(site, "p", chain, 5000))
    site.clock.advance(1)
    assert await one.purge(tenant, site.clock.wall()) == S
    assert not any(isinstance(r, Loaded) for r in await site.read(one, chain))
    assert await one.pins() == []


async def test_a_pin_holds_what_is_stored_later_and_what_goes_on_behind_its_end(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain, aside = chain_of(NS, 2 * S, seed=1), chain_of(NS, S, seed=2)
    await one.pin(named(site, "p", chain[: S + 1], 5000))
    await store(site, one, chain, ttl=300)
    await store(site, one, aside, ttl=300)
    site.clock.advance(1000)
    assert all(isinstance(r, Loaded) for r in await site.read(two, chain)), "both objects hold pinned blocks"
    assert await site.read(two, aside) == [Miss.EXPIRED] * S


async def test_a_damaged_pin_is_as_if_it_were_not_there(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await one.pin(named(site, "p", chain, 5000))
    (path,) = site.root.rglob("pins/*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    site.clock.advance(60)
    assert await two.pins() == []
    path.write_bytes(whole)
    site.clock.advance(60)
    assert [pin.name for pin in await two.pins()] == ["p"]


async def test_a_pin_needs_a_name_and_blocks(site: Site) -> None:
    one = await site.replica()
    for wrong in (
        named(site, "../p", chain_of(NS, 1), 60),
        named(site, "", chain_of(NS, 1), 60),
        named(site, "p", [], 60),
    ):
        with pytest.raises(InvalidRequest):
            await one.pin(wrong)
    assert not list(site.root.rglob("pins/*"))
