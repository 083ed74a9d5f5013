"""Purges of a cache's tenants, for a connector whose engine has blocks of theirs that are not stored yet.

A block that waits for its copy was made before the purge, and its request may be over: stored afterwards, it would come
back. What a request makes that goes on is its own, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier.identity.keys import Scope, tenant_of
from kvtier.manager.manager import Manager
from kvtier.times import Wall


class Purges:
    """Learns of purges on the cache's thread; `take_to` is for the engine's."""

    def __init__(self) -> None:
        self._watched: Manager | None = None
        self._tenants: set[Scope] = set()

    def purge(self, scopes: Mapping[Scope, Wall]) -> None:
        """What their tenants made until now is purged. Under the manager's lock."""
        self._tenants.update(map(tenant_of, scopes))

    def take_to(self, forget: Callable[[set[Scope]], None], manager: Manager) -> None:
        """Have `forget` take the tenants that were purged since the last call, or since the first with this manager. If
        it raises, the next call has them again."""
        if manager is not self._watched:
            with manager.lock:
                manager.hierarchy.work.watch(self)
            self._watched = manager
        if not self._tenants:
            return
        with manager.lock:
            tenants, self._tenants = self._tenants, set()
        try:
            forget(tenants)
        except BaseException:
            with manager.lock:
                self._tenants |= tenants
            raise
