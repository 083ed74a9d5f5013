"""Compressed units: their own bytes or a miss, whoever wrote them, in as many requests as plain ones."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvtier import codec
from kvtier.checksum import digest_of
from kvtier.errors import ConfigError, CorruptError
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.keyring import Keyring
from kvtier.testing import VirtualClock, chain_of, payload_of, sample_namespace, seal
from kvtier.testing.faults_s3 import FaultyS3
from kvtier.tiers.data_keys import StoredKeys
from kvtier.tiers.objects.bucket.open import BucketLimits, open_bucket
from kvtier.tiers.objects.frame import ForeignFrame, decode
from kvtier.tiers.objects.payload import make_unit
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target
from tests.tiers.disk.support.keys import MemoryKeys, sample_keyring
from tests.tiers.objects.support.replicas import NS, S, Site
from tests.tiers.objects.support.virtual_bucket import Replica, VirtualServer

zstandard = pytest.importorskip("zstandard")

SIZE = NS.block_bytes
TENANT = scope_of("tenant")
CHAIN = chain_of(NS, 2 * S, scope=TENANT)
MODES = ["public", "keyed", "encrypted"]


def content(key: BlockKey, index: int) -> bytes:
    """A block of bfloat16 values, by its key; every fourth cannot be compressed."""
    if index % 4 == 1:
        return payload_of(key, SIZE)
    values = np.random.default_rng(list(key[-8:])).standard_normal(SIZE // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def sealed(site: Site, chain: Sequence[BlockKey] = CHAIN, ranks: int = 1) -> list[Sealed]:
    out = []
    for block in seal(chain, range(len(chain)), SIZE, site.clock.wall()):
        whole = content(block.key, block.index)
        cut = [memoryview(whole)[at : at + SIZE // ranks] for at in range(0, SIZE, SIZE // ranks)]
        out.append(replace(block, pieces=tuple(cut), digest=digest_of([whole])))
    return out


class Fleet:
    """Replicas of one mode that share their keys."""

    def __init__(self, site: Site, mode: str) -> None:
        self.site, self.mode, self.store = site, mode, MemoryKeys()

    async def replica(self, compression: str = "lossless") -> ObjectTier:
        if self.mode == "public":
            return await self.site.replica(compression=compression)
        ring = sample_keyring(1)
        keys = StoredKeys(self.store, ring, self.site.clock) if self.mode == "encrypted" else None
        return await self.site.replica(keyring=ring, keys=keys, compression=compression)


async def read(
    tier: ObjectTier,
    site: Site,
    wanted: Sequence[int] = range(2 * S),
    ranks: int = 1,
    chain: Sequence[BlockKey] = CHAIN,
) -> list[bool | Miss]:
    """True for a block that came back; fails if one that did has other bytes."""
    into = [tuple(memoryview(bytearray(SIZE // ranks)) for _ in range(ranks)) for _ in wanted]
    results = await tier.read(chain, [Target(*pair) for pair in zip(wanted, into, strict=True)], site.deadline)
    for index, pieces, result in zip(wanted, into, results, strict=True):
        if isinstance(result, Loaded):
            assert b"".join(pieces) == content(chain[index], index) and result.digest == digest_of(pieces)
    return [True if isinstance(result, Loaded) else result for result in results]


def stored_units(site: Site) -> list[bytes]:
    units = (path for path in site.root.rglob("*") if path.is_file() and len(path.name) == 64)
    return [path.read_bytes() for path in sorted(units)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
async def test_compressed_blocks_come_back(site: Site, mode: str, ranks: int) -> None:
    fleet = Fleet(site, mode)
    one, two = await fleet.replica(), await fleet.replica("none")
    assert await one.write(sealed(site, ranks=ranks), site.deadline) == [Stored.STORED] * len(CHAIN)
    assert await one.write(sealed(site, ranks=ranks), site.deadline) == [Stored.PRESENT] * len(CHAIN)
    assert all(len(unit) < 4096 + 0.8 * S * SIZE for unit in stored_units(site))
    assert one.counters()["saved_bytes"] == 2 * (4096 + S * SIZE) - sum(map(len, stored_units(site)))
    for tier in (one, two):
        for wanted in ([1, 2], [0], [2, 3, 5], range(len(CHAIN)), [3], range(len(CHAIN))):
            assert await read(tier, site, wanted, ranks) == [True] * len(wanted)
    for wanted in ([0, 2], [1], [0, 1, 3, 4, 6], range(len(CHAIN))):
        cold = await fleet.replica("none")
        assert await read(cold, site, wanted, ranks) == [True] * len(wanted)
        await cold.close(site.deadline)


@pytest.mark.parametrize("mode", MODES)
async def test_a_plain_unit_stays_where_units_are_compressed(site: Site, mode: str) -> None:
    fleet = Fleet(site, mode)
    one, two = await fleet.replica("none"), await fleet.replica()
    await one.write(sealed(site), site.deadline)
    before = stored_units(site)
    assert await two.write(sealed(site), site.deadline) == [Stored.PRESENT] * len(CHAIN)
    assert stored_units(site) == before and await read(two, site) == [True] * len(CHAIN)


async def test_what_is_not_of_16_bit_floats_is_stored_as_it_is(site: Site) -> None:
    namespace = sample_namespace(SIZE, dtype="fp8_e4m3")
    tier = ObjectTier(f"file://{site.root}", namespace, clock=site.clock, stride=S, compression="lossless")
    await tier.open()
    await tier.write(sealed(site), site.deadline)
    assert [len(unit) for unit in stored_units(site)] == [4096 + S * SIZE] * 2
    await tier.close(site.deadline)


@pytest.mark.parametrize("size", [1, 7, 4097])
async def test_blocks_of_an_odd_size_are_stored_as_they_are(site: Site, size: int) -> None:
    namespace = sample_namespace(size)
    chain = chain_of(namespace, S)
    tier = ObjectTier(f"file://{site.root}", namespace, clock=site.clock, stride=S, compression="lossless")
    await tier.open()
    blocks = list(seal(chain, range(S), size, site.clock.wall()))
    assert await tier.write(blocks, site.deadline) == [Stored.STORED] * S
    into = [memoryview(bytearray(size)) for _ in chain]
    await tier.read(chain, [Target(index, (view,)) for index, view in enumerate(into)], site.deadline)
    assert into == [payload_of(key, size) for key in chain]
    await tier.close(site.deadline)


@pytest.mark.parametrize("mode", ["public", "keyed"])
async def test_a_read_takes_one_request_whether_the_header_is_known_or_not(mode: str) -> None:
    server = VirtualServer()
    keyring = Keyring.public() if mode == "public" else sample_keyring(1)
    site = type("Site", (), {"clock": server.clock})()
    one, two = (Replica(server, keyring=keyring, compress=True) for _ in range(2))
    assert await one.writer.write(sealed(site)[:S]) is Stored.STORED
    for replica in (one, two, two):
        replica.bucket.requests.clear()
        entry = replica.store.index.get(CHAIN[S - 1])
        into = [(memoryview(bytearray(SIZE)),) for _ in range(S)]
        found = await replica.store.read(CHAIN[:S], 0, entry, [Target(*pair) for pair in enumerate(into)])
        assert [b"".join(into[at]) for at in range(S)] == [content(CHAIN[at], at) for at in range(S)]
        assert all(isinstance(result, Loaded) for result in found.values())
        assert replica.bucket.requests == {"get": 1}


@pytest.mark.parametrize("mode", MODES)
async def test_damage_is_a_miss_wherever_it_is(site: Site, mode: str) -> None:
    fleet = Fleet(site, mode)
    one = await fleet.replica()
    await one.write(sealed(site)[:S], site.deadline)
    (path,) = (path for path in site.root.rglob("*") if path.is_file() and len(path.name) == 64)
    right, rng = path.read_bytes(), random.Random(mode)
    for _ in range(40):
        wrong = bytearray(right)
        wrong[rng.randrange(4096, len(right))] ^= 1 << rng.randrange(8)
        path.write_bytes(wrong)
        reader = await fleet.replica()
        found = await read(reader, site, range(S))
        assert found.count(Miss.CORRUPT) == 1 and found.count(True) == S - 1
        assert not path.exists()
        await reader.close(site.deadline)


def forged(block: Sealed, stored: bytes, **fields: object) -> bytes:
    """A unit of one block with these stored bytes, as anybody may write it where there is no keyring."""
    frame, _ = make_unit(NS.digest, [block], block.life, Keyring.public())
    frame = replace(frame, **{"codec": codec.FLOAT16, "lengths": (len(stored),), **fields})  # type: ignore[arg-type]
    return frame.encode(Keyring.public()) + stored


def test_stored_lengths_are_bounded(site: Site) -> None:
    block = sealed(site)[0]
    for length in (SIZE // 2, SIZE // 2 - 1, codec.stored_max(SIZE) + 1, SIZE + 1, 2 * SIZE, 0):
        with pytest.raises(CorruptError, match="lengths"):
            decode(forged(block, bytes(length)), Keyring.public())
    for length in (SIZE // 2 + 1, codec.stored_max(SIZE), SIZE):
        assert decode(forged(block, bytes(length)), Keyring.public()).total_bytes == 4096 + length
    with pytest.raises(ForeignFrame):
        decode(forged(block, bytes(SIZE // 2 + 1), codec=2), Keyring.public())


async def test_forged_codings_are_misses_and_allocate_no_more_than_a_block(site: Site) -> None:
    one = await site.replica(compression="lossless")
    chain = CHAIN[:1]
    await one.write(sealed(site, chain), site.deadline)
    (path,) = (path for path in site.root.rglob("*") if path.is_file() and len(path.name) == 64)
    block, low = sealed(site, chain)[0], content(chain[0], 0)[: SIZE // 2]
    bombs = [
        zstandard.compress(bytes(1 << 28)),
        zstandard.compress(bytes(SIZE // 2 - 1)),
        zstandard.compress(bytes(SIZE // 2)),  # of the right size: the digest decides
        b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little") + b"\x01\0\0",
        b"junk",
    ]
    for bomb in bombs:
        path.write_bytes(forged(block, (low + bomb)[: codec.stored_max(SIZE)]))
        reader = await site.replica()
        tracemalloc.start()
        assert await read(reader, site, [0], chain=chain) == [Miss.CORRUPT]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 << 20
        await reader.close(site.deadline)


@pytest.mark.parametrize("mode", MODES)
async def test_a_renewal_that_rewrites_the_object_keeps_its_bytes(site: Site, mode: str) -> None:
    fleet = Fleet(site, mode)
    one, two = await fleet.replica(), await fleet.replica("none")
    await one.write(sealed(site), site.deadline)
    one._store.renewer._copies = False
    site.clock.advance(60_000)
    one.touch([CHAIN[S - 1], CHAIN[-1]], site.clock.wall())
    await one.flush(site.deadline)
    assert one.counters()["renewed_units"] == 2
    assert await read(two, site) == [True] * len(CHAIN)


async def test_blocks_deleted_are_counted(site: Site) -> None:
    one, two = await site.replica(compression="lossless"), await site.replica()
    await one.write(sealed(site), site.deadline)
    assert len(CHAIN) // 2 < await two.purge(TENANT, site.clock.wall()) <= len(CHAIN)  # it knows none of them
    three = await site.replica(compression="lossless")
    await three.write([replace(block, position=1) for block in sealed(site)], site.deadline)
    assert await three.evict(None) == len(CHAIN)


async def test_without_the_package_the_setting_is_refused_and_units_are_misses(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await site.replica(compression="lossless")
    await one.write(sealed(site), site.deadline)
    monkeypatch.setattr(codec, "installed", lambda: False)
    with pytest.raises(ConfigError, match=r"tiers\.g4\.compression: .*kvtier\[codec\]"):
        await site.replica(compression="lossless")
    two = await site.replica()
    assert await read(two, site) == [Miss.FOREIGN] * len(CHAIN)
    monkeypatch.undo()
    site.clock.advance(10)
    assert await read(two, site) == [True] * len(CHAIN)


@pytest.mark.parametrize("scheme", ["file", "memory", "local"])
async def test_a_clipped_read_ends_where_the_object_does(site: Site, scheme: str) -> None:
    bucket, _ = open_bucket(f"{scheme}://{site.root}/g4", {}, "auto", VirtualClock(), BucketLimits())
    await bucket.start()
    await bucket.create("p/a", bytearray(b"0123456789"), site.clock.wall())
    for start, count in ((0, 10), (0, 12), (4, 20), (9, 2)):
        into = bytearray(b"." * count)
        stat = await bucket.read("p/a", start, [memoryview(into)[:3], memoryview(into)[3:]], True)
        assert stat is not None and stat.size == 10
        assert into == b"0123456789"[start : start + count].ljust(count, b".")
    for start, clipped in ((10, True), (12, True), (0, False)):
        with pytest.raises(CorruptError):
            await bucket.read("p/a", start, [memoryview(bytearray(11))], clipped)
    assert await bucket.read("p/b", 0, [memoryview(bytearray(11))], True) is None
    await bucket.close()


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize("size", [4 << 10, 64 << 10])  # through the library, and past it
async def test_a_clipped_read_from_a_server(client: str, size: int) -> None:
    whole = random.Random(size).randbytes(size)
    with FaultyS3().running() as server:
        bucket, _ = open_bucket("s3://bucket", server.options, client, VirtualClock(), BucketLimits())  # type: ignore[arg-type]
        await bucket.start()
        await bucket.create("p/a", bytearray(whole), VirtualClock().wall())
        for start, count in ((0, size), (0, size + 5), (100, 2 * size), (size - 1, 2)):
            into = bytearray(b"." * count)
            stat = await bucket.read("p/a", start, [memoryview(into)[:1], memoryview(into)[1:]], True)
            assert stat is not None and stat.size == size
            assert into == whole[start : start + count].ljust(count, b".")
        with pytest.raises(CorruptError):
            await bucket.read("p/a", size, [memoryview(bytearray(9))], True)
        with pytest.raises(CorruptError):
            await bucket.read("p/a", 0, [memoryview(bytearray(size + 1))])
        await bucket.close()
