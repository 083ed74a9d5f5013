"""Encrypted units: their own bytes or a miss with its reason, and no plain byte in the bucket."""

from __future__ import annotations

import pytest

from kvtier.checksum import digest_of
from kvtier.identity.keys import scope_of
from kvtier.testing import chain_of, payload_of, seal
from kvtier.tiers import data_keys
from kvtier.tiers.breaker import Health
from kvtier.tiers.data_keys import ABSENT_S, KEY_CACHE_S, StoredKeys
from kvtier.tiers.guard import Guarded
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target
from tests.tiers.disk.support.keys import MemoryKeys, SickKeys, sample_keyring
from tests.tiers.objects.support.replicas import NS, S, Site

TENANT = scope_of("tenant")
CHAIN = chain_of(NS, 2 * S, scope=TENANT)


def outcomes(results: list[Loaded | Miss]) -> list[bool | Miss]:
    return [result if isinstance(result, Miss) else True for result in results]


async def replica(site: Site, store: MemoryKeys | None, keyring: int = 1) -> ObjectTier:
    ring = sample_keyring(keyring)
    keys = None if store is None else StoredKeys(store, ring, site.clock)
    return await site.replica(keyring=ring, keys=keys)


async def test_blocks_come_back_on_another_replica_and_lie_nowhere_in_plain(site: Site) -> None:
    store = MemoryKeys()
    one, two = await replica(site, store), await replica(site, store)
    assert await site.store(one, CHAIN) == [Stored.STORED] * len(CHAIN)
    assert await site.store(one, CHAIN) == [Stored.PRESENT] * len(CHAIN)
    assert outcomes(await site.read(two, CHAIN)) == [True] * len(CHAIN)
    assert outcomes(await site.read(two, CHAIN, [1, 2, S + 1])) == [True] * 3
    await one.flush(site.deadline)
    stored = b"".join(path.read_bytes() for path in site.root.rglob("*") if path.is_file())
    for key in CHAIN:
        payload = payload_of(key, NS.block_bytes)
        for place in range(0, NS.block_bytes, 64):
            assert payload[place : place + 16] not in stored, "plain bytes"
        assert digest_of([payload]) not in stored, "a digest of plain bytes"


async def test_a_block_of_two_ranks_comes_back_in_two_pieces(site: Site) -> None:
    store = MemoryKeys()
    one, two = await replica(site, store), await replica(site, store)
    blocks = seal(CHAIN[:S], range(S), NS.block_bytes, site.clock.wall(), ranks=2)
    assert await one.write(blocks, site.deadline) == [Stored.STORED] * S
    half = NS.block_bytes // 2
    pieces = [(memoryview(bytearray(half)), memoryview(bytearray(half))) for _ in range(S)]
    results = await two.read(CHAIN[:S], [Target(i, into) for i, into in enumerate(pieces)], site.deadline)
    for key, into, result in zip(CHAIN, pieces, results, strict=False):
        assert isinstance(result, Loaded) and b"".join(into) == payload_of(key, NS.block_bytes)
        assert result.digest == digest_of(into)


async def test_without_a_key_encrypted_units_are_misses_that_say_so_and_stay(site: Site) -> None:
    store = MemoryKeys()
    one, plain = await replica(site, store), await replica(site, None)
    await site.store(one, CHAIN)
    before = [path.read_bytes() for path in site.objects()]
    assert outcomes(await site.read(plain, CHAIN)) == [Miss.NO_KEY] * len(CHAIN)
    assert await plain.lookup(CHAIN, range(len(CHAIN)), site.deadline) == [Miss.NO_KEY] * len(CHAIN)
    assert await site.store(plain, CHAIN) == [Stored.REFUSED] * len(CHAIN)
    assert [path.read_bytes() for path in site.objects()] == before


async def test_with_another_key_of_the_tenant_they_are_misses_that_say_so_and_stay(site: Site) -> None:
    """The other key is older than the units, so they may be another replica's, and are not replaced."""
    mine, other = MemoryKeys(), MemoryKeys()
    StoredKeys(other, sample_keyring(), site.clock).obtain(TENANT)
    await site.clock.sleep(1)
    one, two = await replica(site, mine), await replica(site, other)
    await site.store(one, CHAIN)
    before = [path.read_bytes() for path in site.objects()]
    assert outcomes(await site.read(two, CHAIN)) == [Miss.WRONG_KEY] * len(CHAIN)
    assert await site.store(two, CHAIN) == [Stored.REFUSED] * len(CHAIN)
    assert [path.read_bytes() for path in site.objects()] == before
    assert outcomes(await site.read(one, CHAIN)) == [True] * len(CHAIN)


async def test_a_destroyed_key_ends_its_tenants_units_everywhere_and_those_of_no_other(site: Site) -> None:
    store, others = MemoryKeys(), chain_of(NS, S, scope=scope_of("another"))
    one, two = await replica(site, store), await replica(site, store)
    for chain in (CHAIN, others):
        await site.store(one, chain)
        assert outcomes(await site.read(two, chain)) == [True] * len(chain)
    assert store.destroy(StoredKeys(store, sample_keyring(), site.clock).name_of(TENANT))
    await site.clock.sleep(KEY_CACHE_S + 1)
    for tier in (one, two):
        assert outcomes(await site.read(tier, CHAIN)) == [Miss.NO_KEY] * len(CHAIN)
        assert outcomes(await site.read(tier, others)) == [True] * S
    await site.clock.sleep(ABSENT_S + 1)
    assert await site.store(one, CHAIN) == [Stored.STORED] * len(CHAIN), "under a new key, in the old one's place"
    await site.clock.sleep(ABSENT_S + 1)
    assert outcomes(await site.read(two, CHAIN)) == [True] * len(CHAIN)


async def test_adapters_and_isolated_classes_of_a_tenant_share_its_key(site: Site) -> None:
    store = MemoryKeys()
    one = await replica(site, store)
    for scope in (TENANT, scope_of("tenant", b"adapter"), scope_of("tenant", isolated="class")):
        await site.store(one, chain_of(NS, S, scope=scope))
    assert len(store.keys) == 1


async def test_plain_units_are_read_on_and_replaced_by_the_next_put(site: Site) -> None:
    store = MemoryKeys()
    plain, one = await replica(site, None), await replica(site, store)
    await site.store(plain, CHAIN)
    assert outcomes(await site.read(one, CHAIN)) == [True] * len(CHAIN)
    assert await site.store(one, CHAIN) == [Stored.STORED] * len(CHAIN)
    assert outcomes(await site.read(one, CHAIN)) == [True] * len(CHAIN)
    stored = b"".join(path.read_bytes() for path in site.objects())
    assert payload_of(CHAIN[0], 64) not in stored


async def test_a_damaged_byte_is_a_corrupt_block_and_leaves_nothing_of_it_in_its_target(site: Site) -> None:
    one = await replica(site, MemoryKeys())
    await site.store(one, CHAIN[:S])
    (path,) = site.objects()
    site.flip(path, path.stat().st_size - 1)
    target = bytearray(b"\xaa" * NS.block_bytes)
    results = await one.read(CHAIN[:S], [Target(S - 1, (memoryview(target),))], site.deadline)
    assert results == [Miss.CORRUPT] and target == bytes(NS.block_bytes)


async def test_a_unit_that_lives_on_keeps_its_ciphertext(site: Site) -> None:
    """Where a use is recorded by writing the object again, only its header changes."""
    from kvtier.tiers.objects.frame import decode

    store = MemoryKeys()
    one = await replica(site, store)
    await site.store(one, CHAIN[:S])
    (path,) = site.objects()
    ring = sample_keyring()
    before = path.read_bytes()
    frame = decode(before, ring)
    entry = one._store.index.find(CHAIN[0], CHAIN[S - 1], S - 1)
    assert entry is not None
    stat = await one._loop.run(one._store.renewer._rewrite(entry, site.clock.wall()))
    assert stat is not None
    after = path.read_bytes()
    assert after[frame.header_bytes :] == before[frame.header_bytes :]
    assert decode(after, ring).tags == frame.tags
    assert outcomes(await site.read(one, CHAIN[:S])) == [True] * S


async def test_an_encrypted_unit_is_renewed_by_a_replica_that_forgot_its_key(site: Site) -> None:
    one = await replica(site, MemoryKeys())
    await site.store(one, CHAIN)
    site.clock.advance(60_000)
    one.touch([CHAIN[S - 1]], site.clock.wall())
    await one.flush(site.deadline)
    assert one.counters()["renewed_units"] == 1
    site.clock.advance(60_000)
    assert outcomes(await site.read(one, CHAIN, range(S))) == [True] * S


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_key_that_cannot_be_had_takes_the_tier_from_nobody_else(
    site: Site, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = await replica(site, MemoryKeys())
    assert await site.store(healthy, CHAIN) == [Stored.STORED] * len(CHAIN)
    store = SickKeys(TENANT, hangs)
    tier = Guarded(await replica(site, store), site.clock)
    other = chain_of(NS, S, scope=scope_of("other"))
    with monkeypatch.context() as hurried:  # for this tenant alone: another's key has the time that it needs
        hurried.setattr(data_keys, "WRITE_S", 0.02)
        hurried.setattr(data_keys, "READ_S", 0.02)
        for number in range(8):
            new = chain_of(NS, S, number + 1, TENANT)
            assert await site.store(tier, new) == [Stored.NO_KEY] * S  # type: ignore[arg-type]
        for _ in range(8):
            assert await site.read(tier, CHAIN) == [Miss.NO_KEY] * len(CHAIN)  # type: ignore[arg-type]
    assert tier.breaker.health is Health.WELL
    assert await site.store(tier, other) == [Stored.STORED] * S  # type: ignore[arg-type]
    assert outcomes(await site.read(tier, other)) == [True] * S  # type: ignore[arg-type]
    store.goes_on.set()
