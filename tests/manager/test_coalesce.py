"""What feeds the deepest tier waits for room without holding up the loop that everything else runs on."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.clock import SystemClock
from kvtier.manager.manager import Manager, ManagerLimits
from kvtier.policies.policy import make_policy
from kvtier.retention.terms import BUILTIN, Depth
from kvtier.testing import MemoryTier, VirtualClock, payload_of
from kvtier.testing.payload import chain_of, sample_namespace
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.tier import HostTier

BLOCK = 4096
NS = sample_namespace(BLOCK)


def store(manager: Manager, chain: list[bytes], terms: str = "24h") -> None:
    slots, reached = manager.reserve(chain, 0, len(chain), BUILTIN[terms])
    assert reached == len(slots) == len(chain)
    for slot in slots:
        slot.pieces[0][:] = payload_of(slot.key or b"", BLOCK)
    assert manager.commit(chain, slots, [slot.generation for slot in slots]) == []


@pytest.mark.timeout(30)
async def test_what_an_attempt_gives_back_is_no_news() -> None:
    """An attempt that finds no room unpins what it had: that must not wake it up to try again at once, for ever."""
    clock = SystemClock()
    host = HostTier(Arena(BLOCK, 1, 3 * BLOCK), make_policy("lru", 3))
    lower = [MemoryTier(NS, clock), MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=2)]
    manager = Manager(host, lower, clock, ManagerLimits(queue_fraction=1.0))
    await manager.start()
    ours, other = chain_of(NS, 2, seed=1), chain_of(NS, 2, seed=2)
    store(manager, ours)
    await manager.flush(clock.monotonic() + 10)
    assert host.drop(ours[1])
    store(manager, other)
    await manager.flush(clock.monotonic() + 10)
    lease = manager.pin(other)  # G2: one block of ours, and two that cannot go
    coalescer = manager.demoter._coalescer
    assert coalescer is not None and len(lease) == 2
    gathering = asyncio.create_task(coalescer._gather_patiently(ours, 0, 2))
    for _ in range(100):
        await asyncio.sleep(0)  # would not come back
    assert not gathering.done()
    lease.release()
    slots = await asyncio.wait_for(gathering, 10)
    assert slots is not None and [slot.key for slot in slots] == ours
    manager.release([(slot, slot.generation) for slot in slots])
    await manager.close()


@pytest.mark.parametrize("used", [False, True])
async def test_moving_a_block_down_does_not_renew_it(used: bool) -> None:
    """The idle clock runs from the last request, not from when the background carried the block to a deeper tier."""
    clock = VirtualClock()
    host = HostTier(Arena(BLOCK, 1, 8 * BLOCK), make_policy("lru", 8))
    lower = [MemoryTier(NS, clock), MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=2)]
    manager = Manager(host, lower, clock, ManagerLimits(queue_fraction=1.0))
    await manager.start()
    chain = chain_of(NS, 5)
    store(manager, chain, "5m")
    assert manager.demoter is not None
    await manager.demoter.queues["g3"].drained(clock.monotonic() + 10)
    assert host.drop(chain[4])  # so that one block has to be fetched from below
    clock.advance(200)
    if used:
        (await manager.promote(chain, clock.monotonic() + 10)).release()
    flushed = await manager.flush(clock.monotonic() + 10)  # takes the tail of a stride to the deepest tier
    assert flushed.durable == {"g3": 5, "g4": 5}
    clock.advance(150)
    assert await manager.match(chain) == (5 if used else 0)
    await manager.close()


@pytest.mark.parametrize("stride", [1, 2])
async def test_the_deepest_tier_is_fed_whatever_its_stride(stride: int) -> None:
    """Blocks of more than half a stride's bytes are a unit each."""
    clock = VirtualClock()
    host = HostTier(Arena(BLOCK, 1, 8 * BLOCK), make_policy("lru", 8))
    lower = [MemoryTier(NS, clock), MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=stride)]
    manager = Manager(host, lower, clock, ManagerLimits(queue_fraction=1.0))
    await manager.start()
    store(manager, chain_of(NS, 4))
    assert (await manager.flush(clock.monotonic() + 10)).durable == {"g3": 4, "g4": 4}
    await manager.close()


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("blocks", [4, 7])
async def test_longer_terms_reach_the_objects_that_are_there(near: bool, blocks: int) -> None:
    clock = VirtualClock()
    deep = MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=2)
    host = HostTier(Arena(BLOCK, 1, 16 * BLOCK), make_policy("lru", 16))
    manager = Manager(host, [MemoryTier(NS, clock), deep] if near else [deep], clock)
    await manager.start()
    chain = chain_of(NS, blocks)
    slots, _ = manager.reserve(chain, 0, blocks, BUILTIN["1h"])
    manager.commit(chain, slots, [slot.generation for slot in slots])
    await manager.flush(clock.monotonic() + 10)
    ends = {name: entry.life.ends(Depth.G4) for name, entry in deep.store.entries.items()}
    assert len(ends) == blocks
    clock.advance(60)
    slots, _ = manager.reserve(chain, 0, blocks, BUILTIN["24h"])
    assert not slots, "all of them are here"
    await manager.flush(clock.monotonic() + 10)
    later = {name: entry.life.ends(Depth.G4) for name, entry in deep.store.entries.items()}
    assert all(later[name] > ends[name] + 10 * 3600 for name in ends)
    await manager.close()
