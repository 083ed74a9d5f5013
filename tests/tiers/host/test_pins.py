"""Many pins at once do what one by one do: the same slots, lives, counts, and slots that wait for their last pin."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvtier.policies.lru import LRU
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN, Terms
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.pins import Hold
from kvtier.tiers.host.tier import HostTier
from kvtier.times import Wall

BLOCK = 4096
NOW = 1.8e9
KEYS = chain_of(sample_namespace(BLOCK), 48)
TERMS = (BUILTIN["1h"], BUILTIN["24h"], Terms("brief", ttl=5.0, max_age=30.0))

Pin = Callable[[HostTier, Sequence[bytes], float, float], list[Hold]]


def one_by_one(tier: HostTier, keys: Sequence[bytes], wall_s: float, used_s: float) -> list[Hold]:
    holds: list[Hold] = []
    for key in keys:
        slot = tier.pin(key, Wall(wall_s), Wall(used_s))  # type: ignore[arg-type]
        if slot is None:
            break
        holds.append((slot, slot.generation))
    return holds


def at_once(tier: HostTier, keys: Sequence[bytes], wall_s: float, used_s: float) -> list[Hold]:
    return tier.pin_leading(keys, Wall(wall_s), Wall(used_s))  # type: ignore[arg-type]


def filled(seed: int) -> HostTier:
    """Blocks whose stamps are shared by stretches, made and used at several times; some have two."""
    tier, dice = HostTier(Arena(BLOCK, 1, 48 * BLOCK), LRU()), random.Random(seed)
    tier.open()
    life = Lifetime.of(TERMS[0], Wall(NOW))
    for index, key in enumerate(KEYS):
        if index % 6 == 0:
            life = Lifetime.of(dice.choice(TERMS), Wall(NOW - dice.randrange(20)))
        slot = tier.reserve(key, index)
        assert slot is not None and tier.commit(slot, slot.generation, life)
        if dice.random() < 0.1:
            slot.extend(TERMS[1], Wall(NOW))
        if dice.random() < 0.2:
            slot.use(Wall(NOW + dice.randrange(4)))
    return tier


def seen(tier: HostTier, holds: Sequence[Hold]) -> list[object]:
    slots = [tier.index.get(key) for key in KEYS]
    lives = [None if slot is None else (slot.pins, slot.life, slot.expires_at) for slot in slots]
    return [[(slot.number, generation) for slot, generation in holds], lives, tier.pinned, tier.stale_messages]


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_is_pinned_as_its_blocks_are(seed: int) -> None:
    found: list[list[object]] = []
    for pin in (one_by_one, at_once):
        tier, dice, told = filled(seed), random.Random(seed), list[object]()
        held: list[list[Hold]] = []
        for turn in range(12):
            if dice.random() < 0.3:
                tier.drop(dice.choice(KEYS))
            start, now = dice.randrange(4), NOW + 2 * turn + dice.random()
            held.append(pin(tier, KEYS[start : start + dice.randrange(48)], now, now - dice.choice([0.0, 3.0])))
            if dice.random() < 0.5:
                ended = held.pop(dice.randrange(len(held)))
                if pin is at_once:
                    tier.unpin_all(ended)
                else:
                    for slot, generation in ended:
                        tier.unpin(slot, generation)
            told.append(seen(tier, held[-1] if held else []))
            tier.check()
        for ended in held:
            tier.unpin_all(ended)
            tier.unpin_all(ended[:2])  # stale, or another holder's: each counts alike
        told.append((tier.pinned, tier.quarantined))
        found.append(told)
    assert found[0] == found[1]


def test_a_purged_block_ends_what_is_pinned() -> None:
    tier = filled(0)
    slices = tier.refuse_made_after(Wall(NOW - 100))
    assert tier.pin_leading(KEYS, Wall(NOW), Wall(NOW)) == []
    assert sum(slices) == 48
