"""The work of one verb, from its beginning on: a purge that comes meanwhile holds for all of it.

A verb over a long chain works in slices, and a purge may come between two of them. Its earlier slices are purged like
anything that is stored; before a later one it asks its `Work`. So what began before a purge leaves nothing after it,
however long it takes, and the purge need not be remembered for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol
from weakref import WeakSet

from kvtier.identity.keys import BlockKey, Scope, tenant_of
from kvtier.times import Wall


class Purgeable(Protocol):
    """Whatever is to learn of purges. `purge(scopes)`: what their tenants made until then is purged. Called under the
    manager's lock."""

    def purge(self, scopes: Mapping[Scope, Wall]) -> None: ...


class Work:
    """One verb's. It is under way as long as somebody refers to it."""

    __slots__ = ("__weakref__", "_purges", "made")

    def __init__(self, made: Wall) -> None:
        """`made`: when its blocks were made at the earliest, as they are stamped."""
        self.made = made
        self._purges: dict[Scope, Wall] = {}

    def purge(self, scopes: Mapping[Scope, Wall]) -> None:
        """What these scopes' tenants made until then is purged. Under the lock."""
        self._purges.update((tenant_of(scope), before) for scope, before in scopes.items() if before >= self.made)

    def lost(self, keys: Iterable[BlockKey]) -> bool:
        """Whether one of these blocks has been purged since the beginning: the verb leaves it alone. Under the lock."""
        return bool(self._purges) and any(tenant_of(key) in self._purges for key in keys)


class WorkUnderWay:
    """All of a manager's. Under its lock."""

    def __init__(self) -> None:
        self._works: WeakSet[Purgeable] = WeakSet()

    def begin(self, made: Wall) -> Work:
        """A verb that begins at this time."""
        work = Work(made)
        self._works.add(work)
        return work

    def watch(self, other: Purgeable) -> None:
        """Tell this, too, of every purge from now on, as long as somebody refers to it."""
        self._works.add(other)

    def purge(self, scopes: Mapping[Scope, Wall]) -> None:
        """Tell each verb under way. O(their number)."""
        for work in self._works:
            work.purge(scopes)
