"""G2: slots change state only as they may, late messages change nothing, and memory is there before it is used."""

from __future__ import annotations

import logging
import mmap
import os
import random

import pytest

from kvtier.checksum import DIGEST_BYTES
from kvtier.errors import ClosedError, ConfigError
from kvtier.policies.gapduel import GapDuel
from kvtier.policies.lru import LRU
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN, Depth, Terms
from kvtier.testing import chain_of, payload_of, sample_namespace
from kvtier.tiers.host.arena import Arena, available_bytes
from kvtier.tiers.host.slot import SlotState
from kvtier.tiers.host.slot_table import MANY
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Miss
from kvtier.times import Wall

BLOCK = 4096
NS = sample_namespace(BLOCK)
NOW = 1.8e9
LIFE = Lifetime.of(BUILTIN["24h"], NOW)
KEYS = chain_of(NS, 8)


def host(slots: int = 4) -> HostTier:
    tier = HostTier(Arena(BLOCK, 1, slots * BLOCK), LRU())
    tier.open()
    return tier


def store(tier: HostTier, index: int) -> None:
    slot = tier.reserve(KEYS[index], index)
    assert slot is not None
    slot.pieces[0][:] = payload_of(KEYS[index], BLOCK)
    assert tier.commit(slot, slot.generation, LIFE)


def test_only_ready_blocks_are_visible() -> None:
    tier = host()
    slot = tier.reserve(KEYS[0], 0)
    assert slot is not None and slot.state is SlotState.FILLING
    assert tier.peek(KEYS[0], NOW) is Miss.PENDING
    assert tier.pin(KEYS[0], NOW) is None
    assert tier.reserve(KEYS[0], 0) is None, "two writers of one block"
    tier.commit(slot, slot.generation, LIFE)
    assert tier.peek(KEYS[0], NOW) is None
    tier.check()


def test_everything_pinned_refuses_and_changes_nothing() -> None:
    tier = host(2)
    store(tier, 0)
    store(tier, 1)
    held = [tier.pin(KEYS[i], NOW) for i in range(2)]
    assert tier.reserve(KEYS[2], 2) is None
    assert tier.reserve(KEYS[2], 2, insist=True) is None
    assert [tier.peek(KEYS[i], NOW) for i in range(3)] == [None, None, Miss.ABSENT]
    assert held[0] is not None
    tier.unpin(held[0], held[0].generation)
    assert tier.reserve(KEYS[2], 2) is not None
    assert tier.peek(KEYS[0], NOW) is Miss.ABSENT
    tier.check()


def test_an_eviction_is_told_with_its_reason() -> None:
    tier = host(2)
    lost: list[tuple[bytes, Miss]] = []
    tier.on_lost = lambda key, why: lost.append((key, why))
    store(tier, 0)
    store(tier, 1)
    assert tier.reserve(KEYS[2], 2, wall_s=NOW) is not None
    assert tier.reserve(KEYS[3], 3, wall_s=NOW + 90_000) is not None
    assert lost == [(KEYS[0], Miss.EVICTED), (KEYS[1], Miss.EXPIRED)]


def test_a_late_unpin_leaves_the_next_block_s_pin_alone() -> None:
    tier = host(1)
    store(tier, 0)
    first = tier.pin(KEYS[0], NOW)
    assert first is not None
    stale = first.generation
    tier.unpin(first, stale)
    tier.drop(KEYS[0])
    store(tier, 1)
    held = tier.pin(KEYS[1], NOW)
    assert held == first and held.generation != stale
    tier.unpin(held, stale)
    assert (held.pins, tier.stale_messages) == (1, 1)
    assert tier.reserve(KEYS[2], 2, insist=True) is None, "a pinned block was evicted"


def test_a_use_does_not_renew_a_max_age() -> None:
    tier = host(1)
    slot = tier.reserve(KEYS[0], 0)
    assert slot is not None and tier.commit(slot, slot.generation, Lifetime.of(Terms("t", ttl=100, max_age=150), NOW))
    for at in (90, 149):
        assert tier.pin(KEYS[0], NOW + at, NOW + at) is not None
    assert tier.peek(KEYS[0], NOW + 151) is Miss.EXPIRED


@pytest.mark.parametrize("together", [1, MANY])
def test_a_request_that_stores_a_block_again_restarts_its_max_age(together: int) -> None:
    """Terms are joined, not kept: the block lives as long as one that this request had computed."""
    table, terms = host(together).index.table, Terms("t", ttl=1e4, max_age=150)
    life = Lifetime.of(terms, NOW)
    table.stamp_all(range(together), 0, life, life.ends(Depth.G2))
    table.extend_all(range(together), terms, Wall(NOW + 100))
    assert {table.ends(number) for number in range(together)} == {NOW + 250}


@pytest.mark.parametrize("together", [2, MANY])
def test_longer_terms_reach_every_block_of_a_chain_that_lacks_them(together: int) -> None:
    table, short, long = host(together).index.table, Terms("s", ttl=10), Terms("l", ttl=1e4)
    for number in range(together):
        table.stamp(number, life := Lifetime.of(short if number % 2 else long, NOW), life.ends(Depth.G2))
    assert table.extend_all(range(together), long, Wall(NOW + 5)) == list(range(1, together, 2))
    assert {table.ends(number) for number in range(together)} == {NOW + 5 + 1e4}


@pytest.mark.parametrize("seed", range(8))
def test_terms_are_added_to_many_blocks_as_to_each_of_them(seed: int) -> None:
    """Some were stored together, some were used since, some have terms of several requests."""
    dice = random.Random(seed)
    known = [Terms("a", ttl=100), Terms("b", ttl=1e4, max_age=1e5), Terms("c", ttl=50, max_age=60)]
    one, many = host(40).index.table, host(40).index.table
    lives = [Lifetime.of(dice.choice(known), Wall(NOW + dice.choice((0, 3)))) for _ in range(4)]
    lives.append(lives[0].add(known[1], Wall(NOW + 4)))
    for number in range(40):
        life, used = dice.choice(lives), dice.choice((None, None, Wall(NOW + 7)))
        for table in (one, many):
            table.stamp(number, life, life.ends(Depth.G2))
            if used is not None:
                table.use(number, used)
    numbers = sorted(dice.sample(range(40), 30))
    for _ in range(3):
        terms, now = dice.choice(known), Wall(NOW + dice.choice((8, 9, 20)))
        assert many.extend_all(numbers, terms, now) == [at for at in numbers if one.extend(at, terms, now)]
        assert [many.life(at) for at in range(40)] == [one.life(at) for at in range(40)]
        assert [many.ends(at) for at in range(40)] == [one.ends(at) for at in range(40)]
        assert many.mixed == one.mixed and many.expires == one.expires


def test_a_slot_that_was_freed_has_no_digest_of_the_block_before() -> None:
    tier = host(1)
    slot = tier.reserve(KEYS[0], 0)
    assert slot is not None and tier.commit(slot, slot.generation, LIFE, b"d" * DIGEST_BYTES)
    assert slot.digest == b"d" * DIGEST_BYTES
    tier.drop(KEYS[0])
    assert tier.reserve(KEYS[1], 1) == slot and slot.digest is None


def test_a_claimed_block_is_not_evicted() -> None:
    tier = host(2)
    store(tier, 0)
    store(tier, 1)
    assert tier.reserve(KEYS[2], 2, set(KEYS[:2]).__contains__) is None
    assert tier.reserve(KEYS[2], 2, set(KEYS[:2]).__contains__, insist=True) is None
    assert tier.reserve(KEYS[2], 2, {KEYS[0]}.__contains__, insist=True) is not None
    assert [tier.peek(KEYS[i], NOW) for i in range(2)] == [None, Miss.ABSENT]
    tier.check()


def test_a_pinned_block_that_is_dropped_keeps_its_bytes_until_the_last_pin() -> None:
    tier = host(2)
    store(tier, 0)
    first, second = tier.pin(KEYS[0], NOW), tier.pin(KEYS[0], NOW)
    assert first is not None and first == second
    generation = first.generation
    assert tier.drop(KEYS[0])
    assert (tier.peek(KEYS[0], NOW), first.state, tier.quarantined) == (Miss.ABSENT, SlotState.QUARANTINED, 1)
    store(tier, 1)
    assert tier.reserve(KEYS[2], 2) is not None, "the other slots go on"
    assert bytes(first.pieces[0]) == payload_of(KEYS[0], BLOCK)
    tier.unpin(first, generation)
    tier.check()
    tier.unpin(first, generation)
    assert (first.state, tier.quarantined) == (SlotState.FREE, 0)
    tier.check()


def test_an_aborted_fill_in_flight_is_quarantined_until_acknowledged() -> None:
    tier = host(1)
    slot = tier.reserve(KEYS[0], 0)
    assert slot is not None
    generation = slot.generation
    tier.abort(slot, generation, in_flight=True)
    assert tier.reserve(KEYS[1], 1) is None, "memory under a transfer was handed out"
    tier.unpin(slot, generation)
    assert tier.reserve(KEYS[1], 1) == slot
    tier.check()


def test_stale_messages_are_counted_and_refused() -> None:
    """Commit, abort and unpin of an earlier tenant of the slot."""
    tier = host(1)
    slot = tier.reserve(KEYS[0], 0)
    assert slot is not None
    old = slot.generation
    tier.abort(slot, old)
    assert tier.reserve(KEYS[1], 1) == slot
    assert not tier.commit(slot, old, LIFE)
    tier.abort(slot, old)
    tier.unpin(slot, old)
    assert (tier.stale_messages, slot.state, slot.key) == (3, SlotState.FILLING, KEYS[1])
    assert tier.commit(slot, slot.generation, LIFE)
    tier.check()


def test_expired_blocks_are_not_found() -> None:
    tier = host()
    store(tier, 0)
    later = NOW + 86_401
    assert (tier.peek(KEYS[0], later), tier.pin(KEYS[0], later), tier.prefix(KEYS, later)) == (Miss.EXPIRED, None, 0)


def test_slots_are_aligned_apart_and_shared_by_file_descriptor() -> None:
    arena = Arena(6000, 2, 64 * 1024)  # two ranks of 3,000 bytes
    arena.open()
    assert (arena.piece_bytes, arena.slot_bytes, arena.slots) == (3000, 4096, 8)
    for slot in range(arena.slots):
        for rank, piece in enumerate(arena.pieces(slot)):
            piece[:] = bytes([16 * rank + slot]) * 3000
    for rank, fd in enumerate(arena.fds()):
        with mmap.mmap(os.dup(fd), arena.slots * arena.slot_bytes) as other:
            for slot in range(arena.slots):
                start = slot * arena.slot_bytes
                assert other[start : start + 3000] == bytes([16 * rank + slot]) * 3000
    arena.close()


def test_short_memory_makes_a_smaller_arena_or_a_clear_error(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(BLOCK, 1, 100 * BLOCK)
    with caplog.at_level(logging.WARNING):
        arena.open(free=lambda: 10 * BLOCK)
    assert arena.slots == 10
    assert "tiers.g2.capacity" in caplog.text
    arena.close()
    with pytest.raises(ConfigError, match=r"tiers\.g2\.capacity"):
        Arena(BLOCK, 1, 100 * BLOCK).open(free=lambda: BLOCK - 1)
    assert available_bytes() > 0


def test_an_absurd_capacity_is_no_crash() -> None:
    """More than the machine has: never a SIGBUS at first touch."""
    arena = Arena(1 << 20, 1, 1 << 50)
    arena.open(free=lambda: min(available_bytes(), 64 << 20))
    assert arena.slots == 64
    arena.pieces(63)[0][-1] = 1
    arena.close()


def test_slots_that_were_being_filled_when_it_closed_are_nobodys() -> None:
    tier = host()
    slots = [tier.reserve(KEYS[index], index) for index in range(3)]
    generations = [slot.generation for slot in slots if slot is not None]
    tier.vacate()
    tier.arena.close()
    for slot, generation, end in zip(slots, generations, ("commit", "abort", "unpin"), strict=True):
        assert not getattr(tier, end)(slot, generation)
    assert tier.stale_messages == 3
    tier.check()


def test_what_was_retained_when_it_closed_is_nobodys() -> None:
    """A put that guarantees blocks may end after its cache."""
    tier = host()
    store(tier, 0)
    tier.retain([KEYS[0]])
    tier.vacate()
    tier.arena.close()
    tier.release_retained([KEYS[0]])
    assert not tier.retained and not tier.drop(KEYS[0])


def test_a_slot_whose_arena_is_being_closed_by_another_thread_is_closed() -> None:
    tier = host()
    slot = tier.reserve(KEYS[0], 0)
    assert slot is not None
    tier.arena._views[0].release()  # the first that `close` does
    with pytest.raises(ClosedError):
        _ = slot.pieces


@pytest.mark.parametrize("policy", [LRU, GapDuel])
def test_calls_that_were_under_way_when_it_closed_find_nothing(policy: type[LRU] | type[GapDuel]) -> None:
    tier = HostTier(Arena(BLOCK, 1, 4 * BLOCK), policy(4))
    tier.open()
    for _ in range(2):
        tier.policy.reference(KEYS, 4, 1.0)
        for index in range(4):
            if tier.peek(KEYS[index], NOW) is Miss.ABSENT:
                store(tier, index)
    tier.vacate()
    tier.arena.close()
    tier.policy.reference(KEYS, 4, 2.0)  # as a get that pinned them before
    tier.policy.chain_stored(KEYS, 4, 2.0)
    assert tier.reserve(KEYS[5], 5, insist=True) is None and tier.pin(KEYS[0], NOW) is None
    tier.policy.train()
    tier.check()


@pytest.mark.parametrize("policy", [LRU, GapDuel])
def test_a_reference_goes_on_over_a_close(policy: type[LRU] | type[GapDuel]) -> None:
    """A get tells the policy of its chain in steps; blocks of several priorities are ranked by them."""
    tier = HostTier(Arena(BLOCK, 1, 4 * BLOCK), policy(4))
    tier.open()
    tier.policy.reference(KEYS[:2], 0, 1.0)
    for index in range(2):
        store(tier, index)
    slot = tier.pin(KEYS[1], NOW)
    assert slot is not None
    tier.raise_priority(slot, 80)
    steps = tier.policy.reference_steps(KEYS[:3], 2, 2.0)
    tier.vacate()
    tier.arena.close()
    assert list(steps) == []
    tier.check()
