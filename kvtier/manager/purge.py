"""Scopes dropped for good, in every tier.

A purge is remembered in three places: G2's tombstones (this process), G3's index (every process of the machine) and
tombstones in the bucket (every replica). Each tier learns here of the purges that the others remember.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from kvtier.errors import KVTierError
from kvtier.identity.keys import Scope
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.protection import Protection
from kvtier.times import Wall

_ROUNDED_S = 0.001
"""Stores round the time of a purge up to what they can hold."""


class Purger:
    """Purges and their spreading over the tiers of one manager. On its loop."""

    def __init__(self, hierarchy: Hierarchy, protection: Protection) -> None:
        self._hierarchy = hierarchy
        self._host, self._lower = hierarchy.host, hierarchy.lower
        self._protection = protection

    async def purge(self, scope: Scope, before: Wall) -> int:
        """Drop what a scope stored before a wall-clock time; returns how many blocks. Raises the first tier's error
        when all have been asked."""
        count = self.apply_tombstones({scope: before})
        failures: list[Exception] = []
        for tier in self._lower.values():
            try:
                count += await tier.purge(scope, before)
            except Exception as error:  # the other tiers' blocks must go all the same
                failures.append(error)
        if failures:
            raise failures[0]
        return count

    def apply_tombstones(self, tombstones: Mapping[Scope, Wall]) -> int:
        """`purge` of G2 and of what is protected, for scope → time; returns how many blocks went."""
        with self._hierarchy.lock:
            for scope, before in tombstones.items():
                if self._host.is_newer_tombstone(scope, before):
                    self._protection.purge(scope, before)
            return self._host.apply_tombstones(tombstones)

    async def sync(self) -> None:
        """Have every tier remember the purges of the others: another process may share only one of them."""
        known = {name: dict(await tier.tombstones()) for name, tier in self._lower.items()}
        latest: dict[Scope, Wall] = {}
        for tombstones in known.values():
            for scope, before in tombstones.items():
                latest[scope] = max(before, latest.get(scope, before))
        self.apply_tombstones(latest)
        for name, tier in self._lower.items():
            for scope, before in latest.items():
                if before > known[name].get(scope, 0.0) + _ROUNDED_S:
                    with contextlib.suppress(KVTierError, OSError):  # tried again next time
                        await tier.purge(scope, before)
