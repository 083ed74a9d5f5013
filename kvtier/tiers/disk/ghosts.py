"""Blocks that left G3 lately, so that their return shows what more space had been worth. One process's memory."""

from __future__ import annotations

from array import array

import xxhash

GHOSTS_MAX = 1 << 15
"""Ghosts per class that are looked for; of a larger class a sample by hash stands for all."""
_SPREAD = 2  # places per ghost: the later of two in one place stays


class Ghosts:
    """Per class, fingerprints of blocks that left and the class's mark when they did: 16 bytes per place, 1 MiB per
    class at most. Not thread-safe."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[int, array[int], array[int]]] = {}

    def add(self, name: bytes, slot_cls: int, blocks: int, mark: int) -> None:
        """A block left its class, of which the store can hold `blocks`, when the class's mark stood there."""
        shift, prints, marks = self._table(slot_cls, blocks)
        fingerprint = xxhash.xxh3_64_intdigest(name) | 1
        if fingerprint >> (64 - shift) == 0:
            place = (fingerprint >> 1) & (len(prints) - 1)
            prints[place], marks[place] = fingerprint, mark

    def take(self, name: bytes, slot_cls: int, blocks: int) -> tuple[int, int] | None:
        """The mark at which the block left, and for how many returns this one stands; None if that is not known."""
        shift, prints, marks = self._table(slot_cls, blocks)
        fingerprint = xxhash.xxh3_64_intdigest(name) | 1
        place = (fingerprint >> 1) & (len(prints) - 1)
        if prints[place] != fingerprint:
            return None
        prints[place] = 0
        return marks[place], 1 << shift

    def _table(self, slot_cls: int, blocks: int) -> tuple[int, array[int], array[int]]:
        if slot_cls not in self._tables:
            shift = max(0, (blocks - 1) // GHOSTS_MAX).bit_length()
            places = 1 << (_SPREAD * max(1, blocks >> shift) - 1).bit_length()
            self._tables[slot_cls] = shift, array("Q", bytes(8 * places)), array("Q", bytes(8 * places))
        return self._tables[slot_cls]
