"""Single units in a bucket: read and verify, create or extend, renew, delete. `objects` knows chains, this does not.

What fails its check is read a second time before it is taken for damage, and then deleted in exactly the version
that was read. Everything that is learnt goes into the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtier import checksum
from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.identity.keys import SCOPE_BYTES, BlockKey, Scope, scope_of_key
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.bucket.protocol import LIST_PAGE, RetryingBucket, Stat
from kvtier.tiers.objects.frame import COUNT_MAX, Frame, decode, header_bytes_of
from kvtier.tiers.objects.index import ObjectEntry, ObjectIndex
from kvtier.tiers.objects.pins import SharedPins
from kvtier.tiers.objects.strides import ObjectNames, runs
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target
from kvtier.tiers.rate_limiter import TokenBucket

log = logging.getLogger(__name__)

TRUST_S = 60.0
"""How long the index alone may say "already there" to a writer."""

REWRITES_MAX = 3
RENEWALS = 4
"""Renewals at once: a use that is recorded a little later is as good."""

_SLICE = 500


class ObjectStore:
    """The units of one namespace, on one event loop and within `limits`; probes may be four times as many as
    transfers. `tombstones`: scope → the time until which what it wrote is gone; its keeper keeps it fresh."""

    def __init__(
        self,
        bucket: RetryingBucket,
        names: ObjectNames,
        block_bytes: int,
        stride: int,
        clock: Clock,
        limits: BucketLimits,
    ) -> None:
        self.bucket = bucket
        self.names = names
        self.index = ObjectIndex()
        self.tombstones: dict[Scope, float] = {}
        self.pins = SharedPins(bucket, names, clock)
        self.announce: Callable[[ObjectEntry], None] = lambda unit: None
        self._namespace = names.namespace
        self._block_bytes = block_bytes
        self.stride = stride
        self._clock = clock
        self._gate = asyncio.Semaphore(limits.concurrency)
        self._probes = asyncio.Semaphore(4 * limits.concurrency)
        self._renewals = asyncio.Semaphore(RENEWALS)
        unit_bytes = float(stride * block_bytes)
        self._read_rate = TokenBucket(clock, limits.read_rate, max(limits.read_rate / 10, unit_bytes))
        self._write_rate = TokenBucket(clock, limits.write_rate, max(limits.write_rate / 10, unit_bytes))
        self._suspect: dict[BlockKey, None] = {}
        self.renewed = 0

    def why_not(self, unit: ObjectEntry, now: float) -> Miss | None:
        if self.purged(unit.frame.scope, unit.frame.life.born):
            return Miss.PURGED
        alive = unit.life.servable(Depth.G4, now) or self.pins.kept(unit, now)
        return None if alive else Miss.EXPIRED

    def purged(self, scope: Scope, created: float) -> bool:
        return created <= self.tombstones.get(scope, float("-inf"))

    async def header(self, keys: Sequence[BlockKey], first: int) -> ObjectEntry | None:
        """Read and check the header of the unit that is to hold `keys` from depth `first` on.

        None if it is not there, or was damaged (twice in a row) and has been condemned.
        """
        name = self.names.unit(keys[-1])
        stat: Stat | None = None
        for _ in range(2):
            raw = bytearray(header_bytes_of(len(keys)))
            try:
                async with self._probes:
                    stat = await self.bucket.read(name, 0, [memoryview(raw)])
                if stat is None:
                    self.index.drop(keys[-1])
                    return None
                unit = self._unit(raw, stat, keys, first)
            except CorruptError:
                continue
            self.index.put(unit)
            return unit
        await self._condemn(keys[-1], stat.etag if stat is not None else None)
        return None

    def _unit(self, raw: bytearray, stat: Stat, keys: Sequence[BlockKey], first: int) -> ObjectEntry:
        """The unit that a header describes. Raises CorruptError unless it is exactly the one that was asked for."""
        frame = decode(memoryview(raw))
        expected = (self._namespace, scope_of_key(keys[0]), first, self._block_bytes, len(keys))
        if (frame.namespace, frame.scope, frame.depth, frame.block_bytes, len(frame.hashes)) != expected or any(
            frame.key(index) != key for index, key in enumerate(keys)
        ):
            raise CorruptError("another unit's frame under this name")
        if stat.size != frame.total_bytes:
            raise CorruptError(f"object of {stat.size} bytes, its frame has {frame.total_bytes}")
        used = frame.life.last_use if stat.used is None else stat.used
        return ObjectEntry(
            frame, stat.size, stat.etag, Lifetime(used, frame.life.stamps), used, self._clock.monotonic()
        )

    async def _condemn(self, last: BlockKey, etag: str | None) -> None:
        """Delete the version that failed its check; the next write of this name does not ask what is there."""
        log.warning("g4: unit %s failed its check twice and is deleted", last[SCOPE_BYTES:].hex()[:12])
        self.index.drop(last)
        self._suspect[last] = None
        while len(self._suspect) > LIST_PAGE:
            del self._suspect[next(iter(self._suspect))]
        try:
            await self.bucket.delete(self.names.unit(last), etag)
        except TierError:
            pass  # the write that is no longer conditional replaces it

    async def serve(
        self, keys: Sequence[BlockKey], first: int, unit: ObjectEntry | None, positions: list[int],
        targets: Sequence[Target], results: list[Loaded | Miss],
    ) -> Miss | None:  # fmt: skip
        """Read targets out of one unit. A Miss that holds for all of them, or None: `results` has each one's.

        What fails its check is read a second time, header included, before the object is condemned: the first
        time may have been the network, or another replica's replacement between two requests.
        """
        verdict: Miss | None = None
        for attempt in range(2):
            pending = positions
            if attempt:
                unit, pending = None, [p for p in positions if not isinstance(results[p], Loaded)]
            try:
                unit = await self._fill(keys, first, unit, pending, targets)
            except CorruptError:
                verdict = Miss.CORRUPT
                continue
            if unit is None:
                return Miss.ABSENT
            verdict = self.why_not(unit, self._clock.wall())
            if verdict is Miss.EXPIRED and not attempt:
                continue  # another replica may have renewed it
            if verdict is not None:
                return verdict
            bad = self._verify(unit, first, pending, targets, results)
            if not bad:
                return None
            verdict = None
        last = keys[-1]
        await self._condemn(last, unit.etag if unit is not None else None)
        return verdict

    def _verify(
        self, unit: ObjectEntry, first: int, pending: list[int], targets: Sequence[Target], results: list[Loaded | Miss]
    ) -> bool:
        """Compare what was read with the header's digests; whether any block failed."""
        bad = False
        for position in pending:
            digest = unit.frame.digests[targets[position].index - first]
            if checksum.matches(digest, targets[position].into):
                results[position] = Loaded(digest, unit.life)
            else:
                results[position], bad = Miss.CORRUPT, True
        return bad

    async def _fill(
        self,
        keys: Sequence[BlockKey],
        first: int,
        unit: ObjectEntry | None,
        pending: list[int],
        targets: Sequence[Target],
    ) -> ObjectEntry | None:
        """Read the pending targets' bytes, and the header with them if it is not known. None: not there.

        Blocks are read in runs of neighbours. All runs come from the version the header came from; if another one
        has taken its place, CorruptError asks for a second look.
        """
        name = self.names.unit(keys[-1])
        by_index = {targets[position].index: targets[position].into for position in pending}
        spans = runs(sorted(by_index))
        buffers = [[piece for index in range(*span) for piece in by_index[index]] for span in spans]
        if unit is not None and self.why_not(unit, self._clock.wall()) is not None:
            return unit
        if unit is None:
            raw = bytearray(header_bytes_of(len(keys)))
            head_first = bool(spans) and spans[0][0] == first
            lead = [memoryview(raw), *(buffers[0] if head_first else ())]
            stat = await self._get(name, 0, lead)
            if stat is None:
                self.index.drop(keys[-1])
                return None
            unit = self._unit(raw, stat, keys, first)
            self.index.put(unit)
            if self.why_not(unit, self._clock.wall()) is not None:
                return unit
            if head_first:
                spans, buffers = spans[1:], buffers[1:]
        for span, into in zip(spans, buffers, strict=True):
            stat = await self._get(name, unit.frame.span(span[0] - first, span[1] - first)[0], into)
            if stat is None:
                self.index.drop(keys[-1])
                return None
            if stat.etag != unit.etag:
                raise CorruptError("replaced between two reads")
        return unit

    async def _get(self, name: str, start: int, into: Sequence[memoryview]) -> Stat | None:
        async with self._gate:
            await self._read_rate.take(sum(len(buffer) for buffer in into))
            return await self.bucket.read(name, start, into)

    def acceptable(self, unit: Sequence[Sealed]) -> Sequence[Sealed]:
        """The leading blocks that may lie in this tier: what follows one that may not would have no parent."""
        now = self._clock.wall()
        for count, block in enumerate(unit):
            gone = self.purged(scope_of_key(block.key), block.life.born)
            if gone or not block.life.servable(Depth.G4, now):
                return unit[:count]
        return unit

    async def store(self, blocks: Sequence[Sealed]) -> Stored:
        """Make one unit durable with at least these blocks' life. A tier's failure is FAILED."""
        try:
            async with self._gate:
                await self._write_rate.take(len(blocks) * self._block_bytes)
                return await self._admit(blocks)
        except TierError:
            return Stored.FAILED

    async def _admit(self, blocks: Sequence[Sealed]) -> Stored:
        keys = [block.key for block in blocks]
        first, last = blocks[0].index, keys[-1]
        life = Lifetime.common([block.life for block in blocks])
        if not life.servable(Depth.G4, self._clock.wall()):
            return Stored.REFUSED
        known = self.index.find(keys[0], last, blocks[-1].index)
        if known is not None and last not in self._suspect:
            known = await self._still_there(known)
            if known is not None and self.why_not(known, self._clock.wall()) is None and self._covers(known, life):
                await self._use(known)
                return Stored.PRESENT
        return await self._put(blocks, keys, first, life)

    async def _still_there(self, unit: ObjectEntry) -> ObjectEntry | None:
        if self._clock.monotonic() - unit.seen <= TRUST_S:
            return unit
        return await self.header([unit.frame.key(index) for index in range(unit.blocks)], unit.frame.depth)

    def _covers(self, unit: ObjectEntry, life: Lifetime) -> bool:
        """Whether whatever use `life` allows is allowed by the unit's stamps, last use apart."""
        return all(any(old.covers(new) for old in unit.life.stamps) for new in life.stamps)

    async def _use(self, unit: ObjectEntry) -> None:
        """The unit was stored again: that is a use. It is there even if the server cannot be told of it now."""
        now = self._clock.wall()
        self.index.touch([unit.last], now)
        if unit.life.renewal_time(unit.renewed, now) <= now:
            with contextlib.suppress(TierError):
                await self.renew(unit, now)

    async def _put(self, blocks: Sequence[Sealed], keys: Sequence[BlockKey], first: int, life: Lifetime) -> Stored:
        name, last = self.names.unit(keys[-1]), keys[-1]
        frame = self._frame(blocks, life)
        data = _encode(frame, blocks)
        outcome = Stored.STORED
        for _ in range(REWRITES_MAX):
            if last in self._suspect:
                stat = await self.bucket.replace(name, data, life.last_use, None)
                self._suspect.pop(last, None)
            else:
                stat = await self.bucket.create(name, data, life.last_use)
            if stat is None:
                there = await self.header(keys, first)
                if there is None:
                    continue  # gone since, or condemned: then the next round does not ask
                if self.why_not(there, self._clock.wall()) is None:
                    if self._covers(there, life):
                        await self._use(there)
                        return Stored.PRESENT
                    # The terms add up; the bytes become ours, since a frame holds one writer's.
                    life = there.life.join(life, self._clock.wall())
                    frame, outcome = replace(frame, life=life), Stored.PRESENT
                    data = _encode(frame, blocks)
                stat = await self.bucket.replace(name, data, life.last_use, there.etag)
            if stat is not None:
                break
        else:
            return Stored.FAILED
        if self.purged(frame.scope, life.born):
            await self.bucket.delete(name, stat.etag)
            return Stored.REFUSED
        unit = ObjectEntry(frame, len(data), stat.etag, life, life.last_use, self._clock.monotonic())
        self.index.put(unit)
        self.announce(unit)
        return outcome

    def _frame(self, blocks: Sequence[Sealed], life: Lifetime) -> Frame:
        return Frame(
            self._namespace,
            scope_of_key(blocks[0].key),
            blocks[0].index,
            self._block_bytes,
            tuple(block.key[SCOPE_BYTES:] for block in blocks),
            tuple(block.digest for block in blocks),
            life,
        )

    async def renew_used(self) -> None:
        """Tell the server of the uses that are worth a write by now; the others wait for their time. Raises TierError
        if one could not be told; it comes again."""
        now, due = self._clock.wall(), []
        for count, unit in enumerate(self.index.touched()):
            at = unit.life.renewal_time(unit.renewed, now)
            if at <= now:
                due.append(unit)
            elif at == math.inf:
                self.index.told(unit.last, math.inf)
            if count % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)  # look-ups share this loop
        for failed in await asyncio.gather(
            *(self.renew(unit, unit.life.last_use) for unit in due), return_exceptions=True
        ):
            if failed is not None:
                raise failed

    async def renew(self, unit: ObjectEntry, used: float) -> None:
        """Tell the server of a use: by a copy of the object onto itself, or by writing it again."""
        name = self.names.unit(unit.last)
        async with self._renewals:
            if self.bucket.renewable:
                stat = await self.bucket.renew(name, unit.etag, used)
            else:
                stat = await self._rewrite(unit, used)
        if stat is None or stat.size != unit.size:
            self.index.drop(unit.last)
            return
        self.renewed += 1
        self.index.put(replace(unit, etag=stat.etag, renewed=used))
        self.index.told(unit.last, used)

    async def _rewrite(self, unit: ObjectEntry, used: float) -> Stat | None:
        """The same payload under a header with the unit's present life; None if it is not there as it should be."""
        data = bytearray(unit.size)
        view = memoryview(data)
        try:
            there = await self.bucket.read(self.names.unit(unit.last), 0, [view])
        except CorruptError:
            return None
        if there is None or there.etag != unit.etag:
            return None
        for index, digest in enumerate(unit.frame.digests):
            if not checksum.matches(digest, [view[slice(*unit.frame.span(index, index + 1))]]):
                return None
        header = replace(unit.frame, life=unit.life).encode()
        data[: len(header)] = header
        return await self.bucket.replace(self.names.unit(unit.last), data, used, unit.etag)

    async def delete(self, lasts: Sequence[BlockKey]) -> None:
        for start in range(0, len(lasts), LIST_PAGE):
            some = lasts[start : start + LIST_PAGE]
            for last in some:
                self.index.drop(last)
            await self.bucket.delete_many([self.names.unit(last) for last in some])

    async def discard(self, unit: ObjectEntry) -> bool:
        """Delete this very version of a unit; whether it was there."""
        known = self.index.get(unit.last)
        if known is not None and known.etag == unit.etag:
            self.index.drop(unit.last)
        async with self._renewals:
            return await self.bucket.delete(self.names.unit(unit.last), unit.etag)

    def blocks_in(self, size: int) -> int:
        """How many blocks an object of `size` bytes holds; 0 if it is no whole frame."""
        guess = min(size // self._block_bytes, COUNT_MAX)
        return next((n for n in range(guess, 0, -1) if header_bytes_of(n) + n * self._block_bytes == size), 0)

    async def header_of(self, last: BlockKey, size: int) -> ObjectEntry | None:
        """The unit called by `last`, of which nothing else is known but its object's size; None if it is gone.

        Raises CorruptError, and condemns nothing.
        """
        raw = bytearray(min(size, header_bytes_of(self.stride)))
        async with self._probes:
            stat = await self.bucket.read(self.names.unit(last), 0, [memoryview(raw)])
        if stat is None:
            return None
        frame = decode(memoryview(raw))
        keys = [frame.key(index) for index in range(len(frame.hashes))]
        if keys[-1] != last:
            raise CorruptError("another unit's frame under this name")
        return self._unit(raw, stat, keys, frame.depth)

    async def covered(self, last: BlockKey, size: int) -> bool:
        """Whether the unit is older than its scope's tombstone; what cannot be read is taken for it."""
        known = self.index.get(last)
        try:
            unit = known if known is not None else await self.header_of(last, size)
        except CorruptError:
            return True
        return unit is not None and self.purged(unit.frame.scope, unit.frame.life.born)


def _encode(frame: Frame, blocks: Sequence[Sealed]) -> bytearray:
    """The frame's bytes in memory of their own, so that a request that outlives its caller reads nothing of theirs."""
    data = bytearray(frame.total_bytes)
    header = frame.encode()
    data[: len(header)] = header
    offset = len(header)
    for block in blocks:
        for piece in block.pieces:
            data[offset : offset + len(piece)] = piece
            offset += len(piece)
    return data
