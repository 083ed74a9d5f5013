"""Deletes expired and purged objects: a page at a time, from a random place, without any lock.

Every replica walks the namespace in the order of names, slowly and from a place of its own; together they see
everything. Deleting twice is harmless. Only the version that was found dead is deleted, so that an object which is
being rewritten stays.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.identity.keys import BlockKey
from kvtier.retention.terms import Depth
from kvtier.tiers.objects.bucket.protocol import Stat, first_page
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.protocol import Miss

SWEEP_S = 60.0
"""Between two pages of one replica."""

HEADERS_MAX = 200
"""Headers read per page: of objects that the index does not show to be alive."""

AT_ONCE = 4
"""Headers read at once: lookups share the connections and the loop."""

RENEW_S = 12 * 3600.0
"""Age by the server's stamp at which a pinned object is renewed: the bucket's rule may delete from two days on."""

GRACE_S = 60.0
"""How long an object must have been dead: another replica's clock may be behind."""


@dataclass(slots=True)
class Swept:
    """Deleted by a sweeper since it was made."""

    objects: int = 0
    blocks: int = 0
    bytes: int = 0


class Sweeper:
    """One replica's share of the sweeping. Lives on the tier's event loop."""

    def __init__(self, store: ObjectStore, clock: Clock, rng: random.Random) -> None:
        self._store = store
        self._clock = clock
        self._random = rng
        self._cursor: str | None = None
        self._next = clock.monotonic() + rng.uniform(0, SWEEP_S)
        self.swept = Swept()

    @property
    def due(self) -> bool:
        return self._clock.monotonic() >= self._next

    async def page(self, headers_max: int = HEADERS_MAX) -> bool:
        """Sweep from the cursor on, at most one page and `headers_max` headers; returns whether the walk reached the
        end of the namespace and starts over. Raises TierError."""
        self._next = self._clock.monotonic() + SWEEP_S * self._random.uniform(0.5, 1.5)
        await self._store.pins.refresh()  # with an old list a block pinned since would be deleted
        if self._cursor is None:
            self._cursor = self._random_start()
        page = await first_page(self._store.bucket, self._store.names.root, self._cursor)
        strides = [(last, stat) for stat in page if (last := self._store.names.parse_stride(stat.name)) is not None]
        await self._renew_pinned(strides)
        unknown = [(last, stat) for last, stat in strides if not self._alive(last)][:headers_max]
        for start in range(0, len(unknown), AT_ONCE):
            some = unknown[start : start + AT_ONCE]
            for entry in await asyncio.gather(*(self._delete_dead(last, stat.size) for last, stat in some)):
                if entry is not None:
                    self.swept.objects += 1
                    self.swept.blocks += entry.blocks
                    self.swept.bytes += entry.size
        self._cursor = unknown[-1][1].name if len(unknown) == headers_max else page[-1].name if page else ""
        if not page:
            await self._store.deltas.sweep()
            await self._store.pins.sweep()
        return not page

    async def _renew_pinned(self, strides: Sequence[tuple[BlockKey, Stat]]) -> None:
        """Copy objects that only a pin keeps onto themselves, so that the bucket's own rule does not find them old."""
        old = self._clock.wall() - RENEW_S
        for last, stat in strides if self._store.pins else ():
            if stat.modified is None or stat.modified > old:
                continue
            entry = self._store.index.get(last) or await self._store.inspect(last, stat.size)
            wall_s = self._clock.wall()
            if entry is None or entry.life.servable(Depth.G4, wall_s):
                continue
            if self._store.pins.cover(entry, wall_s):
                await self._store.renew(entry, entry.renewed)

    def _random_start(self) -> str:
        """A random place among the scopes in the index."""
        names = self._store.names
        known = self._store.index.sample(self._random)
        return f"{names.scope(known.frame.scope)}{self._random.randrange(256):02x}/" if known is not None else ""

    def _alive(self, last: BlockKey) -> bool:
        known = self._store.index.get(last)
        return known is not None and self._store.miss_of(known, self._clock.wall()) is None

    async def _delete_dead(self, last: BlockKey, size: int) -> ObjectEntry | None:
        """Delete an object that its present header shows to be dead, in that very version; returns it if so. One that
        cannot be read is left to the next read of its name."""
        entry = await self._store.inspect(last, size)
        if entry is None or self._store.miss_of(entry, self._clock.wall() - GRACE_S) not in (Miss.EXPIRED, Miss.PURGED):
            return None
        return entry if await self._store.delete_version(entry) else None
