"""Which slots may hold blocks of a scope: two bytes per slot, so that a purge looks at few others."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from kvtier.identity.keys import BlockKey, Scope

_SCANNED = 1 << 17
"""Slots whose marks are read at once: 0.3 ms."""


class ScopeMarks:
    """The first two bytes of the latest block's scope in each slot. A scope's digest is as good as random, so of the
    slots with its mark one in 65,536 holds another scope's block: whoever asks looks at the keys, too."""

    def __init__(self, slots: int) -> None:
        self._marks = array("H", bytes(2 * slots))

    def set(self, numbers: Iterable[int], keys: Iterable[BlockKey]) -> None:
        """Blocks of the leading `keys` are to have these slots."""
        marks = self._marks
        for number, key in zip(numbers, keys, strict=False):
            marks[number] = key[0] | key[1] << 8

    def find(self, scopes: Collection[Scope] | None, at_most: int) -> Iterator[Sequence[int]]:
        """The slots with a mark of one of these (None: all slots), ascending, `at_most` at a time, perhaps none: after
        each time others may have their turn."""
        wanted = np.full(1 << 16, scopes is None)
        wanted[[scope[0] | scope[1] << 8 for scope in scopes or ()]] = True
        marks = np.frombuffer(self._marks, np.uint16)
        for first in range(0, len(marks), _SCANNED):
            found = (np.flatnonzero(wanted[marks[first : first + _SCANNED]]) + first).tolist()
            for start in range(0, max(1, len(found)), at_most):
                yield found[start : start + at_most]
