"""The index is a mapping, and none of its parts is large."""

from __future__ import annotations

import sys

import pytest

from kvtier.identity.keys import KEY_PARTS
from kvtier.testing import chain_of, sample_namespace
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.index import SlotIndex
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.slot_table import SlotTable

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
