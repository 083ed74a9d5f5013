"""Long work on G2 releases the lock in between, and what it drops is a miss from its first moment on."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import cast

import numpy as np
import pytest

import kvtier
from kvtier.bench.retention.byteless import EmptyArena
from kvtier.identity.keys import SHARED, scope_of
from kvtier.manager.manager import Manager
from kvtier.manager.slices import SLICE_BLOCKS, slices
from kvtier.policies.lru import LRU
from kvtier.put import Put
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.ranges import uniform
from kvtier.retention.terms import BUILTIN
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.host import tier as host_tier
from kvtier.tiers.host.refusals import Refusals
from kvtier.tiers.host.scope_marks import ScopeMarks
from kvtier.tiers.host.slot import SlotState
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Miss
from tests.support.cpu import slowness, uncollected
from tests.support.waiting import until

NS = sample_namespace(64)
NOW = 1.8e9
LIFE = Lifetime.of(BUILTIN["24h"], NOW)


def filled(slots: int, *chains: list, life: Lifetime = LIFE) -> HostTier:
    tier = HostTier(EmptyArena(slots), LRU(slots))
    tier.open()
    for keys in chains:
        tier.policy.reference(keys, 0, 1.0)
        for index, key in enumerate(keys):
            slot = tier.reserve(key, index)
            assert slot is not None and tier.commit(slot, slot.generation, life)
    return tier


def test_counters_say_what_a_scan_would() -> None:
    keys = list(chain_of(NS, 8))
    tier = filled(10, keys)
    assert (tier.pinned, tier.busy()) == (0, False)
    pins = [tier.pin(key, NOW) for key in keys[:3]]
    tier.pin(keys[0], NOW)
    filling = tier.reserve(chain_of(NS, 1, seed=2)[0], 0)
    assert tier.pinned == 3 and tier.busy() and filling is not None
    tier.drop(keys[1])
    tier.check()
    assert tier.pinned == 2 and tier.quarantined == 1
    tier.abort(filling, filling.generation, in_flight=True)
    for slot in (*pins, pins[0], filling):
        assert slot is not None and tier.busy()
        tier.unpin(slot, slot.generation)
        tier.check()
    assert (tier.pinned, tier.busy()) == (0, False)


def test_no_scan_of_all_slots_to_ask_for_a_counter() -> None:
    """A waiting put asks `busy`, a scrape asks `pinned`: neither may look at a million slots."""
    tier = filled(4, list(chain_of(NS, 4)))
    tier._table = None  # type: ignore[assignment]
    tier.index = None  # type: ignore[assignment]
    assert (tier.pinned, tier.busy()) == (0, False)


def test_an_earlier_purge_takes_nothing_back() -> None:
    keys = list(chain_of(NS, 4))
    tier = filled(4, keys)
    assert sum(tier.apply_tombstones({SHARED: NOW})) == 4
    assert sum(tier.apply_tombstones({SHARED: NOW - 60})) == 0
    assert tier.refusals.purged_until(SHARED) == NOW
    slot = tier.reserve(keys[0], 0)
    assert slot is not None and not tier.commit(slot, slot.generation, LIFE)


def test_a_purge_whose_blocks_are_still_being_dropped_is_not_forgotten() -> None:
    keys = list(chain_of(NS, 4))
    tier = filled(4, keys)
    dropping = tier.apply_tombstones({SHARED: NOW})
    tier.refusals.forget({SHARED: NOW})
    assert tier.peek(keys[0], NOW) is Miss.PURGED and tier.refusals.purged_until(SHARED) == NOW
    assert sum(dropping) == 4
    tier.refusals.forget({SHARED: NOW})
    assert not tier.refusals.tombstones


@pytest.fixture
def tiny_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "SLICE_NS", -1)
    monkeypatch.setattr(host_tier, "_SLICE_SLOTS", 2)


@pytest.mark.usefixtures("tiny_slices")
def test_purged_blocks_are_misses_before_they_are_dropped_and_new_ones_are_none() -> None:
    mine, others = (list(chain_of(NS, 20, scope=scope)) for scope in (scope_of("a"), SHARED))
    tier = filled(60, mine, others)
    held = tier.pin(mine[0], NOW)
    slices = tier.apply_tombstones({scope_of("a"): NOW})
    assert len(tier.index) == 40, "nothing was dropped yet"
    assert tier.peek(mine[5], NOW) is Miss.PURGED and tier.pin(mine[5], NOW) is None and tier.prefix(mine, NOW) == 0
    assert tier.prefix(others, NOW) == 20
    slot = tier.reserve(mine[7], 7)
    assert slot is not None, "a purged block kept a new one out"
    assert tier.commit(slot, slot.generation, Lifetime.of(BUILTIN["24h"], NOW + 1))
    steps = list(slices)
    assert len(steps) >= 10 and sum(steps) == 19
    assert tier.peek(mine[7], NOW) is None and len(tier.index) == 21 and tier.prefix(others, NOW) == 20
    assert held is not None and held.state is SlotState.QUARANTINED
    tier.check()
    assert list(tier.apply_tombstones({scope_of("a"): NOW})) == [], "known already"


@pytest.mark.usefixtures("tiny_slices")
def test_overlapping_purges_of_one_scope_end_with_the_last() -> None:
    mine = list(chain_of(NS, 20, scope=scope_of("a")))
    tier = filled(60, mine)
    first = tier.apply_tombstones({scope_of("a"): NOW - 5})
    second = tier.apply_tombstones({scope_of("a"): NOW})
    assert sum(first) == 20 and tier.prefix(mine, NOW) == 0
    assert sum(second) == 0 and not tier.refusals.dropping


@pytest.mark.usefixtures("tiny_slices")
def test_blocks_of_a_wrong_clock_are_misses_before_they_are_dropped() -> None:
    early, late = list(chain_of(NS, 10)), list(chain_of(NS, 10, seed=1))
    tier = filled(40, early)
    for index, key in enumerate(late):
        slot = tier.reserve(key, index)
        assert slot is not None and tier.commit(slot, slot.generation, Lifetime.of(BUILTIN["24h"], NOW + 9000))
    slices = tier.refuse_made_after(NOW + 120)
    assert (tier.prefix(late, NOW), tier.prefix(early, NOW)) == (0, 10)
    assert sum(slices) == 10 and tier.prefix(early, NOW) == 10 and not tier.refusals.dropping
    tier.check()


def test_a_slice_takes_a_millisecond_of_cpu_time() -> None:
    tier = filled(20_000, *(list(chain_of(NS, 100, seed=seed)) for seed in range(200)))
    longest = count = 0
    slices = tier.drop_where(lambda number: True)
    while True:
        began = time.thread_time_ns()
        dropped = next(slices, None)
        longest = max(longest, time.thread_time_ns() - began)
        if dropped is None:
            break
        count += dropped
    assert count == 20_000 and not tier.index
    assert longest < 5_000_000 * slowness(), "a slice, with a margin for a slow machine"
    tier.check()


@pytest.mark.parametrize("verb", ["purge", "evict"])
async def test_the_loop_and_the_lock_are_free_in_between(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "SLICE_NS", -1)
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 2000 * 4096}}})
    async with kvtier.aopen(config, NS, clock=VirtualClock()) as cache:
        keys = list(chain_of(NS, 1500, scope=scope_of("a")))
        assert await cache.put(keys, [bytes(64)] * 1500) == 1500
        turns = 0

        async def beside() -> None:
            nonlocal turns
            while True:
                for part in slices(keys):  # a match of each takes one turn
                    turns += 1
                    assert await cache.match(part) == 0 or verb == "evict"
                    await asyncio.sleep(0)

        work = asyncio.create_task(cache.purge("a") if verb == "purge" else cache.evict("g2"))
        await asyncio.sleep(0)
        other = asyncio.create_task(beside())
        assert await work == 1500
        other.cancel()
        assert turns > 10
        cache.manager.check()


async def test_a_purge_that_is_cancelled_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "SLICE_NS", -1)
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 2000 * 4096}}})
    async with kvtier.aopen(config, NS, clock=VirtualClock()) as cache:
        keys = list(chain_of(NS, 1500, scope=scope_of("a")))
        assert await cache.put(keys, [bytes(64)] * 1500) == 1500
        work = asyncio.create_task(cache.purge("a"))
        for _ in range(5):
            await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        host = cache.manager.host
        assert host.index and await cache.match(keys) == 0
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not host.index and not host.refusals.dropping


def test_a_guarantee_that_a_tier_below_takes_over_costs_no_search_per_block() -> None:
    """Released in any order, each block finds its place in the policy by its depth."""
    keys = list(chain_of(NS, 16_384))
    tier = filled(16_384, keys)
    tier.retain(keys)
    with uncollected():
        began = time.thread_time()
        tier.release_retained(keys[::-1])
        spent = time.thread_time() - began
    assert spent < 0.5 * slowness(), "1.7 s by a search"
    tier.check()
    assert tier.policy.victim(None, lambda _: True) == keys[-1]


class SteppedLock:
    """Counts how many pins change while it is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.tier: HostTier | None = None
        self.most = self._before = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._before = self.tier.pinned if self.tier is not None else 0

    def __exit__(self, *_: object) -> None:
        if self.tier is not None:
            self.most = max(self.most, abs(self.tier.pinned - self._before))
        self._lock.release()


async def test_a_long_chain_takes_the_lock_many_times() -> None:
    keys, lock = list(chain_of(NS, 3000)), SteppedLock()
    manager = Manager(filled(3000), (), VirtualClock(), lock=cast("threading.Lock", lock))
    await manager.start()
    lock.tier = manager.host
    put = Put(manager, keys, [bytes(1)] * 3000, uniform(BUILTIN["24h"]), start=0, wait=False, request_id="")
    manager.host.arena.pieces = lambda slot: (memoryview(bytearray(1)),)  # type: ignore[method-assign]
    put.step()
    assert put.accepted == 3000 and manager.prefix(keys) == 3000
    with manager.pin(keys) as lease:
        assert len(lease) == 3000 and manager.host.pinned == 3000
    await until(lambda: manager.host.pinned == 0)  # on the loop a release takes as many turns as its CPU time asks for
    assert 0 < lock.most <= SLICE_BLOCKS
    manager.check()
    await manager.close()


def test_a_purge_costs_what_its_scope_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of others are not looked at, whether they arrived earlier or later, and whatever had the slot before."""
    few, many = (list(chain_of(NS, blocks, scope=scope_of(salt))) for salt, blocks in (("few", 40), ("many", 20_000)))
    tier = filled(20_100, many[:9000], few[:20], many[9000:], few[20:])
    tier.drop(many[100])
    late = tier.reserve(many[100], 100)
    assert late is not None and tier.commit(late, late.generation, LIFE)
    looked_at, has_purged = 0, Refusals.has_purged

    def counting(refusals: Refusals, number: int) -> bool:
        nonlocal looked_at
        looked_at += 1
        return has_purged(refusals, number)

    monkeypatch.setattr(Refusals, "has_purged", counting)
    dropped = sum(tier.apply_tombstones({scope_of("few"): NOW + 1}))
    assert dropped == len(few) <= looked_at < 10 * len(few)
    assert sum(tier.apply_tombstones({scope_of("many"): NOW + 1, scope_of("nobody"): NOW + 1})) == len(many)
    tier.check()


@pytest.mark.parametrize("scopes", [None, [scope_of("one")], [scope_of("one"), scope_of("none")]])
def test_a_scan_makes_a_list_of_no_more_slots_than_are_looked_at(
    scopes: list | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`evict` of a million blocks made lists of 131,072 numbers: 7.6 ms."""
    marks, longest = ScopeMarks(10_000), 0

    class Counting(np.ndarray):
        def tolist(self) -> list:
            nonlocal longest
            longest = max(longest, len(self))
            return super().tolist()

    marks.set(range(10_000), [chain_of(NS, 1, scope=scope_of("one"))[0]] * 10_000)
    plain = np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda found: plain(found).view(Counting))
    found = [number for part in marks.find(scopes, 32) for number in part]
    assert found == list(range(10_000)) and longest <= 32


def test_a_scan_for_a_scope_releases_the_lock() -> None:
    marks = ScopeMarks(1_000_000)
    key = chain_of(NS, 1, scope=scope_of("few"))[0]
    for number in (5, 400_000, 999_999):
        marks.set((number,), (key,))
    began, longest, found = time.thread_time_ns(), 0, list[int]()
    for part in marks.find([scope_of("few")], 32):
        longest, began = max(longest, time.thread_time_ns() - began), time.thread_time_ns()
        found += part
    assert found == [5, 400_000, 999_999]
    assert longest < 2_000_000 * slowness(), f"{longest / 1e6:.1f} ms"
