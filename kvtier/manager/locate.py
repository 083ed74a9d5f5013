"""Where the blocks of a chain are, over all tiers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.identity.keys import BlockKey
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.plan import Where
from kvtier.manager.slices import SLICE_BLOCKS
from kvtier.manager.traced import traced_lookup
from kvtier.tiers.meter import Metered
from kvtier.tiers.protocol import Miss
from kvtier.times import Mono

_LOOKUP_BLOCKS_MAX = 4096  # that a tier is asked for in one call: fewer where its answer costs more per block


class Locator:
    """Look-ups over all tiers. Runs on one event loop; pins nothing. `stuck`: by a tier's name, what tells whether
    it has been reading a block for too long; None: none."""

    def __init__(self, hierarchy: Hierarchy, stuck: Callable[[str], Callable[[BlockKey], bool] | None]) -> None:
        self._hierarchy = hierarchy
        self._stuck = stuck
        self._host, self._lock, self._clock = hierarchy.host, hierarchy.lock, hierarchy.clock

    @traced_lookup
    async def locate(self, chain: Sequence[BlockKey], deadline: Mono | None = None, start: int = 0) -> list[Where]:
        """Where each block of `chain` is, up to the first that is nowhere; later ones may be unknown. Blocks before
        `start` are not looked for and given as G2's. Waits for lower tiers until `deadline`, at most `lookup_s`.

        Works in slices. An answer is as old as its slice: nothing is pinned, so a block may be gone by now.
        """
        wall_s = self._hierarchy.now().serve
        where: list[Where] = [self._host.name] * start
        for first in range(start, len(chain), SLICE_BLOCKS):
            if first > start:
                await asyncio.sleep(0)
            with self._lock:
                part = chain[first : first + SLICE_BLOCKS]
                found = self._host.prefix(part, wall_s)
                where += [self._host.name] * found
                where += [self._host.peek(key, wall_s) or self._host.name for key in part[found:]]
        latest = self._clock.monotonic() + self._hierarchy.limits.lookup_s
        deadline = latest if deadline is None else min(deadline, latest)
        for tier in self._hierarchy.lower.values():
            if not await self._ask(tier, chain, where, deadline):
                break
        return where

    async def _ask(self, tier: Metered, chain: Sequence[BlockKey], where: list[Where], deadline: Mono) -> bool:
        """Ask a tier for the blocks that no tier before it has. Whether there were any."""
        width = min(_LOOKUP_BLOCKS_MAX, SLICE_BLOCKS * tier.stride)
        parts = deque[list[int]]()
        for first in range(0, len(where), width):
            if first:
                await asyncio.sleep(0)
            stop = min(first + width, len(where))
            if part := [index for index in range(first, stop) if isinstance(where[index], Miss)]:
                parts.append(part)
        if self._hierarchy.is_clogged(tier):
            for part in parts:
                self._enter(tier.name, where, part, [Miss.NO_ROOM] * len(part))
            return bool(parts)
        if len(parts) == 1:
            self._enter(tier.name, where, parts[0], await self._lookup(tier, chain, parts[0], deadline))
            return True
        asked, calls = bool(parts), deque[asyncio.Task[list[Miss | None]]]()
        try:
            for part in parts:
                calls.append(asyncio.ensure_future(self._lookup(tier, chain, part, deadline)))
                await asyncio.sleep(0)  # it begins in a turn of its own
            while calls:  # what is done with goes in its turn: all at once would be a long one
                self._enter(tier.name, where, parts[0], await calls[0])
                del parts[0], calls[0]
                await asyncio.sleep(0)
        except BaseException:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        return asked

    async def _lookup(
        self, tier: Metered, chain: Sequence[BlockKey], wanted: Sequence[int], deadline: Mono
    ) -> list[Miss | None]:
        """The tier's answers. A block that it has been reading for too long is LATE."""
        answers = await tier.lookup(chain, wanted, deadline)
        if stuck := self._stuck(tier.name):
            for at, (index, miss) in enumerate(zip(wanted, answers, strict=True)):
                if miss is None and stuck(chain[index]):
                    answers[at] = Miss.LATE
        return answers

    def _enter(self, name: str, where: list[Where], wanted: Sequence[int], answers: Sequence[Miss | None]) -> None:
        for index, miss in zip(wanted, answers, strict=True):
            if miss is None:
                where[index] = name
            elif where[index] is Miss.ABSENT:
                where[index] = miss  # the more telling reason
