"""Pins: while a slot has one, its block is neither evicted nor overwritten.

The loops here are an engine's: a request that hits 2,048 blocks pins them between two of its steps. So they go over
columns, and make no object per block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.host.slot import Slot
from kvtier.tiers.host.slot_table import MANY, SlotTable
from kvtier.times import Wall

Hold = tuple[Slot, int]
"""A pinned slot and the generation it was pinned in."""


class Holds(Sequence[Hold]):
    """Holds of one table, as columns: `numbers` of slots and their `generations`, lists or arrays. Immutable.
    `distinct`: no slot is held twice, as far as that is known."""

    __slots__ = ("distinct", "generations", "numbers", "table")

    def __init__(
        self,
        table: SlotTable,
        numbers: list[int] | NDArray[np.intp],
        generations: list[int] | NDArray[np.uint32],
        distinct: bool = False,
    ) -> None:
        self.table = table
        self.numbers = numbers
        self.generations = generations
        self.distinct = distinct

    @staticmethod
    def joined(parts: Sequence[Holds]) -> Sequence[Hold]:
        """All of these, which are of one table."""
        if len(parts) < 2:
            return parts[0] if parts else ()
        numbers = np.concatenate([np.asarray(part.numbers, np.intp) for part in parts])
        generations = np.concatenate([np.asarray(part.generations, np.uint32) for part in parts])
        held = np.zeros(len(parts[0].table), np.bool_)
        held[numbers] = True
        return Holds(parts[0].table, numbers, generations, int(np.count_nonzero(held)) == len(numbers))

    def columns(self) -> tuple[list[int], list[int]]:
        """Numbers and generations."""
        numbers, generations = self.numbers, self.generations
        if isinstance(numbers, list) and isinstance(generations, list):
            return numbers, generations
        return np.asarray(numbers).tolist(), np.asarray(generations).tolist()

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Hold]:
        numbers, generations = self.columns()
        return zip(map(Slot, numbers, repeat(self.table)), generations, strict=False)

    @overload
    def __getitem__(self, at: int) -> Hold: ...
    @overload
    def __getitem__(self, at: slice) -> Holds: ...
    def __getitem__(self, at: int | slice) -> Hold | Holds:
        if isinstance(at, slice):
            return Holds(self.table, self.numbers[at], self.generations[at], self.distinct)
        return Slot(int(self.numbers[at]), self.table), int(self.generations[at])


class SlotPins:
    """Changes the pins of a table's slots, and counts those that have one. Used under the lock of its tier's owner."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self.slots = 0  # with a pin, in any state

    def add(self, slot: Slot) -> None:
        """`HostTier.pin` for a slot that was just found, or committed, under the lock."""
        self.pin(slot.number)

    def pin(self, number: int) -> None:
        """`add` for a slot of the table, by its number."""
        pins = self._table.pins
        if not pins[number]:
            self.slots += 1
        pins[number] += 1

    def pin_all(self, numbers: Iterable[int]) -> None:
        """`pin` for several."""
        pins, first = self._table.pins, 0
        for number in numbers:
            if count := pins[number]:
                pins[number] = count + 1
            else:
                pins[number] = 1
                first += 1
        self.slots += first

    def add_all(self, numbers: list[int], used_wall_s: Wall) -> Holds:
        """Pin and use these slots."""
        table = self._table
        if len(numbers) < MANY or len(set(numbers)) < len(numbers):  # a chain that is none may have a block twice
            self.pin_all(numbers)
            table.use_all(numbers, used_wall_s)
            generations = table.generations
            return Holds(table, numbers, [generations[number] for number in numbers])
        at = np.array(numbers, np.intp)
        counts = table.columns.pins[at]
        self.slots += len(counts) - int(np.count_nonzero(counts))
        counts += 1
        table.columns.pins[at] = counts
        table.use_many(at, used_wall_s)
        return Holds(table, at, table.columns.generations[at], distinct=True)

    def drop(self, holds: Iterable[Hold]) -> tuple[list[int], int]:
        """Undo one pin of each. Returns the numbers of the slots that lost their last one and wait for that, since they
        were dropped meanwhile or the policy left them out, and how many holds were stale: of another block, of another
        table, or without a pin."""
        table, strangers = self._table, 0
        if isinstance(holds, Holds):
            if holds.table is not table:
                return [], len(holds)
            if len(holds) >= MANY and holds.distinct:
                return self._drop_many(holds)
            return self._drop_few(zip(*holds.columns(), strict=True))
        else:
            every = list(holds)
            pairs = [(slot.number, generation) for slot, generation in every if slot.table is table]
            strangers = len(every) - len(pairs)
        waiting, stale = self._drop_few(pairs)
        return waiting, stale + strangers

    def _drop_few(self, pairs: Iterable[tuple[int, int]]) -> tuple[list[int], int]:
        """`drop` for slots of the table, by number and generation."""
        table, last, stale, done = self._table, list[int](), 0, 0
        pins, generations, waiting = table.pins, table.generations, table.waiting
        for number, generation in pairs:
            if generations[number] != generation or not (count := pins[number]):
                stale += 1
                continue
            pins[number] = count - 1
            if count == 1:
                done += 1
                if waiting[number]:
                    waiting[number] = False
                    last.append(number)
        self.slots -= done
        return last, stale

    def _drop_many(self, holds: Holds) -> tuple[list[int], int]:
        """`drop` for different slots of the table."""
        columns, numbers = self._table.columns, np.asarray(holds.numbers, np.intp)
        pins = columns.pins[numbers]
        right, stale = columns.generations[numbers] == np.asarray(holds.generations, np.uint32), 0
        if not (right.all() and pins.all()):
            right &= pins > 0
            stale = len(holds) - int(np.count_nonzero(right))
            numbers, pins = numbers[right], pins[right]
        pins -= 1
        columns.pins[numbers] = pins
        last = numbers[pins == 0] if pins.any() else numbers
        self.slots -= len(last)
        waiting = columns.waiting[last]
        if not waiting.any():
            return [], stale
        last = last[waiting != 0]
        columns.waiting[last] = 0
        return last.tolist(), stale
