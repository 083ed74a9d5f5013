"""What requests ask for through the public surface: ranges, priorities, shares of a scope."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvtier
from kvtier.identity.keys import scope_of
from kvtier.retention.terms import Depth, Terms
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payloads_of
from tests.retention.support.requests import BLOCK, NS, opened, put, served

TOKENS = NS.block_tokens


def test_parts_of_a_prompt_live_as_long_as_they_were_asked_to() -> None:
    clock = VirtualClock()
    with opened(clock) as cache:
        keys = list(chain_of(NS, 8))
        assert put(cache, keys, retention=[(0, 4 * TOKENS, "24h"), (4 * TOKENS, 6 * TOKENS, "1h")]) == 8
        put(cache, list(chain_of(NS, 8, seed=1)), retention="5m")
        clock.advance(400)
        assert served(cache, list(chain_of(NS, 8, seed=1))) == 0
        clock.advance(3600)
        assert cache.match(keys) == 4
        clock.advance(86_400)
        assert cache.match(keys) == 0


def test_a_part_may_not_go_deeper_than_it_was_allowed() -> None:
    shallow = Terms("shallow", ttl=600, ceiling=Depth.G2)
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock)]) as cache:
        keys = list(chain_of(NS, 8))
        assert put(cache, keys, retention=[(4 * TOKENS, 8 * TOKENS, shallow)]) == 8
        assert cache.flush().durable == {"g3": 4}
        cache.evict("g2")
        assert served(cache, keys) == 4


def test_a_range_of_an_isolated_class_isolates_the_request() -> None:
    with opened() as cache:
        tokens = list(range(4 * TOKENS))
        ranges = [(0, TOKENS, "in_memory")]
        keys = cache.chain_hashes(tokens, retention=ranges)
        assert keys == cache.chain_hashes(tokens, retention="in_memory") != cache.chain_hashes(tokens)
        put(cache, keys, retention=ranges)
        assert cache.match(keys) == 4 and cache.match(cache.chain_hashes(tokens)) == 0


@pytest.mark.parametrize("wrong", [[(0, 10)], [(3, 3, "24h")], [(0, 10, "a day")], 7])
def test_wrong_ranges_store_nothing(wrong: object) -> None:
    with opened() as cache:
        keys = list(chain_of(NS, 2))
        with pytest.raises((kvtier.InvalidRequest, TypeError)):
            put(cache, keys, retention=wrong)
        assert cache.match(keys) == 0


@pytest.mark.parametrize("policy", ["lru", "gapduel"])
def test_a_higher_priority_leaves_later(policy: str) -> None:
    classes = {"vip": {"ttl": "1h", "priority": 90}, "batch": {"ttl": "1h", "priority": 10}}
    with opened(blocks=12, retention={"classes": classes}, policy=policy) as cache:
        chains = {name: list(chain_of(NS, 4, seed=seed)) for seed, name in enumerate(("vip", "24h", "batch"))}
        for name, keys in chains.items():
            assert put(cache, keys, retention=name) == 4
        assert put(cache, list(chain_of(NS, 6, seed=9))) == 6
        assert [cache.match(keys) for keys in chains.values()] == [4, 2, 0]
        assert put(cache, list(chain_of(NS, 4, seed=10)), retention="batch") == 0, "pushed out what ranks above it"
        assert [cache.match(keys) for keys in chains.values()] == [4, 2, 0]


def test_an_expired_priority_makes_room() -> None:
    clock = VirtualClock()
    classes = {"vip": {"ttl": "1m", "priority": 90}}
    with opened(clock, blocks=4, retention={"classes": classes}) as cache:
        assert put(cache, list(chain_of(NS, 4)), retention="vip") == 4
        keys = list(chain_of(NS, 4, seed=1))
        assert put(cache, keys) == 0
        clock.advance(61)
        assert put(cache, keys) == 4


@pytest.mark.parametrize("policy", ["lru", "gapduel"])
def test_no_scope_fills_more_than_its_share(policy: str) -> None:
    with opened(retention={"quota": 0.5}, policy=policy) as cache:
        a, b = scope_of("a"), scope_of("b")
        mine, others = list(chain_of(NS, 8, scope=a)), list(chain_of(NS, 8, scope=b))
        assert put(cache, others) == 8
        assert put(cache, mine) == 8
        more = list(chain_of(NS, 6, seed=1, scope=a))
        assert put(cache, more) == 6, "its own blocks make room"
        assert cache.match(others) == 8 and cache.match(more) == 6 and cache.match(mine) == 2
        with cache.get(mine), cache.get(more):
            assert put(cache, list(chain_of(NS, 4, seed=2, scope=a))) == 0, "nothing of its own may leave"
        assert cache.match(others) == 8


def test_a_scope_fills_no_more_of_the_disk_than_its_share(tmp_path: Path) -> None:
    """What passes through RAM in turn would fill the disk; over a restart, too."""
    others = list(chain_of(NS, 8, scope=scope_of("b")))
    mine = [list(chain_of(NS, 6, seed=seed, scope=scope_of("a"))) for seed in range(6)]
    for quota, starts in ((0.5, 2), (None, 1)):
        path = str(tmp_path / f"g3-{quota}")
        tiers = {"g2": {"capacity": 12 * 4096}, "g3": {"path": path, "capacity": 40 * 4096}}
        config = kvtier.Config.parse({"tiers": tiers, "retention": {} if quota is None else {"quota": quota}})
        for _ in range(starts):
            with kvtier.open(config, NS, clock=VirtualClock()) as cache:
                put(cache, others)
                for keys in mine:
                    put(cache, keys)
                    cache.flush()
                cache.evict("g2")
                found = cache.match(others), sum(map(cache.match, mine))
                assert found == ((8, 20) if quota else (4, 36)), "the other tenant's blocks made room"
                cache.check()


def test_what_is_worth_more_outlives_the_rest_on_the_disk_too(tmp_path: Path) -> None:
    tiers = {"g2": {"capacity": 12 * 4096}, "g3": {"path": str(tmp_path / "g3"), "capacity": 24 * 4096}}
    dear, usual = list(chain_of(NS, 8)), list(chain_of(NS, 8, seed=1))
    with kvtier.open(kvtier.Config.parse({"tiers": tiers}), NS, clock=VirtualClock()) as cache:
        put(cache, usual)
        put(cache, dear)
        put(cache, dear, retention=Terms("dear", ttl=86_400, priority=90))  # the second to want it
        for seed in range(2, 8):
            put(cache, list(chain_of(NS, 8, seed=seed)))
            cache.flush()
        assert (cache.match(usual), cache.match(dear)) == (0, 8)
        cache.evict("g2")
        assert served(cache, dear) == 8
        assert {cache.manager.host.index[key].priority for key in dear} == {90}, "as it was"
        cache.check()


def test_a_put_does_not_push_out_its_own_head_because_others_are_worth_more() -> None:
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock)], blocks=12) as cache:
        for seed in range(10):
            keys, dear = list(chain_of(NS, 11, seed=2 * seed)), list(chain_of(NS, 2, seed=2 * seed + 1))
            assert cache.put(keys[:7], payloads_of(keys[:7], BLOCK), wait=False) == 7
            assert cache.put(dear, payloads_of(dear, BLOCK), Terms("dear", ttl=600, priority=90), wait=False) == 2
            assert cache.put(keys, payloads_of(keys, BLOCK), wait=True) == 11
            assert cache.match(keys) == 11
            cache.flush()  # what is on its way down holds its slots, purged or not
            cache.purge()
            clock.advance(1)
