"""What G4 does beyond the contract, on a directory: damage, doubt, terms, purges, and calls in bad circumstances."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

import pytest

from kvtier.clock import SystemClock
from kvtier.errors import ClosedError, ConfigError, InvalidRequest, TierError
from kvtier.identity.keys import scope_of
from kvtier.retention.terms import Depth, Terms
from kvtier.testing import (
    VirtualClock,
    chain_of,
    seal,
    verification_off,
)
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target
from tests.tiers.objects.support.replicas import NS, S, Site


def loaded(results: Sequence[Loaded | Miss]) -> list[bool]:
    return [isinstance(result, Loaded) for result in results]


async def test_one_object_per_stride_and_another_replica_finds_it(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, 3 * S)
    assert await site.store(one, chain) == [Stored.STORED] * len(chain)
    assert len(site.objects()) == 3
    assert set(two.peek(chain, range(len(chain)))) == {Miss.ABSENT}
    assert await two.lookup(chain, range(len(chain)), site.deadline) == [None] * len(chain)
    assert all(loaded(await site.read(two, chain)))


async def test_a_cold_replica_reads_without_a_lookup(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, 2 * S + 2)
    await site.store(one, chain)
    assert loaded(await site.read(two, chain, [1, 3, 4, 2 * S])) == [True] * 4


async def test_a_short_stride_is_found_after_the_last_full_one(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, 3 * S)
    await site.store(one, chain[: S + 2])
    found = await two.lookup(chain, range(len(chain)), site.deadline)
    assert found == [None] * (S + 2) + [Miss.ABSENT] * (2 * S - 2)
    assert loaded(await site.read(two, chain)) == [True] * (S + 2) + [False] * (2 * S - 2)


async def test_a_longer_neighbour_serves_a_shorter_chain(site: Site) -> None:
    tier = await site.replica()
    chain = chain_of(NS, S)
    await site.store(tier, chain)
    assert tier.peek(chain[:2], [0, 1]) == [None, None]
    assert await site.store(tier, chain[:2]) == [Stored.PRESENT] * 2
    assert len(site.objects()) == 1


async def test_lookup_in_a_long_chain_takes_two_rounds_of_few_probes(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, 64 * S)
    await site.store(one, chain[: 40 * S])
    probes = []
    inner = two._store.bucket
    original = inner.read

    async def counting(name: str, start: int, into: object) -> object:
        probes.append(name)
        return await original(name, start, into)  # type: ignore[arg-type]

    inner.read = counting  # type: ignore[assignment,method-assign]
    found = await two.lookup(chain, range(len(chain)), site.deadline)
    assert found.index(Miss.ABSENT) == 40 * S
    assert len(probes) <= 2 * 8, f"{len(probes)} probes for 64 strides"
    inner.read = original  # type: ignore[method-assign]
    assert all(loaded(await site.read(two, chain[: 40 * S])))


@pytest.mark.parametrize("offset", [10, 40, 170, 200, 4095, 4096, 4096 + 4096 * S - 1])
async def test_one_flipped_bit_is_a_miss_that_heals(site: Site, offset: int) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await site.store(one, chain)
    site.flip(site.objects()[0], offset)
    results = await site.read(two, chain)
    assert not all(loaded(results)), "a damaged object was served whole"
    assert site.objects() == [], "what failed its check is deleted"
    assert await site.store(two, chain) == [Stored.STORED] * S
    assert all(loaded(await site.read(two, chain)))


async def test_without_verification_the_same_damage_would_be_served(site: Site) -> None:
    tier = await site.replica()
    chain = chain_of(NS, S)
    await site.store(tier, chain)
    site.flip(site.objects()[0], 4096)
    with verification_off(), pytest.raises(AssertionError, match="wrong bytes"):
        await site.read(tier, chain)


@pytest.mark.parametrize("keep", [0, 100, 4096, 4096 + 4095, 4096 * (S + 1) - 1])
async def test_a_truncated_object_is_a_miss_that_heals(site: Site, keep: int) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await site.store(one, chain)
    os.truncate(site.objects()[0], keep)
    assert not any(loaded(await site.read(two, chain)))
    assert await site.store(two, chain) == [Stored.STORED] * S
    assert all(loaded(await site.read(two, chain)))


async def test_a_whole_frame_under_a_wrong_name_is_a_miss(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    a, b = chain_of(NS, S, seed=1), chain_of(NS, S, seed=2)
    await site.store(one, a)
    (object_a,) = site.objects()
    await site.store(one, b)
    (object_b,) = set(site.objects()) - {object_a}
    object_b.write_bytes(object_a.read_bytes())
    assert not any(loaded(await site.read(two, b)))
    assert all(loaded(await site.read(two, a)))


async def test_a_poisoned_name_does_not_stay_taken(site: Site) -> None:
    """A writer that finds junk under its name replaces it; without the header's check it would trust it for ever."""
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await site.store(one, chain)
    site.objects()[0].write_bytes(b"junk" * 8192)
    assert all(result.durable for result in await site.store(two, chain))
    assert all(loaded(await site.read(await site.replica(), chain)))


async def test_gone_since_lookup_is_a_miss(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await site.store(one, chain)
    assert await two.lookup(chain, [0], site.deadline) == [None]
    assert await one.evict(chain) == S
    assert await site.read(two, chain) == [Miss.EVICTED] * S


async def test_a_wider_term_extends_what_another_replica_stored(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await site.store(one, chain, Terms("short", ttl=300))
    assert await site.store(two, chain, Terms("long", ttl=7200)) == [Stored.PRESENT] * S
    site.clock.advance(3600)
    assert all(loaded(await site.read(await site.replica(), chain)))
    site.clock.advance(3700)
    assert not any(loaded(await site.read(await site.replica(), chain)))


async def test_a_use_here_keeps_it_alive_for_others(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    chain = chain_of(NS, S)
    await site.store(one, chain, Terms("short", ttl=300))
    for _ in range(4):
        site.clock.advance(200)
        one.touch(chain, site.clock.wall())
        await one.flush(site.deadline)
        assert all(loaded(await site.read(two, chain)))
    site.clock.advance(301)
    assert not any(loaded(await site.read(two, chain)))


async def test_an_expired_object_is_replaced(site: Site) -> None:
    one = await site.replica()
    chain = chain_of(NS, S)
    await site.store(one, chain, Terms("short", ttl=300))
    site.clock.advance(400)
    assert await site.store(await site.replica(), chain, Terms("short", ttl=300)) == [Stored.STORED] * S
    assert all(loaded(await site.read(await site.replica(), chain)))


async def test_a_use_long_before_the_write_counts_from_then(site: Site) -> None:
    tier = await site.replica()
    chain = chain_of(NS, S)
    await site.store(tier, chain, Terms("hour", ttl=3600), since=site.clock.wall() - 3000)
    site.clock.advance(601)
    assert not any(loaded(await site.read(await site.replica(), chain))), "the write must not count as a use"


async def test_a_ceiling_keeps_blocks_out_and_what_follows_them(site: Site) -> None:
    tier = await site.replica()
    chain = chain_of(NS, S)
    blocks = seal(chain, range(S), NS.block_bytes, site.clock.wall())
    low = seal(chain, range(S), NS.block_bytes, site.clock.wall(), Terms("ssd", ttl=60, ceiling=Depth.G3))
    assert await tier.write([*blocks[:2], low[2], blocks[3]], site.deadline) == [
        Stored.STORED, Stored.STORED, Stored.REFUSED, Stored.REFUSED,
    ]  # fmt: skip
    assert await tier.write(low, site.deadline) == [Stored.REFUSED] * S


async def test_a_purge_holds_for_every_replica_within_a_minute(site: Site) -> None:
    one, two = await site.replica(), await site.replica()
    tenant = scope_of("tenant")
    chain = chain_of(NS, 2 * S, scope=tenant)
    other = chain_of(NS, S)
    await site.store(one, chain)
    await site.store(one, other)
    old = site.clock.wall()
    assert all(loaded(await site.read(two, chain)))
    site.clock.advance(1)
    assert await one.purge(tenant, site.clock.wall()) == 2 * S
    site.clock.advance(60)
    assert await site.store(two, chain, since=old) == [Stored.REFUSED] * (2 * S), "a late write from elsewhere"
    assert not any(loaded(await site.read(two, chain)))
    assert all(loaded(await site.read(two, other)))
    assert await site.store(two, chain) == [Stored.STORED] * (2 * S)
    assert all(loaded(await site.read(one, chain)))


async def test_a_write_that_slips_past_a_purge_is_never_served(site: Site) -> None:
    """A replica that has not seen the tombstone yet writes an old block; nobody who has seen it serves it."""
    one, two = await site.replica(), await site.replica()
    tenant = scope_of("tenant")
    chain = chain_of(NS, S, scope=tenant)
    old = site.clock.wall()
    site.clock.advance(1)
    await one.purge(tenant, site.clock.wall())
    assert await site.store(two, chain, since=old) == [Stored.STORED] * S
    assert not any(loaded(await site.read(one, chain)))
    site.clock.advance(60)
    assert await site.read(two, chain) == [Miss.PURGED] * S


async def test_orphaned_temporary_files_are_swept(site: Site) -> None:
    site.root.mkdir()
    orphan = site.root / ".tmp-1-2-3"
    orphan.write_bytes(b"half")
    await site.replica()
    assert orphan.exists(), "a young one may be somebody's"


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("bucket/prefix", "tiers.g4.url"),
        ("nosuch://bucket", "nosuch"),
        ("s3://", "bucket"),
        ("s3://key:topsecret@bucket", "credentials"),
        ("s3://bucket/p?token=topsecret", "query"),
        ("file://relative/path", "absolute"),
        ("file:///tmp/../etc", "tiers.g4.url"),
        ("s3://bucket/team//prefix", "single slashes"),
        ("s3://bucket/team\\prefix", "single slashes"),
        ("simplecache::s3://bucket", "tiers.g4.url"),
    ],
)
def test_a_bad_url_is_a_config_error_that_names_the_key(url: str, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ObjectTier(url, NS, clock=VirtualClock())
    assert "tiers.g4.url" in str(caught.value) and names in str(caught.value)
    assert "topsecret" not in str(caught.value)


def test_bad_arguments_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.g4\.client"):
        ObjectTier("s3://bucket", NS, clock=VirtualClock(), client="curl")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tiers\.g4\.stride"):
        ObjectTier("s3://bucket", NS, clock=VirtualClock(), stride=0)


async def test_bad_options_are_a_config_error_without_their_values() -> None:
    tier = ObjectTier("s3://bucket", NS, clock=VirtualClock(), options={"key": "k", "username": "topsecret"})
    with pytest.raises(ConfigError, match=r"tiers\.g4\.options") as caught:
        await tier.open()
    assert "topsecret" not in str(caught.value) + repr(tier)


async def test_wrong_calls_are_refused(site: Site) -> None:
    tier = await site.replica()
    chain = chain_of(NS, 2 * S)
    blocks = seal(chain, range(2 * S), NS.block_bytes, site.clock.wall())
    with pytest.raises(InvalidRequest, match="multiple of 4"):
        await tier.write(blocks[1:3], site.deadline)
    with pytest.raises(InvalidRequest, match="consecutive"):
        await tier.write([blocks[0], blocks[2]], site.deadline)
    with pytest.raises(InvalidRequest, match="4096 bytes"):
        await tier.read(chain, [Target(0, (memoryview(bytearray(10)),))], site.deadline)


async def test_an_unreachable_server_opens_and_misses_fast() -> None:
    clock = VirtualClock()
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "topsecret"}
    tier = ObjectTier("s3://bucket/p", NS, clock=clock, options=options, client="s3fs", attempts=2, seed=1)
    await tier.open()
    try:
        assert tier.problem and "topsecret" not in tier.problem
        chain = chain_of(NS, 16)
        assert set(tier.peek(chain, range(16))) == {Miss.ABSENT}
        for _ in range(3):
            with pytest.raises(TierError, match="g4: connect"):
                await tier.lookup(chain, range(16), clock.monotonic() + 5)
            with pytest.raises(TierError):
                await tier.write(seal(chain, range(16), NS.block_bytes, clock.wall()), clock.monotonic() + 5)
    finally:
        await tier.close(clock.monotonic() + 5)


def _peek_in_child(tier: ObjectTier, answer: Connection) -> None:
    try:
        tier.peek([], [])
    except ClosedError:
        answer.send("refused")


async def test_a_forked_child_is_refused(site: Site) -> None:
    tier = await site.replica()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_peek_in_child, args=(tier, theirs))
    child.start()
    child.join(10)
    assert ours.poll(5) and ours.recv() == "refused"


async def test_transfers_keep_to_their_rates(site: Site) -> None:
    """Ten objects at five objects per second take the better part of two seconds; one burst is free."""
    stride_bytes = S * NS.block_bytes
    limits = BucketLimits(read_rate=5.0 * stride_bytes, write_rate=5.0 * stride_bytes)
    clock = site.clock = SystemClock()  # type: ignore[assignment]
    tier = ObjectTier(f"file://{site.root}", NS, clock=clock, stride=S, limits=limits)
    await tier.open()
    chain = chain_of(NS, 10 * S)
    began = clock.monotonic()
    await tier.write(seal(chain, range(len(chain)), NS.block_bytes, clock.wall()), began + 30)
    between = clock.monotonic()
    assert between - began > 1.5
    assert all(loaded(await site.read(tier, chain)))
    assert clock.monotonic() - between > 1.5
    await tier.close(clock.monotonic() + 5)


async def test_a_lookup_waits_no_longer_than_its_budget_whatever_keeps_its_loop_busy(site: Site) -> None:
    tier = await site.replica()
    chain = chain_of(NS, S)
    held, go = asyncio.Event(), threading.Event()

    async def hog() -> None:
        bench_loop.call_soon_threadsafe(held.set)
        go.wait(60)

    bench_loop = asyncio.get_running_loop()
    hogging = asyncio.create_task(tier._loop.run(hog()))
    await held.wait()
    assert await tier.lookup(chain, range(S), site.clock.monotonic() + 0.1) == [Miss.LATE] * S
    assert not hogging.done()
    go.set()
    await hogging
    assert await tier.lookup(chain, range(S), site.deadline) == [Miss.ABSENT] * S
