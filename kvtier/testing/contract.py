"""The contract of `kvtier.tiers.protocol.Tier` as a suite that any implementation can be put through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from kvtier.errors import ClosedError
from kvtier.identity.keys import BlockKey, scope_of, tenant_of
from kvtier.identity.namespace import Namespace
from kvtier.retention.marks import number_of
from kvtier.retention.terms import Terms
from kvtier.testing.payload import chain_of, payload_of, sample_namespace, seal
from kvtier.tiers.protocol import Loaded, Miss, PurgeLogging, Target, Tier
from kvtier.times import Mono, Wall

_DEADLINE_S = 30.0


class _MovableClock(Protocol):
    def monotonic(self) -> Mono: ...

    def wall(self) -> Wall: ...

    async def sleep(self, seconds: float) -> None: ...

    def advance(self, seconds: float) -> None: ...


async def check_tier(
    make_tier: Callable[[Namespace], Tier],
    clock: _MovableClock,
    *,
    block_bytes: int = 4096,
    persistent: bool = True,
    renews: bool = True,
) -> None:
    """Put a tier through its contract; raises AssertionError at the first breach.

    `make_tier(namespace)` gives a new closed tier on the *same* store each time, running on `clock`. The store must
    start empty and hold at least 16 strides of blocks. `persistent`: blocks survive close and open. `renews`: a
    touch takes effect at the injected clock (an object server stamps uses with its own clock instead).
    """
    namespace = sample_namespace(block_bytes)
    for step in (
        _absent_at_first, _round_trip, _gaps, _split_pieces, _present_again, _other_names_miss, _expiry, _eviction,
        _purge, _deadline_past, _concurrency,
    ):  # fmt: skip
        await _with_tier(make_tier, namespace, clock, step)
    if renews:
        await _with_tier(make_tier, namespace, clock, _renewal)
    if persistent:
        await _restart(make_tier, namespace, clock)
    await _closed(make_tier, namespace, clock)


Step = Callable[[Tier, Callable[[Namespace], Tier], Namespace, _MovableClock], Awaitable[None]]


async def _with_tier(
    make_tier: Callable[[Namespace], Tier], namespace: Namespace, clock: _MovableClock, step: Step
) -> None:
    tier = make_tier(namespace)
    await tier.open()
    try:
        await tier.evict(None)
        await step(tier, make_tier, namespace, clock)
        tier.check()
    finally:
        await tier.close(clock.monotonic() + _DEADLINE_S)


async def _absent_at_first(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    chain = chain_of(namespace, 2 * tier.stride, seed=1)
    assert all(miss is not None for miss in tier.peek(chain, range(len(chain)))), "an empty tier claims blocks"
    assert await _here(tier, chain, clock) == [], "an empty tier claims blocks at lookup"
    assert set(await _read_back(tier, chain, clock)) == {Miss.ABSENT}, "an absent block must read as ABSENT"


async def _round_trip(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    chain = chain_of(namespace, 3 * tier.stride, seed=2)
    await _store(tier, chain, clock)
    assert await _here(tier, chain, clock) == list(range(len(chain)))
    await _expect_bytes(tier, chain, clock)
    some = sorted({0, tier.stride, len(chain) - 1})
    buffers = [bytearray(tier.block_bytes) for _ in some]
    targets = [Target(i, (memoryview(b),)) for i, b in zip(some, buffers, strict=True)]
    results = await tier.read(chain, targets, clock.monotonic() + _DEADLINE_S)
    assert all(isinstance(r, Loaded) for r in results), results
    for index, buffer in zip(some, buffers, strict=True):
        assert buffer == payload_of(chain[index], tier.block_bytes), f"block {index} alone came back wrong"
    assert tier.usage().blocks >= len(chain)


async def _gaps(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    """Blocks that go down alone, of a chain some of whose blocks may not."""
    if tier.stride > 1:
        return
    chain, some = chain_of(namespace, 6, seed=16), [1, 2, 5]
    results = await tier.write(seal(chain, some, tier.block_bytes, clock.wall()), clock.monotonic() + _DEADLINE_S)
    assert all(result.durable for result in results), results
    assert await _here(tier, chain, clock) == some


async def _split_pieces(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    """One block in two pieces, as from two ranks, written and read with different cuts of the same bytes."""
    chain = chain_of(namespace, tier.stride, seed=3)
    blocks = seal(chain, range(tier.stride), tier.block_bytes, clock.wall(), ranks=2)
    results = await tier.write(blocks, clock.monotonic() + _DEADLINE_S)
    assert all(r.durable for r in results), results
    buffers = [bytearray(tier.block_bytes) for _ in chain]
    half = tier.block_bytes // 4
    targets = [Target(i, (memoryview(b)[:half], memoryview(b)[half:])) for i, b in enumerate(buffers)]
    loaded = await tier.read(chain, targets, clock.monotonic() + _DEADLINE_S)
    assert all(isinstance(r, Loaded) for r in loaded), loaded
    assert [bytes(b) for b in buffers] == [payload_of(key, tier.block_bytes) for key in chain]


async def _present_again(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    chain = chain_of(namespace, tier.stride, seed=4)
    await _store(tier, chain, clock)
    before = tier.usage().blocks
    blocks = seal(chain, range(len(chain)), tier.block_bytes, clock.wall())
    results = await tier.write(blocks, clock.monotonic() + _DEADLINE_S)
    assert all(r.durable for r in results), f"a block that is there is durable, got {results}"
    assert tier.usage().blocks == before, "a second write of the same block took more space"


async def _other_names_miss(
    tier: Tier, make: Callable[[Namespace], Tier], namespace: Namespace, clock: _MovableClock
) -> None:
    chain = chain_of(namespace, tier.stride, seed=5)
    await _store(tier, chain, clock)
    tenant = scope_of("tenant-b")
    foreign = [BlockKey(tenant + key[len(tenant) :]) for key in chain]
    assert Loaded not in {type(r) for r in await _read_back(tier, foreign, clock)}, "served across scopes"
    other = make(sample_namespace(namespace.block_bytes, weights="test:2"))
    await other.open()
    try:
        assert Loaded not in {type(r) for r in await _read_back(other, chain, clock)}, "served across namespaces"
    finally:
        await other.close(clock.monotonic() + _DEADLINE_S)
    await _expect_bytes(tier, chain, clock)


async def _expiry(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    chain = chain_of(namespace, tier.stride, seed=6)
    await _store(tier, chain, clock, Terms("short", ttl=300))
    await _expect_bytes(tier, chain, clock)
    clock.advance(301)
    assert await _here(tier, chain, clock) == [], "an expired block is claimed"
    assert Loaded not in {type(r) for r in await _read_back(tier, chain, clock)}, "an expired block was served"
    await _store(tier, chain, clock, Terms("hard", max_age=100))
    clock.advance(101)
    assert Loaded not in {type(r) for r in await _read_back(tier, chain, clock)}, "a block past max_age was served"


async def _renewal(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    chain = chain_of(namespace, tier.stride, seed=7)
    await _store(tier, chain, clock, Terms("short", ttl=300))
    for _ in range(3):
        clock.advance(200)
        tier.touch(chain, clock.wall())
    await tier.flush(clock.monotonic() + _DEADLINE_S)
    await _expect_bytes(tier, chain, clock)


async def _eviction(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    keep, drop = chain_of(namespace, tier.stride, seed=8), chain_of(namespace, tier.stride, seed=9)
    await _store(tier, keep, clock)
    await _store(tier, drop, clock)
    assert await tier.evict(drop) == len(drop)
    assert await _here(tier, drop, clock) == []
    await _expect_bytes(tier, keep, clock)
    assert await tier.evict(drop) == 0, "evicting what is not there must count nothing"
    await tier.evict(None)
    assert await _here(tier, keep, clock) == []


async def _purge(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    tenant = scope_of("tenant-a", b"adapter")
    mine, shared = chain_of(namespace, tier.stride, 10, tenant), chain_of(namespace, tier.stride, 10)
    old = seal(mine, range(len(mine)), tier.block_bytes, clock.wall())
    await tier.write(old, clock.monotonic() + _DEADLINE_S)
    await _store(tier, shared, clock)
    clock.advance(1)
    purged_at = clock.wall()
    assert await tier.purge(tenant_of(tenant), purged_at) == len(mine)
    until = (await tier.tombstones())[tenant_of(tenant)]
    assert number_of(until) or abs(until - purged_at) < 0.01, "a purge must leave a tombstone"
    assert Loaded not in {type(r) for r in await _read_back(tier, mine, clock)}, "served after its purge"
    await tier.write(old, clock.monotonic() + _DEADLINE_S)
    assert Loaded not in {type(r) for r in await _read_back(tier, mine, clock)}, "a late write undid a purge"
    await _expect_bytes(tier, shared, clock)
    clock.advance(1)
    await _store(tier, mine, clock)
    await _expect_bytes(tier, mine, clock)


async def _deadline_past(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    """A deadline that is over gives misses or the right answer, at once; never an exception, never a wrong byte."""
    chain = chain_of(namespace, tier.stride, seed=11)
    await _store(tier, chain, clock)
    past = clock.monotonic() - 1
    async with asyncio.timeout(10):
        await tier.lookup(chain, range(len(chain)), past)
        buffers = [bytearray(tier.block_bytes) for _ in chain]
        targets = [Target(i, (memoryview(b),)) for i, b in enumerate(buffers)]
        for key, buffer, result in zip(chain, buffers, await tier.read(chain, targets, past), strict=True):
            assert not isinstance(result, Loaded) or buffer == payload_of(key, tier.block_bytes)
        late = chain_of(namespace, tier.stride, seed=12)
        await tier.write(seal(late, range(len(late)), tier.block_bytes, clock.wall()), past)


async def _concurrency(tier: Tier, make: object, namespace: Namespace, clock: _MovableClock) -> None:
    """Readers, writers and evictions of the same keys at once: right bytes or a miss."""
    chain = chain_of(namespace, 2 * tier.stride, seed=13)

    async def write() -> None:
        for _ in range(3):
            await _store(tier, chain, clock, check=False)

    async def evict() -> None:
        for _ in range(3):
            await tier.evict(chain[: tier.stride])
            await asyncio.sleep(0)

    async def read() -> None:
        for _ in range(5):
            buffers = [bytearray(tier.block_bytes) for _ in chain]
            targets = [Target(i, (memoryview(b),)) for i, b in enumerate(buffers)]
            results = await tier.read(chain, targets, clock.monotonic() + _DEADLINE_S)
            for key, buffer, result in zip(chain, buffers, results, strict=True):
                assert not isinstance(result, Loaded) or buffer == payload_of(key, tier.block_bytes)
                assert result is not Miss.CORRUPT, "a race was taken for damage"

    await asyncio.gather(write(), write(), evict(), read(), read())
    await _store(tier, chain, clock)
    await _expect_bytes(tier, chain, clock)


async def _restart(make_tier: Callable[[Namespace], Tier], namespace: Namespace, clock: _MovableClock) -> None:
    chain = chain_of(namespace, 2 * make_tier(namespace).stride, seed=14)
    first = make_tier(namespace)
    await first.open()
    await _store(first, chain, clock)
    await first.close(clock.monotonic() + _DEADLINE_S)
    second = make_tier(namespace)
    await second.open()
    try:
        assert await _here(second, chain, clock) == list(range(len(chain))), "durable blocks are gone after a restart"
        await _expect_bytes(second, chain, clock)
        second.check()
    finally:
        await second.close(clock.monotonic() + _DEADLINE_S)


async def _closed(make_tier: Callable[[Namespace], Tier], namespace: Namespace, clock: _MovableClock) -> None:
    tier = make_tier(namespace)
    await tier.open()
    await tier.close(clock.monotonic() + _DEADLINE_S)
    await tier.close(clock.monotonic() + _DEADLINE_S)
    chain = chain_of(namespace, tier.stride, seed=15)
    try:
        await _read_back(tier, chain, clock)
    except ClosedError:
        return
    raise AssertionError("a closed tier must raise ClosedError")


async def _store(
    tier: Tier, chain: Sequence[BlockKey], clock: _MovableClock, terms: Terms | None = None, check: bool = True
) -> None:
    """Write a whole chain, one stride at a time; every block must become durable."""
    terms = terms or Terms("contract", ttl=86400)
    for start in range(0, len(chain), tier.stride):
        indices = range(start, min(start + tier.stride, len(chain)))
        blocks = seal(chain, indices, tier.block_bytes, clock.wall(), terms, position=_position(tier))
        results = await tier.write(blocks, clock.monotonic() + _DEADLINE_S)
        assert not check or all(r.durable for r in results), results


def _position(tier: Tier) -> int:
    log: PurgeLogging | None = getattr(tier, "purge_log", None)
    return 0 if log is None else log.position


async def _here(tier: Tier, chain: Sequence[BlockKey], clock: _MovableClock) -> list[int]:
    misses = await tier.lookup(chain, range(len(chain)), clock.monotonic() + _DEADLINE_S)
    return [index for index, miss in enumerate(misses) if miss is None]


async def _read_back(tier: Tier, chain: Sequence[BlockKey], clock: _MovableClock) -> list[Loaded | Miss]:
    targets = [Target(index, (memoryview(bytearray(tier.block_bytes)),)) for index in range(len(chain))]
    return await tier.read(chain, targets, clock.monotonic() + _DEADLINE_S)


async def _expect_bytes(tier: Tier, chain: Sequence[BlockKey], clock: _MovableClock) -> None:
    buffers = [bytearray(tier.block_bytes) for _ in chain]
    targets = [Target(index, (memoryview(buffer),)) for index, buffer in enumerate(buffers)]
    results = await tier.read(chain, targets, clock.monotonic() + _DEADLINE_S)
    for index, (key, buffer, result) in enumerate(zip(chain, buffers, results, strict=True)):
        assert isinstance(result, Loaded), f"block {index} of {len(chain)}: expected its bytes, got {result}"
        assert buffer == payload_of(key, tier.block_bytes), f"block {index}: wrong bytes"
