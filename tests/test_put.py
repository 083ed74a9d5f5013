"""A put that is cancelled publishes nothing more, owes nothing, and leaves its buffers to the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

import kvtier
from kvtier import put as put_module
from kvtier.clock import SystemClock
from kvtier.manager.put_guarantee import PutGuarantee
from kvtier.retention.terms import Depth, Terms
from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, chain_of, payload_of, sample_namespace
from kvtier.tiers.host.index import SlotIndex
from kvtier.tiers.host.slot import Slot, copy_in
from kvtier.tiers.protocol import Sealed, Stored
from kvtier.times import Mono
from tests.support.waiting import until

MIB = 1 << 20
BLOCK = 2 * MIB
NS = sample_namespace(BLOCK)
CONFIG = {
    "tiers": {"g2": {"capacity": "32MiB"}},
    "retention": {"classes": {"sure": {"ttl": "1h", "guarantee": True}}},
}


def buffers_of(chain: Sequence[bytes]) -> list[bytearray]:
    return [bytearray(payload_of(key, BLOCK)) for key in chain]


class Paused:
    """`copy_in` that stops before its n-th call until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._at, self._calls, self._copy = at, 0, put_module.copy_in
        monkeypatch.setattr(put_module, "copy_in", self)

    def __call__(self, pieces: Sequence[memoryview], buffer: memoryview) -> None:
        self._calls += 1
        if self._calls == self._at:
            self.reached.set()
            assert self.go.wait(10)
        self._copy(pieces, buffer)


@pytest.mark.parametrize("at", [1, 2, 3, 8])
@pytest.mark.parametrize("retention", [None, "sure"])
async def test_a_cancelled_put_s_buffers_may_be_written_at_once(
    monkeypatch: pytest.MonkeyPatch, at: int, retention: str | None
) -> None:
    chain = chain_of(NS, 4)
    async with kvtier.aopen(kvtier.Config.parse(CONFIG), NS, tiers=[]) as cache:
        buffers = buffers_of(chain)
        paused = Paused(monkeypatch, at)
        putting = asyncio.create_task(cache.put(chain, buffers, retention))
        await until(paused.reached.is_set)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        for buffer in buffers:
            buffer[:] = b"\xff" * BLOCK
        paused.go.set()
        host = cache.manager.host
        await until(lambda: len(host._free) == host.capacity)
        assert await cache.match(chain) == 0 and host.quarantined == 0
        await until(lambda: cache.stats()["requests"]["promises"]["guaranteed"] == 0)
        cache.check()
        assert await cache.put(chain, buffers_of(chain), retention) == 4, "another put is not hindered"
        async with cache.get(chain) as hit:
            assert [bytes(block) for block in hit.blocks] == [payload_of(key, BLOCK) for key in chain]


async def test_impatient_puts_of_reused_buffers_serve_no_wrong_byte() -> None:
    """Whatever is served is what was put, though each put is given a few milliseconds and its buffers are reused."""
    buffers = [bytearray(BLOCK) for _ in range(4)]
    async with kvtier.aopen(kvtier.Config.parse(CONFIG), NS, tiers=[]) as cache:
        for seed in range(24):
            chain = chain_of(NS, 4, seed=seed)
            for buffer, key in zip(buffers, chain, strict=True):
                buffer[:] = payload_of(key, BLOCK)
            try:
                await asyncio.wait_for(cache.put(chain, buffers), (1 + seed % 6) / 1000)
            except TimeoutError:
                for buffer in buffers:
                    buffer[:] = b"\xff" * BLOCK
            async with cache.get(chain) as hit:
                served = [bytes(block) for block in hit.blocks]
            assert served == [payload_of(key, BLOCK) for key in chain[: len(served)]]
        cache.check()


async def test_a_put_cancelled_while_it_waits_for_space_gives_back_its_guarantees() -> None:
    clock = VirtualClock()
    tier = FaultyTier(MemoryTier(NS, clock), [Fault("write", "hang")])
    chain, more = chain_of(NS, 6, seed=1), chain_of(NS, 16, seed=2)
    config = kvtier.Config.parse({**CONFIG, "deadlines": {"close": "500ms"}})  # the write never returns
    async with kvtier.aopen(config, NS, tiers=[tier], clock=clock) as cache:
        assert await cache.put(chain, buffers_of(chain), wait=False) == 6
        putting = asyncio.create_task(cache.put(more[:8], buffers_of(more[:8]), "sure", timeout=1e6))
        await until(lambda: cache.stats()["requests"]["promises"]["guaranteed"] == 8)
        await until(lambda: cache.manager.hierarchy.space._waiters, "it does not wait for space")
        assert not putting.done()
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        resident = cache.manager.prefix(more)
        assert cache.stats()["requests"]["promises"]["guaranteed"] == resident < 8
        tier.faults.clear()
        clock.advance(1e4)


class Full(MemoryTier):
    async def write(self, blocks: Sequence[Sealed], deadline: float) -> list[Stored]:
        return [Stored.FULL] * len(blocks)


async def test_a_put_that_waits_above_a_full_tier_does_not_evict_its_own_head() -> None:
    """What it says was accepted can be served."""
    clock, chain = VirtualClock(), chain_of(NS, 24)
    async with kvtier.aopen(kvtier.Config.parse(CONFIG), NS, tiers=[Full(NS, clock)], clock=clock) as cache:
        demoter, capacity = cache.manager.demoter, cache.manager.host.capacity
        putting = asyncio.create_task(cache.put(chain, buffers_of(chain), timeout=5.0))
        await until(lambda: putting.done() or demoter.dropped >= capacity)
        await asyncio.sleep(0.05)
        clock.advance(10)
        assert await putting == cache.manager.prefix(chain) == capacity < len(chain)


async def test_a_put_that_fails_leaves_the_guarantees_of_another_put_of_the_same_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = chain_of(NS, 4)
    async with kvtier.aopen(kvtier.Config.parse(CONFIG), NS, tiers=[]) as cache:
        paused = Paused(monkeypatch, 1)
        first = asyncio.create_task(cache.put(chain, buffers_of(chain), "sure"))
        await until(paused.reached.is_set)
        terms = put_module.ChainTerms(cache._terms("sure"), NS.block_tokens)
        hierarchy = cache.manager.hierarchy
        another = PutGuarantee(hierarchy, cache.manager.protection, chain, 0, terms, hierarchy.begin())
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        paused.go.set()
        await until(lambda: len(cache.manager.host._free) == cache.manager.host.capacity)
        assert cache.stats()["requests"]["promises"]["guaranteed"] == 4
        another.end(0)
        assert cache.stats()["requests"]["promises"]["guaranteed"] == 0


async def test_blocks_that_a_load_still_fills_are_not_counted() -> None:
    chain = chain_of(NS, 4)
    async with kvtier.aopen(kvtier.Config.parse(CONFIG), NS, tiers=[]) as cache:
        host = cache.manager.host
        loading = host.reserve(chain[2], 2)
        assert loading is not None
        assert await cache.put(chain, buffers_of(chain)) == 2
        host.abort(loading, loading.generation)
        assert await cache.put(chain, buffers_of(chain)) == 4


async def test_a_put_that_waits_does_not_look_again_at_its_whole_chain() -> None:
    """Looks at G2's index, at two lengths: linear."""

    class Looked(SlotIndex):
        count = 0

        def __contains__(self, key: object) -> bool:
            self.count += 1
            return super().__contains__(key)

    async def looks(blocks: int) -> int:
        small = sample_namespace(512)
        tier = MemoryTier(small, clock := VirtualClock())
        config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 16 * 4096}}})
        async with kvtier.aopen(config, small, clock=clock, tiers=[tier]) as cache:
            looked = cache.manager.host.index = Looked(cache.manager.host.index.table)
            chain = chain_of(small, blocks)
            assert await cache.put(chain, [payload_of(key, 512) for key in chain]) == blocks
            await cache.flush()
            assert len(tier.store.entries) == blocks
        return looked.count

    few, many = await looks(128), await looks(1024)
    assert many < 12 * few, f"{few} → {many}"


async def test_a_block_that_is_put_again_is_renewed_in_every_tier_and_counts_as_written_once() -> None:
    clock, chain = VirtualClock(), chain_of(NS, 6)
    async with kvtier.aopen(kvtier.Config.parse(CONFIG), NS, tiers=[MemoryTier(NS, clock)], clock=clock) as cache:
        assert await cache.put(chain, buffers_of(chain), "1h") == 6
        assert (await cache.flush()).durable == {"g3": 6}
        for again in range(3):
            clock.advance(3000)
            assert await cache.put(chain, buffers_of(chain), "1h") == 6
            assert (await cache.flush()).durable == {"g3": 6}, "it was there"
            if again == 1:
                await cache.evict("g2")
        await cache.evict("g2")
        clock.advance(3000)
        assert await cache.match(chain) == 6, "renewed at each of 0, 3000, 6000 and 9000 s"
        clock.advance(601)
        assert await cache.match(chain) == 0


@pytest.mark.parametrize("end", ["published", "given up"])
def test_blocks_that_another_caller_fills_have_these_terms_too_or_are_stored(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The other, a put or a load, ends after this put has passed its blocks over."""
    chain, tier = chain_of(NS, 4), MemoryTier(NS, SystemClock())
    with kvtier.open(kvtier.Config.parse(CONFIG), NS, tiers=[tier]) as cache:
        manager, buffers = cache.manager, buffers_of(chain)
        slots, _ = manager.reserve(chain, 0, 3, Terms("ram", ttl=60, ceiling=Depth.G2))
        generations, reserve = [slot.generation for slot in slots], manager.reserve

        def reserved(*arguments: Any, **named: Any) -> tuple[list[Slot], int]:
            monkeypatch.undo()
            result = reserve(*arguments, **named)
            if end == "published":
                for slot, buffer in zip(slots, buffers, strict=False):
                    copy_in(slot.pieces, memoryview(buffer))
                manager.commit(chain, slots, generations)
            else:
                manager.abort(slots, generations)
            return result

        monkeypatch.setattr(manager, "reserve", reserved)
        assert cache.put(chain, buffers) == 4
        with cache.get(chain) as hit:
            assert [bytes(block) for block in hit.blocks] == buffers
        cache.flush()
        assert cache._run(tier.lookup(chain, range(3), Mono(SystemClock().monotonic() + 1))) == [None] * 3
        cache.check()


def test_blocks_that_another_caller_still_fills_at_the_end_are_not_counted() -> None:
    chain = chain_of(NS, 4)
    with kvtier.open(kvtier.Config.parse(CONFIG), NS, tiers=[]) as cache:
        slots, _ = cache.manager.reserve(chain, 1, 2, Terms("t"))
        assert cache.put(chain, buffers_of(chain)) == 1
        cache.manager.abort(slots, [slot.generation for slot in slots])
        assert cache.put(chain, buffers_of(chain)) == 4
