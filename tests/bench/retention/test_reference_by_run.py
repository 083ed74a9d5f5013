"""The benchmark's reference by runs evicts block for block what one block per call evicts."""

from __future__ import annotations

import random

import pytest

from kvtier.bench.retention.simulate import _any, _reference
from kvtier.policies.gapduel import GapDuel
from kvtier.policies.lru import LRU
from kvtier.policies.policy import Policy
from kvtier.times import Mono


def one_per_call(policy: Policy, chain: list[bytes], hit: int, now: Mono, resident: set[bytes], capacity: int) -> None:
    policy.reference(chain, hit, now)
    for key in chain[hit:]:
        if key in resident:
            continue
        if len(resident) >= capacity:
            victim = policy.victim(key, _any)
            if victim is None:
                break
            policy.remove(victim)
            resident.remove(victim)
        policy.insert(key)
        resident.add(key)


@pytest.mark.parametrize("kind", [LRU, GapDuel])
@pytest.mark.parametrize("seed", range(10))
def test_by_run_equals_one_per_call(kind: type[LRU] | type[GapDuel], seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.choice([1, 7, 40, 200])
    policies, residents = (kind(capacity), kind(capacity)), (set[bytes](), set[bytes]())
    for turn in range(400):
        user, length = draw.randrange(12), draw.randrange(1, 90)
        chain = [b"%047d" % (depth if depth < 5 else 1000 * user + depth) + bytes([user]) for depth in range(length)]
        for policy, resident, play in zip(policies, residents, (one_per_call, _reference), strict=True):
            hit = next((depth for depth, key in enumerate(chain) if key not in resident), length)
            play(policy, chain, hit, Mono(float(turn)), resident, capacity)
            policy.train()
        assert residents[0] == residents[1], turn
    for policy, resident in zip(policies, residents, strict=True):
        policy.check(resident)
