"""Loads that several requests share, and estimates that no clock could tell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import kvtier
from kvtier.clock import Clock, SystemClock
from kvtier.identity.keys import BlockKey
from kvtier.manager.promote import LOADS_AT_ONCE
from kvtier.retention.terms import Depth
from kvtier.testing import Fault, FaultyTier, MemoryTier, chain_of, payloads_of, sample_namespace
from kvtier.testing.short_slices import slices_of
from kvtier.tiers.host.pins import Holds
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Loaded, Miss, Target
from tests.manager.support.late import give_up
from tests.support.waiting import until

BLOCK = 4096
NS = sample_namespace(BLOCK)
CONFIG = kvtier.Config.parse({"tiers": {"g2": {"capacity": 64 * BLOCK}}})


class Punctual(MemoryTier):
    """A read takes `read_s`, and is LATE at its deadline."""

    def __init__(self, clock: Clock, read_s: float) -> None:
        super().__init__(NS, clock)
        self.read_s = read_s

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        left = deadline - self._clock.monotonic()
        await asyncio.sleep(min(max(left, 0.0), self.read_s))
        return await super().read(chain, targets, deadline) if left > self.read_s else [Miss.LATE] * len(targets)


async def test_a_patient_get_is_served_though_an_impatient_one_began_the_load() -> None:
    clock = SystemClock()
    chain = chain_of(NS, 8)
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[Punctual(clock, 0.2)]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        impatient = asyncio.ensure_future(cache._get(chain, clock.monotonic() + 0.1, 0))
        await asyncio.sleep(0.02)
        patient = asyncio.ensure_future(cache._get(chain, clock.monotonic() + 10, 0))
        with await impatient as hit:
            assert len(hit.blocks) == 0 and hit.miss == "late"
        with await patient as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)
        assert not any(slot.pins for slot in cache.manager.host.index.values())


async def test_a_get_that_shares_a_load_is_told_why_it_failed() -> None:
    clock = SystemClock()
    chain = chain_of(NS, 8)
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[Punctual(clock, 5.0)]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        gets = [asyncio.ensure_future(cache._get(chain, clock.monotonic() + 0.1, 0)) for _ in range(2)]
        for get in gets:
            with await get as hit:
                assert len(hit.blocks) == 0 and hit.miss == "late"


class Short(MemoryTier):
    """A read leaves the last answer out."""

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        return (await super().read(chain, targets, deadline))[:-1]


async def test_a_tier_with_too_few_answers_costs_misses_and_no_slot() -> None:
    chain = chain_of(NS, 8)
    async with kvtier.aopen(CONFIG, NS, tiers=[Short(NS, SystemClock())]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        with await cache._get(chain, SystemClock().monotonic() + 10, 0) as hit:
            assert len(hit.blocks) == 0 and hit.miss == "error"
        assert not cache.manager.host.filling() and not cache.manager.promoter._under_way
        assert await cache.put(chain, payloads_of(chain, BLOCK))


async def test_a_load_reserves_its_slots_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time 64 slots held the lock for 2.5 ms. Blocks that turned up meanwhile, in between, are pinned."""
    calls, plain = [], HostTier.reserve_leading

    def noted(tier: HostTier, keys: Sequence[BlockKey], depth: int, *rest: object, **more: object) -> object:
        calls.append(len(keys))
        return plain(tier, keys, depth, *rest, **more)  # type: ignore[arg-type]

    chain = chain_of(NS, 48)
    async with kvtier.aopen(CONFIG, NS, tiers=[MemoryTier(NS, SystemClock())]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        manager = cache.manager
        monkeypatch.setattr(HostTier, "reserve_leading", noted)
        deadline = manager._clock.monotonic() + 10
        some = await manager.promoter.load(chain, {"g3": range(20, 24)}, deadline)
        assert calls == [4] and sorted(some) == [20, 21, 22, 23]
        calls.clear()
        every = await manager.promoter.load(chain, {"g3": range(48)}, deadline)
        assert len(calls) <= 2 + 2 * 4 and len(every) == 48
        manager.promoter._undo(some)
        manager.promoter._undo(every)
        async with cache.get(chain) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)
        cache.check()
        assert not manager.host.pinned


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
async def test_a_time_that_no_clock_could_tell_makes_no_resident_block_a_miss(seconds: float) -> None:
    chain = chain_of(NS, 5)
    async with kvtier.aopen(CONFIG, NS, tiers=[MemoryTier(NS, SystemClock())]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        cache.computed(16, seconds)
        async with cache.get(chain) as hit:
            assert len(hit.blocks) == 5


async def test_a_tier_that_is_not_there_cannot_be_emptied() -> None:
    async with kvtier.aopen(CONFIG, NS, tiers=[MemoryTier(NS, SystemClock())]) as cache:
        with pytest.raises(kvtier.InvalidRequest, match="it has g2, g3"):
            await cache.evict("g4")


async def test_impatient_calls_do_not_take_a_healthy_tier_out_of_service() -> None:
    """Ten matches and ten gets that wait no time, over two tiers of which the first is slow."""
    clock = SystemClock()
    slow = FaultyTier(Punctual(clock, 0.05), [Fault("lookup", "slow", seconds=0.05)])
    deep = MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=1)
    chain = chain_of(NS, 8)
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[slow, deep]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        for _ in range(10):
            await cache.match([*chain, *chain_of(NS, 16, seed=1)[8:]], timeout=0.001)
            async with cache.get(chain, timeout=0.07):
                pass
        for tier in cache.manager.lower.values():
            assert tier.healthy(), tier.name
        assert await cache.match(chain, timeout=5) == 8
        async with cache.get(chain, timeout=5) as hit:
            assert len(hit.blocks) == 8


async def test_a_tier_that_is_late_for_patient_callers_goes_out_of_service() -> None:
    clock = SystemClock()
    tier = FaultyTier(MemoryTier(NS, clock), [Fault("lookup", "hang")])
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[tier]) as cache:
        for _ in range(60):
            if not cache.manager.lower["g3"].healthy():
                break
            await cache.match(chain_of(NS, 2), timeout=0.15)
        assert not cache.manager.lower["g3"].healthy()


class Together(MemoryTier):
    """All reads are answered at once, when `answer` is set."""

    def __init__(self) -> None:
        super().__init__(NS, SystemClock())
        self.answer, self.reads = asyncio.Event(), 0

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        self.reads += 1
        results = await super().read(chain, targets, deadline)
        await self.answer.wait()
        return results


async def test_loads_that_are_answered_together_are_taken_up_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen loads were published in one turn of the loop: of a long chain that took 5 ms."""
    tier, chain, turns, taken = Together(), chain_of(NS, 64), [0], list[int]()
    with slices_of(4):
        async with kvtier.aopen(CONFIG, NS, tiers=[tier]) as cache:
            await cache.put(chain, payloads_of(chain, BLOCK))
            await cache.flush()
            await cache.evict("g2")
            promoter = cache.manager.promoter
            end_reads = promoter._end_reads

            def ended(*args: Any, **options: Any) -> Any:
                taken.append(turns[0])
                return end_reads(*args, **options)

            async def count() -> None:
                while True:
                    turns[0] += 1
                    await asyncio.sleep(0)

            monkeypatch.setattr(promoter, "_end_reads", ended)
            getting = asyncio.ensure_future(cache._get(chain, SystemClock().monotonic() + 10, 0))
            await until(lambda: tier.reads == 16)
            counting = asyncio.ensure_future(count())
            tier.answer.set()
            with await getting as hit:
                assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)
            counting.cancel()
            assert len(taken) == len(set(taken)) == 16, "two loads in one turn"
            cache.manager.check()


async def test_a_load_that_ends_with_its_cache_keeps_no_pin() -> None:
    """It was answered, and cancelled before its blocks were published."""
    tier, chain, seen = Together(), chain_of(NS, 64), list[int]()
    with slices_of(4):
        cache = kvtier.aopen(CONFIG, NS, tiers=[tier])
        await cache.__aenter__()
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        manager = cache.manager
        getting = asyncio.ensure_future(cache._get(chain, SystemClock().monotonic() + 10, 0))
        await until(lambda: tier.reads == 16)
        tier.answer.set()
        for _ in range(8):
            await asyncio.sleep(0)
        loads = set(manager.promoter._under_way.values())
        assert loads and not all(load.done() for load in loads)
        for load in loads:
            load.cancel()
        with await getting as hit:
            seen.append(len(hit.blocks))
        await asyncio.gather(*loads, return_exceptions=True)
        assert seen[0] < 64 and not manager.host.filling()
        await until(lambda: not any(slot.pins for slot in manager.host.index.values()))
        manager.check()
        await cache.close()


async def test_a_load_that_is_cancelled_before_its_first_step_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, chain, begun = Together(), chain_of(NS, 8), list[asyncio.Task[Any]]()
    tier.answer.set()
    async with kvtier.aopen(CONFIG, NS, tiers=[tier]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        supervisor = cache.manager.hierarchy.supervisor
        spawn = supervisor.spawn

        def cancelled(*args: Any) -> asyncio.Task[Any]:
            begun.append(spawn(*args))
            begun[-1].cancel()
            return begun[-1]

        with monkeypatch.context() as patch:
            patch.setattr(supervisor, "spawn", cancelled)
            with await cache._get(chain, SystemClock().monotonic() + 1, 0) as hit:
                assert len(hit.blocks) == 0 and hit.miss == "late"
        assert begun and not cache.manager.host.filling() and not cache.manager.promoter._under_way
        with await cache._get(chain, SystemClock().monotonic() + 10, 0) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)
        cache.manager.check()


async def test_a_cache_closes_while_loads_that_were_given_up_end() -> None:
    tier, chain = Together(), chain_of(NS, 16)
    cache = kvtier.aopen(CONFIG, NS, tiers=[tier])
    await cache.__aenter__()
    await cache.put(chain, payloads_of(chain, BLOCK))
    await cache.flush()
    await cache.evict("g2")
    with slices_of(4):
        await give_up(cache, chain)
        assert len(cache.manager.promoter.given_up.running()) == 4
        closing = asyncio.ensure_future(cache.close())
        await asyncio.sleep(0.05)
        tier.answer.set()
        await asyncio.wait_for(closing, 60)
    assert not cache.manager.promoter.given_up.running()


async def test_a_long_promotion_is_pinned_in_columns() -> None:
    """An object for each of 100,000 pins took 7 ms of one turn to give up."""
    tier, chain = MemoryTier(NS, SystemClock()), chain_of(NS, 60)
    async with kvtier.aopen(CONFIG, NS, tiers=[tier]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        with slices_of(8):
            lease = await cache.manager.promote(chain, SystemClock().monotonic() + 10)
        assert isinstance(lease._held, Holds) and lease._held.distinct and len(lease) == 60
        assert [slot.index for slot in lease.slots] == list(range(60))
        lease.release()
        await until(lambda: not cache.manager.host.pinned)
        cache.manager.check()


async def test_pins_go_though_their_release_is_cancelled_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(NS, 60)
    monkeypatch.setattr("kvtier.manager.hierarchy.TURN_NS", -1)
    async with kvtier.aopen(CONFIG, NS, tiers=[]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        with slices_of(8):
            lease = await cache.manager.promote(chain, SystemClock().monotonic() + 10)
            before = asyncio.all_tasks()
            lease.release()
            for task in asyncio.all_tasks() - before:
                task.cancel()
            await until(lambda: not cache.manager.host.pinned)
        cache.manager.check()


class Crowded(MemoryTier):
    """Knows how many reads were under way at once, each of which waits for `answer`."""

    def __init__(self) -> None:
        super().__init__(NS, SystemClock())
        self.answer, self.now, self.most = asyncio.Event(), 0, 0
        self.answer.set()

    async def read(self, chain: Sequence[BlockKey], targets: Sequence[Target], deadline: float) -> list[Loaded | Miss]:
        self.now += 1
        self.most = max(self.most, self.now)
        await self.answer.wait()
        self.now -= 1
        return await super().read(chain, targets, deadline)


async def test_a_long_prompt_leaves_the_tier_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many loads, of which a bound is under way; those behind the deadline are not begun."""
    monkeypatch.setattr("kvtier.manager.slices.LOADED_BLOCKS", 1)
    tier, chain = Crowded(), chain_of(NS, 3 * LOADS_AT_ONCE)
    async with kvtier.aopen(CONFIG, NS, tiers=[tier]) as cache:
        await cache.put(chain, payloads_of(chain, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        tier.answer.clear()
        await give_up(cache, chain, LOADS_AT_ONCE)
        assert tier.most == LOADS_AT_ONCE == cache.manager.promoter.overdue
        tier.answer.set()
        await asyncio.gather(*cache.manager.promoter.given_up.running())
        async with cache.get(chain, 10) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)
        assert tier.most == LOADS_AT_ONCE
        cache.check()


async def test_reads_that_never_end_leave_the_other_tiers() -> None:
    """They hold a share of G2 for ever, which is their tier's alone."""
    clock, chain, other = SystemClock(), chain_of(NS, 16), chain_of(NS, 16, 1)
    sick = FaultyTier(MemoryTier(NS, clock))
    tiers = [sick, MemoryTier(NS, clock, name="g4", depth=Depth.G4)]
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=tiers) as cache:
        for one in (chain, other):
            await cache.put(one, payloads_of(one, BLOCK))
        await cache.flush()
        await cache.evict("g2")
        sick.faults = [Fault("read", "hang", times=1)]
        await give_up(cache, chain)
        stats = cache.stats()
        assert stats["g3"]["health"] == "out" and "16 blocks" in stats["tasks"]["out"]["g3"]
        assert stats["g4"]["health"] == "well" and stats["g2"]["quarantined"] == 16
        for _ in range(3):
            async with cache.get(other, 5) as hit:
                assert [bytes(block) for block in hit.blocks] == payloads_of(other, BLOCK)
                assert set(hit.tiers) == {"g4"}
            await cache.evict("g2")
