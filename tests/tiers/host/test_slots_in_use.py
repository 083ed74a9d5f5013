"""G2 with another capacity than its arena's: the coldest leave, what may not leave stays, nothing else changes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvtier.bench.retention.byteless import EmptyArena
from kvtier.identity.keys import scope_of
from kvtier.policies.gapduel import GapDuel
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.host.arena import Arena, available_bytes
from kvtier.tiers.host.tier import HostTier
from kvtier.times import Wall

NS = sample_namespace(64)
NOW = Wall(1.8e9)


def put(tier: HostTier, keys: list, mono_s: float) -> int:
    """How many of a chain's blocks were stored."""
    tier.policy.reference(keys, 0, mono_s)
    for depth, key in enumerate(keys):
        slot = tier.reserve(key, depth)
        if slot is None:
            return depth
        tier.commit(slot, slot.generation)
    return len(keys)


def shrink(tier: HostTier) -> int:
    return sum(tier.in_use.shrink_steps(tier.quota, lambda scope: tier.evict_coldest(scope, NOW)))


def grow(tier: HostTier) -> None:
    part = tier.in_use.unused[tier.in_use.surplus :]
    tier.in_use.take_back(part, len(part))


def opened(slots: int, quota: float = 0.0) -> HostTier:
    tier = HostTier(EmptyArena(slots), GapDuel(slots, refuses=False), quota)
    tier.open()
    return tier


def test_the_coldest_leave_and_the_rest_stays() -> None:
    tier, cold, warm = opened(100), list(chain_of(NS, 40, seed=1)), list(chain_of(NS, 30, seed=2))
    assert put(tier, cold, 1.0) == 40 and put(tier, warm, 2.0) == 30
    tier.resize(50)
    assert tier.capacity == 50 and tier.in_use.surplus == 50
    assert shrink(tier) == 20, "thirty slots were free"
    tier.check()
    assert [tier.prefix(chain, NOW) for chain in (cold, warm)] == [20, 30]
    assert put(tier, list(chain_of(NS, 10, seed=3)), 3.0) == 10, "it goes on, within the capacity"
    assert len(tier.index) == 50 and tier.in_use.surplus == 0
    tier.resize(80)
    grow(tier)
    tier.check()
    assert put(tier, list(chain_of(NS, 30, seed=4)), 4.0) == 30 and len(tier.index) == 80


def test_blocks_that_may_not_leave_stay_until_they_may() -> None:
    tier, keys = opened(10), list(chain_of(NS, 10))
    put(tier, keys, 1.0)
    tier.retain(keys[:2])
    pinned = [slot for key in keys[2:6] if (slot := tier.pin(key, NOW)) is not None]
    tier.resize(3)
    assert shrink(tier) == 4 and tier.in_use.surplus == 3
    tier.check()
    assert put(tier, list(chain_of(NS, 1, seed=2)), 2.0) == 0, "nothing may leave for another one"
    for slot in pinned:
        tier.unpin(slot, slot.generation)
    assert shrink(tier) == 3 and tier.in_use.surplus == 0 and len(tier.index) == 3
    assert tier.prefix(keys, NOW) == 3
    tier.check()


def test_a_slot_that_is_freed_above_the_capacity_is_put_out_of_use_by_a_later_call() -> None:
    tier, keys = opened(4), list(chain_of(NS, 4))
    put(tier, keys, 1.0)
    slot = tier.pin(keys[3], NOW)
    assert slot is not None
    tier.drop(keys[3])
    tier.resize(1)
    assert shrink(tier) == 3 and tier.in_use.surplus == 0, "the quarantined one is the last in use"
    tier.unpin(slot, slot.generation)
    tier.check()
    assert put(tier, list(chain_of(NS, 1, seed=2)), 2.0) == 1


def test_a_scope_keeps_its_share_of_the_new_capacity() -> None:
    tier = opened(40, quota=0.5)
    mine = list(chain_of(NS, 20, scope=scope_of("mine")))
    others = list(chain_of(NS, 4, scope=scope_of("others")))
    assert put(tier, mine, 1.0) == 20 and put(tier, others, 0.5) == 4
    tier.resize(30)
    assert shrink(tier) == 5, "fifteen of thirty"
    tier.check()
    assert (tier.prefix(mine, NOW), tier.prefix(others, NOW)) == (15, 4)


def test_shadows_of_the_policy_follow() -> None:
    policy = GapDuel(100)
    for seed in range(10):
        policy.reference(list(chain_of(NS, 20, seed=seed)), 0, float(seed))
    policy.train()
    assert {shadow.used_blocks for shadow in policy._duel.shadows} == {100}
    policy.resize(50)
    policy.reference(list(chain_of(NS, 20, seed=99)), 0, 99.0)
    policy.train()
    assert {shadow.used_blocks for shadow in policy._duel.shadows} == {50}
    policy._duel.check()


def test_an_arena_is_not_closed_under_a_thread_that_takes_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its file's number may be another file's by then."""
    arena, begun, go_on, real = Arena(4096, 2, 8 * 4096), threading.Event(), threading.Event(), os.posix_fallocate
    arena.open()
    errors: list[OSError] = []

    def slow(fd: int, start: int, length: int) -> None:
        begun.set()
        go_on.wait(10)
        try:
            real(fd, start, length)
        except OSError as error:
            errors.append(error)
            raise

    monkeypatch.setattr(os, "posix_fallocate", slow)
    taking = threading.Thread(target=arena.take_back, args=(range(4),))
    closing = threading.Thread(target=arena.close)
    taking.start()
    assert begun.wait(10)
    closing.start()
    closing.join(0.05)
    go_on.set()
    taking.join(10)
    closing.join(10)
    assert not errors and not closing.is_alive()


def test_memory_that_may_be_page_locked_is_not_given_back_any_more() -> None:
    arena = Arena(4096, 1, 4 * 4096)
    arena.open()
    for slot in range(2):
        arena.pieces(slot)[0][:4] = b"kept"
    arena.give_back([0])
    arena.fds()
    arena.give_back([1])
    assert bytes(arena.pieces(0)[0][:4]) == bytes(4) and bytes(arena.pieces(1)[0][:4]) == b"kept"
    arena.close()


def test_memory_is_not_taken_back_where_the_kernel_would_end_a_process_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = Arena(4096, 2, 8 * 4096)
    arena.open()
    arena.give_back(range(1, 4))
    monkeypatch.setattr("kvtier.tiers.host.arena.available_bytes", lambda: 6 * 2048 - 1)
    assert arena.take_back([1, 2, 3]) == 0
    monkeypatch.setattr("kvtier.tiers.host.arena.available_bytes", lambda: 6 * 4096)
    assert arena.take_back([1, 2, 3]) == 3
    arena.views()  # page-locked: none is given back any more
    monkeypatch.setattr("kvtier.tiers.host.arena.available_bytes", lambda: 0)
    assert arena.take_back([1, 2, 3]) == 3
    arena.close()


def test_a_cgroups_cache_of_files_does_not_count_as_used(tmp_path: Path) -> None:
    """Weights that were just read would leave nothing for G2."""
    free = available_bytes(tmp_path)
    for name, text in (("max", 100 << 20), ("current", 90 << 20), ("stat", f"anon 1\ninactive_file {60 << 20}\n")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert available_bytes(tmp_path) == int((70 << 20) * 0.95) < free
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 70 << 20
