"""Cancelling a call at any point leaves nothing behind, and nobody else notices."""

from __future__ import annotations

import asyncio

import pytest

import kvtier
from kvtier.retention.terms import Depth
from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace
from kvtier.testing.memory import MemoryStore
from tests.support.waiting import until

BLOCK = 4096
NS = sample_namespace(BLOCK)
SLOTS = 48  # a quarter of them, what abandoned loads may hold before others are refused, is more than a chain
CONFIG = kvtier.Config.parse({"tiers": {"g2": {"capacity": SLOTS * BLOCK}}, "deadlines": {"close": "2s"}})


def tiers(clock: VirtualClock, g3: MemoryStore, g4: MemoryStore) -> list[FaultyTier]:
    return [
        FaultyTier(MemoryTier(NS, clock, store=g3), [Fault("*", "slow", seconds=0.001)]),
        FaultyTier(MemoryTier(NS, clock, store=g4, name="g4", depth=Depth.G4, stride=4)),
    ]


def pins(cache: kvtier.AsyncCache) -> int:
    return sum(slot.pins for slot in cache.manager.host.index.values())


async def settle(cache: kvtier.AsyncCache) -> None:
    await cache.flush(timeout=30)
    await until(lambda: not pins(cache), "somebody still holds a slot")


@pytest.mark.parametrize("verb", ["get", "put", "flush", "match"])
async def test_cancel_at_every_step(verb: str) -> None:
    clock, g3, g4 = VirtualClock(), MemoryStore.empty(), MemoryStore.empty()
    mine, neighbour = list(chain_of(NS, 8)), list(chain_of(NS, 8, seed=1))
    fresh = list(chain_of(NS, 8, seed=2))
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=tiers(clock, g3, g4)) as cache:
        for keys in (mine, neighbour):
            await cache.put(keys, payloads_of(keys, BLOCK))
        await cache.flush()
        finished = 0
        for steps in range(40):
            await cache.evict("g2")
            calls = {
                "get": lambda: cache._get(mine, clock.monotonic() + 5, 0),
                "put": lambda: cache.put(fresh, payloads_of(fresh, BLOCK)),
                "flush": cache.flush,
                "match": lambda: cache.match(mine, timeout=5),
            }
            task = asyncio.ensure_future(calls[verb]())
            other = asyncio.ensure_future(cache._get(neighbour, clock.monotonic() + 5, 0))
            for _ in range(steps):
                await asyncio.sleep(0 if steps < 20 else 0.0005)
            task.cancel()
            try:
                done = await task
                finished += 1
                if isinstance(done, kvtier.Hit):
                    done.release()
            except asyncio.CancelledError:
                pass
            with await other as hit:
                assert [bytes(b) for b in hit.blocks] == payloads_of(neighbour, BLOCK), f"after {steps} steps"
            await settle(cache)
            assert pins(cache) == 0, f"cancelled after {steps} steps: somebody still holds a slot"
            cache.check()
            async with cache.get(mine) as hit:
                assert [bytes(b) for b in hit.blocks] == payloads_of(mine, BLOCK)
        assert finished < 40, "nothing was ever cancelled"
