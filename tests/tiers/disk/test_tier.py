"""G3 without faults: bytes, bounds, order of eviction, sharing."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import ClosedError, ConfigError, TierError, TierUnavailable
from kvtier.retention.terms import BUILTIN, Terms
from kvtier.testing import VirtualClock, chain_of, check_tier, sample_namespace, seal
from kvtier.tiers.disk import expired, index, quarantine, removals, store, touches, write
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Miss, Stored, Target
from tests.support.waiting import until
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put, slabs

NAMESPACE = sample_namespace(BLOCK)


@pytest.mark.parametrize("block_bytes", [4096, 5000, 64 << 10])
async def test_it_keeps_the_contract_of_a_tier(tmp_path: Path, block_bytes: int) -> None:
    clock = VirtualClock()

    def make(namespace: object) -> DiskTier:
        return DiskTier([tmp_path / "g3"], 64 * 64 * 1024, namespace, clock=clock)  # type: ignore[arg-type]

    await check_tier(make, clock, block_bytes=block_bytes)


async def test_blocks_come_back_after_a_restart_and_the_slab_stays_below_the_capacity(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", 16) as tier:
        for seed in range(8):
            await put(tier, chain_of(NAMESPACE, 4, seed))
            tier.check()
        kept = [await get(tier, chain_of(NAMESPACE, 4, seed)) for seed in range(8)]
        assert tier.usage().blocks == tier.usage().evictions == 16
        assert tier.usage().bytes == tier.usage().capacity_bytes == 16 * BLOCK
    async with opened(tmp_path / "g3", 16) as tier:
        assert [await get(tier, chain_of(NAMESPACE, 4, seed)) for seed in range(8)] == kept
    assert sum(file.stat().st_size for file in slabs(tmp_path / "g3")) <= 16 * BLOCK


async def test_the_coldest_chain_goes_first_and_its_leaves_before_its_head(tmp_path: Path) -> None:
    old, warm, new = (chain_of(NAMESPACE, 4, seed) for seed in range(3))
    async with opened(tmp_path / "g3", 8) as tier:
        await put(tier, old)
        await put(tier, warm)
        assert await put(tier, new, [0, 1, 2]) == [Stored.STORED] * 3
        assert await get(tier, old) == [True] + [Miss.ABSENT] * 3
        assert await get(tier, warm) == [True] * 4
        tier.touch(old[:1], tier._clock.wall())
        await put(tier, new, [3])
        assert await get(tier, old) == [True] + [Miss.ABSENT] * 3, "a touched block must outlive an untouched one"
        assert await get(tier, warm) == [True, True, True, Miss.ABSENT]


async def test_a_chain_longer_than_the_store_keeps_its_head(tmp_path: Path) -> None:
    chain = chain_of(NAMESPACE, 12)
    async with opened(tmp_path / "g3", 8) as tier:
        assert await put(tier, chain) == [Stored.STORED] * 8 + [Stored.FULL] * 4
        tier.touch(chain[:8], tier._clock.wall())
        assert await put(tier, chain, range(8, 12)) == [Stored.FULL] * 4
        assert await get(tier, chain) == [True] * 8 + [Miss.ABSENT] * 4


async def test_many_uses_reach_the_index_in_short_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "NAMES_PER_COMMIT_MAX", 3)
    clock = VirtualClock()
    chain = chain_of(NAMESPACE, 16)
    async with opened(tmp_path / "g3", clock=clock) as tier:
        await put(tier, chain, terms=Terms("short", ttl=60))
        clock.advance(50)
        tier.touch(chain, clock.wall())
        await tier.flush(clock.monotonic() + FAR_S)
        assert not tier._store.touches
    async with opened(tmp_path / "g3", clock=clock) as tier:
        clock.advance(50)
        assert await get(tier, chain) == [True] * 16
        tier.touch(chain, clock.wall())
    async with opened(tmp_path / "g3", clock=clock) as tier:
        clock.advance(50)
        assert await get(tier, chain) == [True] * 16, "closing brings uses to the medium, too"


async def test_terms_decide_what_may_be_stored_and_served(tmp_path: Path) -> None:
    clock = VirtualClock()
    chain = chain_of(NAMESPACE, 2)
    async with opened(tmp_path / "g3", clock=clock) as tier:
        assert await put(tier, chain, terms=BUILTIN["in_memory"]) == [Stored.REFUSED] * 2
        assert await put(tier, chain, terms=Terms("short", ttl=60)) == [Stored.STORED] * 2
        clock.advance(61)
        assert await get(tier, chain) == [Miss.EXPIRED] * 2
        tier.touch(chain, clock.wall())
        await tier.flush(clock.monotonic() + FAR_S)
        assert await get(tier, chain) == [Miss.EXPIRED] * 2, "a use renews, it does not revive"
        assert await put(tier, chain, terms=Terms("long", ttl=600)) == [Stored.PRESENT] * 2
        clock.advance(500)
        assert await get(tier, chain) == [True] * 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_aligned_and_unaligned_memory_is_written_and_read_alike(tmp_path: Path, ranks: int) -> None:
    import mmap

    chain = chain_of(sample_namespace(16384), 6)
    async with opened(tmp_path / "g3", block_bytes=16384) as tier:
        await put(tier, chain, ranks=ranks)
        assert await get(tier, chain) == [True] * 6
        arena = memoryview(mmap.mmap(-1, 6 * 16384))
        step = 16384 // ranks
        targets = [
            Target(i, tuple(arena[i * 16384 + r * step : i * 16384 + (r + 1) * step] for r in range(ranks)))
            for i in range(6)
        ]
        await tier.read(chain, targets, tier._clock.monotonic() + FAR_S)
        blocks = seal(chain, range(6), 16384, tier._clock.wall())
        assert bytes(arena) == b"".join(bytes(piece) for block in blocks for piece in block.pieces)


async def test_several_paths_share_the_load(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    namespace = sample_namespace(1 << 20)
    chain = chain_of(namespace, 130)
    async with opened(paths, 192, block_bytes=1 << 20, namespace=namespace) as tier:
        for start in range(0, 130, 26):
            await put(tier, chain, range(start, start + 26))
        assert await get(tier, chain) == [True] * 130
    assert slabs(paths[0]) and slabs(paths[1])
    with pytest.raises(ConfigError, match="part"):
        async with opened(paths[0], 192, block_bytes=1 << 20, namespace=namespace):
            pass


async def test_namespaces_of_other_block_sizes_share_the_capacity(tmp_path: Path) -> None:
    small, large = sample_namespace(4096), sample_namespace(16384)
    clock = VirtualClock()
    capacity_blocks = 32
    tiers = [
        DiskTier([tmp_path / "g3"], capacity_blocks * 4096, namespace, clock=clock) for namespace in (small, large)
    ]
    for tier in tiers:
        await tier.open()
    try:
        for turn in range(3):
            for tier, namespace in zip(tiers, (small, large), strict=True):
                chain = chain_of(namespace, 4, seed=turn)
                await put(tier, chain)
                assert await get(tier, chain) == [True] * 4
                tier.check()
                assert tier.usage().bytes <= capacity_blocks * 4096
    finally:
        for tier in tiers:
            await tier.close(clock.monotonic() + FAR_S)


async def test_a_capacity_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smaller than one block"):
        await DiskTier([tmp_path / "g3"], 4095, NAMESPACE, clock=VirtualClock()).open()


async def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    never, not_now = ConfigError, TierUnavailable  # a volume may be mounted later; a file stays one
    for path, refusal in (
        (tmp_path / "no" / "such" / "parent", not_now),
        (tmp_path / "file", never),
        (tmp_path / "file" / "below", never),
    ):
        with pytest.raises(refusal, match=str(path)):
            await DiskTier([path], 1 << 20, NAMESPACE, clock=VirtualClock()).open()
    async with opened(tmp_path / "g3"):
        pass


async def test_a_block_of_the_wrong_size_is_refused_and_a_target_of_the_wrong_size_is_a_miss(tmp_path: Path) -> None:
    chain = chain_of(NAMESPACE, 1)
    async with opened(tmp_path / "g3") as tier:
        with pytest.raises(TierError):
            await tier.write(seal(chain, [0], 8192, tier._clock.wall()), tier._clock.monotonic() + FAR_S)
        await put(tier, chain)
        short = Target(0, (memoryview(bytearray(2048)),))
        assert await tier.read(chain, [short], tier._clock.monotonic() + FAR_S) == [Miss.MISMATCH]
        assert await get(tier, chain) == [True]


async def test_cancellation_returns_only_when_nothing_touches_the_memory(tmp_path: Path) -> None:
    chain = chain_of(NAMESPACE, 16)
    async with opened(tmp_path / "g3", 64) as tier:
        for delay in range(12):
            task = asyncio.ensure_future(put(tier, chain))
            for _ in range(delay):
                await asyncio.sleep(0.0005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await tier.flush(tier._clock.monotonic() + FAR_S)
            tier.check()
            assert not tier._store.index.has_reservations(), "a cancelled write left a slot behind"
            assert set(await get(tier, chain)) <= {True, Miss.ABSENT}
            await tier.evict(chain)


def _use_inherited(tier: DiskTier, result: multiprocessing.connection.Connection) -> None:
    for verb in (lambda: tier.peek(chain_of(NAMESPACE, 1), [0]), lambda: tier.touch([], 0.0), tier.usage):
        try:
            verb()
        except ClosedError:
            continue
        result.send("was usable")
        os._exit(0)
    result.send("refused")
    os._exit(0)


async def test_a_forked_child_may_not_use_the_parents_tier(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    async with opened(tmp_path / "g3") as tier:
        await put(tier, chain_of(NAMESPACE, 2))
        ours, theirs = context.Pipe()
        child = context.Process(target=_use_inherited, args=(tier, theirs))
        child.start()
        child.join(20)
        assert ours.recv() == "refused"
        assert await get(tier, chain_of(NAMESPACE, 2)) == [True] * 2


async def test_a_stream_of_writes_commits_once_each_and_gives_back_what_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "STREAM_BYTES_MIN", 4 * BLOCK)
    monkeypatch.setattr(store, "IDLE_S", 0.02)
    monkeypatch.setattr(store, "HOLD_S", 1.0)  # longer than a loaded machine needs from one write to the next
    async with opened(tmp_path / "g3", 256) as tier:
        transact, count = Index.transact, []
        monkeypatch.setattr(Index, "transact", lambda self, *a, **k: (count.append(1), transact(self, *a, **k))[1])
        for seed in range(60):
            assert await put(tier, chain_of(NAMESPACE, 8, seed)) == [Stored.STORED] * 8
        assert 60 <= len(count) <= 90
        assert await put(tier, chain_of(NAMESPACE, 8, 59)) == [Stored.PRESENT] * 8
        for seed in range(60):
            found = await get(tier, chain_of(NAMESPACE, 8, seed))
            assert True not in found[found.index(Miss.ABSENT) if Miss.ABSENT in found else 8 :], "a chain without head"
        assert await get(tier, chain_of(NAMESPACE, 8, 59)) == [True] * 8
        await until(lambda: not tier._store.index.has_reservations(), "slots kept for a stream that ended")
        tier.check()


async def test_slots_kept_for_writes_are_given_back_though_blocks_are_used_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "STREAM_BYTES_MIN", 4 * BLOCK)
    monkeypatch.setattr(store, "IDLE_S", 0.02)
    monkeypatch.setattr(store, "HOLD_S", 0.2)
    async with opened(tmp_path / "g3", 256) as tier:
        await put(tier, chain_of(NAMESPACE, 8))
        assert tier._store.index.has_reservations()
        for _ in range(1000):
            tier.touch(chain_of(NAMESPACE, 8), tier._clock.wall())
            await asyncio.sleep(0.02)
            if not tier._store.index.has_reservations():
                break
        assert not tier._store.index.has_reservations(), "slots kept for a stream that ended"


async def test_churn_of_twenty_times_the_capacity_grows_nothing(tmp_path: Path) -> None:
    def memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    blocks, length = 64, 16
    async with opened(tmp_path / "g3", blocks) as tier:
        sizes = []
        for turn in range(20 * blocks // length):
            chain = chain_of(NAMESPACE, length, seed=turn)
            assert await put(tier, chain) == [Stored.STORED] * length
            assert await get(tier, chain) == [True] * length
            if turn in (2 * blocks // length, 20 * blocks // length - 1):
                index = (tmp_path / "g3" / "index" / "data.mdb").stat()
                slab = sum(file.stat().st_blocks for file in slabs(tmp_path / "g3"))
                sizes.append((memory(), len(list(Path("/proc/self/fd").iterdir())), slab, 512 * index.st_blocks))
        (memory_1, files_1, slab_1, index_1), (memory_2, files_2, slab_2, index_2) = sizes
        assert memory_2 - memory_1 < 8 << 20
        assert files_2 <= files_1 + 1
        assert slab_2 == slab_1
        assert index_2 - index_1 <= 128 << 10
        assert tier.usage().blocks == blocks


async def test_expired_blocks_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "SCAN_FIRST_S", 0.0)
    monkeypatch.setattr(removals, "SCAN_EVERY_S", 0.0)
    monkeypatch.setattr(expired, "ENTRIES_PER_STEP", 3)
    clock = VirtualClock()
    short, kept, used, long = (chain_of(NAMESPACE, 4, seed) for seed in range(4))
    async with opened(tmp_path / "g3", clock=clock) as tier:

        async def work(times: int) -> None:
            for _ in range(times):
                await tier.flush(clock.monotonic() + FAR_S)

        for chain in (short, kept, used):
            await put(tier, chain, terms=Terms("short", ttl=60))
        await put(tier, long)
        await tier.retain(kept, clock.wall() + 1000)
        clock.advance(50)
        tier.touch(used, clock.wall())
        await work(10)
        clock.advance(55)
        await work(10)
        assert await get(tier, short) == [Miss.EXPIRED] * 4, "who looks soon after still learns why"
        assert await get(tier, used) == [True] * 4
        clock.advance(50)
        await work(10)
        assert await get(tier, short) == [Miss.ABSENT] * 4
        assert await get(tier, kept) == [Miss.EXPIRED] * 4, "not to be evicted, which is not to be served"
        assert await get(tier, used) == [Miss.EXPIRED] * 4
        assert await get(tier, long) == [True] * 4
        assert tier.usage().blocks == 12


async def test_slots_kept_for_a_stream_are_not_those_of_a_store_that_was_opened_anew_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "STREAM_BYTES_MIN", 4 * BLOCK)
    monkeypatch.setattr(quarantine, "PROBE_FIRST_S", 0.01)
    monkeypatch.setattr(store, "IDLE_S", 0.01)
    first, second, third = (chain_of(NAMESPACE, 4, seed) for seed in range(3))
    async with opened(tmp_path / "g3", 256) as tier:
        await put(tier, first)
        kept = tier._store.reserved.take(1, 4, 0)
        assert len(kept) == 4, "the control: a stream keeps slots"
        tier._store.quarantine("a test")
        tier._store.reserved.add(kept)  # by a write whose commit came just before that
        await until(lambda: tier._store._state.index is not None)
        assert not tier._store.reserved.take(1, 1, 0), "these slots may be another block's by now"
        for chain in (second, third):
            assert await put(tier, chain) == [Stored.STORED] * 4
        assert [await get(tier, chain) for chain in (first, second, third)] == [[True] * 4] * 3


async def test_a_stream_finds_what_is_there_without_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "STREAM_BYTES_MIN", 4 * BLOCK)
    chain = chain_of(NAMESPACE, 8)
    async with opened(tmp_path / "g3", 256) as tier:
        assert await put(tier, chain[:4], parents=True) == [Stored.STORED] * 4
        await tier.evict(chain[:2])
        expected = [Stored.STORED] * 2 + [Stored.PRESENT] * 2 + [Stored.STORED] * 4
        assert await put(tier, chain, parents=True) == expected
        assert await get(tier, chain) == [True] * 8
        assert await put(tier, chain, parents=True) == [Stored.PRESENT] * 8


async def test_a_cold_index_makes_a_peek_late_and_a_lookup_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at the index waits for a page: a peek waits for a few, and a lookup for all, on a thread."""
    namespace = sample_namespace(BLOCK)
    chain = chain_of(namespace, 512)
    async with opened(tmp_path / "g3", 512) as tier:
        await put(tier, chain)
        assert tier.peek(chain, range(512)) == [None] * 512
        faults = itertools.count(0, 3)
        monkeypatch.setattr(index, "_page_faults", lambda: next(faults))
        found = tier.peek(chain, range(512))
        here = found.index(Miss.LATE)
        assert 0 < here < 100
        assert found == [None] * here + [Miss.LATE] * (512 - here)
        assert await tier.lookup(chain, range(512), 1e9) == [None] * 512


async def test_a_lone_put_commits_once(tmp_path: Path) -> None:
    """A commit writes at least 20 KB of the index: the slot is reserved by the commit of the put before."""
    async with opened(tmp_path / "g3", 2048) as tier:
        await put(tier, chain_of(NAMESPACE, 1, 0))
        before = tier._store.tick
        for seed in range(1, 11):
            assert await put(tier, chain_of(NAMESPACE, 1, seed)) == [Stored.STORED]
        assert tier._store.tick - before <= 11


async def test_puts_at_once_share_commits(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", 1 << 16) as tier:
        chains = iter([chain_of(NAMESPACE, 1, seed) for seed in range(128)])
        for _ in range(2):  # the first ones tell how many slots to hold
            await asyncio.gather(*(put(tier, next(chains)) for _ in range(32)))
        before = tier._store.tick
        for _ in range(2):
            await asyncio.gather(*(put(tier, next(chains)) for _ in range(32)))
        assert tier._store.tick - before <= 14


async def test_lone_puts_into_a_full_store_evict_in_batches(tmp_path: Path) -> None:
    """An eviction changes pages all over the index, of which several that leave together share some."""
    async with opened(tmp_path / "g3", blocks := 16_384) as tier:
        for seed in range(8):
            await put(tier, chain_of(NAMESPACE, blocks // 8, seed))
        await put(tier, chain_of(NAMESPACE, 1, 8))
        evictions = []
        for seed in range(9, 57):
            before = tier.usage().evictions
            assert await put(tier, chain_of(NAMESPACE, 1, seed)) == [Stored.STORED]
            evictions.append(tier.usage().evictions - before)
        assert sum(evictions) >= 32
        assert len([count for count in evictions if count]) <= 4
        assert max(evictions) <= 16, "more than a thousandth of the store is kept empty"


async def test_slots_that_are_held_are_for_blocks_of_that_priority_only(tmp_path: Path) -> None:
    """A held slot was taken from a block of the common priority: one of a lower has no claim to it."""
    async with opened(tmp_path / "g3", 1024) as tier:
        await put(tier, chain_of(NAMESPACE, 1, 0))
        held = len(tier._store.reserved._held)
        assert held == 1
        (block,) = seal(chain_of(NAMESPACE, 1, 1), [0], BLOCK, tier._clock.wall())
        assert await tier.write([replace(block, priority=1)], tier._clock.monotonic() + FAR_S) == [Stored.STORED]
        assert len(tier._store.reserved._held) >= held
