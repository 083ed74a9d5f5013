"""Blocks that pass through a tier on their way down: they enter at the eviction end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvtier.identity.keys import BlockKey

PASSING_MAX = 16384
"""Blocks in each of the tables here: one of 65,536 stops its owner for 4 ms when it grows."""


class Transit:
    """The residents that leave first, unless they are suspended, and newcomers that are to be among them.

    What is too many is ordered as all others are: the oldest of those here, and newcomers that were told of before.
    """

    __slots__ = ("_here", "_suspended", "expected")

    def __init__(self) -> None:
        self._here: OrderedDict[BlockKey, None] = OrderedDict()
        self._suspended: set[BlockKey] = set()  # to return to those here
        self.expected: set[BlockKey] = set()
        """Newcomers that were given a slot, and have not arrived."""

    def expect(self, key: BlockKey) -> None:
        """A newcomer is to pass through."""
        if len(self.expected) >= PASSING_MAX:  # their copies were given up
            self.expected.clear()
        self.expected.add(key)

    def arrive(self, key: BlockKey) -> None:
        """One of those expected is resident."""
        self.expected.remove(key)
        self._enter(key)

    def _enter(self, key: BlockKey) -> None:
        self._here[key] = None
        if len(self._here) > PASSING_MAX:
            self._here.popitem(last=False)

    def warm(self, key: BlockKey) -> None:
        """A block was referenced: it is no longer here, nor to return."""
        self._here.pop(key, None)
        self._suspended.discard(key)

    def leave(self, key: BlockKey) -> None:
        """A block is no longer resident."""
        self._here.pop(key, None)
        self._suspended.discard(key)

    def suspend(self, key: BlockKey) -> None:
        """A block, if it is here, does not leave until `resume`."""
        if key in self._here:
            del self._here[key]
            if len(self._suspended) < PASSING_MAX:
                self._suspended.add(key)

    def resume(self, key: BlockKey) -> bool:
        """Undo `suspend`, if it was. Whether the block is here."""
        if key in self._suspended:
            self._suspended.remove(key)
            self._enter(key)
        return key in self._here

    @property
    def any_known(self) -> bool:
        """Whether any is here, or is to return."""
        return bool(self._here or self._suspended)

    def newest(self) -> Iterator[BlockKey]:
        """Those here, the latest first."""
        return reversed(self._here)

    def __bool__(self) -> bool:
        """Whether any is here."""
        return bool(self._here)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._here)
