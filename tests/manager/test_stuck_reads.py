"""Reads that no tier ends: their blocks come from another one, and their slots stay theirs."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

import pytest

import kvtier
from kvtier.clock import Clock, SystemClock
from kvtier.identity.keys import BlockKey
from kvtier.manager.given_up import GivenUpLoads
from kvtier.retention.terms import Depth
from kvtier.testing import MemoryTier, chain_of, payloads_of, sample_namespace
from kvtier.tiers.protocol import Loaded, Miss, Target
from kvtier.times import Mono
from tests.manager.support.late import give_up
from tests.support.waiting import until

BLOCK = 4096
NS = sample_namespace(BLOCK)
CONFIG = kvtier.Config.parse({"tiers": {"g2": {"capacity": 64 * BLOCK}}})


class Stuck(MemoryTier):
    """Reads that began while `gate` is closed wait for it, and may then scribble over their slots, which they say."""

    def __init__(self, clock: Clock, scribbles: bool = True) -> None:
        super().__init__(NS, clock)
        self.scribbles = scribbles
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        stuck = self.scribbles and not self.gate.is_set()
        await self.gate.wait()
        results = await super().read(chain, targets, deadline)
        if not stuck:
            return results
        for piece in (piece for target in targets for piece in target.into):
            piece[:] = b"\xee" * len(piece)
        return [Miss.ERROR] * len(targets)


@pytest.fixture
def soon_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.manager.given_up.STUCK_S", 0.1)


async def leave_stuck(cache: kvtier.AsyncCache, tier: Stuck, chain: list[BlockKey]) -> None:
    """Put a chain, and give a read of it up that does not end; it counts as stuck."""
    await cache.put(chain, payloads_of(chain, BLOCK))
    await cache.flush()
    await cache.evict("g2")
    tier.gate.clear()
    await give_up(cache, chain)
    await asyncio.sleep(0.15)


@pytest.mark.usefixtures("soon_stuck")
async def test_a_block_whose_read_is_stuck_comes_from_the_next_tier() -> None:
    """Its slot stays the read's, which may write to it at any time; what it brings is of no use any more."""
    clock, chain = SystemClock(), chain_of(NS, 4)
    tier = Stuck(clock)
    tiers = [tier, MemoryTier(NS, clock, name="g4", depth=Depth.G4)]
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=tiers) as cache:
        await leave_stuck(cache, tier, chain)
        assert cache.stats()["g3"]["health"] == "well", "few blocks do not clog it"
        async with cache.get(chain, 20) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK) and set(hit.tiers) == {"g4"}
            tier.gate.set()
            await until(lambda: not cache.stats()["g2"]["quarantined"])
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)
        async with cache.get(chain, 20) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK) and set(hit.tiers) == {"g2"}
        assert not cache.manager.host.filling() and not cache.manager.promoter._under_way
        await until(lambda: not cache.manager.host.pinned)
        assert not cache.manager.host.stale_messages
        cache.check()


@pytest.mark.usefixtures("soon_stuck")
async def test_nobody_waits_long_for_a_read_that_is_stuck() -> None:
    """Once it has ended, its blocks are hits again."""
    clock, chain = SystemClock(), chain_of(NS, 4)
    tier = Stuck(clock, scribbles=False)
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[tier]) as cache:
        await leave_stuck(cache, tier, chain)
        async with asyncio.timeout(30), cache.get(chain, 100) as hit:
            assert len(hit.blocks) == 0 and hit.miss == "pending"
        tier.gate.set()
        await until(lambda: not cache.manager.promoter.overdue)
        async with cache.get(chain, 20) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)
        cache.check()


@pytest.mark.usefixtures("soon_stuck")
async def test_a_block_whose_read_is_stuck_can_be_put() -> None:
    """Who computed it meanwhile has it: it is kept, though the read still has a slot for it, and may write there."""
    clock, chain = SystemClock(), chain_of(NS, 4)
    tier = Stuck(clock)
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[tier]) as cache:
        await leave_stuck(cache, tier, chain)
        assert not any(map(cache.manager.holds, chain)), "an engine would not store it"
        await cache.put(chain, payloads_of(chain, BLOCK))
        async with cache.get(chain, 20) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)
            tier.gate.set()
            await until(lambda: not cache.stats()["g2"]["quarantined"])
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)
        assert not cache.manager.host.filling() and not cache.manager.promoter._under_way
        await until(lambda: not cache.manager.host.pinned)
        cache.check()


@pytest.mark.usefixtures("soon_stuck")
async def test_a_tier_is_not_asked_again_for_a_block_that_it_is_stuck_with() -> None:
    """By those either who look up nothing before they load (`manager.coalesce`): each would have other slots for it,
    until the tier has its share of them and is out of service for all blocks."""
    clock, chain = SystemClock(), chain_of(NS, 2)
    tier = Stuck(clock)
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[tier]) as cache:
        await leave_stuck(cache, tier, chain)
        for _ in range(2):
            async with asyncio.timeout(30):
                found = await cache.manager.promoter.load(chain, {"g3": [0, 1]}, Mono(clock.monotonic() + 100))
            assert dict(found) == {0: Miss.LATE, 1: Miss.LATE}
        assert cache.stats()["g2"]["quarantined"] == 2
        tier.gate.set()
        await until(lambda: not cache.stats()["g2"]["quarantined"])
        cache.check()


@pytest.mark.usefixtures("soon_stuck")
async def test_a_tier_is_not_asked_again_for_a_block_that_another_brought_and_g2_has_no_more() -> None:
    """The slot of the stuck read is no longer the block's, but the read goes on."""
    clock, chain = SystemClock(), chain_of(NS, 2)
    tier = Stuck(clock)
    tiers = [tier, MemoryTier(NS, clock, name="g4", depth=Depth.G4)]
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=tiers) as cache:
        await leave_stuck(cache, tier, chain)
        async with cache.get(chain, 20) as hit:
            assert set(hit.tiers) == {"g4"}
        await cache.evict("g2")
        assert not any(map(cache.manager.holds, chain))
        async with asyncio.timeout(30):
            found = await cache.manager.promoter.load(chain, {"g3": [0, 1]}, Mono(clock.monotonic() + 100))
        assert dict(found) == {0: Miss.LATE, 1: Miss.LATE}
        tier.gate.set()
        await until(lambda: not cache.stats()["g2"]["quarantined"])
        cache.check()


async def test_who_shares_a_read_waits_for_it_until_it_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.manager.given_up.STUCK_S", 0.3)
    clock, chain = SystemClock(), chain_of(NS, 2)
    tier = Stuck(clock)
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[tier]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        tier.gate.clear()
        began = clock.monotonic()
        first = asyncio.create_task(cache.manager.promoter.load(chain, {"g3": [0, 1]}, Mono(began + 0.4)))
        await until(cache.manager.host.filling)
        async with asyncio.timeout(30), cache.get(chain, 100) as hit:
            assert hit.miss == "late"
        assert clock.monotonic() - began >= 0.4, "it has not waited until the load was given up"
        await asyncio.wait_for(first, 10)
        assert cache.manager.promoter.overdue == 2
        tier.gate.set()
        await until(lambda: not cache.stats()["g2"]["quarantined"])
        cache.check()


@pytest.mark.usefixtures("soon_stuck")
async def test_a_cache_closes_beside_a_read_that_is_stuck() -> None:
    clock, chain = SystemClock(), chain_of(NS, 4)
    tier = Stuck(clock)
    tiers = [tier, MemoryTier(NS, clock, name="g4", depth=Depth.G4)]
    cache = kvtier.aopen(CONFIG, NS, clock=clock, tiers=tiers)
    async with asyncio.timeout(30), cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        tier.gate.clear()
        await give_up(cache, chain)
        await asyncio.sleep(0.15)
        async with cache.get(chain, 20) as hit:
            assert set(hit.tiers) == {"g4"}
        cache.check()


class Deaf(Stuck):
    """As a device: a read goes on whatever is cancelled."""

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        reading = asyncio.ensure_future(super().read(chain, targets, deadline))
        while not reading.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({reading})
        return reading.result()


async def test_a_cache_closes_in_time_beside_a_read_that_heeds_no_cancellation() -> None:
    """The read keeps its memory, and may write there after the cache was closed."""
    clock, chain = SystemClock(), chain_of(NS, 4)
    tier = Deaf(clock)
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 64 * BLOCK}}, "deadlines": {"close": "500ms"}})
    cache = kvtier.aopen(config, NS, clock=clock, tiers=[tier])
    await cache.__aenter__()
    await leave_stuck(cache, tier, chain)
    (load,) = cache.manager.promoter.given_up.running()
    closing = asyncio.ensure_future(cache.close())
    await asyncio.wait({closing}, timeout=30)
    in_time = closing.done() and not load.done()
    tier.gate.set()
    await asyncio.wait({load, closing}, timeout=30)
    assert in_time and load.done() and not cache.manager.promoter.given_up.running()


@pytest.mark.usefixtures("soon_stuck")
@pytest.mark.parametrize("seed", range(4))
async def test_no_wrong_byte_comes_of_reads_that_are_stuck_and_end_at_any_time(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.manager.given_up.STUCK_S", 0.01)
    dice, clock = random.Random(seed), SystemClock()
    taken, take_over = list[BlockKey](), GivenUpLoads.take_over
    monkeypatch.setattr(GivenUpLoads, "take_over", lambda *args: taken.append(args[-1]) or take_over(*args))
    chains = [chain_of(NS, 6, number) for number in range(4)]
    tier = Stuck(clock)
    tiers = [tier, MemoryTier(NS, clock, name="g4", depth=Depth.G4)]
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=tiers) as cache:
        for chain in chains:
            await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()

        async def put(chain: list[BlockKey]) -> None:
            await cache.put(chain, payloads_of(chain, BLOCK))

        async def use(chain: list[BlockKey], timeout_s: float, held_s: float) -> None:
            async with cache.get(chain, timeout_s) as hit:
                await asyncio.sleep(held_s)
                assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)[: len(hit.blocks)]

        for _ in range(40):
            dice.choice((tier.gate.set, tier.gate.clear, tier.gate.clear))()
            await cache.evict("g2")
            await asyncio.gather(
                *(use(dice.choice(chains), dice.choice((0.005, 0.02)), dice.choice((0.0, 0.02))) for _ in range(3)),
                *(put(dice.choice(chains)) for _ in range(dice.choice((0, 0, 1)))),
            )
        assert taken, "some read was stuck"
        tier.gate.set()
        await until(lambda: not (cache.stats()["g2"]["quarantined"] or cache.manager.host.pinned))
        assert not cache.manager.host.filling() and not cache.manager.promoter._under_way
        cache.check()
