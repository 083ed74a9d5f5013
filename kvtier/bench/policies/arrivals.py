"""Blocks that became resident since the last reference, for policies that keep plain queues.

A chain arrives head first, but its tail has to leave first; so newcomers wait here until the next reference and
then enter their queue tail first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtier.identity.keys import BlockKey


class Ungraded:
    """The verbs of a policy that looks at every block until one is movable."""

    def attach(self, priority_of: Callable[[BlockKey], int], *, scoped: bool) -> None:
        """Nothing."""

    def regrade(self, key: BlockKey) -> None:
        """Nothing."""

    def suspend(self, key: BlockKey) -> None:
        """Nothing."""

    def resume(self, key: BlockKey) -> None:
        """Nothing."""


class Fresh:
    """An ordered set, head of the chain first."""

    def __init__(self) -> None:
        self._keys: dict[BlockKey, None] = {}

    def add(self, key: BlockKey) -> None:
        self._keys[key] = None

    def discard(self, key: BlockKey) -> None:
        self._keys.pop(key, None)

    def deepest(self, movable: Callable[[BlockKey], bool]) -> BlockKey | None:
        """The last that may be moved."""
        return next((key for key in reversed(self._keys) if movable(key)), None)

    def drain(self) -> list[BlockKey]:
        """All, tail first; empty afterwards."""
        keys = list(reversed(self._keys))
        self._keys.clear()
        return keys

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys
