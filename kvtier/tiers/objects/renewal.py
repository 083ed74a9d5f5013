"""Recording the uses of objects in the bucket, for every replica's idle expiry."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace

from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.identity.keys import BlockKey
from kvtier.keyring import Keyring, UnknownKey
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.tiers.objects.bucket.retry import RetryingBucket
from kvtier.tiers.objects.index import ObjectEntry, ObjectIndex
from kvtier.tiers.objects.loop_thread import PerLoop
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.payload_work import PayloadWork
from kvtier.tiers.objects.uses import UseProofs
from kvtier.times import Wall

RENEWALS = 4
"""Parallel renewals: they are not urgent."""

AT_ONCE = 16
"""Renewals after which, where all have failed, the rest is not tried."""

_SLICE = 500


class Renewer:
    """Renews objects of one namespace. `renewed`: how many. Lives on the tier's event loop."""

    def __init__(
        self, bucket: RetryingBucket, names: ObjectNames, keyring: Keyring, index: ObjectIndex, clock: Clock,
        payloads: PayloadWork,
    ) -> None:  # fmt: skip
        self._payloads = payloads
        self._bucket = bucket
        self._keyring = keyring
        self._proofs = UseProofs(keyring, names.root)
        self._copies = bucket.renewable and (bucket.keeps_proof or not keyring.trusted)
        self._names = names
        self._index = index
        self.renewed = 0
        self._failed: set[BlockKey] = set()  # last blocks of objects whose record failed, among those that are due
        self._clock = clock
        self._renewals = PerLoop(lambda: asyncio.Semaphore(RENEWALS))

    async def record_use(self, entry: ObjectEntry) -> None:
        """The object was stored again: that is a use, recorded in the bucket now or later."""
        wall_s = self._clock.wall()
        self._index.touch([entry.last], wall_s)
        if entry.life.renewal_time(entry.renewed, wall_s) <= wall_s:
            with contextlib.suppress(TierError):
                await self.renew(entry, wall_s)

    async def record_uses(self) -> None:
        """Record the uses that are worth a write by now. Raises TierError if one could not be; it stays due, and with
        AT_ONCE that fail in a row so do the rest. Those that failed before are the last to be tried again."""
        wall_s, due = self._clock.wall(), []
        for count, entry in enumerate(self._index.unrecorded()):
            at = entry.life.renewal_time(entry.renewed, wall_s)
            if at <= wall_s:
                due.append(entry)
            elif at == math.inf:
                self._index.mark_recorded(entry.last, at)
            if count % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)  # lookups share this loop
        self._failed.intersection_update(entry.last for entry in due)
        due.sort(key=lambda entry: entry.last in self._failed)
        first: BaseException | None = None
        for start in range(0, len(due), AT_ONCE):
            some = due[start : start + AT_ONCE]
            renewals = (self.renew(entry, entry.life.last_use) for entry in some)
            results = await asyncio.gather(*renewals, return_exceptions=True)
            failed = [(entry.last, why) for entry, why in zip(some, results, strict=True) if why is not None]
            self._failed.update(last for last, _ in failed)
            first = first or next((why for _, why in failed), None)
            if len(failed) == len(some):
                break  # no right to write, or a server that is overloaded: not a request for each of thousands
        if first is not None:
            raise first

    async def renew(self, entry: ObjectEntry, used: Wall) -> None:
        """Record a use: by a copy of the object onto itself, or by rewriting it. A use of what this tier may not serve
        any more is none here. Raises TierError."""
        copies = self._copies
        if used > entry.renewed:
            life = entry.life.used(used)
            if not life.servable(Depth.G4, used):
                self._index.mark_recorded(entry.last, used)
                return
            # Whoever reads header and use cannot tell which stamps had died before it.
            if Lifetime(used, entry.frame.life.stamps).ends(Depth.G4) > life.ends(Depth.G4):
                entry, copies = replace(entry, life=life, frame=replace(entry.frame, life=life)), False
        async with self._renewals():
            try:
                stat = await (self._copy(entry, used) if copies else self._rewrite(entry, used))
            except UnknownKey:
                stat = None
        if stat is None or stat.size != entry.size:
            self._index.drop(entry.last)
            return
        self.renewed += 1
        self._index.put(replace(entry, etag=stat.etag, renewed=used))
        self._index.mark_recorded(entry.last, used)

    async def _copy(self, entry: ObjectEntry, used: Wall) -> Stat | None:
        name = self._names.unit(entry.last)
        return await self._bucket.renew(name, entry.etag, self._proofs.prove(name, entry.frame, used))

    async def _rewrite(self, entry: ObjectEntry, used: Wall) -> Stat | None:
        """Replace the header by one with the entry's life; None if this version is not there, or damaged."""
        name, data = self._names.unit(entry.last), bytearray(entry.size)
        view = memoryview(data)
        try:
            there = await self._bucket.read(name, 0, [view])
        except CorruptError:
            return None
        if there is None or there.etag != entry.etag:
            return None
        if not await self._payloads.is_right(entry, view):
            return None
        header = replace(entry.frame, life=entry.life).encode(self._keyring)
        data[: len(header)] = header
        return await self._bucket.replace(name, data, used, entry.etag)
