"""Deleting what nobody may be served any more: a page at a time, from a random place, without any lease.

Every replica walks the namespace in the order of names, each from a place of its own and slowly; together they see
everything. Deleting twice is harmless. What is deleted is the version that was found dead, so that a unit which is
being written anew stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.errors import CorruptError
from kvtier.identity.keys import BlockKey
from kvtier.retention.terms import Depth
from kvtier.tiers.objects.bucket.protocol import Stat, first_page
from kvtier.tiers.objects.deltas import Deltas
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.protocol import Miss

SWEEP_S = 60.0
"""Between two pages of one replica."""

HEADERS_MAX = 200
"""Headers read per page: what this replica does not know for alive."""

AT_ONCE = 4
"""Headers read at once: look-ups share the connections and the loop."""

RENEW_S = 12 * 3600.0
"""Age by the server's stamp at which a pinned unit is renewed: the bucket's rule may delete from two days on."""

GRACE_S = 60.0
"""How long a unit must have been dead: another replica's clock may be behind."""


@dataclass(slots=True)
class Swept:
    """What a sweeper deleted since it was made."""

    units: int = 0
    blocks: int = 0
    bytes: int = 0
    deltas: int = 0
    pins: int = 0


class Sweeper:
    """One replica's share of the sweeping. Lives on the tier's event loop."""

    def __init__(self, store: ObjectStore, deltas: Deltas, clock: Clock, rng: random.Random) -> None:
        self._store = store
        self._deltas = deltas
        self._clock = clock
        self._random = rng
        self._cursor: str | None = None
        self._next = clock.monotonic() + rng.uniform(0, SWEEP_S)
        self.swept = Swept()

    @property
    def due(self) -> bool:
        return self._clock.monotonic() >= self._next

    async def page(self, headers_max: int = HEADERS_MAX) -> bool:
        """Sweep from the cursor on, at most one page and `headers_max` headers; whether the walk came to the end
        of the namespace and begins anew. Raises TierError."""
        self._next = self._clock.monotonic() + SWEEP_S * self._random.uniform(0.5, 1.5)
        await self._store.pins.refresh()  # nothing is deleted by an old list of what is kept
        root = self._store.names.root
        if self._cursor is None:
            self._cursor = self._somewhere()
        page = await first_page(self._store.bucket, root, self._cursor)
        unknown = [(last, stat) for stat in page if (last := self._store.names.parse_unit(stat.name)) is not None]
        await self._renew_kept(unknown)
        unknown = [(last, stat) for last, stat in unknown if not self._alive(last)][:headers_max]
        for start in range(0, len(unknown), AT_ONCE):
            some = unknown[start : start + AT_ONCE]
            for unit in await asyncio.gather(*(self._sweep(last, stat.size) for last, stat in some)):
                if unit is not None:
                    self.swept.units += 1
                    self.swept.blocks += unit.blocks
                    self.swept.bytes += unit.size
        self._cursor = unknown[-1][1].name if len(unknown) == headers_max else page[-1].name if page else ""
        if not page:
            self.swept.deltas += await self._deltas.sweep()
            self.swept.pins += await self._store.pins.sweep()
        return not page

    async def _renew_kept(self, named: Sequence[tuple[BlockKey, Stat]]) -> None:
        """A copy onto itself for what only a pin keeps, so that the bucket's own rule does not find it old."""
        old = self._clock.wall() - RENEW_S
        for last, stat in named if self._store.pins else ():
            if stat.modified is None or stat.modified > old:
                continue
            unit = self._store.index.get(last)
            if unit is None:
                with contextlib.suppress(CorruptError):
                    unit = await self._store.header_of(last, stat.size)
            now = self._clock.wall()
            if unit is not None and self._store.pins.kept(unit, now) and not unit.life.servable(Depth.G4, now):
                await self._store.renew(unit, unit.renewed)

    def _somewhere(self) -> str:
        """A random place among the scopes that this replica knows."""
        names = self._store.names
        known = self._store.index.some(self._random)
        return f"{names.scope(known.frame.scope)}{self._random.randrange(256):02x}/" if known is not None else ""

    def _alive(self, last: BlockKey) -> bool:
        known = self._store.index.get(last)
        return known is not None and self._store.why_not(known, self._clock.wall()) is None

    async def _sweep(self, last: BlockKey, size: int) -> ObjectEntry | None:
        """Delete a unit that is dead by the header that is there now, in that very version: somebody may be writing it
        anew. What cannot be read is left to whoever asks for it by name."""
        try:
            unit = await self._store.header_of(last, size)
        except CorruptError:
            return None
        if unit is None or self._store.why_not(unit, self._clock.wall() - GRACE_S) not in (Miss.EXPIRED, Miss.PURGED):
            return None
        return unit if await self._store.discard(unit) else None
