"""Blocks that became resident since the last reference, for policies that keep plain queues.

A chain arrives head first, but its tail has to leave first; so newcomers wait here until the next reference and
then enter their queue tail first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.terms import PRIORITY_MAX
from kvtier.times import Mono


class Ungraded(ABC):
    """The verbs of a policy that looks at every block until one is movable."""

    @abstractmethod
    def insert(self, key: BlockKey, depth: int = 0) -> None: ...

    @abstractmethod
    def remove(self, key: BlockKey, depth: int = 0, *, returns: bool = False) -> None: ...

    @abstractmethod
    def victim(
        self,
        newcomer: BlockKey | None,
        movable: Callable[[BlockKey], bool],
        *,
        depth: int = 0,
        scope: Scope | None = None,
        priority_max: int = PRIORITY_MAX,
    ) -> BlockKey | None: ...

    @abstractmethod
    def reference(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None: ...

    @abstractmethod
    def chain_stored(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None: ...

    def reference_steps(
        self, chain: Sequence[BlockKey], resident: int, mono_s: Mono, *, stored: bool = False
    ) -> Iterator[None]:
        (self.chain_stored if stored else self.reference)(chain, resident, mono_s)
        yield

    def insert_all(self, keys: Sequence[BlockKey], depths: Sequence[int]) -> None:
        for key, depth in zip(keys, depths, strict=True):
            self.insert(key, depth)

    def evict(
        self,
        newcomers: Sequence[BlockKey | None],
        movable: Callable[[BlockKey], bool],
        *,
        depth: int = 0,
        scope: Scope | None = None,
        priority_max: int = PRIORITY_MAX,
    ) -> list[BlockKey]:
        victim = self.victim(newcomers[0], movable, depth=depth, scope=scope, priority_max=priority_max)
        if victim is None:
            return []
        self.remove(victim)
        return [victim]

    def resize(self, capacity: int) -> None:
        """Only for caches that run: no simulation changes its capacity."""
        raise NotImplementedError

    def train(self) -> None:  # noqa: B027
        """Nothing."""

    def train_steps(self) -> Iterator[None]:
        return iter(())

    def attach(self, priority_of: Callable[[BlockKey], int], *, scoped: bool) -> None:  # noqa: B027
        """Nothing."""

    def regrade(self, key: BlockKey) -> None:  # noqa: B027
        """Nothing."""

    def suspend(self, key: BlockKey) -> None:  # noqa: B027
        """Nothing."""

    def resume(self, key: BlockKey) -> None:  # noqa: B027
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
