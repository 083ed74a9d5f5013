"""Scopes dropped for good, in every tier: each store remembers its purges, and the tiers learn of each other's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping

from kvtier.errors import KVTierError
from kvtier.identity.keys import Scope
from kvtier.manager.protection import Protection
from kvtier.tiers.host.tier import HostTier
from kvtier.tiers.protocol import Tier

_ROUNDED_S = 0.001
"""Stores round the time of a purge up to what they can hold."""


class Purger:
    """`lower` are the tiers below G2, nearest first; `lock` guards `host` and `keeper`."""

    def __init__(self, host: HostTier, lower: Mapping[str, Tier], keeper: Protection, lock: threading.Lock) -> None:
        self._host = host
        self._lower = lower
        self._keeper = keeper
        self._lock = lock

    async def purge(self, scope: Scope, before: float) -> int:
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

    def apply_tombstones(self, tombstones: Mapping[Scope, float]) -> int:
        """The same for G2 and what is promised, for scope → time; returns how many blocks went."""
        with self._lock:
            for scope, before in tombstones.items():
                if self._host.is_newer_tombstone(scope, before):
                    self._keeper.purge(scope, before)
            return self._host.apply_tombstones(tombstones)

    async def sync(self) -> None:
        """What one tier's store remembers, all others learn: another process may share only one of them."""
        known = {name: dict(await tier.tombstones()) for name, tier in self._lower.items()}
        news: dict[Scope, float] = {}
        for tombstones in known.values():
            for scope, before in tombstones.items():
                news[scope] = max(before, news.get(scope, 0.0))
        self.apply_tombstones(news)
        for name, tier in self._lower.items():
            for scope, before in news.items():
                if before > known[name].get(scope, 0.0) + _ROUNDED_S:
                    with contextlib.suppress(KVTierError, OSError):  # said again next time
                        await tier.purge(scope, before)
