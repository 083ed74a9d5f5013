"""The public surface over tiers in memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.manager import write_behind
from kvtier.retention.terms import Depth
from kvtier.testing import (
    Fault,
    FaultyTier,
    MemoryTier,
    VirtualClock,
    chain_of,
    payload_of,
    payloads_of,
    sample_namespace,
    verification_off,
)
from kvtier.testing.memory import MemoryStore
from kvtier.tiers.protocol import Miss, Sealed

BLOCK = 4096
NS = sample_namespace(BLOCK)


def config(blocks: int = 64, **more: object) -> kvtier.Config:
    return kvtier.Config.parse({"version": 1, "tiers": {"g2": {"capacity": blocks * BLOCK}}, **more})


class Stack:
    """A cache over in-memory G3 and G4, and the stores behind them."""

    def __init__(self, blocks: int = 64, stride: int = 4, faults: list[Fault] | None = None) -> None:
        self.clock = VirtualClock()
        self.g3, self.g4 = MemoryStore.empty(), MemoryStore.empty()
        self.faulty = FaultyTier(MemoryTier(NS, self.clock, store=self.g3), faults or [])
        deep = MemoryTier(NS, self.clock, store=self.g4, name="g4", depth=Depth.G4, stride=stride)
        self.cache = kvtier.open(config(blocks), NS, clock=self.clock, tiers=[self.faulty, deep])


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack()
    yield stack
    stack.faulty.faults.clear()
    stack.cache.check()
    stack.cache.close()


def put(cache: kvtier.Cache, keys: list[bytes], **options: object) -> int:
    return cache.put(keys, payloads_of(keys, BLOCK), **options)  # type: ignore[arg-type]


def expect(cache: kvtier.Cache, keys: list[bytes], tiers: list[str]) -> None:
    with cache.get(keys) as hit:
        assert hit.tiers == tiers
        assert [bytes(b) for b in hit.blocks] == [payload_of(k, BLOCK) for k in keys[: len(tiers)]]
        assert all(b.readonly for b in hit.blocks)


def test_a_chain_comes_back_from_every_tier(stack: Stack) -> None:
    keys = list(chain_of(NS, 10))
    assert put(stack.cache, keys) == 10
    assert stack.cache.match(keys) == 10
    expect(stack.cache, keys, ["g2"] * 10)
    flushed = stack.cache.flush()
    assert (flushed.durable, flushed.dropped, flushed.pending) == ({"g3": 10, "g4": 10}, 0, 0)
    assert stack.cache.evict("g2") == 10
    assert stack.cache.match(keys) == 10
    expect(stack.cache, keys, ["g3"] * 10)
    expect(stack.cache, keys, ["g2"] * 10)
    stack.cache.evict("g2")
    assert stack.cache.evict("g3") == 10
    expect(stack.cache, keys, ["g4"] * 10)
    stack.cache.flush()
    stack.cache.evict("g2")
    expect(stack.cache, keys, ["g3"] * 10)


def test_a_hit_mixes_tiers(stack: Stack) -> None:
    keys = list(chain_of(NS, 6))
    put(stack.cache, keys)
    stack.cache.flush()
    stack.cache.evict("g2")
    with stack.cache.get(keys[:2]):
        pass
    expect(stack.cache, keys, ["g2"] * 2 + ["g3"] * 4)


def test_blocks_end_with_the_with(stack: Stack) -> None:
    keys = list(chain_of(NS, 2))
    put(stack.cache, keys)
    with stack.cache.get(keys) as hit:
        view = hit.blocks[0]
    with pytest.raises(ValueError, match="released"):
        bytes(view)


def test_more_than_g2_holds_goes_through_it(stack: Stack) -> None:
    """A put larger than G2 waits for the queue and ends up below, head included."""
    keys = list(chain_of(NS, 200))
    assert put(stack.cache, keys) == 200
    assert stack.cache.flush().durable["g3"] == 200
    assert stack.cache.match(keys) == 200
    with stack.cache.get(keys[:60]) as hit:
        assert [bytes(b) for b in hit.blocks] == payloads_of(keys[:60], BLOCK)


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_a_chain_longer_than_g2_is_served_as_far_as_g2_holds(policy: str) -> None:
    """Its deeper blocks, which are in G2 after the put, must not keep its head out."""
    clock, store = VirtualClock(), MemoryStore.empty()
    keys = list(chain_of(NS, 40))
    tier = MemoryTier(NS, clock, store=store)
    with kvtier.open(config(32, policy=policy), NS, clock=clock, tiers=[tier]) as cache:
        assert put(cache, keys) == 40
        cache.flush()
        for _ in range(2):
            with cache.get(keys) as hit:
                assert (len(hit), hit.miss) == (32, Miss.NO_ROOM)
                assert [bytes(b) for b in hit.blocks] == payloads_of(keys[:32], BLOCK)
        cache.check()


def test_a_write_that_fails_beside_the_tier_does_not_end_its_queue(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(batch: write_behind.ChainBatch) -> list[Sealed]:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(write_behind, "seal", no_memory)
        for seed in range(4):  # more than there are writers
            assert put(stack.cache, list(chain_of(NS, 4, seed=seed)), timeout=1.0) == 4
            assert stack.cache.flush(timeout=5.0).durable["g3"] == 0
    stack.clock.advance(60)  # a tier whose writer keeps failing is out of service until a probe
    assert put(stack.cache, list(chain_of(NS, 4, seed=4))) == 4
    assert stack.cache.flush().durable["g3"] == 4


def test_without_lower_tiers_the_head_is_kept() -> None:
    with kvtier.open(config(8), NS) as cache:
        keys = list(chain_of(NS, 20))
        assert put(cache, keys) == 8
        assert cache.match(keys) == 8
        other = list(chain_of(NS, 20, seed=1))
        assert put(cache, other) == 8
        assert (cache.match(keys), cache.match(other)) == (0, 8)
        cache.check()


def test_only_g4_below_g2() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    keys = list(chain_of(NS, 40))
    tier = MemoryTier(NS, clock, store=store, name="g4", depth=Depth.G4, stride=4)
    with kvtier.open(config(16), NS, clock=clock, tiers=[tier]) as cache:
        assert put(cache, keys, timeout=10) == 40
        assert cache.flush().durable["g4"] == 40
        assert cache.match(keys) == 40
        cache.evict("g2")
        expect(cache, keys[:12], ["g4"] * 12)


def test_a_restart_finds_what_was_flushed() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    keys = list(chain_of(NS, 5))
    with kvtier.open(config(), NS, clock=clock, tiers=[MemoryTier(NS, clock, store=store)]) as cache:
        put(cache, keys)
    with kvtier.open(config(), NS, clock=clock, tiers=[MemoryTier(NS, clock, store=store)]) as cache:
        expect(cache, keys, ["g3"] * 5)


def test_extending_a_chain_stores_only_what_is_new(stack: Stack) -> None:
    keys = list(chain_of(NS, 8))
    put(stack.cache, keys[:5])
    assert stack.cache.put(keys, payloads_of(keys[5:], BLOCK), start=5) == 3
    assert stack.cache.flush().durable == {"g3": 8, "g4": 8}
    stack.cache.evict("g2")
    stack.cache.evict("g3")
    expect(stack.cache, keys, ["g4"] * 8)


def test_terms_bound_depth_and_time(stack: Stack) -> None:
    keys = list(chain_of(NS, 4))
    put(stack.cache, keys, retention="in_memory")
    assert stack.cache.flush().durable == {"g3": 0, "g4": 0}
    assert not stack.g3.entries and not stack.g4.entries
    stack.clock.advance(599)
    expect(stack.cache, keys, ["g2"] * 4)
    stack.clock.advance(601)
    assert stack.cache.match(keys) == 0
    with stack.cache.get(keys) as hit:
        assert (len(hit), hit.miss) == (0, Miss.EXPIRED)


def test_a_later_wider_term_reaches_the_disk(stack: Stack) -> None:
    keys = list(chain_of(NS, 4))
    put(stack.cache, keys, retention=kvtier.Terms("ram", ceiling=Depth.G2))
    put(stack.cache, keys, retention="24h")
    assert stack.cache.flush().durable["g3"] == 4


def test_a_use_in_g2_renews_the_copy_below(stack: Stack) -> None:
    keys = list(chain_of(NS, 4))
    put(stack.cache, keys, retention="5m")
    stack.cache.flush()
    for _ in range(3):
        stack.clock.advance(200)
        expect(stack.cache, keys, ["g2"] * 4)
        stack.cache.flush()
    stack.cache.evict("g2")
    expect(stack.cache, keys, ["g3"] * 4)


@pytest.mark.parametrize("kind", ["error", "crash", "drop"])
def test_a_failing_tier_is_a_miss(stack: Stack, kind: str) -> None:
    keys = list(chain_of(NS, 4))
    put(stack.cache, keys)
    stack.cache.flush()
    stack.cache.evict("g2")
    stack.cache.evict("g4")
    stack.faulty.faults.append(Fault("read", kind))
    with stack.cache.get(keys) as hit:
        assert len(hit) == 0
        assert hit.miss in (Miss.ERROR, Miss.ABSENT)
    stack.faulty.faults.clear()
    stack.clock.advance(60)
    expect(stack.cache, keys, ["g3"] * 4)


def test_a_hanging_tier_costs_the_deadline_and_nothing_else(stack: Stack) -> None:
    keys = list(chain_of(NS, 4))
    put(stack.cache, keys)
    stack.cache.flush()
    stack.cache.evict("g2")
    stack.faulty.faults.append(Fault("read", "hang", times=1))
    with stack.cache.get(keys, timeout=0.2) as hit:
        assert (len(hit), hit.miss) == (0, Miss.LATE)
    assert stack.cache.stats()["g2"]["quarantined"] == 4
    other = list(chain_of(NS, 4, seed=1))
    put(stack.cache, other)
    expect(stack.cache, other, ["g2"] * 4)


def test_damage_is_a_miss_and_shortens_the_hit(stack: Stack) -> None:
    keys = list(chain_of(NS, 6))
    put(stack.cache, keys)
    stack.cache.flush()
    stack.cache.evict("g2")
    stack.cache.evict("g4")
    stack.g3.damage(NS.digest + keys[3], offset=7)
    with stack.cache.get(keys) as hit:
        assert (len(hit), hit.miss) == (3, Miss.CORRUPT)
        assert [bytes(b) for b in hit.blocks] == payloads_of(keys[:3], BLOCK)
    assert stack.cache.stats()["g3"]["misses"] == {"corrupt": 1}


def test_without_verification_damage_would_be_served(stack: Stack) -> None:
    """The control of the test above: its comparison can fail."""
    keys = list(chain_of(NS, 6))
    put(stack.cache, keys)
    stack.cache.flush()
    stack.cache.evict("g2")
    stack.g3.damage(NS.digest + keys[3], offset=7)
    with verification_off(), stack.cache.get(keys) as hit:
        assert [bytes(b) for b in hit.blocks] != payloads_of(keys, BLOCK)


def test_purge_reaches_every_tier_and_one_salt_only(stack: Stack) -> None:
    mine, other = (kvtier.chain_hashes(range(64), NS, salt=s) for s in ("a", "b"))
    put(stack.cache, mine)
    put(stack.cache, other)
    stack.cache.flush()
    assert stack.cache.purge(salt="a") == 12
    assert (stack.cache.match(mine), stack.cache.match(other)) == (0, 4)
    stack.clock.advance(1)
    put(stack.cache, mine)
    assert stack.cache.match(mine) == 4


def test_counts_add_up(stack: Stack) -> None:
    keys = list(chain_of(NS, 8))
    put(stack.cache, keys[:5])
    for asked in (keys, keys[:3], list(chain_of(NS, 4, seed=9))):
        with stack.cache.get(asked):
            pass
    requests = stack.cache.stats()["requests"]
    assert requests["lookups"] == 15 == requests["hits"] + sum(requests["misses"].values())
    assert requests["misses"] == {"absent": 7}


BAD_PUTS = {
    "a key of the wrong length": (lambda keys: [keys[0], keys[1][:-1]], None, r"keys\[1\]: expected 48 bytes"),
    "a repeated key": (lambda keys: [keys[0], keys[0]], None, r"keys\[1\] repeats keys\[0\]"),
    "a short buffer": (None, lambda bufs: [bufs[0], bufs[1][:-1]], r"buffers\[1\] has 4095 bytes, a block has 4096"),
    "too few buffers": (None, lambda bufs: bufs[:1], r"1 buffers for 2 keys"),
    "no buffer at all": (None, lambda bufs: [bufs[0], 7], r"buffers\[1\] is not contiguous bytes-like"),
    "a buffer given up": (
        None,
        lambda bufs: [bufs[0], given_up(bufs[1])],
        r"buffers\[1\] is not contiguous bytes-like",
    ),
}


def given_up(buffer: bytes) -> memoryview:
    with memoryview(buffer) as view:
        return view


@pytest.mark.parametrize("fault", BAD_PUTS)
def test_bad_puts_say_what_is_wrong_and_store_nothing(stack: Stack, fault: str) -> None:
    bad_keys, bad_buffers, message = BAD_PUTS[fault]
    keys = list(chain_of(NS, 2))
    buffers = payloads_of(keys, BLOCK)
    with pytest.raises(kvtier.InvalidRequest, match=message):
        stack.cache.put(bad_keys(keys) if bad_keys else keys, bad_buffers(buffers) if bad_buffers else buffers)
    assert stack.cache.match(keys) == 0


def test_bad_words_are_named(stack: Stack) -> None:
    keys = list(chain_of(NS, 1))
    with pytest.raises(kvtier.InvalidRequest, match="retention 'weekly' is not a class; known: 1h, 24h, 5m, in_memory"):
        put(stack.cache, keys, retention="weekly")
    with pytest.raises(kvtier.InvalidRequest, match="'g9' is not a tier"):
        stack.cache.evict("g9")
    wrong: list[tuple[str, Any, str]] = [
        *(("timeout", value, "timeout must be at least 0") for value in (-1, float("nan"), "5", [])),
        *(("start", value, "start must lie in 0 … 1") for value in (-1, 2, 0.5, "0", None)),
        *(("request_id", value, "a request's id must be a string") for value in (7, b"r", None, [])),
    ]
    for name, value, message in wrong:  # an id that is none was remembered, and no question about it was answered
        for verb in (stack.cache.get, lambda keys, **named: put(stack.cache, keys, **named)):
            with pytest.raises(kvtier.InvalidRequest, match=message):
                verb(keys, **{name: value})  # type: ignore[operator]
    with pytest.raises(kvtier.InvalidRequest, match="retention is a class or a list of token ranges, got int"):
        put(stack.cache, keys, retention=7)
    assert stack.cache.get(keys, timeout=np.float32(1), start=np.int64(1)).miss is None  # type: ignore[arg-type]


def test_a_closed_cache_says_so() -> None:
    cache = kvtier.open(config(), NS)
    cache.close()
    cache.close()
    for call in (lambda: cache.match([]), lambda: cache.get([]), lambda: cache.put([], []), lambda: cache.flush()):
        with pytest.raises(kvtier.ClosedError):
            call()


def test_g2_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(kvtier.ConfigError, match=r"tiers\.g2\.capacity: 1000 bytes hold not one block of 4096"):
        kvtier.open(kvtier.Config.parse({"version": 1, "tiers": {"g2": {"capacity": 1000}}}), NS)


async def test_the_async_face() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    keys = list(chain_of(NS, 100))
    async with kvtier.aopen(config(16), NS, clock=clock, tiers=[MemoryTier(NS, clock, store=store)]) as cache:
        assert await cache.put(keys, payloads_of(keys, BLOCK)) == 100
        assert (await cache.flush()).durable == {"g3": 100}
        assert await cache.match(keys) == 100
        async with cache.get(keys[:10]) as hit:
            assert [bytes(b) for b in hit.blocks] == payloads_of(keys[:10], BLOCK)
        hit = await cache.get(keys[:2])
        with hit:
            assert len(hit) == 2
        assert await cache.evict("g3") == 100
        cache.check()


def test_two_ranks_are_gathered_in_order() -> None:
    namespace = sample_namespace(BLOCK, ranks_served=2, ranks=1)
    clock, store = VirtualClock(), MemoryStore.empty()
    keys = list(chain_of(namespace, 4))
    capacity = kvtier.Config.parse({"version": 1, "tiers": {"g2": {"capacity": 16 * 8192}}})
    with kvtier.open(capacity, namespace, clock=clock, tiers=[MemoryTier(namespace, clock, store=store)]) as cache:
        put(cache, keys)
        cache.flush()
        cache.evict("g2")
        expect(cache, keys, ["g3"] * 4)


def test_a_load_under_way_does_not_undo_a_purge() -> None:
    """A block read from G3 before a purge and arriving in G2 after it stays a miss."""
    clock, store = VirtualClock(), MemoryStore.empty()
    slow = FaultyTier(MemoryTier(NS, clock, store=store))
    keys = list(chain_of(NS, 4))
    with kvtier.open(config(), NS, clock=clock, tiers=[slow]) as cache:
        put(cache, keys)
        cache.flush()
        cache.evict("g2")
        slow.faults.append(Fault("read", "linger", seconds=0.3))
        with cache.get(keys, timeout=0.1) as hit:
            assert (len(hit), hit.miss) == (0, Miss.LATE)
        cache.purge()
        time.sleep(0.4)
        assert cache.match(keys) == 0
        cache.check()


def test_an_isolated_class_shares_with_nobody(stack: Stack) -> None:
    """Blocks of `in_memory` are not found by other classes, and do not reach the disk through their terms."""
    private = stack.cache.chain_hashes(range(64), retention="in_memory")
    common = stack.cache.chain_hashes(range(64))
    assert common == kvtier.chain_hashes(range(64), NS)
    put(stack.cache, private, retention="in_memory")
    assert stack.cache.match(common) == 0
    put(stack.cache, common, retention="24h")
    assert stack.cache.flush().durable["g3"] == 4
    assert {name[32:] for name in stack.g3.entries} == set(common)
    assert stack.cache.purge() == 4 + 4 + 4 + 4
    assert stack.cache.match(private) == 0


def test_a_forgotten_hit_does_not_hold_its_blocks_for_ever() -> None:
    """Nor does its collection lock anything: it may happen inside any critical section."""
    with kvtier.open(config(8), NS) as cache:
        keys = list(chain_of(NS, 8))
        put(cache, keys)
        hit = cache.get(keys)
        cycle = [hit]
        cycle.append(cycle)  # only the garbage collector finds it
        del hit, cycle
        with cache.manager.lock:
            gc.collect()
        other = list(chain_of(NS, 8, seed=1))
        assert put(cache, other) == 8
        cache.check()
