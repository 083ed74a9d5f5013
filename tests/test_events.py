"""Who listens hears which blocks come into each tier and which leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import kvtier
from kvtier.config import Config
from kvtier.events import Change, Events, Lost
from kvtier.identity.keys import BlockKey, Scope
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace
from kvtier.times import Wall


def resident(changes: Sequence[Change | Lost], tier: str) -> set[bytes]:
    """What is in a tier after these changes; each must be one."""
    here: set[bytes] = set()
    for change in changes:
        assert isinstance(change, Change), "blocks have left without their names"
        if change.tier == tier:
            for key in change.keys:
                assert (key in here) != change.stored, "told twice"
                (here.add if change.stored else here.remove)(key)
    return here


def test_every_tier_tells_what_comes_and_goes(tmp_path: Path) -> None:
    namespace, events = sample_namespace(block_bytes=8192), Events()
    size = namespace.block_bytes
    tiers = {"g2": {"capacity": 8 * size}, "g3": {"path": str(tmp_path / "g3"), "capacity": 16 * size}}
    heard: list[Change | Lost] = []
    with kvtier.open(Config.parse({"tiers": tiers}), namespace) as cache:
        cache.manager.subscribe(events)
        chains = [chain_of(namespace, 6, seed) for seed in range(6)]
        for chain in chains:
            assert cache.put(chain, payloads_of(chain, size)) == 6
        assert cache.flush(20).pending == 0
        heard += events.take()
        host = {key for chain in chains for key in chain if cache.manager.prefix([BlockKey(key)])}
        assert resident(heard, "g2") == host and len(host) == 8
        lower = cache.manager.lower["g3"]
        disk = {key for chain in chains for key in chain if lower.peek([BlockKey(key)], [0]) == [None]}
        assert resident(heard, "g3") == disk and 0 < len(disk) <= 16, "also of those that left for others"
        cache.evict("g2")
        heard += events.take()
        assert resident(heard, "g2") == set() and resident(heard, "g3") == disk
        assert events.take() == []


def test_blocks_of_an_earlier_process_are_told_of_when_a_read_finds_them(tmp_path: Path) -> None:
    namespace = sample_namespace(block_bytes=8192)
    tiers = {"g2": {"capacity": 64 * 8192}, "g3": {"path": str(tmp_path / "g3"), "capacity": 64 * 8192}}
    chains = [chain_of(namespace, 6, seed) for seed in range(2)]
    with kvtier.open(Config.parse({"tiers": tiers}), namespace) as cache:
        for chain in chains:
            assert cache.put(chain, payloads_of(chain, 8192)) == 6
        assert cache.flush(20).pending == 0
    events = Events()
    with kvtier.open(Config.parse({"tiers": tiers}), namespace) as cache:
        cache.manager.subscribe(events)
        with cache.get(chains[0], 20) as lease:
            assert list(lease.tiers) == ["g3"] * 6
        heard = events.take()
        assert resident(heard, "g2") == resident(heard, "g3") == set(chains[0])


@pytest.mark.parametrize("computes", [False, True])
def test_blocks_that_are_dropped_for_good_are_told_of_by_name(tmp_path: Path, computes: bool) -> None:
    """By a purge and by an eviction of the whole tier, also where G3 is in a process of its own."""
    namespace, events = sample_namespace(block_bytes=8192), Events()
    tiers = {"g2": {"capacity": 64 * 8192}, "g3": {"path": str(tmp_path / "g3"), "capacity": 64 * 8192}}
    heard: list[Change | Lost] = []
    with kvtier.open(Config.parse({"tiers": tiers}), namespace, computes=computes) as cache:
        cache.manager.subscribe(events)
        drops: list[Callable[[], object]] = [cache.purge, lambda: cache.evict("g3")]
        for seed, drop in enumerate(drops):
            chain = chain_of(namespace, 6, seed)
            assert cache.put(chain, payloads_of(chain, 8192)) == 6 and cache.flush(20).pending == 0
            heard += events.take()
            assert resident(heard, "g3") == set(chain)
            drop()
            heard += events.take()
            assert resident(heard, "g3") == set(), "nothing that routers were told of is left"
    assert not any(change.tier == "g4" for change in heard)


def test_what_waits_before_a_loss_without_names_is_told_before_it(tmp_path: Path) -> None:
    """The bucket does not say what a purge took: whoever forgets everything must not be told of it afterwards."""
    namespace, events = sample_namespace(block_bytes=8192), Events()
    tiers = {"g2": {"capacity": 64 * 8192}, "g4": {"url": f"file://{tmp_path}/bucket", "stride": 2}}
    with kvtier.open(Config.parse({"tiers": tiers}), namespace) as cache:
        cache.manager.subscribe(events)
        before, after = (chain_of(namespace, 6, seed) for seed in range(2))
        assert cache.put(before, payloads_of(before, 8192)) == 6 and cache.flush(20).pending == 0
        assert cache.purge() > 0
        assert cache.put(after, payloads_of(after, 8192)) == 6 and cache.flush(20).pending == 0
        heard = events.take()
        lost = heard.index(Lost("g4"))
        assert resident(heard[:lost], "g4") == set(before)
        assert resident(heard[lost + 1 :], "g4") == set(after)
        assert heard.count(Lost("g4")) == 1


def test_what_an_operator_takes_out_of_the_bucket_is_told(tmp_path: Path) -> None:
    """All of it, without names, and a pin's blocks by name: the bucket itself tells nothing."""
    namespace, events = sample_namespace(block_bytes=8192), Events()
    tiers = {"g2": {"capacity": 64 * 8192}, "g4": {"url": f"file://{tmp_path}/bucket", "stride": 2}}
    with kvtier.open(Config.parse({"tiers": tiers}), namespace) as cache:
        cache.manager.subscribe(events)
        chain = chain_of(namespace, 6)
        for drop in (lambda: cache.pins.delete("docs", drop=True), lambda: cache.evict("g4")):
            assert cache.put(chain, payloads_of(chain, 8192)) == 6
            cache.pins.create("docs", chain, "1h")
            assert cache.flush(20).pending == 0
            assert resident(events.take(), "g4") == set(chain)
            drop()
            assert cache.match(chain) == cache.manager.prefix([BlockKey(key) for key in chain])
            heard = events.take()
            assert Lost("g4") in heard or Change("g4", tuple(chain), False) in heard


async def test_a_purge_that_is_given_up_is_told_all_the_same() -> None:
    """Its tiers may have dropped blocks by then, and drop the rest when they are asked again."""
    namespace, events, clock = sample_namespace(block_bytes=8192), Events(), VirtualClock()
    tier, asked = MemoryTier(namespace, clock), asyncio.Event()
    purge = tier.purge

    async def slow(scope: Scope, before: Wall) -> int:
        gone = await purge(scope, before)
        asked.set()
        await asyncio.sleep(60)
        return gone

    tier.purge = slow  # type: ignore[method-assign]
    config = Config.parse({"tiers": {"g2": {"capacity": 64 * 8192}}, "deadlines": {"close": "1s"}})
    async with kvtier.aopen(config, namespace, clock=clock, tiers=[tier]) as cache:
        cache.manager.subscribe(events)
        chain = chain_of(namespace, 6)
        await cache.put(chain, payloads_of(chain, 8192))
        await cache.flush()
        assert Lost("g3") not in events.take()
        purging = asyncio.ensure_future(cache.purge())
        await asked.wait()
        purging.cancel()
        await asyncio.wait({purging})
        assert Lost("g3") in events.take()


def test_changes_that_nobody_takes_are_dropped_from_the_oldest_on() -> None:
    events = Events(keys_max=3)
    told = events.of("g2")
    keys = [BlockKey(bytes([i]) * 48) for i in range(5)]
    for key in keys:
        told([key], True)
    told([], True)
    assert events.take() == [Change("g2", tuple(keys[2:]), True)] and events.dropped == 2, "only arrivals"
    told(keys[:2], False)
    told(keys[2:], True)
    assert events.take() == [Lost("g2"), Change("g2", tuple(keys[2:]), True)] and events.dropped == 4
    told(keys[:1], True)
    told(keys[:1], False)
    events.of("g3")(keys[:1], True)
    assert events.take() == [Change("g2", (keys[0],), True), Change("g2", (keys[0],), False),
                             Change("g3", (keys[0],), True)]  # fmt: skip


def test_tiers_that_are_lost_in_turns_take_no_room() -> None:
    """As purges do it that nobody takes the changes of."""
    events = Events()
    notify = events.of("g3")
    for _ in range(3):
        for tier in ("g3", "g4"):
            events.lose(tier)
    notify([BlockKey(b"a")], True)
    events.lose("g3")
    assert events.take() == [Lost("g3"), Lost("g4"), Change("g3", (BlockKey(b"a"),), True), Lost("g3")]
