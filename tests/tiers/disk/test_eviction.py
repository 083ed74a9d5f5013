"""Blocks of a higher priority leave G3 later, and never for blocks of a lower one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.identity.keys import BlockKey
from kvtier.retention.terms import PRIORITY, Terms
from kvtier.retention.trusted_clock import TrustedClock
from kvtier.testing import VirtualClock, chain_of, sample_namespace
from kvtier.tiers.disk import eviction
from kvtier.tiers.disk.records import slot_class
from kvtier.tiers.disk.retained import Retained
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.protocol import Loaded, Stored, Target
from tests.tiers.disk.support.store import BLOCK, FAR_S, opened, put

NAMESPACE = sample_namespace(BLOCK)
DEAR = Terms("dear", ttl=60, priority=90)
CHEAP = Terms("cheap", ttl=86_400, priority=10)
PLAIN = Terms("plain", ttl=86_400)


def chain(seed: int, length: int = 6) -> list[BlockKey]:
    return list(chain_of(NAMESPACE, length, seed=seed))


def here(tier: DiskTier, keys: Sequence[BlockKey]) -> int:
    return sum(miss is None for miss in tier.peek(keys, range(len(keys))))


async def priorities(tier: DiskTier, keys: Sequence[BlockKey]) -> list[int]:
    """As they come back with the blocks."""
    targets = [Target(index, (memoryview(bytearray(BLOCK)),)) for index in range(len(keys))]
    found = await tier.read(keys, targets, tier._clock.monotonic() + FAR_S)
    return [one.priority for one in found if isinstance(one, Loaded)]


@pytest.mark.parametrize(("first", "left"), [(DEAR, 6), (PLAIN, 0)])
async def test_what_is_worth_more_outlives_what_came_later(tmp_path: Path, first: Terms, left: int) -> None:
    async with opened(tmp_path / "g3", 16) as tier:
        await put(tier, chain(0), terms=first, parents=True)
        for seed in range(1, 6):
            assert await put(tier, chain(seed), terms=PLAIN, parents=True) == [Stored.STORED] * 6
        assert here(tier, chain(0)) == left


async def test_nothing_leaves_for_what_is_worth_less(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with opened(tmp_path / "g3", 12, clock=clock) as tier:
        await put(tier, chain(0), terms=DEAR, parents=True)
        await put(tier, chain(1), terms=DEAR, parents=True)
        assert (await put(tier, chain(2), terms=PLAIN, parents=True))[0] is Stored.FULL
        assert here(tier, chain(0)) == here(tier, chain(1)) == 6
        assert await put(tier, chain(3), terms=DEAR, parents=True) == [Stored.STORED] * 6
        assert (here(tier, chain(0)), here(tier, chain(1))) == (0, 6), "among equals, the least recent"
        clock.advance(61)
        assert await put(tier, chain(2), terms=CHEAP, parents=True) == [Stored.STORED] * 6, "the dead are worth nothing"


async def test_nothing_leaves_for_it_in_a_transaction_that_knows_no_time_either(tmp_path: Path) -> None:
    """As the one that replaces slots which failed, or a copy while the clock is in doubt: by that time nothing was made
    yet, so nothing seemed to live."""
    async with opened(tmp_path / "g3", 12) as tier:
        await put(tier, chain(0), terms=DEAR, parents=True)
        await put(tier, chain(1), terms=DEAR, parents=True)
        assert await tier._store.submit(lambda txn: txn.reserve_slots(slot_class(BLOCK), 1)).result() == []
        assert here(tier, chain(0)) == here(tier, chain(1)) == 6


@pytest.mark.parametrize("kept", ["by its priority", "retained"])
async def test_nothing_is_taken_for_dead_while_the_clock_is_in_doubt(tmp_path: Path, kept: str) -> None:
    """It is not served then, but may be again once an operator has set the clock right."""
    clock = VirtualClock()
    async with opened(tmp_path / "g3", 12, clock=TrustedClock(clock)) as tier:
        for seed in range(2):
            await put(tier, chain(seed), terms=DEAR if kept == "by its priority" else PLAIN, parents=True)
            if kept == "retained":
                assert all(await tier.retain(chain(seed), clock.wall() + 60, None))
        clock.jump_wall(3600)
        assert (await put(tier, chain(2), terms=PLAIN, parents=True))[0] is Stored.FULL
        clock.jump_wall(-3600)
        assert here(tier, chain(0)) == here(tier, chain(1)) == 6
        clock.advance(61)
        assert await put(tier, chain(2), terms=PLAIN, parents=True) == [Stored.STORED] * 6


async def test_a_search_while_the_clock_is_in_doubt_finds_what_came_behind_its_beginning(tmp_path: Path) -> None:
    """Where it passed over retained blocks, and a colder one was stored since."""
    clock = VirtualClock()
    async with opened(tmp_path / "g3", 12, clock=TrustedClock(clock)) as tier:
        await put(tier, chain(0), terms=PLAIN, parents=True)
        assert all(await tier.retain(chain(0), clock.wall() + 60, None))
        await put(tier, chain(1), terms=PLAIN, parents=True)
        clock.jump_wall(3600)
        assert await put(tier, chain(2), terms=PLAIN, parents=True) == [Stored.STORED] * 6
        assert await tier.evict(chain(2)) == 6
        assert await put(tier, chain(3), terms=CHEAP, parents=True) == [Stored.STORED] * 6
        assert await put(tier, chain(4), terms=PLAIN, parents=True) == [Stored.STORED] * 6


async def test_a_retained_block_may_leave_from_the_very_time_at_which_that_ends(tmp_path: Path) -> None:
    """A search that passed it over before must not go on behind it: it would find the block's parent there."""
    clock = VirtualClock()
    async with opened(tmp_path / "g3", 4, clock=clock) as tier:
        sure, other = chain(0, 2), chain(1, 2)
        await put(tier, sure, parents=True)
        await tier.retain(sure, clock.wall() + 20)
        await put(tier, other, parents=True)
        assert await put(tier, chain(2, 1), parents=True) == [Stored.STORED]
        assert (here(tier, sure), here(tier, other)) == (2, 1)
        clock.advance(20)
        assert await put(tier, chain(3, 1), parents=True) == [Stored.STORED]
        assert (here(tier, sure[:1]), here(tier, sure[1:]), here(tier, other)) == (1, 0, 1)


async def test_a_block_that_is_retained_for_less_than_before_leaves_before_its_parent(tmp_path: Path) -> None:
    """As that of a pin which is replaced by a shorter one. A search that passed it over before must not go on behind
    it."""
    clock = VirtualClock()
    async with opened(tmp_path / "g3", 4, clock=clock) as tier:
        sure = chain(0, 2)
        await put(tier, sure, parents=True)
        await put(tier, chain(1, 1), parents=True)
        await put(tier, sure[:1], parents=True)  # warmer than that now, which is warmer than the other block
        await put(tier, chain(2, 1), parents=True)
        await tier.retain(sure, clock.wall() + 3600)
        assert await put(tier, chain(3, 1), parents=True) == [Stored.STORED]
        assert (here(tier, sure), here(tier, chain(1, 1))) == (2, 0)
        await tier.retain(sure, clock.wall() + 20)
        clock.advance(20)
        assert await put(tier, chain(4, 1), parents=True) == [Stored.STORED]
        assert (here(tier, sure[:1]), here(tier, sure[1:])) == (1, 0)


async def test_a_search_that_goes_on_while_many_are_remembered_knows_what_it_passed_over_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And until when: those of other scopes are forgotten for it, not its own beginning."""
    monkeypatch.setattr(eviction, "FLOORS_MAX", 1)
    clock = VirtualClock()
    async with opened(tmp_path / "g3", 5, clock=clock) as tier:
        sure, dear = chain(0, 2), chain(2, 1)
        for one in (sure, chain(1, 1), dear, chain(3, 1), sure[:1]):
            await put(tier, one, parents=True)
        await tier.retain(sure, clock.wall() + 20)
        await tier.retain(dear, clock.wall() + 3600)
        for seed in (4, 5):
            assert await put(tier, chain(seed, 1), parents=True) == [Stored.STORED]
        assert (here(tier, sure), here(tier, dear), here(tier, chain(1, 1) + chain(3, 1))) == (2, 1, 0)
        clock.advance(20)
        assert await put(tier, chain(6, 1), parents=True) == [Stored.STORED]
        assert (here(tier, sure[:1]), here(tier, sure[1:])) == (1, 0)


@pytest.mark.parametrize("set_by", [0, -172_800])
async def test_what_another_process_releases_may_leave_ten_minutes_later(tmp_path: Path, set_by: float) -> None:
    """Also where the clock was set back meanwhile: not when it has come to that time once more."""
    clock = VirtualClock()
    async with opened(tmp_path / "g3", 4, clock=clock) as tier:
        sure, other = chain(0, 2), chain(1, 2)
        await put(tier, sure, parents=True)
        await tier.retain(sure, clock.wall() + 7 * 86_400)
        await put(tier, other, parents=True)
        assert await put(tier, chain(2, 1), parents=True) == [Stored.STORED]
        names = [tier._prefix + key for key in sure]
        await tier._store.submit(lambda txn: [Retained(txn._txn).forget(name) for name in names]).result()
        clock.jump_wall(set_by)
        clock.advance(2 * eviction.FORGET_S)
        assert await put(tier, chain(3, 1), parents=True) == [Stored.STORED]
        clock.jump_wall(-set_by)
        assert (here(tier, sure[:1]), here(tier, sure[1:]), here(tier, other)) == (1, 0, 1)


async def test_the_least_worth_goes_first_however_recent(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", 12) as tier:
        await put(tier, chain(0), terms=PLAIN, parents=True)
        await put(tier, chain(1), terms=CHEAP, parents=True)
        assert await put(tier, chain(2), terms=PLAIN, parents=True) == [Stored.STORED] * 6
        assert (here(tier, chain(0)), here(tier, chain(1)), here(tier, chain(2))) == (6, 0, 6)


async def test_what_is_worth_less_does_not_stay_because_it_is_used(tmp_path: Path) -> None:
    """Not even if its use comes with the same transaction."""
    async with opened(tmp_path / "g3", 12) as tier:
        await put(tier, chain(0), terms=CHEAP, parents=True)
        await put(tier, chain(1), terms=PLAIN, parents=True)
        tier.touch(chain(0), tier._clock.wall())
        assert await put(tier, chain(2), terms=PLAIN, parents=True) == [Stored.STORED] * 6
        assert (here(tier, chain(0)), here(tier, chain(1)), here(tier, chain(2))) == (0, 6, 6)


async def test_a_block_comes_back_with_what_it_is_worth(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", 16) as tier:
        await put(tier, chain(0), terms=DEAR, parents=True)
        await put(tier, chain(1), terms=PLAIN, parents=True)
        assert await priorities(tier, chain(0)) == [90] * 6
        assert await priorities(tier, chain(1)) == [PRIORITY] * 6
        tier.touch([*chain(0), *chain(1)], tier._clock.wall())
        await tier.flush(tier._clock.monotonic() + FAR_S)
        assert await priorities(tier, [*chain(0)]) == [90] * 6, "a use changes nothing about it"


async def test_a_later_request_raises_it_and_none_lowers_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "g3", 16) as tier:
        await put(tier, chain(0), terms=PLAIN, parents=True)
        assert await put(tier, chain(0), terms=DEAR, parents=True) == [Stored.PRESENT] * 6
        assert await put(tier, chain(0), terms=CHEAP, parents=True) == [Stored.PRESENT] * 6
        assert await priorities(tier, chain(0)) == [90] * 6


async def test_a_block_is_worth_no_more_than_its_parent(tmp_path: Path) -> None:
    """Or the parent left first, and the block were in vain."""
    async with opened(tmp_path / "g3", 8) as tier:
        await put(tier, chain(0), [0, 1, 2], terms=PLAIN, parents=True)
        await put(tier, chain(0), [3, 4, 5], terms=DEAR, parents=True)
        assert await priorities(tier, chain(0)) == [PRIORITY] * 6
        await put(tier, chain(1), terms=PLAIN, parents=True)
        assert [miss is None for miss in tier.peek(chain(0), range(6))] == [True] * 2 + [False] * 4
