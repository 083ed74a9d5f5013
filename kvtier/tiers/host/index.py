"""Which slot has which block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING

from kvtier.identity.key_parts import KeyParts
from kvtier.identity.keys import BlockKey
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.slot_table import SlotTable
from kvtier.times import Wall


class SlotIndex(MutableMapping[BlockKey, Slot]):
    """Slots by key. `parts` has their numbers: for loops over many keys. Else use the verbs, which give views of
    `table`."""

    __slots__ = ("_numbers", "parts", "table")

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self._numbers = KeyParts()
        self.parts = self._numbers.dicts

    def leading(self, keys: Sequence[BlockKey], wall_s: Wall, refused: Callable[[int], bool] | None) -> list[int]:
        """The slots of the leading `keys`, up to the first that is not here, has expired at `wall_s`, or is `refused`:
        by their numbers."""
        parts = self.parts
        if not keys or keys[0] not in parts[keys[0][-1]]:
            return []
        numbers = [parts[key[-1]].get(key, -1) for key in keys]
        if -1 in numbers:
            del numbers[numbers.index(-1) :]
        if refused is not None:
            numbers = list(takewhile(lambda number: not refused(number), numbers))
        if (alive := self.table.alive(numbers, wall_s)) < len(numbers):
            del numbers[alive:]
        return numbers

    def absent(self, keys: Sequence[BlockKey], others: Sequence[Collection[BlockKey]]) -> list[BlockKey]:
        """The leading `keys`, each once, up to the first that is here or among `others`, parts as the
        own ones."""
        parts, absent = self.parts, dict[BlockKey, None]()
        for key in keys:
            if key in parts[key[-1]] or key in others[key[-1]] or key in absent:
                break
            absent[key] = None
        return list(absent)

    def __getitem__(self, key: BlockKey) -> Slot:
        return Slot(self.parts[key[-1]][key], self.table)

    def __setitem__(self, key: BlockKey, slot: Slot) -> None:
        self.parts[key[-1]][key] = slot.number
        self.added(1)

    def added(self, keys: int) -> None:
        """So many keys were added to `parts`."""
        self._numbers.added(keys)

    def __delitem__(self, key: BlockKey) -> None:
        del self.parts[key[-1]][key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self.parts[key[-1]]

    def __iter__(self) -> Iterator[BlockKey]:
        return chain.from_iterable(self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    if not TYPE_CHECKING:  # what the mixin does goes through an exception

        def get(self, key, default=None):
            number = self.parts[key[-1]].get(key)
            return default if number is None else Slot(number, self.table)

        def pop(self, key, default=None):
            number = self.parts[key[-1]].pop(key, None)
            return default if number is None else Slot(number, self.table)
