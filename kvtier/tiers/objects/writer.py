"""Creates objects: one whose name is taken is left, renewed, or replaced in exactly the version that was read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from kvtier.clock import Clock
from kvtier.encryption import DataKey
from kvtier.errors import KeyUnavailable, TierError
from kvtier.identity.keys import BlockKey, scope_of_key
from kvtier.keyring import Keyring
from kvtier.retention.lifetime import FUTURE_S, Lifetime
from kvtier.retention.terms import Depth
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.tiers.objects.frame import ForeignFrame, Frame
from kvtier.tiers.objects.hints import UnitHint
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.loop_thread import PerLoop
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.protocol import Miss, Sealed, Stored
from kvtier.tiers.rate_limiter import TokenBucket
from kvtier.times import Wall

TRUST_S = 60.0
"""How long the index alone may report an object as present to a writer."""

REWRITES_MAX = 3


class ObjectWriter:
    """Writes units of a store, within `limits`. Lives on the tier's event loop."""

    def __init__(self, store: ObjectStore, keyring: Keyring, clock: Clock, limits: BucketLimits) -> None:
        self._store = store
        self._keyring = keyring
        self._clock = clock
        # Units whose bytes lie in memory of ours.
        self._units = PerLoop(lambda: asyncio.Semaphore(limits.concurrency))
        stride_bytes = float(store.stride * store.block_bytes)
        self._rate = TokenBucket(clock, limits.write_rate, max(limits.write_rate / 10, stride_bytes))
        self.saved_bytes = 0  # by compression

    def acceptable(self, blocks: Sequence[Sealed]) -> Sequence[Sealed]:
        """The leading blocks that may lie in this tier: those behind one that may not would have no parent. Pure."""
        wall_s = self._clock.wall()
        for count, block in enumerate(blocks):
            purged = self._store.purges.covers(scope_of_key(block.key), block.position)
            if purged or not block.life.servable(Depth.G4, wall_s):
                return blocks[:count]
        return blocks

    async def write(self, blocks: Sequence[Sealed]) -> Stored:
        """Make one object of these blocks durable, with at least the life that they share. NO_KEY where it cannot be
        encrypted, FAILED on any other TierError."""
        try:
            async with self._units():
                await self._rate.take(len(blocks) * self._store.block_bytes)
                return await self._write(blocks)
        except KeyUnavailable:
            return Stored.NO_KEY
        except TierError:
            return Stored.FAILED

    async def _write(self, blocks: Sequence[Sealed]) -> Stored:
        store, keys = self._store, [block.key for block in blocks]
        last = keys[-1]
        life = Lifetime.common([block.life for block in blocks])
        if not life.servable(Depth.G4, self._clock.wall()):
            return Stored.REFUSED
        key = await store.encryption.key_for(scope_of_key(last))
        known = store.known(keys[0], last, blocks[-1].index)
        if isinstance(known, UnitHint):
            known = await store.entry_of(known, last, blocks[-1].index)
        if known is not None and last not in store.damaged:
            if self._clock.monotonic() - known.seen > TRUST_S:
                known = await store.probe(known.frame.keys, known.frame.depth)
            here = known is not None and store.miss_of(known, self._clock.wall()) is None and known.covers(life)
            if here and known is not None and store.encryption.gives_way(known.frame, key) is None:
                await store.renewer.record_use(known)
                return Stored.PRESENT
        frame, data = await store.payloads.make(blocks, life, key)
        return await self._put(keys, frame, data, key)

    async def _put(self, keys: Sequence[BlockKey], frame: Frame, data: bytearray, key: DataKey | None) -> Stored:
        """Create the object, or replace the one that is there unless its life covers the frame's."""
        store, last = self._store, keys[-1]
        outcome = Stored.STORED
        for _ in range(REWRITES_MAX):
            damaged = store.damaged.get(last)
            stat = await self._send(keys, frame, data, damaged)
            if damaged is not None:
                store.damaged.pop(last, None)
            if stat is None:
                try:
                    there = await store.header(keys, frame.depth)
                except ForeignFrame as other:
                    store.foreign += 1
                    if not other.junk or self._keyring.trusted:
                        return Stored.REFUSED
                    stat = await self._send(keys, frame, data, other.etag)
                    if stat is not None:
                        break
                    continue
                if there is None:
                    continue  # gone since, or deleted as corrupt: then the next round overwrites
                if store.miss_of(there, self._clock.wall()) is Miss.EXPIRED:
                    await store.measure_clock()
                joined = self._succeed(there, frame.life, key)
                if joined is None:
                    return Stored.REFUSED
                if joined is there.life:
                    await store.renewer.record_use(there)
                    return Stored.PRESENT
                if joined is not frame.life:
                    # Both lives apply; the bytes become ours, since a frame holds one writer's.
                    frame, outcome = replace(frame, life=joined), Stored.PRESENT
                    data[: frame.header_bytes] = frame.encode(self._keyring)
                stat = await self._send(keys, frame, data, there.etag)
            if stat is not None:
                break
        else:
            return Stored.FAILED
        return await self._keep(frame, len(data), stat, outcome)

    async def _send(self, keys: Sequence[BlockKey], frame: Frame, data: bytearray, etag: str | None) -> Stat | None:
        """Create the object, or replace the version `etag`; None if another version is there."""
        name, store = self._store.names.unit(keys[-1]), self._store
        async with store.transfers():
            if etag is None:
                return await store.bucket.create(name, data, frame.life.last_use)
            return await store.bucket.replace(name, data, frame.life.last_use, etag)

    def _succeed(self, there: ObjectEntry, life: Lifetime, key: DataKey | None) -> Lifetime | None:
        """The life of the object that is to stand instead of the one that is there: `there.life` itself if that is to
        stay, `life` itself if nothing of it is to be kept, None if it must not be replaced. Pure."""
        store, now = self._store, self._clock.wall()
        gives_way = store.encryption.gives_way(there.frame, key)
        if gives_way:
            return life
        if gives_way is False:
            return None
        if store.miss_of(there, now) is None:
            return there.life if there.covers(life) else there.life.join(life, now)
        if abs(store.ahead_s) > FUTURE_S and not store.dead_at(there, Wall(now - store.ahead_s)):
            return None  # our clock is wrong: what we write instead would be dead to the others
        return life

    async def _keep(self, frame: Frame, size: int, stat: Stat, outcome: Stored) -> Stored:
        """Note the object that was written, unless it was purged since its blocks were taken for writing."""
        store, last_use = self._store, frame.life.last_use
        if store.purges.covers(frame.scope, frame.position):
            await store.bucket.delete(store.names.unit(frame.keys[-1]), stat.etag)
            return Stored.REFUSED
        entry = ObjectEntry(frame, size, stat.etag, frame.life, last_use, self._clock.monotonic())
        store.index.put(entry)
        store.deltas.add(entry.hint)
        self.saved_bytes += frame.header_bytes + len(frame.hashes) * frame.block_bytes - size
        return outcome
