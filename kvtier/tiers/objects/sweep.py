"""Deletes expired and purged objects: a page at a time, from a random place, without any lock.

Every replica walks the names of units in their order, slowly and from a place of its own; together they see
everything. Deltas and other control objects are no part of the walk: new ones cannot make it longer. Deleting twice is
harmless. Only the version that was found dead is deleted, so that an object which is being rewritten stays.

What looks dead may be alive to everybody else, if this replica's clock is ahead. So an object must be dead by the
earlier of two times: this clock's, when it may be trusted, and the server's, where it stamps its objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass

from kvtier.clock import Clock
from kvtier.errors import TierError
from kvtier.retention.terms import Depth
from kvtier.retention.trusted_clock import deletion_time
from kvtier.tiers.objects.bucket.protocol import Stat, first_page
from kvtier.tiers.objects.hints import UnitHint
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.store import ObjectStore
from kvtier.times import Mono, Wall

SWEEP_S = 60.0
"""Between two pages of one replica."""

FRUITFUL_S = 10.0
"""The same after a page of which half the headers were dead: a million of them go within a day."""

REST_S = 600.0
"""Between the end of a walk and the next: an idle replica asks little."""

HEADERS_MAX = 200
"""Objects looked at per page: headers read, and renewals."""

AT_ONCE = 8
"""Objects looked at at once: lookups share the connections and the loop."""

RENEW_S = 12 * 3600.0
"""Age by the server's stamp at which a pinned object is renewed: the bucket's rule may delete from two days on."""

YOUNG_S = 120.0
"""Age up to which an object that the index does not know is left alone: others' deltas are on their way, and all
replicas would read its header."""

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
        end of the namespace and starts over. What was done stays done if this is cancelled. Raises TierError."""
        self._rest(SWEEP_S)
        await self._store.refresh()  # with an old list a block pinned since would be deleted
        with contextlib.suppress(TierError):
            await self._store.pins.settle()
        if self._cursor is None:
            self._cursor = self._random_start()
        names = self._store.names
        page = await first_page(self._store.bucket, names.units, self._cursor)
        work = [stat for stat in page if names.is_unit(stat.name) and self._doubtful(stat)]
        before = self.swept.objects
        now = await self.deletion_time() if work else None
        for start in range(0, min(len(work), headers_max), AT_ONCE):
            some = work[start : min(start + AT_ONCE, headers_max)]
            await asyncio.gather(*(self._look(stat, now) for stat in some))
            self._cursor = some[-1].name
        if self.swept.objects - before > headers_max // 2:
            self._rest(FRUITFUL_S)
        if len(work) > headers_max:
            return False
        self._cursor = names.behind(page[-1].name) if page else ""
        if self._cursor:
            return False
        await self.tidy()
        self._rest(REST_S)
        return True

    async def tidy(self) -> None:
        """Delete old deltas, and pins that have ended for everybody; sign the purge log anew where another key did.
        Raises TierError."""
        await self._store.refresh()  # with an old list a pin that was put anew since would be deleted
        with contextlib.suppress(TierError):
            await self._store.purges.sign_anew()
        if self._store.pins:
            await self._store.pins.sweep(await self.deletion_time())
        if await self._store.deltas.any_old():
            await self._store.deltas.sweep(await self.deletion_time())

    def about(self, seconds: float) -> float:
        """Half to one and a half of it, another time each time: a fleet that started together falls apart."""
        return seconds * self._random.uniform(0.5, 1.5)

    def _rest(self, seconds: float) -> None:
        self._next = Mono(self._clock.monotonic() + self.about(seconds))

    def _random_start(self) -> str:
        """A random place among the scopes in the index."""
        names = self._store.names
        known = self._store.index.sample(self._random)
        return f"{names.scope(known.scope)}{self._random.randrange(256):02x}/" if known is not None else ""

    async def deletion_time(self) -> Wall | None:
        """Objects that were dead at this time are so by all evidence; None: there is no telling now. Raises
        TierError."""
        now = deletion_time(self._clock)
        if now is None:
            return None
        await self._store.measure_clock()
        return Wall(now - max(0.0, self._store.ahead_s) - GRACE_S)

    def _doubtful(self, stat: Stat) -> bool:
        """Whether the object has to be looked at: the index does not show it to be alive by its own terms, or a pin may
        keep it and the bucket's own rule may find it old."""
        known = self._store.named(stat.name)
        if known is None and stat.modified is not None and stat.modified > self._clock.wall() - YOUNG_S:
            return False
        if known is None or self._store.miss_of(known, self._clock.wall()) is not None:
            return True
        return self._old(stat) and self._pinned_only(known)

    def _pinned_only(self, unit: ObjectEntry | UnitHint) -> bool:
        wall_s = self._clock.wall()
        return not unit.life.servable(Depth.G4, wall_s) and self._store.pins.cover(unit, wall_s)

    def _old(self, stat: Stat) -> bool:
        return bool(self._store.pins) and stat.modified is not None and stat.modified <= self._clock.wall() - RENEW_S

    async def _look(self, stat: Stat, now: Wall | None) -> None:
        """Delete an object that its present header, if it is authentic, shows to be dead, in that very version, but for
        an expired one that an unread pin may hold; renew one that only a pin keeps, by a copy onto itself. One that is
        damaged is left to the next read of its name, one that cannot be had to the next walk: it stops none."""
        with contextlib.suppress(TierError):
            await self._judge(stat, now)

    async def _judge(self, stat: Stat, now: Wall | None) -> None:
        entry = await self._store.inspect(stat.name, stat.size)
        if entry is None:
            return
        purged = self._store.purges.covers(entry.frame.scope, entry.frame.position)
        if now is not None and (purged or (not self._store.pins.doubtful and self._store.dead_at(entry, now))):
            if await self._store.delete_version(entry):
                self._count(entry)
        elif self._old(stat) and self._pinned_only(entry):
            await self._store.renewer.renew(entry, entry.renewed)

    def _count(self, entry: ObjectEntry) -> None:
        self.swept.objects += 1
        self.swept.blocks += entry.blocks
        self.swept.bytes += entry.size
