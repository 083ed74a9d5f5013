"""One process's way to the bucket, with what goes wrong on it: cut, slow, errors, answers lost, half and damaged
bodies, requests that hang, writes that land later, listings that are behind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvtier.errors import TierError
from kvtier.testing.virtual_bucket import VirtualBucket, VirtualServer
from kvtier.tiers.objects.bucket.protocol import TIER, Scatter, Stat, Transient
from kvtier.times import Wall

STALE_S = 5.0
"""How far a listing of units and deltas may be behind; the purge log's is not: its promise needs that."""


@dataclass
class LinkFaults:
    """What goes wrong on one machine's way to the bucket, which outlives its processes. `kind`: one of KINDS; `rate`:
    of requests; `late`: writes that were not answered, and land when the world says so."""

    KINDS: ClassVar[tuple[str, ...]] = (
        "error", "fatal", "lost", "half", "flipped", "hang", "slow", "late", "stale", "cut",
    )  # fmt: skip
    kind: str = ""
    rate: float = 0.0
    late: list[tuple[str, bytes, Wall]] = field(default_factory=list)


class Link(VirtualBucket):
    """See the module. A dead process's does nothing any more."""

    def __init__(
        self, server: VirtualServer, link_faults: LinkFaults, rng: random.Random, heard: Callable[[str], None]
    ) -> None:
        """`heard` is told of every request."""
        super().__init__(server)
        self._faults = link_faults
        self._rng = rng
        self._heard = heard
        self.dead = False

    def _strikes(self, *kinds: str) -> bool:
        link_faults = self._faults
        return link_faults.kind in kinds and (link_faults.kind == "cut" or self._rng.random() < link_faults.rate)

    async def _asked(self, verb: str, name: str) -> None:
        await super()._asked(verb, name)
        await asyncio.sleep(self._rng.choice((0.0, 0.0, 0.001, 0.004)))
        if self._strikes("hang"):
            await asyncio.get_running_loop().create_future()
        if self._strikes("slow"):
            await asyncio.sleep(self._rng.choice((0.05, 0.5, 3.0)))
        if self.dead or self._strikes("error", "cut"):
            self._heard(f"{verb} {name[:16]} fails")
            raise Transient(TIER, verb, "simulated")
        if self._strikes("fatal"):
            self._heard(f"{verb} {name[:16]} is refused")
            raise TierError(TIER, verb, "simulated")
        self._heard(f"{verb} {name[:16]}")

    async def _answering(self, verb: str, name: str) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.0, 0.001)))
        if self._strikes("lost", "cut"):
            self._heard(f"the answer to {verb} is lost")
            raise Transient(TIER, verb, "simulated, after it took effect")

    async def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        if self._strikes("late") and not self.dead:
            self._faults.late.append((name, bytes(data), used))
            await asyncio.sleep(0.01)
            raise Transient(TIER, "put", "simulated: no answer yet")
        return await super().create(name, data, used)

    async def read(self, name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        there = self.server.objects.get(name)
        if there is not None and self._strikes("half"):
            await self._asked("get", name)
            Scatter(into).feed(memoryview(there.data)[start : start + sum(map(len, into)) // 2])
            raise Transient(TIER, "get", "simulated: half of the body")
        stat = await super().read(name, start, into, clipped)
        if stat is not None and self._strikes("flipped"):
            piece = into[self._rng.randrange(len(into))]
            if len(piece):
                piece[self._rng.randrange(len(piece))] ^= 1 << self._rng.randrange(8)
        return stat

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        behind = self._strikes("stale")
        async for page in super().list(prefix, after):
            yield [stat for stat in page if not (behind and self._is_new(stat))] or page[:0]

    def _is_new(self, stat: Stat) -> bool:
        young = stat.modified is not None and self.server.clock.wall() - stat.modified < STALE_S
        return young and "/log/" not in stat.name
