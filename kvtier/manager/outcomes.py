"""What became of the loads for one request."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvtier.tiers.host.slot import Slot
from kvtier.tiers.protocol import Miss

LoadOutcome = Slot | Miss
"""A slot that is pinned once for the caller, or why the block was not loaded."""

_PART_BLOCKS = 1024


class Outcomes(MutableMapping[int, LoadOutcome]):
    """Outcomes by depth. In parts: one dictionary of 100,000 stops the event loop for 3 ms when it grows."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, LoadOutcome]] = {}

    def __getitem__(self, depth: int) -> LoadOutcome:
        return self._parts[depth // _PART_BLOCKS][depth]

    def __setitem__(self, depth: int, outcome: LoadOutcome) -> None:
        part = self._parts.get(depth // _PART_BLOCKS)
        if part is None:
            part = self._parts[depth // _PART_BLOCKS] = {}
        part[depth] = outcome

    def __delitem__(self, depth: int) -> None:
        del self._parts[depth // _PART_BLOCKS][depth]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts.values())

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    def forget(self, depths: Sequence[int]) -> None:
        """Without these, all of which are here."""
        for depth in depths:
            part = self._parts[depth // _PART_BLOCKS]
            del part[depth]
            if not part:  # now: a hundred of them that go together take a third of a millisecond
                del self._parts[depth // _PART_BLOCKS]

    def pinned(self) -> Iterator[Slot]:
        """The slots, the deepest first."""
        for number in sorted(self._parts, reverse=True):
            part = self._parts[number]
            for depth in sorted(part, reverse=True):
                if isinstance(outcome := part[depth], Slot):
                    yield outcome

    if not TYPE_CHECKING:  # what the mixin does goes through an exception

        def get(self, depth, default=None):
            return self._parts.get(depth // _PART_BLOCKS, {}).get(depth, default)
