"""What one transaction of G3 may do: other processes wait for its lock meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from kvtier.identity.keys import SHARED
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Miss, Stored
from kvtier.times import Wall
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put

NAMESPACE = sample_namespace(BLOCK)
WORK_MAX = 300
"""Blocks per transaction. One costs at most 70 µs here, so that is 20 ms."""


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Blocks that a transaction reserved, published, renewed, retained or removed, by tick."""
    done = Counter[int]()
    for name in ("_reserve_slot", "publish", "renew", "_retain", "drop"):

        def counted(self: WriteTxn, *args: object, verb: object = getattr(WriteTxn, name)) -> object:
            done[self.tick] += 1
            return verb(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(WriteTxn, name, counted)
    return done


async def test_no_transaction_works_on_many_blocks(tmp_path: Path, work: Counter[int]) -> None:
    clock = VirtualClock()
    async with opened(tmp_path / "g3", 2048, clock=clock) as tier:

        async def tell(what: str, least: int) -> None:
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
        await tier.retain(large[2], Wall(clock.wall() + 100))
        await tell("retained", 1024)
        assert await tier.evict(large[2][:512]) == 512
        await tell("evicted", 512)
        left = tier.usage().blocks
        assert await tier.purge(SHARED, clock.wall()) == left
        await tell("purged", left)


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
