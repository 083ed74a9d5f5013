"""What goes below G2 when the tier there would have to be asked what it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import kvtier
from kvtier.clock import SystemClock
from kvtier.identity.keys import BlockKey
from kvtier.manager.manager import Manager
from kvtier.policies.policy import make_policy
from kvtier.retention.terms import BUILTIN, Depth
from kvtier.testing import MemoryTier, chain_of, payload_of, payloads_of, sample_namespace
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Miss, Sealed, Stored

BLOCK = 4096
NS = sample_namespace(BLOCK)


class Unasked(MemoryTier):
    """Says nothing without being asked."""

    def peek(self, chain: Sequence[BlockKey], wanted: Sequence[int]) -> list[Miss | None]:
        return [Miss.LATE] * len(wanted)

    async def lookup(self, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: float) -> list[Miss | None]:
        return MemoryTier.peek(self, chain, wanted)


class Refusing(MemoryTier):
    """Takes no block, with that answer."""

    answer = Stored.FULL

    async def write(self, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        return [self.answer] * len(blocks)


def store(manager: Manager, chain: Sequence[BlockKey], start: int) -> list[int]:
    slots, reached = manager.reserve(chain, start, len(chain), BUILTIN["24h"])
    assert reached == len(chain)
    for slot in slots:
        slot.pieces[0][:] = payload_of(slot.key or b"", BLOCK)
    return manager.commit(chain, slots, [slot.generation for slot in slots])


@pytest.mark.parametrize("here", [True, False])
async def test_a_tail_goes_below_where_its_head_may_be_and_is(here: bool) -> None:
    clock, chain = SystemClock(), chain_of(NS, 8)
    tier = Unasked(NS, clock)
    manager = Manager(HostTier(Arena(BLOCK, 1, 16 * BLOCK), make_policy("lru", 16)), [tier], clock)
    await manager.start()
    try:
        assert store(manager, chain[:4], 0) == []
        assert (await manager.flush(clock.monotonic() + 10)).durable == {"g3": 4}
        await manager.evict("g2")
        if not here:
            await tier.evict(chain[3:4])
        assert store(manager, chain, 4) == [], "the queue asks"
        flushed = await manager.flush(clock.monotonic() + 10)
        refused = manager.demoter.queues["g3"].refused
        assert (flushed.durable, flushed.dropped) == (({"g3": 8}, 0) if here else ({"g3": 4}, 4))
        assert refused["orphan"] == (0 if here else 4), "no tail without its head"
    finally:
        await manager.close()


async def test_a_head_that_may_be_missing_goes_with_its_tail() -> None:
    clock, chain = SystemClock(), chain_of(NS, 8)
    tier = Unasked(NS, clock)
    manager = Manager(HostTier(Arena(BLOCK, 1, 16 * BLOCK), make_policy("lru", 16)), [tier], clock)
    await manager.start()
    try:
        store(manager, chain[:4], 0)
        await manager.flush(clock.monotonic() + 10)
        await tier.evict(None)
        assert store(manager, chain, 4) == []
        await manager.flush(clock.monotonic() + 10)
        assert tier.usage().blocks == 8
    finally:
        await manager.close()


async def test_a_chain_that_came_from_the_deepest_tier_grows_in_a_full_nearest_one(tmp_path: Path) -> None:
    """Its head is the coldest there until the tier knows of the use: the head leaves for none of its own chain."""
    disk = {"path": str(tmp_path / "g3"), "capacity": 8 * BLOCK}
    tiers = {"g2": {"capacity": 32 * BLOCK}, "g3": disk, "g4": {"url": f"file://{tmp_path}/g4", "stride": 2}}
    chain, other = chain_of(NS, 8), chain_of(NS, 4, seed=1)
    cache = kvtier.aopen(kvtier.Config.parse({"tiers": tiers}), NS)
    manager = cache.manager
    manager.hierarchy.limits = manager._limits = replace(manager._limits, housekeeping_s=3600.0)
    async with cache:
        for keys in (chain[:6], other):  # of the first, the last two leave for the second
            assert await cache.put(keys, payloads_of(list(keys), BLOCK)) == len(keys)
            assert (await cache.flush()).pending == 0
        await cache.evict("g2")
        with await cache.get(chain) as hit:
            assert hit.tiers == ["g3"] * 4 + ["g4"] * 2
        await manager.demoter.drain(manager.hierarchy.clock.monotonic() + 10)  # unlike a flush, tells no tier of uses
        assert await cache.put(chain, payloads_of(list(chain), BLOCK)) == 8
        await manager.demoter.drain(manager.hierarchy.clock.monotonic() + 10)
        assert manager.demoter.dropped == 0
        await cache.evict("g2")
        with await cache.get(chain) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(list(chain), BLOCK)


@pytest.mark.parametrize("answer", [Stored.FULL, Stored.BUDGET, Stored.FAILED, Stored.REFUSED])
async def test_the_deepest_tier_gets_what_the_nearest_refuses(answer: Stored) -> None:
    """A full disk, or a spent budget, is no reason to lose what the bucket has space for."""
    clock, chain = SystemClock(), chain_of(NS, 11)
    near, deep = Refusing(NS, clock), MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=2)
    near.answer = answer
    manager = Manager(HostTier(Arena(BLOCK, 1, 64 * BLOCK), make_policy("lru", 64)), [near, deep], clock)
    await manager.start()
    try:
        for stop in (4, 8, 11):  # the later ones are orphans there, too
            store(manager, chain[:stop], max(0, stop - 4))
            flushed = await manager.flush(clock.monotonic() + 10)
            assert flushed.durable.get("g4", 0) == stop and flushed.pending == 0
            assert manager.host.pinned == 0
        await manager.evict("g2")
        assert [miss is None for miss in deep.peek(chain, range(11))] == [True] * 11
    finally:
        await manager.close()
