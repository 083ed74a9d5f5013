"""Chains of many runs: what leaves is what leaves of single blocks, wherever chains part and runs end."""

from __future__ import annotations

import random

import pytest

from kvtier.identity.keys import BlockKey
from kvtier.policies import memory, pages, parts, run, runs
from kvtier.policies.policy import make_policy
from kvtier.times import Mono

RUN = 8


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few blocks, named in steps, on pages of a few runs."""
    for module in (memory, run, parts):
        monkeypatch.setattr(module, "RUN_BLOCKS", RUN)
    for module in (memory, runs):
        monkeypatch.setattr(module, "NAMED_AT_ONCE", 3)
    for module in (memory, run):
        monkeypatch.setattr(module, "COMPARED_MAX", RUN // 2)
    monkeypatch.setattr(pages, "PAGE", 2)


def prompt(dice: random.Random) -> list[BlockKey]:
    """Leaves others at the end of a run, a block before or behind it, or anywhere."""
    name, blocks = dice.randrange(2), dice.randrange(1, 4 * RUN)
    ends = [RUN * count + more for count in (1, 2) for more in (-1, 0, 1)]
    forks = {dice.choice([*ends, dice.randrange(1, blocks + 1)]): dice.randrange(3) for _ in range(dice.randrange(3))}
    keys = list[BlockKey]()
    for depth in range(blocks):
        if depth in forks:
            name = hash((name, depth, forks[depth])) & 0xFFFF_FFFF_FFFF
        keys.append(BlockKey(random.Random(name << 16 | depth).randbytes(48)))
    return keys


@pytest.mark.parametrize("seed", range(8))
def test_the_block_that_was_used_least_lately_leaves_the_deepest_of_its_request_first(seed: int) -> None:
    dice, policy = random.Random(seed), make_policy("lru", 1000)
    used, depth_of, resident = dict[BlockKey, int](), dict[BlockKey, int](), set[BlockKey]()
    for now in range(1, 60):
        keys = prompt(dice)
        used.update(dict.fromkeys(keys, now))
        depth_of.update((key, depth) for depth, key in enumerate(keys))
        policy.reference(keys, 0, Mono(now))
        new = [key for key in keys if key not in resident]
        del new[dice.choice([len(new), dice.randrange(len(new) + 1)]) :]  # no room for the rest
        policy.insert_all(new, [depth_of[key] for key in new])
        resident.update(new)
        if resident and dice.random() < 0.3:  # damaged, or purged
            policy.remove(gone := dice.choice(sorted(resident)), depth_of[gone])
            resident.remove(gone)
        policy.check(resident)
        for _ in range(min(len(resident), dice.choice([0, 0, 3, 20]))):
            least = max(resident, key=lambda key: (-used[key], depth_of[key]))
            assert policy.evict((None,), lambda _: True) == [least]
            resident.remove(least)
    policy.check(resident)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_cancelled_pinned_or_dropped_every_block_leaves_once(seed: int) -> None:
    dice, policy = random.Random(seed), make_policy("auto", 100)
    resident, pinned, depth_of, under_way = set[BlockKey](), set[BlockKey](), dict[BlockKey, int](), []
    for now in range(1, 80):
        keys = prompt(dice)
        depth_of.update((key, depth) for depth, key in enumerate(keys))
        under_way.append(policy.reference_steps(keys, 0, Mono(now), stored=dice.random() < 0.3))
        for steps in dice.sample(under_way, min(2, len(under_way))):
            for _ in range(dice.randrange(9)):
                next(steps, None)
        del under_way[: dice.choice([0, 0, 2])]  # cancelled
        new = [key for key in keys if key not in resident][: 100 - len(resident)]
        policy.insert_all(new, [depth_of[key] for key in new])
        resident.update(new)
        for key in dice.sample(sorted(resident), min(4, len(resident))):
            if key in pinned:
                pinned.remove(key)
                policy.resume(key)
            else:
                pinned.add(key)
                policy.suspend(key)
        for key in policy.evict([dice.choice(keys)], lambda key: key not in pinned):
            resident.remove(key)
        for key in dice.sample(sorted(resident), min(dice.choice([0, 5]), len(resident))):
            pinned.discard(key)
            policy.remove(key, depth_of[key])
            resident.remove(key)
        policy.check(resident)
    for key in pinned:
        policy.resume(key)
    while resident:
        gone = policy.evict((None,), lambda _: True)
        assert gone
        resident.difference_update(gone)
        policy.check(resident)
