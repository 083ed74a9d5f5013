"""What one transaction of G3 may do: other processes wait for its lock meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.bench.tiers.class_store import ClassStore, name_of
from kvtier.identity.keys import SHARED
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import allocator, eviction
from kvtier.tiers.disk.group_commit import GroupCommit
from kvtier.tiers.disk.records import FREE, SLOT_ALIGN
from kvtier.tiers.disk.retained import Retained
from kvtier.tiers.disk.slab import SystemCalls
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss, Stored
from kvtier.times import Wall
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put

NAMESPACE = sample_namespace(BLOCK)
WORK_MAX = 200
"""Blocks per transaction. One costs at most 100 µs here, so that is 20 ms."""


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Blocks that a transaction reserved, released, published, renewed, retained or removed, by tick."""
    done = Counter[int]()
    for name in ("_reserve_slot", "release", "publish", "renew", "_retain", "drop"):

        def counted(self: WriteTxn, *args: object, verb: object = getattr(WriteTxn, name), **options: object) -> object:
            done[self.tick] += 1
            return verb(self, *args, **options)  # type: ignore[operator]

        monkeypatch.setattr(WriteTxn, name, counted)
    return done


class Closed(SystemCalls):
    """The kernel's calls; while `closed`, none writes to a slot."""

    closed = False

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return super().pwritev(fd, buffers, offset)


async def test_no_transaction_works_on_many_blocks(tmp_path: Path, work: Counter[int]) -> None:
    clock, calls = VirtualClock(), Closed()
    async with opened(tmp_path / "g3", 2048, clock=clock, calls=calls) as tier:

        async def tell(what: str, least: int) -> None:
            for _ in range(2):  # the second one waits for a transaction that took the last slots while the first ended
                await tier.flush(clock.monotonic() + FAR_S)
            assert work.total() >= least, what
            assert max(work.values()) <= WORK_MAX, what
            work.clear()

        large = [chain_of(NAMESPACE, 1024, seed) for seed in range(3)]
        for chain in large:
            assert set(await put(tier, chain)) == {Stored.STORED}
            await tell("a large put, the last into a full store", 2048)
        await asyncio.gather(*(put(tier, chain_of(NAMESPACE, 32, seed)) for seed in range(3, 35)))
        await tell("32 puts at once", 2048)
        tier.touch(large[2], clock.wall())
        await tell("uses", 1024)
        calls.closed = True
        assert set(await put(tier, chain_of(NAMESPACE, 1024, 40))) == {Stored.FAILED}
        calls.closed = False
        await tell("a large put that fails", 2048)
        assert set(await put(tier, large[2])) == {Stored.PRESENT}
        work.clear()
        await tier.retain(large[2], Wall(clock.wall() + 100))
        await tell("retained", 1024)
        assert await tier.evict(large[2][:512]) == 512
        await tell("evicted", 512)
        left = tier.usage().blocks
        assert await tier.purge(SHARED, clock.wall()) == left
        await tell("purged", left)


def test_fewer_jobs_are_taken_beside_other_work() -> None:
    """But one in any case."""
    commits = GroupCommit(
        lambda jobs: False, lambda: False, 1.0, "test", lambda error: 0.0, lambda: (0, 0.0), lambda: 64
    )
    for blocks in (100, 32, 32, 32):
        commits.submit(lambda txn: None, blocks=blocks)
    assert [[job.blocks for job in commits._take()] for _ in range(3)] == [[100], [32, 32], [32]]


@pytest.mark.parametrize(("apart_s", "least_s", "most_s"), [(0.0, 0.005, 0.02), (0.01, 0.01, 0.02), (9.0, 0.02, 1.0)])
def test_a_commit_waits_for_the_next_write_of_a_stream(
    apart_s: float, least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it may take, within bounds; and no longer than until it is there."""
    waits = list[float]()
    commits = GroupCommit(
        lambda jobs: False, lambda: False, 1.0, "test", lambda error: 0.0, lambda: (2, apart_s), lambda: 64
    )
    monkeypatch.setattr(commits._lock, "wait", lambda seconds: waits.append(seconds))
    commits.submit(lambda txn: None)
    with commits._lock:
        commits._gather()
    assert len(waits) == 1 and least_s - 0.004 < waits[0] <= most_s
    commits.submit(lambda txn: None)
    with commits._lock:
        commits._gather()
    assert len(waits) == 1


async def test_a_search_for_a_victim_goes_on_in_the_next_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past blocks that must stay, a few at a time; no block is refused while one that may leave lies behind them."""
    monkeypatch.setattr(eviction, "SCAN_ROWS_MAX", 16)
    seen = Counter[Retained]()
    until = Retained.until

    def counted(self: Retained, name: bytes) -> Wall:
        seen[self] += 1
        return until(self, name)

    async with opened(tmp_path / "g3", 96) as tier:
        old, new = chain_of(NAMESPACE, 80), chain_of(NAMESPACE, 8, seed=2)
        await put(tier, old)
        await put(tier, chain_of(NAMESPACE, 16, seed=1))
        await tier.retain(old, Wall(tier._clock.wall() + 100))
        monkeypatch.setattr(Retained, "until", counted)
        assert await put(tier, new) == [Stored.STORED] * 8
        assert seen.total() >= 80 and max(seen.values()) <= 2 * (16 + 8)
        assert await get(tier, old + new) == [True] * 88


def test_segments_that_empty_together_are_given_back_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of their free slots are deleted by one transaction, a bounded number; the rest stay with their class
    until another wants them."""
    monkeypatch.setattr(allocator, "FREE_ROWS_PER_TXN", 12)
    store = ClassStore(tmp_path / "index", 4, 8 * SLOT_ALIGN)
    for number in range(32):
        assert store.put((1, number)) is Stored.STORED

    def free() -> int:
        return len(store.index.rows(FREE))

    names = [name_of((1, number)) for number in range(32)]
    store.transact(lambda txn: txn.drop_all([name for place, name in enumerate(names) if place % 8]))
    assert free() == 28
    store.transact(lambda txn: txn.drop_all(names))
    assert free() == 24, "of the four segments one is nobody's"
    store.index.check()
    for _round in range(8):
        store.run((8, number) for number in range(4))
    assert store.resident(8, range(4)) == 4 and free() == 0
    store.index.check()
    store.index.close()


@pytest.mark.parametrize("parents", [True, False])
async def test_a_long_chain_keeps_its_head(tmp_path: Path, parents: bool) -> None:
    """It comes in several transactions: into a store that is shorter, and as what leaves later."""
    async with opened(tmp_path / "g3", 600) as tier:
        await put(tier, chain_of(NAMESPACE, 500, 1))
        chain = chain_of(NAMESPACE, 1000)
        results = await put(tier, chain, parents=parents)
        assert results[:600] == [Stored.STORED] * 600
        assert Stored.STORED not in results[600:]
        assert await get(tier, chain) == [True] * 600 + [Miss.ABSENT] * 400
        assert await put(tier, chain, parents=parents) == [Stored.PRESENT] * 600 + results[600:]
        await put(tier, chain_of(NAMESPACE, 300, 2))
        assert await get(tier, chain[:600]) == [True] * 300 + [Miss.ABSENT] * 300
