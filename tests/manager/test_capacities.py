"""Capacities that a reload has changed are followed in passes that other work does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import kvtier
from kvtier.manager import capacities as module
from kvtier.manager.capacities import Capacities
from kvtier.testing import VirtualClock, chain_of, payloads_of, sample_namespace

BLOCK = 4096
NS = sample_namespace(BLOCK)
CONFIG = kvtier.Config.parse({"tiers": {"g2": {"capacity": 32 * BLOCK}}})


async def test_a_pass_ends_within_its_time_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a terabyte takes minutes to be faulted in: purges of other replicas waited for that."""
    monkeypatch.setattr(module, "_MOVED_SLOTS", 4)
    clock, moved = VirtualClock(), list[int]()
    async with kvtier.aopen(CONFIG, NS, clock=clock) as cache:
        manager, chain = cache.manager, chain_of(NS, 32)
        await cache.put(chain, payloads_of(chain, BLOCK))
        host, follower = manager.host, Capacities(manager.hierarchy)
        for verb in ("give_back", "take_back"):
            work = getattr(host.arena, verb)

            def slow(slots: Sequence[int], work: object = work) -> object:
                moved.append(len(slots))
                clock.advance(0.6)
                return work(slots)  # type: ignore[operator]

            monkeypatch.setattr(host.arena, verb, slow)
        for capacity, left in ((8, [8] * 4), (32, [16, 24, 32, 32])):
            with manager.lock:
                host.resize(capacity)
            for slots in left:
                moved.clear()
                await follower.follow()
                assert sum(moved) <= 8 and host.in_use.used == slots
                host.check()
        assert host.in_use.surplus == 0 and host.prefix(chain, clock.wall()) == 8
        assert await cache.put(chain, payloads_of(chain, BLOCK)) == 32
        with await cache.get(chain) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, BLOCK)


async def test_memory_that_was_not_given_back_yet_is_after_a_small_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOVED_SLOTS", 4)
    clock, given = VirtualClock(), set[int]()
    async with kvtier.aopen(CONFIG, NS, clock=clock) as cache:
        host, follower = cache.manager.host, Capacities(cache.manager.hierarchy)

        def slow(slots: Sequence[int]) -> None:
            given.update(slots)
            clock.advance(2.0)

        monkeypatch.setattr(host.arena, "give_back", slow)
        for capacity in (8, 10):
            with cache.manager.lock:
                host.resize(capacity)
            await follower.follow()
        for _ in range(8):
            await follower.follow()
        assert given >= set(host.in_use.unused) and len(host.in_use.unused) == 22


async def test_what_is_beyond_a_quota_and_leased_leaves_in_a_later_pass() -> None:
    """G2 itself has shrunk by then, so nothing else is left to do."""
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 32 * BLOCK}}, "retention": {"quota": 0.5}})
    async with kvtier.aopen(config, NS, clock=VirtualClock()) as cache:
        host, follower, chain = cache.manager.host, Capacities(cache.manager.hierarchy), chain_of(NS, 16)
        assert await cache.put(chain, payloads_of(chain, BLOCK)) == 16
        with await cache.get(chain):
            with cache.manager.lock:
                host.resize(16)
            await follower.follow()
            assert host.in_use.surplus == 0 and cache.manager.prefix(chain) == 16
        await follower.follow()
        assert host.quota.beyond() == [] and cache.manager.prefix(chain) == 8
        cache.check()
