"""Who listens hears which blocks come into each tier and which leave it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import kvtier
from kvtier.config import Config
from kvtier.events import Change, Events
from kvtier.identity.keys import BlockKey
from kvtier.testing import chain_of, payloads_of, sample_namespace


def resident(changes: Sequence[Change], tier: str) -> set[bytes]:
    """What is in a tier after these changes; each must be one."""
    here: set[bytes] = set()
    for change in changes:
        if change.tier == tier:
            for key in change.keys:
                assert (key in here) != change.stored, "told twice"
                (here.add if change.stored else here.remove)(key)
    return here


def test_every_tier_tells_what_comes_and_goes(tmp_path: Path) -> None:
    namespace, events = sample_namespace(block_bytes=8192), Events()
    size = namespace.block_bytes
    tiers = {"g2": {"capacity": 8 * size}, "g3": {"path": str(tmp_path / "g3"), "capacity": 16 * size}}
    heard: list[Change] = []
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


def test_a_purge_says_that_blocks_have_left_without_their_names(tmp_path: Path) -> None:
    namespace, events = sample_namespace(block_bytes=8192), Events()
    tiers = {"g2": {"capacity": 64 * 8192}, "g3": {"path": str(tmp_path / "g3"), "capacity": 64 * 8192}}
    with kvtier.open(Config.parse({"tiers": tiers}), namespace) as cache:
        cache.manager.subscribe(events)
        chain = chain_of(namespace, 6)
        assert cache.put(chain, payloads_of(chain, 8192)) == 6 and cache.flush(20).pending == 0
        assert events.unheard == 0
        assert cache.purge() > 0
        assert events.unheard == 1


def test_changes_that_nobody_takes_are_dropped_from_the_oldest_on() -> None:
    events = Events(keys_max=3)
    told = events.of("g2")
    keys = [BlockKey(bytes([i]) * 48) for i in range(5)]
    for key in keys:
        told([key], True)
    told([], True)
    assert events.take() == [Change("g2", tuple(keys[2:]), True)] and events.dropped == 2
    assert events.unheard == 0, "only arrivals"
    told(keys[:1], True)
    told(keys[:1], False)
    events.of("g3")(keys[:1], True)
    assert [(c.tier, c.stored) for c in events.take()] == [("g2", True), ("g2", False), ("g3", True)]
