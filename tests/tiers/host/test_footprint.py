"""What a resident block costs beside its bytes: few bytes, and nothing that the garbage collector has to look at."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from kvtier.bench.retention.byteless import EmptyArena
from kvtier.bench.tiers.scale import chain_of
from kvtier.policies import memory, runs
from kvtier.policies.policy import make_policy
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN
from kvtier.tiers.host.tier import HostTier
from kvtier.times import Mono, Wall

CHAIN = 100
LIFE = Lifetime.of(BUILTIN["24h"], Wall(1.8e9))


def stored(tier: HostTier, chains: range) -> None:
    """Put chains, evicting others."""
    for number in chains:
        chain = chain_of(number, CHAIN)
        tier.policy.reference(chain, 0, Mono(number))
        for depth, key in enumerate(chain):
            slot = tier.reserve(key, depth, insist=True)
            assert slot is not None and tier.commit(slot, slot.generation, LIFE)
        tier.policy.train()


def opened(blocks: int) -> HostTier:
    tier = HostTier(EmptyArena(blocks), make_policy("lru", blocks))
    tier.open()
    return tier


def test_what_the_garbage_collector_tracks_does_not_grow_with_blocks() -> None:
    """There is something per request, not per block. The records of 10,000 blocks were 10,000 tracked objects."""
    tier = opened(10_000)
    gc.collect()
    before = len(gc.get_objects())
    stored(tier, range(100))
    gc.collect()
    assert len(tier.index) == 10_000
    assert len(gc.get_objects()) - before < 10_000 / 10
    assert not any(map(gc.is_tracked, tier.index.parts))
    tier.check()


def test_a_collection_does_not_go_over_what_the_policy_remembers() -> None:
    """Lists of the requests, sorted by age and by rank, were gone over at each full collection, which stops every
    thread."""

    def gone_over() -> int:
        gc.collect()
        return sum(len(one) for one in gc.get_objects() if isinstance(one, list | dict | tuple))

    policy = make_policy("auto", 8_000)
    before = gone_over()
    for number in range(4_000):
        chain = chain_of(number, 2)
        policy.reference(chain, 0, Mono(number))
        policy.insert_all(chain, range(2))
        policy.train()
    assert len(policy._history) == 4_000  # type: ignore[attr-defined]
    assert gone_over() - before < 4_000


def test_a_block_and_those_that_were_evicted_take_400_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After four times the capacity has passed through; it was 800."""
    for module in (memory, runs):  # the blocks of requests that may be under way keep their names
        monkeypatch.setattr(module, "ARRIVING_MAX", 4)
    blocks = 6_000
    tracemalloc.start()
    try:
        tier = opened(blocks)
        stored(tier, range(4 * blocks // CHAIN))
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tier.policy._known >= 3 * blocks  # type: ignore[attr-defined]
    assert used / blocks < 400
