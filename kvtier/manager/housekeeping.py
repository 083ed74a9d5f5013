"""The work of every few seconds that no request waits for: uses, forgotten leases, purges, pins, saved state."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

from kvtier.errors import ClosedError
from kvtier.identity.keys import BlockKey
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.lease import Hold
from kvtier.manager.protection import Protection
from kvtier.manager.purge import Purger
from kvtier.manager.saved_state import SavedState
from kvtier.times import Wall


class Housekeeping:
    """One manager's housekeeping. `run` is called on its loop; the other verbs are thread-safe and do not wait."""

    def __init__(self, hierarchy: Hierarchy, protection: Protection, purger: Purger, saved: SavedState) -> None:
        self._hierarchy = hierarchy
        self._protection = protection
        self._purger = purger
        self._saved = saved
        self._used: dict[BlockKey, Wall] = {}  # a block's latest use that the tiers below do not know
        self._forgotten: deque[Sequence[Hold]] = deque()
        self._waited_s = 0.0  # since purges and pins of elsewhere were read

    async def run(self) -> None:
        """One pass, every `housekeeping_s`. Where a tier fails, or does not answer in time, a later one tries again."""
        self.unpin_forgotten()
        self.flush_uses()
        with self._hierarchy.lock:
            self._hierarchy.host.policy.train()
        await self._hierarchy.accept_time()
        limits = self._hierarchy.limits
        self._waited_s += limits.housekeeping_s
        elsewhere = self._waited_s >= limits.tombstones_s
        if elsewhere:
            self._waited_s = 0.0
        if elsewhere or self._purger.owed:
            await self._purger.sync()
        await self._protection.tend(read_pins=elsewhere)
        await self._saved.write_when_due()

    def record_use(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        """Blocks were used: to be passed on by `flush_uses`. Under the lock."""
        wanted = self._hierarchy.lower or self._protection.busy
        if wanted and len(self._used) < self._hierarchy.limits.touched_max:
            self._used.update(dict.fromkeys(keys, wall_s))

    def flush_uses(self) -> None:
        """Renew used blocks in the tiers below, and their guarantees."""
        with self._hierarchy.lock:
            used, self._used = self._used, {}
            if self._protection.busy:
                for key, wall_s in used.items():
                    self._protection.used([key], wall_s)
        by_time: dict[Wall, list[BlockKey]] = {}
        for key, wall_s in used.items():
            by_time.setdefault(wall_s, []).append(key)
        for tier in self._hierarchy.lower.values():
            with contextlib.suppress(ClosedError):
                for wall_s, keys in by_time.items():
                    tier.touch(keys, wall_s)

    def forget(self, holds: Sequence[Hold]) -> None:
        """Take the pins of a lease that the garbage collector found, in the middle of anything: so without a lock."""
        self._forgotten.append(holds)

    def unpin_forgotten(self) -> None:
        """Undo the pins of forgotten leases."""
        while self._forgotten:
            self._hierarchy.unpin(self._forgotten.popleft())
