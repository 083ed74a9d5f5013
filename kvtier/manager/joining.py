"""Tiers that did not open when the cache did, and join it when they do."""

from __future__ import annotations

from functools import partial

from kvtier.errors import KVTierError, TierError
from kvtier.manager.demote import Demoter
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.protection import Protection
from kvtier.manager.purge import Purger
from kvtier.manager.saved_state import SavedState

LOOK_S = 0.5
"""How often the clock is asked whether a tier is to be tried again."""


class Joining:
    """One manager's tiers that are left out. On its loop."""

    def __init__(
        self, hierarchy: Hierarchy, purger: Purger, saved: SavedState, protection: Protection, demoter: Demoter
    ) -> None:
        self._hierarchy = hierarchy
        self._purger = purger
        self._saved = saved
        self._protection = protection
        self._demoter = demoter

    def start(self) -> None:
        """Try each of them again in the background, until it is in use."""
        for name, left in self._hierarchy.lower.out.items():
            self._hierarchy.supervisor.start(f"{name} open", partial(self._bring_in, name), left.tier.breaker)

    async def _bring_in(self, name: str) -> None:
        """Open it, have it learn the purges that it missed, and use it; then bring what outlives a restart to it."""
        lower = self._hierarchy.lower
        while name in lower.out:
            tier = await lower.open_again(name, min(LOOK_S, self._hierarchy.limits.housekeeping_s))
            try:
                if tier not in await self._purger.sync(tier):
                    raise TierError(name, "purge", "it does not take the purges that it missed")
            except KVTierError as error:
                lower.defer(name, error)
                continue
            with self._hierarchy.lock:  # who counts tiers counts their queues
                lower.join(name)
                self._demoter.open()
        await self._saved.open_late()
        await self._protection.open_late()
