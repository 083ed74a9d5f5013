"""Blocks that are reserved, published and evicted together are the same ones as one by one. When they end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvtier.bench.retention.byteless import EmptyArena
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.policies.policy import make_policy
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN, Depth, Terms
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.host import slot_table
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Miss
from kvtier.times import Mono, Wall

NS = sample_namespace(4096)
NOW = Wall(1.8e9)
LIFE = Lifetime.of(BUILTIN["24h"], NOW)
CHAINS = [chain_of(NS, 40, seed, scope_of("ab"[seed % 2])) for seed in range(16)]


def opened(policy: str, quota: float = 0.0) -> HostTier:
    tier = HostTier(EmptyArena(200), make_policy(policy, 200), quota)
    tier.open()
    return tier


def stored(tier: HostTier, chain: Sequence[BlockKey], priority: int, insist: bool, width: int) -> int:
    """Store a chain, `width` blocks reserved at a time, 16 published; the depth reached."""
    table, depth, filling, room = tier.index.table, 0, list[Slot](), True
    while depth < len(chain) and room:
        keys = chain[depth : min(depth // 16 * 16 + 16, depth + width)]
        found, numbers = tier.find_leading(keys, NOW), list[int]()
        if not found:
            numbers, room = tier.reserve_leading(keys, depth, None, insist=insist, priority=priority, wall_s=NOW)
            table.stamp_all(numbers, 0, LIFE, LIFE.ends(Depth.G2))
        filling += [Slot(number, table) for number in numbers]
        depth += len(found) + len(numbers)
        if depth % 16 == 0 or depth == len(chain) or not room:
            assert tier.commit_all([(slot, slot.generation) for slot in filling]) == filling
            filling = []
    return depth


@pytest.mark.parametrize("quota", [0.0, 0.4])
@pytest.mark.parametrize("policy", ["lru", "auto"])
@pytest.mark.parametrize("seed", range(2))
def test_blocks_stored_together_evict_what_they_would_one_by_one(policy: str, seed: int, quota: float) -> None:
    seen: list[list[object]] = []
    for width in (1, 16):
        tier, dice, told = opened(policy, quota), random.Random(seed), list[object]()
        lost: list[tuple[BlockKey, Miss]] = []
        tier.on_lost = lambda key, why, lost=lost: lost.append((key, why))  # type: ignore[misc]
        held: list[list[Slot]] = []
        for turn in range(100):
            chain = CHAINS[dice.randrange(16)][: dice.randrange(1, 40)]
            tier.policy.reference(chain, tier.prefix(chain, NOW), Mono(10 * turn))
            priority = dice.choice([50] * 9 + [10, 90]) if seed % 2 else 50
            told.append(stored(tier, chain, priority, dice.random() < 0.5, width))
            if dice.random() < 0.3:
                pinned = (tier.pin(key, NOW) for key in chain[-3:])
                held.append([slot for slot in pinned if slot is not None])
            if held and dice.random() < 0.3:
                tier.unpin_all((slot, slot.generation) for slot in held.pop(0))
            if dice.random() < 0.1:
                tier.drop(dice.choice(chain))
            told.append(list(lost))
        tier.check()
        told.append((set(tier.index), tier.evictions, tier.pinned, tier.stale_messages))
        seen.append(told)
    assert seen[0] == seen[1]


def test_a_key_that_is_named_twice_has_one_slot() -> None:
    tier = opened("lru")
    keys = [*CHAINS[0][:5], *CHAINS[0][:5]]
    numbers, room = tier.reserve_leading(keys, 0, None, insist=False, priority=50, wall_s=NOW)
    assert len(numbers) == 5 and room
    assert tier.reserve_leading(keys[5:], 5, None, insist=False, priority=50, wall_s=NOW) == ([], True)
    tier.check()


@pytest.mark.parametrize("blocks", [4, 40])
def test_a_use_puts_off_the_end(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the end is looked for block by block or at once."""
    monkeypatch.setattr(slot_table, "MANY", 16)
    tier, chain, life = opened("lru"), CHAINS[0][:blocks], Lifetime.of(Terms("minute", ttl=60.0), NOW)
    for depth, key in enumerate(chain):
        slot = tier.reserve(key, depth)
        assert slot is not None and tier.commit(slot, slot.generation, life)
    tier.unpin_all(tier.pin_leading(chain, Wall(NOW + 50), Wall(NOW + 50)))
    tier.unpin_all(tier.pin_leading(chain[:2], Wall(NOW + 90), Wall(NOW + 90)))
    assert [tier.prefix(chain, Wall(NOW + seconds)) for seconds in (60, 100, 110)] == [blocks] * 3
    assert [tier.prefix(chain, Wall(NOW + seconds)) for seconds in (111, 149, 151, 111)] == [2, 2, 0, 2]
    assert tier.peek(chain[2], Wall(NOW + 111)) is Miss.EXPIRED and tier.peek(chain[1], Wall(NOW + 111)) is None
    assert tier.index[chain[1]].expires_at == NOW + 150
    tier.check()


def test_a_generation_comes_round() -> None:
    tier = opened("lru")
    table = tier.index.table
    table.generations[0] = 2**32 - 1
    slot = tier.reserve(CHAINS[0][0], 0)
    assert slot is not None and slot.number == 0 and tier.commit(slot, 2**32 - 1, LIFE)
    tier.drop(CHAINS[0][0])
    assert table.generations[0] == 0 and not tier.commit(slot, 2**32 - 1, LIFE)


@pytest.mark.parametrize("seed", range(3))
def test_lives_are_made_longer_together_as_one_by_one(seed: int) -> None:
    dice, tier = random.Random(seed), opened("lru")
    assert stored(tier, CHAINS[0], 50, insist=True, width=16) == 40
    table, numbers = tier.index.table, [tier.index[key].number for key in CHAINS[0]]
    terms = [
        Terms("a", ttl=60),
        Terms("b", ttl=None, max_age=30),
        Terms("c", ttl=5, ceiling=Depth.G2),
        Terms("d", ttl=9e3),
    ]
    lives = [Lifetime.of(one, NOW) for one in terms]
    lives += [lives[0].add(terms[1], NOW), lives[0].used(Wall(NOW + 3)), Lifetime(NOW)]
    untils = [Wall(NOW + seconds) for seconds in (-5, 40, 5000)]
    given = {number: dice.choice(untils) for number in numbers}
    expected = {}
    for number in numbers:
        life = dice.choice(lives)
        table.stamp(number, life, life.ends(Depth.G2))
        ceiling = life.ceiling(Wall(NOW + 10))
        expected[number] = life if ceiling is None else life.extend_until(given[number], ceiling, Wall(NOW + 10))
    table.extend_until(given, Wall(NOW + 10))
    assert {number: table.life(number) for number in numbers} == expected
    assert all(table.expires[number] == expected[number].ends(Depth.G2) for number in numbers)
