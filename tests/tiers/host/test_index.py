"""The index is a mapping, and none of its parts is large."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import pytest

from kvtier.bench.retention.byteless import EmptyArena
from kvtier.identity.keys import KEY_PARTS, BlockKey
from kvtier.policies.policy import make_policy
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.index import SlotIndex
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.slot_table import SlotTable
from kvtier.tiers.host.tier import HostTier
from kvtier.times import Mono, Wall

KEYS = chain_of(sample_namespace(4096), 5000)


def filled() -> SlotIndex:
    index = SlotIndex(SlotTable(Arena(4096, 1, 5000 * 4096), 5000))
    for number, key in enumerate(KEYS):
        index[key] = Slot(number, index.table)
    return index


def test_it_is_a_mapping() -> None:
    index = filled()
    assert len(index) == len(KEYS) and set(index) == set(KEYS) == index.keys()
    assert [index[key].number for key in KEYS] == list(range(5000)) == sorted(slot.number for slot in index.values())
    assert KEYS[7] in index and index.get(KEYS[7]) == index[KEYS[7]] != index[KEYS[8]]
    assert index.pop(KEYS[7]).number == 7 and index.pop(KEYS[7], None) is None
    assert KEYS[7] not in index and index.get(KEYS[7]) is None and len(index) == 4999
    with pytest.raises(KeyError):
        index[KEYS[7]]
    del index[KEYS[8]]
    assert KEYS[8] not in index


def test_it_grows_in_small_parts() -> None:
    """A dictionary moves all of itself when it grows."""
    index = filled()
    largest = max(map(len, index.parts))
    assert len(index.parts) == KEY_PARTS and largest < 4 * len(KEYS) / KEY_PARTS
    assert max(map(sys.getsizeof, index.parts)) < sys.getsizeof(dict.fromkeys(KEYS)) / 50


def test_a_slot_s_memory_is_its_place_in_the_arena() -> None:
    arena = Arena(64, 2, 4 * 2 * 4096)
    arena.open()
    try:
        slot = Slot(3, SlotTable(arena, 4))
        for rank, piece in enumerate(slot.pieces):
            piece[:] = bytes([rank + 1]) * 32
        assert [bytes(piece) for piece in slot.pieces] == [bytes([1]) * 32, bytes([2]) * 32]
        assert [bytes(piece) for piece in arena.pieces(3)] == [bytes(piece) for piece in slot.pieces]
    finally:
        arena.close()


def looked_up(index: SlotIndex, keys: Sequence[BlockKey]) -> list[int]:
    """`SlotIndex.leading` one by one, where none has expired."""
    numbers = list[int]()
    for key in keys:
        if (slot := index.get(key)) is None:
            break
        numbers.append(slot.number)
    return numbers


def scattered(dice: random.Random) -> tuple[HostTier, list[list[BlockKey]]]:
    """Chains in stretches of neighbouring slots of all lengths. Some blocks have left a slot that somebody still reads,
    others are still being filled."""
    tier = HostTier(EmptyArena(2000), make_policy("lru", 2000))
    tier.open()
    chains = [chain_of(sample_namespace(4096), 300, seed) for seed in range(6)]
    depths, table, free = [0] * len(chains), tier.index.table, list(tier._free)
    for first in range(0, 2000, 250):
        free[first : first + 250] = free[first : first + 250][:: dice.choice((1, -1))]
    tier._free.clear()
    tier._free.extend(free)
    while min(depths) < 300:
        which, blocks = dice.randrange(len(chains)), dice.choice((1, 2, 7, 8, 9, 63, 64, 65, 130, 300))
        keys = chains[which][depths[which] : depths[which] + blocks]
        numbers, _ = tier.reserve_leading(keys, depths[which], None, insist=False, priority=50, wall_s=Wall(1))
        depths[which] += len(numbers)
        filled = [(Slot(number, table), table.generations[number]) for number in numbers]
        if dice.random() < 0.1 and filled:
            filled.pop(dice.randrange(len(filled)))
        tier.commit_all(filled)
    for chain in chains:
        for key in dice.sample(chain, dice.choice((0, 1, 1, 5))):
            if (pinned := tier.pin(key, Wall(1))) is not None and tier.drop(key) and dice.random() < 0.7:
                again = tier.reserve(key, pinned.index, wall_s=Wall(1))
                assert again is not None and again.number != pinned.number, "its old slot is still read"
                tier.commit(again, again.generation)
    tier.check()
    return tier, chains


@pytest.mark.parametrize("seed", range(20))
def test_blocks_in_neighbouring_slots_are_those_that_would_be_found_one_by_one(seed: int) -> None:
    dice = random.Random(seed)
    tier, chains = scattered(dice)
    strangers = chain_of(sample_namespace(4096), 300, 99)
    for chain in chains:
        for _ in range(20):
            first = dice.randrange(300)
            asked = chain[first : first + dice.choice((1, 2, 8, 64, 65, 300))]
            if dice.random() < 0.5:
                asked[dice.randrange(len(asked))] = dice.choice(dice.choice([*chains, strangers]))
            for keys in (asked, tuple(asked), [*asked, *asked], chain[first:] + chains[0]):
                assert tier.index.leading(keys, Wall(1), None) == looked_up(tier.index, keys)
    assert tier.index.leading([], Wall(1), None) == []


def test_slots_whose_neighbours_are_others_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain in the slots of many short ones, each of which left from its end on: a block lies as far from another as
    it would in a row, and none beside the next. To compare neighbours at each of them takes forty times as long."""
    tier = HostTier(EmptyArena(2100), make_policy("lru", 2100))
    tier.open()
    short, table = [chain_of(sample_namespace(4096), 7, seed) for seed in range(300)], tier.index.table
    chain = chain_of(sample_namespace(4096), 1400, 999)
    for mono_s, (keys, blocks_at_once) in enumerate([*((keys, 7) for keys in short), (chain, 70)]):
        for _ in tier.policy.reference_steps(keys, 0, Mono(mono_s)):
            pass
        for first in range(0, len(keys), blocks_at_once):
            part = keys[first : first + blocks_at_once]
            numbers, room = tier.reserve_leading(part, first, None, insist=True, priority=50, wall_s=Wall(1))
            assert room
            tier.commit_all([(Slot(number, table), table.generations[number]) for number in numbers])
    numbers, compare, compared = looked_up(tier.index, chain), SlotIndex._ready, list[int]()
    assert len(numbers) == 1400 and numbers[:8] == [6, 5, 4, 3, 2, 1, 0, 13]
    monkeypatch.setattr(SlotIndex, "_ready", lambda *args: compared.append(1) or compare(*args))
    assert tier.index.leading(chain, Wall(1), None) == numbers
    assert len(compared) <= 1400 / 64 + 1
