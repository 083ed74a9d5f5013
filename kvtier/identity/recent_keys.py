"""A number for each of the latest blocks, as many as are remembered."""

from __future__ import annotations

from itertools import islice

from kvtier.identity.keys import BlockKey

_PART_BLOCKS = 256


class RecentKeys:
    """Remembers the latest `blocks_max` blocks or so, by a hash of the key: a third of its bytes. No lock of its own.

    In parts, each of which forgets its oldest: one dictionary of 65,536 stops its owner for 4 ms when it grows.
    """

    __slots__ = ("_part_max", "_parts")

    def __init__(self, blocks_max: int) -> None:
        parts = max(1, blocks_max // _PART_BLOCKS)
        self._part_max = blocks_max // parts
        self._parts: list[dict[int, int]] = [{} for _ in range(parts)]

    def get(self, key: BlockKey) -> int | None:
        """A block's number; None: it is not remembered."""
        name = hash(key)
        return self._parts[name % len(self._parts)].get(name)

    def put(self, key: BlockKey, number: int) -> None:
        """Of all blocks, `key` is the latest."""
        name = hash(key)
        part = self._parts[name % len(self._parts)]
        part.pop(name, None)
        part[name] = number
        if len(part) > self._part_max:  # an eighth at once: this runs for every block that is evicted
            for old in list(islice(part, self._part_max // 8 + 1)):
                del part[old]

    def __len__(self) -> int:
        return sum(map(len, self._parts))
