"""Many pins at once do what one by one do: the same slots, lives, counts, and slots that wait for their last pin."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvtier.policies.lru import LRU
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN, Terms
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.host import pins, slot_table
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.pins import Hold, Holds
from kvtier.tiers.host.tier import HostTier
from kvtier.times import Wall

BLOCK = 4096
NOW = 1.8e9
EARLY = Wall(NOW - 30)  # no block has expired
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


@pytest.mark.parametrize("many", [1, 64])
@pytest.mark.parametrize("seed", range(20))
def test_a_chain_is_pinned_as_its_blocks_are(seed: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By columns and one by one."""
    for module in (pins, slot_table):
        monkeypatch.setattr(module, "MANY", many)
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


@pytest.mark.parametrize("many", [1, 64])
def test_a_block_that_a_chain_names_twice_has_two_pins(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pins, slot_table):
        monkeypatch.setattr(module, "MANY", many)
    tier = filled(0)
    holds = tier.pin_leading([*KEYS[:5], *KEYS[:5]], EARLY, EARLY)
    assert (len(holds), tier.pinned, tier.index[KEYS[3]].pins) == (10, 5, 2)
    tier.unpin_all(holds)
    tier.unpin_all(holds)
    assert (tier.pinned, tier.stale_messages) == (0, 10)


def test_holds_are_a_sequence_of_slots_with_their_generations() -> None:
    tier = filled(0)
    parts = [tier.pin_leading(KEYS[first : first + 16], EARLY, EARLY) for first in (0, 16, 32)]
    holds, slots = Holds.joined(parts), [tier.index[key] for key in KEYS]
    assert list(holds) == [(slot, slot.generation) for slot in slots] == [holds[at] for at in range(48)]
    assert list(holds[40:8:-3]) == list(holds)[40:8:-3]
    assert Holds.joined(parts[:1]) is parts[0] and not Holds.joined([])


def test_pins_are_void_once_the_tier_is_closed() -> None:
    tier = filled(0)
    holds = tier.pin_leading(KEYS, EARLY, EARLY)
    tier.vacate()
    tier.arena.close()
    tier.unpin_all(holds)
    tier.unpin_all(list(holds))
    assert (tier.pinned, tier.stale_messages) == (0, 96)


def test_a_purged_block_ends_what_is_pinned() -> None:
    tier = filled(0)
    slices = tier.refuse_made_after(Wall(NOW - 100))
    assert not tier.pin_leading(KEYS, Wall(NOW), Wall(NOW))
    assert sum(slices) == 48
