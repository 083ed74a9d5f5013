"""Encrypted blocks of G3: their own bytes or a miss with its reason, and no plain byte on the disk."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.checksum import digest_of
from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.identity.keys import SHARED, scope_of
from kvtier.identity.namespace import Namespace
from kvtier.testing import VirtualClock, chain_of, payload_of, payloads_of, sample_namespace, seal
from kvtier.testing.contract import check_tier
from kvtier.tiers import data_keys
from kvtier.tiers.breaker import Health
from kvtier.tiers.data_keys import KEY_CACHE_S
from kvtier.tiers.disk.maintenance import looking_after
from kvtier.tiers.disk.records import FIRST_FORMAT, FORMAT_KEY, SHORT_FORMAT
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.worker.client import DiskWorkerClient
from kvtier.tiers.guard import Guarded
from kvtier.tiers.protocol import Miss, Stored, Target
from kvtier.times import Wall
from tests.tiers.disk.support.keys import MemoryKeys, SickKeys, sample_keys
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put, slabs
from tests.tiers.disk.support.worker import Bounced, memory

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 8)


@pytest.mark.parametrize(("block_bytes", "ranks"), [(4096, 1), (4096, 2), (3 << 12, 3), (5000, 1), (1 << 20, 2)])
async def test_blocks_come_back_as_they_were_and_lie_nowhere_in_plain(
    tmp_path: Path, block_bytes: int, ranks: int
) -> None:
    namespace, path = sample_namespace(block_bytes), tmp_path / "g3"
    chain = chain_of(namespace, 6)
    async with opened(path, block_bytes=block_bytes + 4096, namespace=namespace, keys=sample_keys()) as g3:
        assert await put(g3, chain, ranks=ranks) == [Stored.STORED] * 6
        assert await get(g3, chain) == [True] * 6
        assert await put(g3, chain, ranks=ranks) == [Stored.PRESENT] * 6
    written = b"".join(_pages(path))
    sixteens = {written[place : place + 16] for place in range(0, len(written), 16)}
    for payload in payloads_of(chain, block_bytes):
        assert not sixteens & {payload[place : place + 16] for place in range(0, block_bytes - 15, 16)}, "plain bytes"
        assert digest_of([payload]) not in written, "a digest of plain bytes"


def _pages(folder: Path) -> Iterator[bytes]:
    """Every page of the folder's files that is not zero."""
    for path in folder.rglob("*"):
        with path.open("rb") if path.is_file() else io.BytesIO() as file:
            while page := file.read(4096):
                if page.strip(b"\0"):
                    yield page.ljust(4096, b"\0")


async def test_nothing_stays_described_in_the_clear_beside_encrypted_blocks(tmp_path: Path) -> None:
    """Tokens and salts of the time before."""
    async with opened(tmp_path / "g3") as g3:
        _, purges, _ = await g3.write_contents(0, [], 0)
        assert (await g3.write_contents(0, [bytes(16) + b"tokens"], purges))[0] == 1
    assert list((tmp_path / "g3" / "contents").iterdir())
    async with opened(tmp_path / "g3", keys=sample_keys()) as g3:
        assert await g3.write_contents(0, [bytes(16) + b"tokens"], 0) == (0, 0, None)
    assert not list((tmp_path / "g3" / "contents").iterdir())


async def test_each_encryption_has_a_salt_and_bytes_of_its_own(tmp_path: Path) -> None:
    seen = set()
    async with opened(tmp_path / "g3", keys=sample_keys()) as g3:
        for _ in range(5):
            await put(g3, CHAIN[:1])
            seen.add(slabs(tmp_path / "g3")[0].read_bytes())
            await g3.evict(CHAIN[:1])
    assert len(seen) == 5


async def test_without_a_key_encrypted_blocks_are_misses_that_say_so_and_stay(tmp_path: Path) -> None:
    keys = sample_keys()
    async with opened(tmp_path / "g3", keys=keys) as g3:
        await put(g3, CHAIN)
    async with opened(tmp_path / "g3") as plain:
        assert plain.peek(CHAIN, range(8)) == [Miss.NO_KEY] * 8
        assert await get(plain, CHAIN) == [Miss.NO_KEY] * 8
        assert await put(plain, CHAIN) == [Stored.REFUSED] * 8
    async with opened(tmp_path / "g3", keys=keys) as g3:
        assert await get(g3, CHAIN) == [True] * 8


async def test_with_another_key_they_are_misses_that_say_so_and_stay(tmp_path: Path) -> None:
    """The other key is older than the blocks, so they may be another process's, and are not replaced."""
    clock = VirtualClock()
    other, keys = sample_keys(clock), sample_keys(clock)
    other.obtain(SHARED)
    await clock.sleep(1)
    async with opened(tmp_path / "g3", keys=keys, clock=clock) as g3:
        await put(g3, CHAIN)
    async with opened(tmp_path / "g3", keys=other, clock=clock) as g3:
        assert await g3.lookup(CHAIN, range(8), clock.monotonic() + FAR_S) == [Miss.WRONG_KEY] * 8
        assert await get(g3, CHAIN, check=False) == [Miss.WRONG_KEY] * 8
        assert await put(g3, CHAIN) == [Stored.REFUSED] * 8
    async with opened(tmp_path / "g3", keys=keys, clock=clock) as g3:
        assert await get(g3, CHAIN) == [True] * 8


async def test_a_destroyed_key_ends_its_tenants_blocks_within_the_time_of_its_cache(tmp_path: Path) -> None:
    """And those of no other tenant. The tenant's new blocks, under a new key, take the places of the old."""
    clock, store = VirtualClock(), MemoryKeys()
    scope = scope_of("tenant")
    theirs = chain_of(NAMESPACE, 4, scope=scope)
    keys = sample_keys(clock, store)
    async with opened(tmp_path / "g3", keys=keys, clock=clock) as g3:
        await put(g3, CHAIN)
        await put(g3, theirs)
        assert store.destroy(keys.name_of(scope))
        await clock.sleep(KEY_CACHE_S + 1)
        assert g3.peek(theirs, range(4)) == [Miss.LATE] * 4
        assert await g3.lookup(theirs, range(4), clock.monotonic() + FAR_S) == [Miss.NO_KEY] * 4
        assert await get(g3, theirs, check=False) == [Miss.NO_KEY] * 4
        assert await get(g3, CHAIN) == [True] * 8
        assert await put(g3, theirs) == [Stored.STORED] * 4
        assert await get(g3, theirs) == [True] * 4


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_key_that_cannot_be_had_takes_the_tier_from_nobody_else(
    tmp_path: Path, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tenant's blocks are misses with that reason in a short time, and count against nobody."""
    clock, scope = VirtualClock(), scope_of("tenant")
    theirs, other = chain_of(NAMESPACE, 2, scope=scope), chain_of(NAMESPACE, 2, scope=scope_of("other"))
    async with opened(tmp_path / "g3", keys=sample_keys(clock), clock=clock) as healthy:
        assert await put(healthy, theirs) == [Stored.STORED] * 2
    store = SickKeys(scope, hangs)
    async with opened(tmp_path / "g3", keys=sample_keys(clock, store), clock=clock) as g3:
        tier, patient = Guarded(g3, clock), clock.monotonic() + 1.0
        with monkeypatch.context() as hurried:  # for this tenant alone: another's key has the time that it needs
            hurried.setattr(data_keys, "WRITE_S", 0.02)
            hurried.setattr(data_keys, "READ_S", 0.02)
            for number in range(6):
                new = seal(chain_of(NAMESPACE, 2, number + 1, scope), range(2), BLOCK, clock.wall())
                assert await tier.write(new, patient) == [Stored.NO_KEY] * 2
                assert await tier.lookup(theirs, range(2), patient) == [Miss.NO_KEY] * 2
                targets = [Target(index, (memoryview(bytearray(BLOCK)),)) for index in range(2)]
                assert await tier.read(theirs, targets, patient) == [Miss.NO_KEY] * 2
        assert tier.breaker.health is Health.WELL
        assert await put(g3, other) == [Stored.STORED] * 2
        assert await get(g3, other) == [True] * 2
        store.goes_on.set()


async def test_plain_blocks_of_an_old_store_are_read_on_and_replaced_by_the_next_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.disk.index.SHORT_FORMAT", FIRST_FORMAT)
    async with opened(tmp_path / "g3") as plain:
        await put(plain, CHAIN)
        assert _format(plain) == 1
    async with opened(tmp_path / "g3", keys=sample_keys()) as g3:
        assert await get(g3, CHAIN) == [True] * 8
        assert _format(g3) == 1, "a release that knows no encryption may still read it"
        assert await put(g3, CHAIN) == [Stored.STORED] * 8
        assert await get(g3, CHAIN) == [True] * 8
        assert _format(g3) == 2


async def test_a_retained_plain_block_is_replaced_by_one_that_is_written_and_as_well_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, path, until = VirtualClock(), tmp_path / "g3", Wall(3e9)
    async with opened(path, clock=clock) as plain:
        await put(plain, CHAIN)
        assert await plain.retain(CHAIN, until, until) == [True] * 8
    async with opened(path, keys=sample_keys(clock), clock=clock) as g3:
        with monkeypatch.context() as device:
            device.setattr(Slab, "write", _no_space)
            assert await put(g3, CHAIN) == [Stored.FULL] * 8
        assert await get(g3, CHAIN) == [True] * 8
        assert await put(g3, CHAIN) == [Stored.STORED] * 8
        assert await g3.retained() == dict.fromkeys(CHAIN, until)
        await clock.sleep(3 * 86400)
        assert await get(g3, CHAIN) == [True] * 8
        assert await put(g3, CHAIN) == [Stored.PRESENT] * 8
        assert _format(g3) == SHORT_FORMAT, "that of a new index has a place for encryption"


def _no_space(*_args: object) -> None:
    raise OSError(errno.ENOSPC, "no space")


async def test_a_damaged_byte_is_a_corrupt_block_and_leaves_nothing_of_it_in_its_target(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", keys=sample_keys()) as g3:
        await put(g3, CHAIN)
        with slabs(tmp_path / "g3")[0].open("r+b") as file:
            file.seek(2 * BLOCK + 4000)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        target = bytearray(b"\xaa" * BLOCK)
        into = Target(2, (memoryview(target),))
        assert await g3.read(CHAIN, [into], g3._clock.monotonic() + FAR_S) == [Miss.CORRUPT]
        assert target == bytes(BLOCK)
        assert await get(g3, CHAIN) == [True, True, Miss.ABSENT] + [True] * 5


async def test_a_blocks_ciphertext_under_another_name_is_not_served(tmp_path: Path) -> None:
    """Slots of two blocks that are swapped, tags and all, do not decrypt."""
    async with opened(tmp_path / "g3", keys=sample_keys()) as g3:
        await put(g3, CHAIN[:2])
        with slabs(tmp_path / "g3")[0].open("r+b") as file:
            one, two = file.read(BLOCK), file.read(BLOCK)
            file.seek(0)
            file.write(two + one)
        assert await get(g3, CHAIN[:2]) == [Miss.CORRUPT] * 2


async def test_a_key_store_that_fails_is_a_miss_and_a_failed_put(tmp_path: Path) -> None:
    clock, store = VirtualClock(), MemoryKeys()
    async with opened(tmp_path / "g3", keys=sample_keys(clock, store), clock=clock) as g3:
        await put(g3, CHAIN)
        store.error = TierError("keys", "read", "gone")
        assert await get(g3, CHAIN) == [True] * 8, "the key is remembered"
        await clock.sleep(KEY_CACHE_S + 1)
        assert await get(g3, CHAIN) == [Miss.NO_KEY] * 8
        with pytest.raises(TierError, match="gone"):
            await put(g3, CHAIN)
        store.error = None
        await clock.sleep(6)
        assert await get(g3, CHAIN) == [True] * 8


async def test_verify_says_how_many_blocks_it_could_not_check(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", keys=sample_keys()) as g3:
        await put(g3, CHAIN)
    with looking_after([tmp_path / "g3"], VirtualClock()) as store:
        found = store.verify()
        assert found.sound and (found.blocks, found.encrypted) == (8, 8)
        assert store.inspect()["format"] == SHORT_FORMAT


async def test_an_encrypted_tier_keeps_the_contract(tmp_path: Path) -> None:
    clock = VirtualClock()
    keys = sample_keys(clock)

    def make(namespace: Namespace) -> DiskTier:
        return DiskTier([tmp_path / "g3"], 256 * BLOCK, namespace, clock=clock, keys=keys)

    await check_tier(make, clock, block_bytes=BLOCK)


def _format(tier: DiskTier) -> int:
    with tier._store.index.reading() as txn:
        return int.from_bytes(txn.get(FORMAT_KEY), "little")


async def test_the_workers_process_encrypts_with_keys_that_come_with_each_call(tmp_path: Path) -> None:
    """They are in no argument and no variable of its environment, and without them its blocks are misses."""
    clock, store = SystemClock(), MemoryKeys()
    keys = sample_keys(clock, store)
    with memory() as arena:
        for its, expected in ((keys, True), (None, Miss.NO_KEY), (sample_keys(clock), Miss.NO_KEY), (keys, True)):
            tier = DiskWorkerClient([tmp_path / "g3"], 64 * BLOCK, NAMESPACE, clock=clock, arena=arena, keys=its)
            await tier.open()
            if its is keys:
                blocks = seal(CHAIN, range(8), BLOCK, clock.wall())
                stored = await Bounced(tier, arena).write(blocks, clock.monotonic() + FAR_S)
                assert all(one.durable for one in stored)
                process = Path(f"/proc/{tier._worker.process.pid}")
                secret = keys.obtain(SHARED).secret
                for exposed in ("cmdline", "environ"):
                    assert secret not in (process / exposed).read_bytes()
                    assert secret.hex().encode() not in (process / exposed).read_bytes()
            buffers = [bytearray(BLOCK) for _ in CHAIN]
            targets = [Target(place, (memoryview(one),)) for place, one in enumerate(buffers)]
            results = await Bounced(tier, arena).read(CHAIN, targets, clock.monotonic() + FAR_S)
            for key, buffer, result in zip(CHAIN, buffers, results, strict=True):
                assert (result if isinstance(result, Miss) else buffer == payload_of(key, BLOCK)) == expected
            await tier.close(clock.monotonic() + FAR_S)
