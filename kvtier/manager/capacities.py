"""Capacities that a reload has changed: G2 and G3 follow in the background, block by block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import takewhile

from kvtier.errors import KVTierError
from kvtier.manager.hierarchy import Hierarchy
from kvtier.times import Mono
from kvtier.units import format_size

log = logging.getLogger(__name__)

PASS_S = 1.0
"""A pass begins nothing after so long: other work of every few seconds, such as purges of elsewhere, waits for it."""

_MOVED_SLOTS, _MOVED_BYTES = 4096, 4 << 30
"""Slots whose memory is given back, or taken back, between two looks at the capacity: a second's work."""


class Capacities:
    """One manager's. On its loop."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._given = 0  # of the slots out of use, those whose memory was given back
        self._g3 = hierarchy.limits.g3_bytes, hierarchy.limits.g3_write_budget
        self._told = ""

    async def follow(self) -> bool:
        """One pass, as far as it goes now: G2's coldest blocks leave what is beyond its capacity, or memory is taken
        back; G3 grows. Whether a capacity has changed. Raises nothing."""
        follows = [await self._follow_g2(), await self._follow_g3()]
        return any(follows)

    async def _follow_g2(self) -> bool:
        hierarchy, slots = self._hierarchy, self._hierarchy.host.in_use
        before, until = len(slots.unused), hierarchy.clock.monotonic() + PASS_S
        with hierarchy.lock:
            beyond = slots.surplus > 0 or hierarchy.host.quota.beyond()  # what was leased then may leave by now
        if beyond:
            now = hierarchy.now().serve
            steps = slots.shrink_steps(hierarchy.host.quota, lambda scope: hierarchy.host.evict_coldest(scope, now))
            await hierarchy.drop_slices(takewhile(lambda _: not self._is_over(until), steps))
        while await self._give_back() and not self._is_over(until):
            pass
        while slots.surplus < 0 and await self._take_back() and not self._is_over(until):
            pass
        changed = len(slots.unused) != before
        if changed and not slots.surplus:
            log.info("tiers.g2.capacity: %s now", format_size(hierarchy.host.capacity_bytes))
        return changed

    def _is_over(self, until: Mono) -> bool:
        return self._hierarchy.clock.monotonic() >= until

    @property
    def _moved(self) -> int:
        arena = self._hierarchy.host.arena
        return max(1, min(_MOVED_SLOTS, _MOVED_BYTES // (arena.slot_bytes * arena.ranks)))

    async def _give_back(self) -> bool:
        """The memory of some slots that are out of use now goes back to the system. Whether there were any."""
        host = self._hierarchy.host
        part = sorted(host.in_use.unused[self._given : self._given + self._moved])
        self._given += len(part)
        if part:
            with contextlib.suppress(OSError, ValueError):  # it stays, or the arena is closed
                await asyncio.to_thread(host.arena.give_back, part)
        return bool(part)

    async def _take_back(self) -> bool:
        """Use some slots again. Whether there was memory for all of them."""
        host, slots = self._hierarchy.host, self._hierarchy.host.in_use
        part = sorted(slots.unused[slots.surplus :][-self._moved :])
        taken = await asyncio.to_thread(host.arena.take_back, part)
        with self._hierarchy.lock:
            slots.take_back(part, taken)
        self._given = min(self._given, len(slots.unused))
        self._hierarchy.space.notify()
        if taken < len(part):
            slot_bytes = host.arena.slot_bytes * host.arena.ranks
            self._tell(f"tiers.g2.capacity: memory is short, G2 has {format_size(slots.used * slot_bytes)}")
        return taken == len(part)

    async def _follow_g3(self) -> bool:
        """The tiers that can grow are asked until they have."""
        limits = self._hierarchy.limits
        wanted = limits.g3_bytes, limits.g3_write_budget
        tier = next((tier for tier in self._hierarchy.lower.values() if tier.resizable() is not None), None)
        resizable = tier.resizable() if tier is not None else None
        if wanted == self._g3 or resizable is None:
            return False
        try:
            if not await resizable.resize(*wanted):
                self._tell("tiers.g3.capacity: it grows when no other process uses the directory")
                return False
        except KVTierError as error:
            self._tell(f"tiers.g3.capacity: not changed yet: {error}")
            return False
        self._g3, self._told = wanted, ""
        log.info("tiers.g3.capacity: %s now", format_size(wanted[0]))
        return True

    def _tell(self, why: str) -> None:
        """Once per reason: a pass comes every few seconds."""
        if why != self._told:
            self._told = why
            log.warning("%s", why)
