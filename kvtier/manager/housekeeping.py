"""The work of every few seconds that no request waits for: uses, forgotten leases, purges, pins, saved state."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

from kvtier.errors import ClosedError
from kvtier.identity.keys import BlockKey
from kvtier.manager.capacities import Capacities
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.protection import Protection
from kvtier.manager.purge import Purger
from kvtier.manager.saved_state import SavedState
from kvtier.manager.slices import MOVED_BLOCKS, slices
from kvtier.tiers.host.pins import Hold
from kvtier.times import Wall

_SLICES_MAX = 16384
"""Slices of chains whose uses wait to be passed on: a table of 65,536 stops its owner for 4 ms when it grows."""


class _Uses:
    """The latest uses of blocks, by slices of chains: where a chain is used again, most of its slices are the same, and
    a table of slices does not get large. Used under the lock."""

    def __init__(self) -> None:
        self.blocks = 0  # in all slices; those of slices that overlap count in each
        self._slices: dict[tuple[BlockKey, ...], Wall] = {}

    def full(self, blocks_max: int) -> bool:
        """Whether there is no room for another slice."""
        return self.blocks >= blocks_max or len(self._slices) >= _SLICES_MAX

    def add(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        """The blocks of a slice were used."""
        part = tuple(keys)
        earlier = self._slices.pop(part, None)  # it becomes the latest
        self._slices[part] = wall_s if earlier is None else max(earlier, wall_s)
        self.blocks += len(part) if earlier is None else 0

    def take(self, most: int) -> dict[Wall, list[BlockKey]]:
        """Take out the latest uses, of at most so many blocks: these by time, each slice from its end on."""
        by_time: dict[Wall, list[BlockKey]] = {}
        while self._slices and most > 0:
            part, wall_s = self._slices.popitem()
            self.blocks -= len(part)
            if len(part) > most:
                self.add(part[:-most], wall_s)
            taken = part[-most:]
            by_time.setdefault(wall_s, []).extend(reversed(taken))
            most -= len(taken)
        return by_time


class Housekeeping:
    """One manager's housekeeping. `run` is called on its loop; the other verbs are thread-safe and do not wait."""

    def __init__(self, hierarchy: Hierarchy, protection: Protection, purger: Purger, saved: SavedState) -> None:
        self._hierarchy = hierarchy
        self._protection = protection
        self._purger = purger
        self._saved = saved
        self._capacities = Capacities(hierarchy)
        self._uses, self._passing = _Uses(), _Uses()  # that the tiers below do not know: new ones, and those before
        self._forgotten: deque[Sequence[Hold]] = deque()
        self._waited_s = 0.0  # since purges and pins of elsewhere were read

    async def run(self) -> None:
        """One pass, every `housekeeping_s`. Where a tier fails, or does not answer in time, a later one tries again."""
        self.unpin_forgotten()
        await self.flush_uses()
        for _ in self._hierarchy.trained():
            await asyncio.sleep(0)
        await self._hierarchy.accept_time()
        if await self._capacities.follow():
            self._protection.budget = self._protection.retainer.size(self._hierarchy.limits.reserved)
        limits = self._hierarchy.limits
        self._waited_s += limits.housekeeping_s
        elsewhere = self._waited_s >= limits.tombstones_s
        if elsewhere:
            self._waited_s = 0.0
        if elsewhere or any(tier.behind for tier in self._hierarchy.lower.values()):
            await self._purger.sync()
        if await self._protection.tend(read_pins=elsewhere):
            await self._purger.forget()
        await self._saved.write_when_due()

    def record_use(self, keys: Sequence[BlockKey], wall_s: Wall) -> None:
        """Blocks were used: to be passed on by `flush_uses`. Takes the lock for a slice at a time."""
        if not (self._hierarchy.lower or self._protection.busy):
            return
        for part in slices(keys):
            with self._hierarchy.lock:
                if self._uses.full(self._hierarchy.limits.touched_max - self._passing.blocks):
                    return
                self._uses.add(part, wall_s)

    async def flush_uses(self) -> bool:
        """Renew used blocks in the tiers below, and their guarantees. Those that are used meanwhile wait for the next
        call: an engine may use them faster than they are passed on. Whether there were any."""
        any_used = await self._pass_on()  # what an earlier call has left, or passes on now
        with self._hierarchy.lock:  # the former has none now
            self._passing, self._uses = self._uses, self._passing
        return await self._pass_on() or any_used

    async def _pass_on(self) -> bool:
        """In slices, the latest first: so a block never has a later use below than its parent. At each yield a use is
        here or with every tier. Whether there were any."""
        any_used = bool(self._passing.blocks)
        while self._passing.blocks:
            with self._hierarchy.lock:
                by_time = self._passing.take(MOVED_BLOCKS)
                for wall_s, keys in by_time.items():
                    self._protection.used(keys, wall_s)
            for tier in self._hierarchy.lower.values():
                with contextlib.suppress(ClosedError):
                    for wall_s, keys in by_time.items():
                        tier.touch(keys[::-1], wall_s)
            await asyncio.sleep(0)
        return any_used

    def forget(self, holds: Sequence[Hold]) -> None:
        """Take the pins of a lease that the garbage collector found, in the middle of anything: so without a lock."""
        self._forgotten.append(holds)

    def unpin_forgotten(self) -> None:
        """Undo the pins of forgotten leases. On any thread, several at once."""
        while True:
            try:
                holds = self._forgotten.popleft()
            except IndexError:  # not asked before: another thread may take the last
                return
            self._hierarchy.release(holds[::-1])
