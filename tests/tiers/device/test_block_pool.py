"""BlockPool: slots, names, eviction order, offload."""

from __future__ import annotations

import hashlib

import pytest

from kvtier.errors import CapacityError, ConfigError, InvalidRequest
from kvtier.identity.keys import SHARED, BlockKey, Scope, make_keys
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN, Depth, Terms
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.dirty import DirtyList
from kvtier.times import Wall

DAY = Lifetime.of(BUILTIN["24h"], 0.0)


def chain_of(name: str, count: int, scope: Scope = SHARED) -> tuple[BlockKey, ...]:
    return tuple(make_keys(scope, [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(count)]))


def fill(pool: BlockPool, chain: tuple[BlockKey, ...], *, dirty: bool = False, life: Lifetime = DAY) -> list[int]:
    """A request that computes `chain` and ends."""
    slots = pool.allocate(len(chain))
    pool.confirm(slots, chain, life, dirty_since=0.0 if dirty else None)
    pool.free(slots)
    pool.check()
    return slots


def test_a_freed_block_stays_hittable_until_its_slot_is_handed_out() -> None:
    pool = BlockPool(4)
    chain = chain_of("a", 4)
    slots = fill(pool, chain)
    assert pool.match(chain, 1.0) == slots and pool.free_blocks == 4
    pool.allocate(1)
    pool.check()
    assert pool.match(chain, 1.0) == slots[:3], "the tail of the chain leaves first"


def test_allocated_blocks_are_invisible_until_confirmed() -> None:
    pool = BlockPool(4)
    chain = chain_of("a", 2)
    slots = pool.allocate(2)
    assert pool.match(chain, 0.0) == []
    pool.confirm(slots, chain, DAY)
    assert pool.match(chain, 0.0) == slots


def test_slots_without_a_name_are_handed_out_first() -> None:
    pool = BlockPool(4)
    fill(pool, chain_of("a", 3))
    scratch = pool.allocate(1)
    pool.free(scratch)
    pool.check()
    assert pool.allocate(1) == scratch and pool.resident == 3


def test_least_recently_freed_chain_leaves_first_and_a_pin_renews() -> None:
    pool = BlockPool(4)
    a, b = chain_of("a", 2), chain_of("b", 2)
    fill(pool, a)
    fill(pool, b)
    pool.free(pool.pin(a, 1.0))
    pool.allocate(2)
    assert len(pool.match(a, 1.0)) == 2 and pool.match(b, 1.0) == []


def test_pinned_blocks_are_taken_from_the_middle_of_the_queue_and_never_handed_out() -> None:
    pool = BlockPool(6)
    a, b, c = (chain_of(name, 2) for name in "abc")
    for chain in (a, b, c):
        fill(pool, chain)
    held = pool.pin(b, 1.0)
    pool.check()
    assert not set(pool.allocate(4)) & set(held)
    with pytest.raises(CapacityError):
        pool.allocate(1)
    pool.free(held)
    assert sorted(pool.allocate(2)) == sorted(held)


def test_allocation_beyond_what_is_free_changes_nothing() -> None:
    pool = BlockPool(4)
    chain = chain_of("a", 2)
    fill(pool, chain)
    pool.allocate(2)
    before = (pool.free_blocks, pool.resident, pool.evicted)
    with pytest.raises(CapacityError, match="3 blocks wanted, 2 of 4"):
        pool.allocate(3)
    pool.check()
    assert before == (pool.free_blocks, pool.resident, pool.evicted)
    assert len(pool.allocate(2)) == 2


@pytest.mark.parametrize("wrong", [[0, 0], [1], [0, 1]])
def test_a_reference_is_given_back_once_or_nothing_changes(wrong: list[int]) -> None:
    pool = BlockPool(3)
    assert pool.allocate(1) == [0]
    with pytest.raises(InvalidRequest):
        pool.free(wrong)
    pool.check()
    assert pool.free_blocks == 2
    pool.free([0])
    assert pool.free_blocks == 3


def test_two_requests_that_compute_one_block_keep_the_first() -> None:
    pool = BlockPool(4)
    chain = chain_of("a", 1)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.confirm(first, chain, DAY)
    pool.confirm(second, chain, DAY)
    assert pool.match(chain, 0.0) == first
    pool.free(second)
    pool.free(first)
    pool.check()
    assert pool.allocate(1) == second


def test_a_slot_cannot_take_a_second_name() -> None:
    pool = BlockPool(2)
    slots = pool.allocate(1)
    pool.confirm(slots, chain_of("a", 1), DAY)
    with pytest.raises(InvalidRequest, match="another block"):
        pool.confirm(slots, chain_of("b", 1), DAY)
    with pytest.raises(InvalidRequest, match="in use"):
        pool.confirm([1], chain_of("b", 1), DAY)
    pool.check()


class TestTerms:
    def test_an_expired_block_is_not_served_and_a_use_renews(self) -> None:
        pool = BlockPool(2)
        chain = chain_of("a", 2)
        fill(pool, chain, life=Lifetime.of(BUILTIN["5m"], 0.0))
        pool.free(pool.pin(chain, 299.0))
        assert len(pool.match(chain, 598.0)) == 2
        assert pool.match(chain, 600.0) == []

    def test_max_age_is_not_renewed(self) -> None:
        pool = BlockPool(1)
        chain = chain_of("a", 1)
        fill(pool, chain, life=Lifetime.of(Terms("t", ttl=100, max_age=150), 0.0))
        pool.free(pool.pin(chain, 90.0))
        assert len(pool.match(chain, 149.0)) == 1 and pool.match(chain, 151.0) == []

    def test_a_recomputed_block_takes_the_place_of_its_expired_copy(self) -> None:
        pool = BlockPool(2)
        chain = chain_of("a", 1)
        (old,) = fill(pool, chain, life=Lifetime.of(BUILTIN["5m"], 0.0))
        new = fill(pool, chain, life=Lifetime.of(BUILTIN["5m"], 1000.0))
        assert pool.match(chain, 1001.0) == new and new != [old]

    def test_a_further_request_shortens_no_life(self) -> None:
        pool = BlockPool(1)
        chain = chain_of("a", 1)
        (slot,) = pool.allocate(1)
        pool.confirm([slot], chain, DAY)
        pool.confirm([slot], chain, Lifetime.of(Terms("brief", ttl=5, ceiling=Depth.G2), 1.0))
        life = pool.life(slot)
        assert life is not None and life.servable(Depth.G4, 80_000.0) and pool.match(chain, 80_000.0) == [slot]

    def test_a_deeper_term_makes_a_clean_block_dirty_again(self) -> None:
        pool = BlockPool(2, horizon=2)
        shallow = Lifetime.of(Terms("ram", ceiling=Depth.G2), 0.0)
        chain = chain_of("a", 1)
        slots = pool.allocate(1)
        pool.confirm(slots, chain, shallow, dirty_since=0.0)
        pool.copies_done(pool.pick(1, 10.0))
        pool.confirm(slots, tuple(bytes(bytearray(k)) for k in chain), shallow, dirty_since=11.0)  # type: ignore[arg-type]
        assert pool.dirty == 0, "the same term again is nothing new"
        pool.confirm(slots, tuple(bytes(bytearray(k)) for k in chain), DAY, dirty_since=12.0)  # type: ignore[arg-type]
        pool.check()
        (dirty,) = pool.pick(1, 20.0)
        assert pool.holds(dirty)


class TestOffload:
    def test_the_horizon_comes_first_then_age(self) -> None:
        pool = BlockPool(6, horizon=2, dirty_max_age_s=10)
        old, young = chain_of("old", 2), chain_of("young", 2)
        first = pool.allocate(2)
        pool.confirm(first, old, DAY, dirty_since=0.0)  # stays in use: outside the horizon
        pool.free(pool.allocate(2))
        slots = pool.allocate(4)
        pool.confirm(slots[:2], young, DAY, dirty_since=5.0)
        pool.free(slots[:2])
        assert [d.key for d in pool.pick(9, 6.0)] == [young[0], young[1]]
        assert [d.key for d in pool.pick(9, 11.0)] == list(old)
        assert pool.dirty == 0

    def test_ancestors_come_before_descendants_and_a_budget_cuts_tails(self) -> None:
        pool = BlockPool(4, horizon=1)
        chain = chain_of("a", 4)
        fill(pool, chain, dirty=True)
        assert [d.depth for d in pool.pick(3, 0.0)] == [0, 1, 2], "the tail is in the horizon, its heads go first"
        assert [d.depth for d in pool.pick(3, 0.0)] == [3]

    def test_a_slot_that_a_copy_reads_is_not_handed_out_and_keeps_its_place(self) -> None:
        pool = BlockPool(3, horizon=3)
        a, b = chain_of("a", 1), chain_of("b", 1)
        (slot_a,), (slot_b,) = fill(pool, a, dirty=True), fill(pool, b)
        fill(pool, chain_of("c", 1))
        picked = pool.pick(1, 0.0)
        assert pool.free_blocks == 2
        assert pool.allocate(1) == [slot_b]
        with pytest.raises(CapacityError):
            pool.allocate(2)
        pool.check()
        pool.copies_done(picked)
        pool.check()
        assert pool.allocate(1) == [slot_a], "still the oldest"

    def test_a_block_lost_before_its_spill_is_counted(self) -> None:
        pool = BlockPool(2, horizon=2)
        told: list[bytes] = []
        pool.on_lost = told.extend
        chain = chain_of("a", 2)
        fill(pool, chain, dirty=True)
        pool.allocate(1)
        assert pool.spill_lost == 1 and pool.dirty == 1 and told == list(chain[1:])

    def test_a_copy_of_an_evicted_block_is_not_to_be_committed(self) -> None:
        pool = BlockPool(2, horizon=2)
        chain = chain_of("a", 2)
        fill(pool, chain, dirty=True)
        picked = pool.pick(2, 0.0)
        assert all(map(pool.holds, picked))
        assert pool.evict(chain[1:]) == 1
        assert [pool.holds(d) for d in picked] == [True, False]
        pool.copies_done(picked, again_since=1.0)
        pool.check()
        assert pool.dirty == 1, "what is still held becomes dirty again"

    def test_a_block_that_was_stored_anew_is_not_the_one_that_a_copy_read(self) -> None:
        """The same name in the same slot: its bytes may have been written while they were copied."""
        pool = BlockPool(1, horizon=1)
        for count in range(2):
            chain = tuple(BlockKey(bytes(bytearray(key))) for key in chain_of("a", 1))
            slots = pool.allocate(1)
            pool.confirm(slots, chain, DAY, dirty_since=0.0)
            if not count:
                picked = pool.pick(1, 10.0)
                pool.evict()
                pool.copies_done(picked)
            pool.free(slots)
        assert pool.match(chain, 0.0) == [picked[0].slot] and not pool.holds(picked[0])

    def test_a_slot_that_two_copies_read_waits_for_both(self) -> None:
        pool = BlockPool(1, horizon=1)
        slots, picked = pool.allocate(1), []
        for name in "ab":
            pool.confirm(slots, chain_of(name, 1), DAY, dirty_since=0.0)
            picked += pool.pick(1, 10.0)
            pool.evict()
        pool.free(slots)
        assert len(picked) == 2
        pool.copies_done(picked[:1])
        assert pool.free_blocks == 0
        pool.copies_done(picked[1:])
        assert pool.allocate(1) == slots


def test_purge_empties_one_scope() -> None:
    pool = BlockPool(4)
    mine, other = chain_of("a", 2), chain_of("a", 2, Scope(b"s" * 16))
    fill(pool, mine)
    fill(pool, other)
    assert pool.purge(Scope(b"s" * 16)) == 2
    pool.check()
    assert pool.match(other, 0.0) == [] and len(pool.match(mine, 0.0)) == 2


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError):
        BlockPool(0)


def test_slots_ahead_of_the_first_dirty_block_are_counted() -> None:
    pool = BlockPool(6, horizon=6)
    assert pool.clean_ahead(4) == 4 and pool.clean_ahead(9) == 6
    fill(pool, chain_of("a", 2), dirty=True)
    assert pool.clean_ahead(3) == 3 and pool.clean_ahead(6) == 4, "four slots were never used"
    held = pool.allocate(4)
    assert pool.clean_ahead(1) == 0
    picked = pool.pick(2, 0.0)
    assert pool.clean_ahead(2) == 0, "a copy still reads them"
    pool.copies_done(picked)
    assert pool.clean_ahead(2) == 2
    pool.free(held)


def test_where_the_only_dirty_block_is_in_use_all_free_slots_are_clean() -> None:
    pool = BlockPool(4)
    chain = chain_of("a", 1)
    pool.confirm(pool.allocate(1), chain, DAY, dirty_since=0.0)
    assert pool.clean_ahead(9) == 3


def test_a_block_that_is_dirty_already_keeps_its_age() -> None:
    dirty, chain = DirtyList(), chain_of("a", 1)
    dirty.add(0, chain, 0, 1.0)
    dirty.add(0, chain, 0, 2.0)
    found = dirty.get(chain[0])
    assert found is not None and found.since == 1.0 and len(dirty) == 1 and dirty.get(chain_of("b", 1)[0]) is None


def test_blocks_of_a_time_that_was_given_up_leave() -> None:
    """What a wrong clock made, or renewed, would outlive its terms."""
    pool = BlockPool(4)
    old, new = chain_of("old", 2), chain_of("new", 2)
    fill(pool, old, life=Lifetime.of(BUILTIN["24h"], 100.0))
    fill(pool, new, life=Lifetime.of(BUILTIN["24h"], 200.0))
    assert pool.drop_made_after(Wall(150.0)) == 2
    assert len(pool.match(old, 100.0)) == 2 and pool.match(new, 200.0) == []
    pool.check()
    assert pool.drop_made_after(Wall(99.0)) == 2 and pool.resident == 0
