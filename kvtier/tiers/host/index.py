"""Which slot has which block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from itertools import chain, takewhile
from operator import eq
from typing import TYPE_CHECKING

from kvtier.identity.key_parts import KeyParts
from kvtier.identity.keys import BlockKey
from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.slot_table import READY, SlotTable
from kvtier.times import Wall

_AT_ONCE = 64  # blocks that are looked for
_NEAR = 7  # so far from a block its chain is looked for in neighbouring slots: fewer do not pay
_READY = bytes([READY])


class SlotIndex(MutableMapping[BlockKey, Slot]):
    """Slots by key. `parts` has their numbers: for loops over many keys. Else use the verbs, which give views of
    `table`."""

    __slots__ = ("_numbers", "parts", "table")

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self._numbers = KeyParts()
        self.parts = self._numbers.dicts

    def at(self, chain: Sequence[BlockKey], depth: int) -> Slot | None:
        """The slot of a chain's block, as far as it was stored at this depth. A name says all that lies before a block,
        so one that another chain has at another depth did not begin with its first block: neither's depths are the
        other's, and none is written under a name that they give."""
        number = self.parts[chain[depth][-1]].get(chain[depth])
        return Slot(number, self.table) if number is not None and self.table.depths[number] == depth else None

    def leading(self, keys: Sequence[BlockKey], wall_s: Wall, refused: Callable[[int], bool] | None) -> list[int]:
        """The slots of the leading `keys`, up to the first that is not here, has expired at `wall_s`, or is `refused`:
        by their numbers."""
        numbers = self._leading(keys if isinstance(keys, list) else list(keys))
        if refused is not None:
            numbers = list(takewhile(lambda number: not refused(number), numbers))
        if (alive := self.table.alive(numbers, wall_s)) < len(numbers):
            del numbers[alive:]
        return numbers

    def _leading(self, keys: list[BlockKey]) -> list[int]:
        """The slots of the leading `keys` that are here. A chain that was stored at once lies mostly in neighbouring
        slots, up or, where it took those of one chain from its end on, down: to compare their names takes a fifth of
        looking each up, which waits for memory among a million."""
        parts, numbers, last = self.parts, list[int](), len(keys) - 1
        while (at := len(numbers)) <= last:
            part = keys[at : at + _AT_ONCE]
            number = parts[part[0][-1]].get(part[0])
            if number is None:
                break
            near = min(_NEAR, last - at)
            step = self._step(number, part[near], near)
            ready = self._ready(number + step, step, part[1:]) if step else 0
            if step and ready >= near:  # else others lie between
                numbers += range(number, number + step * (1 + ready), step)
            else:
                found = [parts[key[-1]].get(key, -1) for key in part]
                if -1 in found:
                    numbers += found[: found.index(-1)]
                    break
                numbers += found
        return numbers

    def _step(self, number: int, key: BlockKey, distance: int) -> int:
        """Where the block that comes so far behind that of a slot is: 1 as far above, -1 below, 0 elsewhere."""
        names = self.table.keys
        if number + distance < len(names) and names[number + distance] == key:
            return 1
        return -1 if number >= distance and names[number - distance] == key else 0

    def _ready(self, first: int, step: int, keys: list[BlockKey]) -> int:
        """How many leading `keys` are READY in the slots from `first` on, up or down."""
        stop = first + step * len(keys)
        part = slice(first, stop if stop >= 0 else None, step)
        names, states = self.table.keys[part].tolist(), self.table.states[part]
        if names != keys:
            del states[[*map(eq, names, keys), False].index(False) :]
        return len(states) - len(states.lstrip(_READY))

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
