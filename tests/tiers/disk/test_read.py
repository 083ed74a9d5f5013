"""Reads from G3 that are overtaken, late, of another length, or of a block that a wrong clock made."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier import checksum
from kvtier.retention.lifetime import FUTURE_S, Lifetime
from kvtier.retention.marks import POSITIONS, mark_below
from kvtier.retention.terms import BUILTIN
from kvtier.testing import VirtualClock, chain_of, payload_of, sample_namespace
from kvtier.tiers.disk.read import miss_of
from kvtier.tiers.disk.records import Entry, NewBlock, SlotReservation
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.touches import Touches
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Loaded, Miss, Stored, Target
from kvtier.times import Wall
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put

NAMESPACE = sample_namespace(BLOCK)
CHAIN = chain_of(NAMESPACE, 2)
NAME = NAMESPACE.digest + CHAIN[0]
NOW = Wall(1e9)
NEVER = Wall("-inf")


def put_again(tier: DiskTier) -> None:
    """The block leaves, and another write of it gets the same slot; its bytes are those that are there."""

    def work(txn: WriteTxn) -> Stored:
        entry = txn.find(NAME)
        assert entry is not None and txn.drop(NAME)
        block = NewBlock(NAME, BLOCK, entry.life, digest=entry.digest)
        slot = txn.reserve(block, tier._clock.wall())
        assert isinstance(slot, SlotReservation) and (slot.segment, slot.slot) == (entry.segment, entry.slot)
        return txn.publish(slot, block, tier._clock.wall())

    assert tier._store.submit(work).future.result(10) is Stored.STORED


async def test_a_read_that_was_overtaken_is_repeated_and_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the next write of the same block got the same slot."""
    sound, torn = checksum.matches, 1

    def matches(*args: object) -> bool:
        nonlocal torn
        if torn:
            torn -= 1
            put_again(tier)
            return False
        return sound(*args)  # type: ignore[arg-type]

    async with opened(tmp_path / "g3") as tier:
        await put(tier, CHAIN)
        monkeypatch.setattr(checksum, "matches", matches)
        assert await get(tier, CHAIN) == [True, True]
        torn = 2
        assert await get(tier, CHAIN[:1]) == [Miss.RACED]
        assert await get(tier, CHAIN) == [True, True], "it is there all the same"


async def test_a_target_of_another_length_is_a_miss_and_harms_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3") as tier:
        await put(tier, CHAIN)
        for size in (BLOCK // 2, 2 * BLOCK):
            target = Target(0, (memoryview(bytearray(size)),))
            assert await tier.read(CHAIN, [target], tier._clock.monotonic() + FAR_S) == [Miss.MISMATCH]
        assert await get(tier, CHAIN) == [True, True]


async def test_a_job_that_begins_after_the_deadline_touches_nothing(tmp_path: Path) -> None:
    clock = VirtualClock()
    memory = bytearray(BLOCK)
    async with opened(tmp_path / "g3", clock=clock) as tier:
        await put(tier, CHAIN)
        deadline = clock.monotonic() + 1
        target = Target(0, (memoryview(memory),))
        assert isinstance((await tier.read(CHAIN, [target], deadline))[0], Loaded)
        assert memory == payload_of(CHAIN[0], BLOCK)
        memory[:] = bytes(BLOCK)
        clock.advance(2)
        assert await tier.read(CHAIN, [target], deadline) == [Miss.LATE]
        assert memory == bytes(BLOCK)


def raw_of(created: Wall, position: int = 0) -> bytes:
    life = Lifetime.of(BUILTIN["24h"], created)
    return Entry(7, 0, 0, BLOCK, 0, 9, bytes(16), life, position=position).encode(NAME, short=True)


@pytest.mark.parametrize("position", [0, 5])
def test_an_entry_keeps_the_position_that_its_block_was_taken_at(position: int) -> None:
    entry = Entry.decode(NAME, raw_of(NOW, position))
    assert entry.position == position and entry.mark == (POSITIONS + position if position else NOW)
    assert miss_of(NAME, raw_of(NOW, position), mark_below(position), Touches(), NOW) is (
        None if position else Miss.PURGED
    ), "an entry of the log covers what has no position"
    assert miss_of(NAME, raw_of(NOW, position), mark_below(position + 1), Touches(), NOW) is Miss.PURGED


@pytest.mark.parametrize("position", [0, 5])
def test_a_block_that_a_clock_ahead_made_is_not_served(position: int) -> None:
    """Nor where a position in the purge log, and no time, is its mark: it lived for as long as the clock was ahead."""
    assert miss_of(NAME, raw_of(Wall(NOW + FUTURE_S), position), NEVER, Touches(), NOW) is None
    assert miss_of(NAME, raw_of(Wall(NOW + FUTURE_S + 1), position), NEVER, Touches(), NOW) is Miss.EXPIRED


def test_a_block_that_only_a_use_dates_ahead_is_served() -> None:
    life = Lifetime.of(BUILTIN["24h"], NOW).used(Wall(NOW + FUTURE_S + 1))
    raw = Entry(7, 0, 0, BLOCK, 0, 9, bytes(16), life).encode(NAME, short=True)
    assert miss_of(NAME, raw, NEVER, Touches(), NOW) is None
