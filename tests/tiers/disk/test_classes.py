"""Blocks of several sizes in one store: each gets the space it is worth, and no put waits for what cannot leave."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvtier.identity.keys import BlockKey
from kvtier.retention.terms import BUILTIN, Terms
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import recovery
from kvtier.tiers.disk.allocator import FREE_ROWS_PER_TXN
from kvtier.tiers.disk.bad_places import bad_places
from kvtier.tiers.disk.maintenance import looking_after
from kvtier.tiers.disk.records import SlotReservation
from kvtier.tiers.disk.slab import Calls
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall
from tests.tiers.disk.support.bad_medium import BadMedium
from tests.tiers.disk.support.store import get, opened, put

SMALL, LARGE = 4096, 32768
SEGMENT = 16 * SMALL
SEGMENTS = 16
CAPACITY = SEGMENTS * SEGMENT
PLAIN = BUILTIN["24h"]
DEAR = Terms("dear", ttl=86_400, priority=90)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SEGMENT_BYTES_SMALL", SEGMENT)


def keys(size: int, count: int, seed: int = 0) -> list[BlockKey]:
    return list(chain_of(sample_namespace(size), count, seed=seed))


@asynccontextmanager
async def both(
    path: Path, clock: VirtualClock | None = None, calls: Calls | None = None
) -> AsyncIterator[tuple[DiskTier, DiskTier]]:
    """Tiers of small and of large blocks in one store."""
    clock = clock or VirtualClock()
    async with AsyncExitStack() as stack:
        small, large = [
            await stack.enter_async_context(opened(path, CAPACITY // size, block_bytes=size, clock=clock, calls=calls))
            for size in (SMALL, LARGE)
        ]
        yield small, large


async def fill(tier: DiskTier, chain: list[BlockKey], terms: Terms = PLAIN) -> None:
    """Store a chain in order, some blocks at a time."""
    for start in range(0, len(chain), 64):
        await put(tier, chain, range(start, min(start + 64, len(chain))), terms=terms)


def resident(tier: DiskTier, chain: list[BlockKey]) -> int:
    return sum(miss is None for miss in tier.peek(chain, range(len(chain))))


async def reserve(tier: DiskTier, size: int, count: int) -> list[SlotReservation]:
    """Slots as a write holds them."""
    return await tier._store.submit(lambda txn: txn.reserve_slots(size // SMALL, count)).result()


FULL_SMALL = keys(SMALL, CAPACITY // SMALL)


async def test_a_write_in_every_segment_keeps_no_other_class_out(tmp_path: Path) -> None:
    """Each put costs one segment's blocks, and the writes end as if nothing had happened."""
    async with both(tmp_path / "g3") as (small, large):
        held = []
        for segment in range(SEGMENTS):
            held += await reserve(small, SMALL, 1)
            await fill(small, FULL_SMALL[15 * segment : 15 * (segment + 1)])
        before = resident(small, FULL_SMALL)
        assert before == 15 * SEGMENTS
        for index in range(5):
            assert await put(large, keys(LARGE, 5), [index]) == [Stored.STORED]
            large.check()
        assert resident(small, FULL_SMALL) >= before - 5 * 15
        small._store.give_back(held)
        assert await put(large, keys(LARGE, 5, seed=1)) == [Stored.STORED] * 5
        assert await get(large, keys(LARGE, 5, seed=1)) == [True] * 5


KEPT = {
    "coldest": FULL_SMALL[:1],
    "all segments but one": FULL_SMALL[: 16 * (SEGMENTS - 1) : 16],
    "each segment": FULL_SMALL[::16],
}


@pytest.mark.parametrize("where", KEPT)
async def test_retained_blocks_keep_no_other_class_out(tmp_path: Path, where: str) -> None:
    """They are still there, and still read, in segments of the other class."""
    kept = KEPT[where]
    async with both(tmp_path / "g3") as (small, large):
        await fill(small, FULL_SMALL)
        assert all(await small.retain(kept, until=small._clock.wall() + 3600))
        for index in range(60):
            assert await put(large, keys(LARGE, 60), [index]) == [Stored.STORED]
        assert await get(small, kept) == [True] * len(kept)
        assert await get(large, keys(LARGE, 60)[-1:]) == [True]


async def test_retained_blocks_on_every_large_slot_go_together(tmp_path: Path) -> None:
    """Each of the larger slots has one on it. They are copied to where they keep fewer, and read as before."""
    async with both(tmp_path / "g3") as (small, large):
        await fill(small, FULL_SMALL)
        kept = FULL_SMALL[::8]
        assert all(await small.retain(kept, until=small._clock.wall() + 3600))
        for index in range(20):
            assert await put(large, keys(LARGE, 20), [index]) == [Stored.STORED]
        assert await get(small, kept) == [True] * len(kept)
        assert resident(large, keys(LARGE, 20)) >= 10
        small.check()


async def test_what_must_stay_stays_and_costs_no_search_below_the_lock(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with both(tmp_path / "g3", clock) as (small, large):
        await fill(small, FULL_SMALL)
        kept = [key for place, key in enumerate(FULL_SMALL) if place % 32]  # in no other segments is room for one's
        assert all(await small.retain(kept, until=clock.wall() + 3600))
        before = small._store.tick
        for index in range(20):
            assert await put(large, keys(LARGE, 20), [index]) == [Stored.FULL]
        assert small._store.tick - before < 60, "each put that is refused asked anew"
        assert resident(small, FULL_SMALL) == len(FULL_SMALL)
        clock.advance(3601)
        await fill(large, keys(LARGE, 20, seed=1))
        assert resident(large, keys(LARGE, 20, seed=1)) > 0, "they may leave now"


@pytest.mark.parametrize(("terms", "result"), [(PLAIN, Stored.FULL), (DEAR, Stored.STORED)])
async def test_no_class_takes_what_is_worth_more(tmp_path: Path, terms: Terms, result: Stored) -> None:
    async with both(tmp_path / "g3") as (small, large):
        await fill(small, FULL_SMALL, DEAR)
        assert (await put(large, keys(LARGE, 1), terms=terms)) == [result]
        assert (resident(small, FULL_SMALL) == len(FULL_SMALL)) == (result is Stored.FULL)


async def test_what_is_worth_more_stays_while_the_clock_is_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time for deletions, which is none then, it was not made yet, and so it did not seem to live."""
    monkeypatch.setattr(DiskTier, "_expired_by", lambda _: Wall("-inf"))
    async with both(tmp_path / "g3") as (small, large):
        await fill(small, FULL_SMALL, DEAR)
        assert await put(large, keys(LARGE, 1)) == [Stored.FULL]
        assert resident(small, FULL_SMALL) == len(FULL_SMALL)


async def test_one_block_that_is_used_keeps_no_other_class_out(tmp_path: Path) -> None:
    async with both(tmp_path / "g3") as (small, large):
        chain = keys(LARGE, CAPACITY // 2 // LARGE)
        await fill(small, FULL_SMALL)
        for index in range(len(chain)):
            small.touch(FULL_SMALL[-1:], small._clock.wall())
            assert await put(large, chain, [index]) == [Stored.STORED]
        assert resident(large, chain) >= 0.8 * len(chain)


async def test_inspect_shows_how_the_classes_share(tmp_path: Path) -> None:
    async with both(tmp_path / "g3") as (small, large):
        await fill(small, FULL_SMALL)
        await put(large, keys(LARGE, 3))
        with looking_after([tmp_path / "g3"], small._clock) as maintenance:
            seen = maintenance.inspect()["classes"]
    assert [one["slot_bytes"] for one in seen] == [SMALL, LARGE]
    assert sum(one["segments"] for one in seen) == SEGMENTS
    assert seen[1]["used_bytes"] == 3 * LARGE
    assert sum(one["bytes"] for one in seen) == CAPACITY


async def test_a_class_that_is_used_gets_the_space_of_one_that_is_not(tmp_path: Path) -> None:
    async with both(tmp_path / "g3") as (small, large):
        chain = keys(LARGE, CAPACITY * 3 // 4 // LARGE)
        await fill(small, FULL_SMALL)
        for _round in range(8):
            for index in range(len(chain)):
                large.touch(chain[index : index + 1], large._clock.wall())
                await put(large, chain, [index])
        assert resident(large, chain) == len(chain)
        assert await get(large, chain) == [True] * len(chain)


async def test_a_class_without_a_block_gives_all_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments with more free slots than one transaction deletes: the other class gets them, and waits for none."""
    slots, segments = 2 * FREE_ROWS_PER_TXN + 8, 2
    monkeypatch.setattr(recovery, "SEGMENT_BYTES_SMALL", slots * SMALL)
    blocks, path = slots * segments, tmp_path / "g3"
    async with opened(path, blocks) as small:
        assert set(await put(small, keys(SMALL, blocks))) == {Stored.STORED}
        await small.evict(None)
        async with opened(path, blocks * SMALL // LARGE, block_bytes=LARGE) as large:
            chain = keys(LARGE, blocks * SMALL // LARGE)
            assert set(await put(large, chain[:8])) == {Stored.STORED}
            for number in range(8, len(chain)):
                assert await put(large, chain, [number]) == [Stored.STORED]
            assert resident(large, chain) == len(chain)


async def test_a_capacity_that_shrinks_and_grows_loses_no_slot(tmp_path: Path) -> None:
    path, clock = tmp_path / "g3", VirtualClock()
    blocks = CAPACITY // SMALL
    async with opened(path, blocks, clock=clock) as tier:
        await fill(tier, FULL_SMALL)
    for share in (2.5, 1, 7.3, 1):
        with looking_after([path], clock, capacity=int(CAPACITY / share) // SMALL * SMALL) as maintenance:
            maintenance.shrink()
            assert maintenance.verify().sound
    async with opened(path, blocks, clock=clock) as tier:
        await fill(tier, keys(SMALL, blocks, seed=1))
        await fill(tier, keys(SMALL, blocks, seed=2))
        assert tier.usage().blocks == blocks


async def test_a_bad_place_costs_each_size_its_slot_and_no_put(tmp_path: Path) -> None:
    """Its segment goes from size to size; it is tried twice, whoever has it."""
    medium = BadMedium()
    medium.unwritable = {("00000000.slab", 5)}
    async with both(tmp_path / "g3", calls=medium) as (small, large):
        await fill(small, FULL_SMALL)
        for seed in range(6):
            tier, size = (large, LARGE) if seed % 2 == 0 else (small, SMALL)
            chain = keys(size, CAPACITY // 2 // size, seed=seed + 1)
            for _round in range(4):
                for start in range(0, len(chain), 8):
                    tier.touch(chain[start : start + 8], tier._clock.wall())
                    some = range(start, min(start + 8, len(chain)))
                    assert set(await put(tier, chain, some)) <= {Stored.STORED, Stored.PRESENT}
            assert await get(tier, chain[-4:]) == [True] * 4
            tier.check()
        with small._store.index.reading() as txn:
            assert [place[:3] for place in bad_places(txn)] == [(0, 5, 1)]
        assert sum(medium.tries.values()) == 2
