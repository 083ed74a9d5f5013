"""`get(start=…)`, for a caller that has the head of a chain in G1, and waits that cannot end."""

from __future__ import annotations

import math

import pytest

import kvtier
from kvtier.clock import SystemClock
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payload_of, sample_namespace

BLOCK = 4096
NS = sample_namespace(BLOCK)
CONFIG = kvtier.Config.parse({"version": 1, "tiers": {"g2": {"capacity": "64KiB"}}})


def test_blocks_before_the_start_are_neither_loaded_nor_leased() -> None:
    keys = chain_of(NS, 8)
    clock = VirtualClock()
    with kvtier.open(CONFIG, NS, clock=clock, tiers=[MemoryTier(NS, clock)]) as cache:
        cache.put(keys, [payload_of(key, BLOCK) for key in keys])
        assert cache.flush().durable == {"g3": 8}
        cache.evict("g2")
        with cache.get(keys, start=5) as hit:
            assert [bytes(block) for block in hit.blocks] == [payload_of(key, BLOCK) for key in keys[5:]]
            assert hit.tiers == ["g3"] * 3 and len(hit.lives) == 3
        assert cache.stats()["g2"]["blocks"] == 3
        with cache.get(keys, start=8) as hit:
            assert len(hit) == 0 and hit.miss is None
        with cache.get(keys) as hit:
            assert hit.tiers == ["g3"] * 5 + ["g2"] * 3
        cache.check()
        with pytest.raises(kvtier.InvalidRequest):
            cache.get(keys, start=9)


def test_a_put_does_not_wait_for_room_that_nobody_will_make() -> None:
    """A chain longer than G2: its head is not evicted for its tail, so no room is on its way."""
    keys = chain_of(NS, 20)
    clock = SystemClock()
    with kvtier.open(CONFIG, NS, clock=clock, tiers=[MemoryTier(NS, clock)]) as cache:
        with cache.get(keys) as hit:  # the request is known to the policy now
            assert len(hit) == 0
        before = clock.monotonic()
        assert 16 <= cache.put(keys, [payload_of(key, BLOCK) for key in keys], timeout=30) <= 20
        assert clock.monotonic() - before < 5


@pytest.mark.parametrize("timeout", [math.inf, 1e10, 1e300])
def test_a_caller_may_wait_without_end(timeout: float) -> None:
    """A thread's wait takes no infinite time: every call raised OverflowError."""
    keys, clock = chain_of(NS, 8), SystemClock()
    payloads = [payload_of(key, BLOCK) for key in keys]
    with kvtier.open(CONFIG, NS, clock=clock, tiers=[MemoryTier(NS, clock)]) as cache:
        assert cache.put(keys, payloads, timeout=timeout) == 8
        assert cache.flush(timeout).pending == 0
        cache.evict("g2")
        assert cache.match(keys, timeout) == 8 == cache.prewarm(keys, timeout)
        cache.evict("g2")
        with cache.get(keys, timeout) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads
