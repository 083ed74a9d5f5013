"""No table that grows under the lock is large: one of a million entries that is moved stops every thread for 30 ms."""

from __future__ import annotations

import gc
import sys
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from unittest.mock import Mock

import pytest

from kvtier.bench.retention.byteless import EmptyArena
from kvtier.identity.keys import BlockKey
from kvtier.manager.accounts import LOSSES_MAX, Losses
from kvtier.manager.admission import Admission
from kvtier.manager.claims import Claims
from kvtier.manager.housekeeping import _Uses
from kvtier.manager.outcomes import Outcomes
from kvtier.manager.write_behind import ChainBatch, QueueLimits, WriteBehind
from kvtier.policies.lru import LRU
from kvtier.policies.policy import POLICIES, make_policy
from kvtier.retention.guarantees import Guarantees
from kvtier.retention.pins import Pins
from kvtier.testing import MemoryTier, VirtualClock, chain_of, sample_namespace
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Miss
from kvtier.tiers.rate_limiter import TokenBucket
from kvtier.times import Mono, Wall

NS = sample_namespace(64)
LARGE_BYTES = 128 * 1024
"""A dictionary of some 3,000 entries: it is moved in a tenth of a millisecond."""


def largest_dict(root: object, kind: type = dict) -> int:
    """Bytes of the largest dictionary that is reached from an object, without those of modules and types."""
    seen, left, most = {id(root)}, [root], 0
    while left:
        one = left.pop()
        if isinstance(one, kind):
            most = max(most, sys.getsizeof(one))
        for found in gc.get_referents(one):
            if id(found) in seen or isinstance(
                found, ModuleType | type | FunctionType | BuiltinFunctionType | MethodType | bytes | int
            ):
                continue
            seen.add(id(found))
            left.append(found)
    return most


def test_reasons_are_kept_in_parts() -> None:
    losses = Losses()
    for number in range(LOSSES_MAX + LOSSES_MAX // 4):
        losses.record(BlockKey(number.to_bytes(48, "big")), Miss.EVICTED)
    assert LOSSES_MAX * 0.8 <= len(losses) <= LOSSES_MAX
    assert largest_dict(losses) <= LARGE_BYTES


def test_blocks_on_their_way_in_are_kept_in_parts() -> None:
    """A long chain comes from below: all of it has slots before the first is read."""
    tier, keys = HostTier(EmptyArena(5_000), LRU(5_000)), list(chain_of(NS, 5_000))
    tier.open()
    numbers, room = tier.reserve_leading(keys, 0, None, insist=True, priority=50, wall_s=0.0)
    assert room and len(numbers) == len(keys) == len(tier.filling()) and tier.busy()
    assert largest_dict(tier._filling) <= LARGE_BYTES


def test_what_is_protected_is_kept_in_parts() -> None:
    """A thousand pins of a hundred blocks: each table of their blocks was one dictionary."""
    keys, pins, guarantees, claims = list(chain_of(NS, 5_000)), Pins(5_000), Guarantees(5_000, 1), Claims(Lock())
    pins.create("all", keys, Wall(0), 600.0)
    claims.add(keys)
    for number, key in enumerate(keys):
        guarantees.reserve([key], Wall(600.0 + number % 100))
    for kept in (pins, guarantees, claims):
        assert largest_dict(kept) <= LARGE_BYTES, kept
    assert len(pins) == len(guarantees) == 5_000
    claims.remove(keys)
    assert not any(key in claims for key in keys) and len(pins.delete("all")) == 5_000 and not len(pins)


def test_blocks_that_are_guaranteed_until_one_time_are_kept_in_parts() -> None:
    """A long chain: those to be looked at at one time were one table."""
    keys, guarantees = list(chain_of(NS, 5_000)), Guarantees(5_000, 1)
    guarantees.reserve(keys, Wall(600.0))
    guarantees.check()
    assert len(guarantees) == 5_000 and largest_dict(guarantees) <= LARGE_BYTES
    assert guarantees.expire(Wall(601.0)) == keys
    guarantees.check()


def test_requests_for_blocks_are_counted_in_parts() -> None:
    """Where a block is written below G2 only when it is wanted again: a quarter of a million is remembered."""
    admission, keys = Admission(threshold=2), list(chain_of(NS, 5_000))
    admission.want(keys)
    assert not any(admission.admits(keys, index) for index in range(5_000))
    admission.want(keys)
    assert all(admission.admits(keys, index) for index in range(5_000))
    assert largest_dict(admission) <= LARGE_BYTES


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_runs_are_kept_in_parts(name: str) -> None:
    """Many short prompts: their runs were in one table by age, one by rank, and one per shadow cache."""
    policy, prompts = make_policy(name, 8_000), [list(chain_of(NS, 1, seed=seed)) for seed in range(6_000)]
    for number, chain in enumerate(prompts):
        policy.reference(chain, 0, Mono(number))
        policy.insert(chain[0])
    policy.train()
    assert largest_dict(policy) <= LARGE_BYTES
    policy.check({chain[0] for chain in prompts})


def test_blocks_on_their_way_down_are_kept_in_parts() -> None:
    """Half of G2 may wait for a slow tier."""
    clock, keys = VirtualClock(), list(chain_of(NS, 5_000))
    tier = MemoryTier(NS, clock)
    answers = {"finished": Mock(), "position": Mock(), "flush_uses": Mock()}
    rate = TokenBucket(clock, 0.0, 0.0)
    queue = WriteBehind(tier, clock, QueueLimits(5_000), lock=Lock(), rate=rate, **answers)
    for first in range(0, 5_000, 100):
        batch = ChainBatch(keys, tuple(range(first, first + 100)), (Mock(),) * 100)
        assert queue.enqueue(batch) == 100
    assert queue.pending() == 5_000 and all(map(queue.has, keys)) and not queue.space()
    assert largest_dict(queue._names) <= LARGE_BYTES


def test_retained_blocks_are_kept_in_parts() -> None:
    tier, keys = HostTier(EmptyArena(5_000), LRU(5_000)), list(chain_of(NS, 5_000))
    tier.open()
    numbers, _ = tier.reserve_leading(keys, 0, None, insist=True, priority=50, wall_s=Wall(0))
    tier.policy.reference(keys, 0, Mono(0))
    slots = [Slot(number, tier._table) for number in numbers]
    assert len(tier.commit_all([(slot, slot.generation) for slot in slots])) == 5_000
    tier.retain(keys)
    assert len(tier.retained) == 5_000 and largest_dict(tier, set) <= LARGE_BYTES
    tier.check()
    tier.release_retained(keys)
    assert not tier.retained
    tier.check()


def test_uses_of_a_slice_are_noted_once_and_passed_on_from_its_end() -> None:
    uses, keys = _Uses(), list(chain_of(NS, 10))
    uses.add(keys[:4], Wall(1.0))
    uses.add(keys[4:], Wall(1.0))
    uses.add(keys[:4], Wall(3.0))  # the chain's first slice again
    uses.add(keys[:4], Wall(2.0))  # by a thread that has read the clock earlier
    uses.add(keys[2:4], Wall(4.0))
    assert uses.blocks == 12
    assert uses.take(3) == {4.0: [keys[3], keys[2]], 3.0: [keys[3]]} and uses.blocks == 9
    assert uses.take(4) == {3.0: keys[2::-1], 1.0: [keys[9]]} and uses.blocks == 5
    assert uses.take(100) == {1.0: keys[8:3:-1]} and uses.blocks == 0


def test_outcomes_of_loads_are_kept_in_parts() -> None:
    """A prompt of 100,000 blocks comes from below."""
    tier, keys, outcomes = HostTier(EmptyArena(5_000), LRU(5_000)), list(chain_of(NS, 5_000)), Outcomes()
    tier.open()
    numbers, _ = tier.reserve_leading(keys, 0, None, insist=True, priority=50, wall_s=Wall(0))
    outcomes.update((depth, Slot(number, tier._table)) for depth, number in enumerate(numbers))
    assert largest_dict(outcomes._parts) <= LARGE_BYTES and len(outcomes) == 5_000
    outcomes.update(dict.fromkeys(range(0, 5_000, 2), Miss.LATE))
    del outcomes[1]
    assert (
        outcomes.get(0) is Miss.LATE and outcomes.get(1) is None and outcomes.get(9_999, Miss.EVICTED) is Miss.EVICTED
    )
    assert [slot.index for slot in outcomes.pinned()] == list(range(4_999, 1, -2))
    assert set(outcomes) == {0, *range(2, 5_000)}
    outcomes.forget(range(1_000, 3_000))
    assert set(outcomes) == {0, *range(2, 1_000), *range(3_000, 5_000)} and len(outcomes._parts) == 4
    outcomes.forget([*range(2, 1_000), 0])
    assert len(outcomes) == 2_000 and outcomes.get(0) is None and len(outcomes._parts) == 3
