"""Single objects in a bucket: read and verify, create or extend, renew, delete. Chains are known above this.

An object that fails its check is read a second time before it counts as damaged, and then deleted in exactly the
version that was read. Every object seen goes into the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from kvtier import checksum
from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.identity.keys import SCOPE_BYTES, BlockKey, scope_of_key
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.bucket.protocol import LIST_PAGE, Stat
from kvtier.tiers.objects.bucket.retry import RetryingBucket
from kvtier.tiers.objects.deltas import Deltas
from kvtier.tiers.objects.frame import COUNT_MAX, Frame, decode, header_bytes_of
from kvtier.tiers.objects.index import ObjectEntry, ObjectIndex
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.pins import SharedPins
from kvtier.tiers.objects.strides import runs
from kvtier.tiers.objects.tombstones import Tombstones
from kvtier.tiers.protocol import Loaded, Miss, Sealed, Stored, Target
from kvtier.tiers.rate_limiter import TokenBucket
from kvtier.times import Wall

log = logging.getLogger(__name__)

TRUST_S = 60.0
"""How long the index alone may report an object as present to a writer."""

REWRITES_MAX = 3
RENEWALS = 4
"""Parallel renewals: they are not urgent."""

_SLICE = 500


class ObjectStore:
    """The objects of one namespace, on one event loop and within `limits`; probes may be four times as many as
    transfers. `deltas`, `pins` and `tombstones` are kept fresh by the tier."""

    def __init__(
        self, bucket: RetryingBucket, names: ObjectNames, block_bytes: int, stride: int, clock: Clock,
        limits: BucketLimits,
    ) -> None:  # fmt: skip
        self.bucket = bucket
        self.names = names
        self.stride = stride
        self.index = ObjectIndex()
        self.deltas = Deltas(bucket, names, self.index, clock)
        self.pins = SharedPins(bucket, names, clock)
        self.tombstones = Tombstones(bucket, names, clock)
        self.renewed = 0
        self._block_bytes = block_bytes
        self._clock = clock
        self._transfers = asyncio.Semaphore(limits.concurrency)
        self._probes = asyncio.Semaphore(4 * limits.concurrency)
        self._renewals = asyncio.Semaphore(RENEWALS)
        stride_bytes = float(stride * block_bytes)
        self._read_rate = TokenBucket(clock, limits.read_rate, max(limits.read_rate / 10, stride_bytes))
        self._write_rate = TokenBucket(clock, limits.write_rate, max(limits.write_rate / 10, stride_bytes))
        self._overwrite: dict[BlockKey, None] = {}  # damaged objects: the next write is unconditional

    def miss_of(self, entry: ObjectEntry, wall_s: Wall) -> Miss | None:
        """Why the object may not be served at `wall_s`; None if it may. Pure."""
        if self.tombstones.cover(entry.frame.scope, entry.frame.life.born):
            return Miss.PURGED
        alive = entry.life.servable(Depth.G4, wall_s) or self.pins.cover(entry, wall_s)
        return None if alive else Miss.EXPIRED

    # -- headers --------------------------------------------------------------------------------------------------

    async def probe(self, keys: Sequence[BlockKey], depth: int) -> ObjectEntry | None:
        """Read and check the header of the object that is to hold `keys` from `depth` on. None if it is not there, or
        was damaged twice in a row, and then it is deleted. Raises TierError."""
        stat: Stat | None = None
        for _ in range(2):
            raw = bytearray(header_bytes_of(len(keys)))
            try:
                async with self._probes:
                    stat = await self.bucket.read(self.names.stride(keys[-1]), 0, [memoryview(raw)])
                if stat is None:
                    self.index.drop(keys[-1])
                    return None
                entry = self._checked(decode(memoryview(raw)), stat, keys, depth)
            except CorruptError:
                continue
            self.index.put(entry)
            return entry
        await self._delete_corrupt(keys[-1], stat.etag if stat is not None else None)
        return None

    async def inspect(self, last: BlockKey, size: int) -> ObjectEntry | None:
        """The object named by `last`, of which a listing gave the size, by its header; None if it is gone or damaged.
        Changes neither bucket nor index. Raises TierError."""
        with contextlib.suppress(CorruptError):
            return await self._inspect(last, size)
        return None

    async def _inspect(self, last: BlockKey, size: int) -> ObjectEntry | None:
        raw = bytearray(min(size, header_bytes_of(self.stride)))
        async with self._probes:
            stat = await self.bucket.read(self.names.stride(last), 0, [memoryview(raw)])
        if stat is None:
            return None
        frame = decode(memoryview(raw))
        keys = frame.keys
        if keys[-1] != last:
            raise CorruptError("another object's frame under this name")
        return self._checked(frame, stat, keys, frame.depth)

    async def is_purged(self, last: BlockKey, size: int) -> bool:
        """Whether a tombstone covers the object; one that cannot be read counts as covered."""
        known = self.index.get(last)
        try:
            entry = known if known is not None else await self._inspect(last, size)
        except CorruptError:
            return True
        return entry is not None and self.tombstones.cover(entry.frame.scope, entry.frame.life.born)

    def _checked(self, frame: Frame, stat: Stat, keys: Sequence[BlockKey], depth: int) -> ObjectEntry:
        """The entry of an object with this header. Raises CorruptError unless it holds just `keys` from `depth` on."""
        expected = (self.names.namespace, depth, self._block_bytes, list(keys))
        if (frame.namespace, frame.depth, frame.block_bytes, frame.keys) != expected:
            raise CorruptError("another object's frame under this name")
        if stat.size != frame.total_bytes:
            raise CorruptError(f"object of {stat.size} bytes, its frame has {frame.total_bytes}")
        used = frame.life.last_use if stat.used is None else stat.used
        life = Lifetime(used, frame.life.stamps)
        return ObjectEntry(frame, stat.size, stat.etag, life, used, self._clock.monotonic())

    def blocks_in(self, size: int) -> int:
        """How many blocks an object of `size` bytes holds; 0 if it is no whole frame."""
        guess = min(size // self._block_bytes, COUNT_MAX)
        return next((n for n in range(guess, 0, -1) if header_bytes_of(n) + n * self._block_bytes == size), 0)

    # -- reading --------------------------------------------------------------------------------------------------

    async def read(
        self, keys: Sequence[BlockKey], depth: int, entry: ObjectEntry | None, targets: Sequence[Target]
    ) -> dict[int, Loaded | Miss]:
        """Read `targets` out of the object that holds `keys` from `depth` on, with its header unless `entry` is given.
        Returns the result of each by its depth; ABSENT for all if there is no such object. Raises TierError.

        Blocks that fail their check are read again, header included, before the object is deleted: the cause may be
        the network, or another replica's replacement between two requests.
        """
        results: dict[int, Loaded | Miss] = {}
        miss: Miss | None = None
        for attempt in range(2):
            pending = [target for target in targets if not isinstance(results.get(target.index), Loaded)]
            known, entry = None if attempt else entry, None
            try:
                entry = await self._fill(keys, depth, known, pending)
            except CorruptError:
                miss = Miss.CORRUPT
                continue
            except TierError:
                if not results:
                    raise
                return results
            miss = Miss.ABSENT if entry is None else self.miss_of(entry, self._clock.wall())
            if miss is Miss.EXPIRED and not attempt:
                continue  # another replica may have renewed it
            if entry is None or miss is not None:
                break
            results |= _verified(entry, pending)
            if Miss.CORRUPT not in results.values():
                return results
        else:
            await self._delete_corrupt(keys[-1], entry.etag if entry is not None else None)
        return {target.index: miss for target in targets} if miss is not None else results

    async def _fill(
        self, keys: Sequence[BlockKey], depth: int, entry: ObjectEntry | None, targets: Sequence[Target]
    ) -> ObjectEntry | None:
        """Read the targets' bytes, unverified, and first the header if `entry` is not given. None: not there. An entry
        that may not be served: nothing was read.

        Neighbours are read in one request, all from the version of the header; CorruptError if another has replaced it.
        """
        name = self.names.stride(keys[-1])
        into = {target.index: target.into for target in targets}
        reads = [(span[0], [view for at in range(*span) for view in into[at]]) for span in runs(sorted(into))]
        if entry is None:
            raw = bytearray(header_bytes_of(len(keys)))
            lead = reads.pop(0)[1] if reads and reads[0][0] == depth else []
            stat = await self._get(name, 0, [memoryview(raw), *lead])
            if stat is None:
                self.index.drop(keys[-1])
                return None
            entry = self._checked(decode(memoryview(raw)), stat, keys, depth)
            self.index.put(entry)
        if self.miss_of(entry, self._clock.wall()) is not None:
            return entry
        for first, views in reads:
            stat = await self._get(name, entry.frame.span(first - depth, first - depth)[0], views)
            if stat is None:
                self.index.drop(keys[-1])
                return None
            if stat.etag != entry.etag:
                raise CorruptError("replaced between two reads")
        return entry

    async def _get(self, name: str, start: int, into: Sequence[memoryview]) -> Stat | None:
        async with self._transfers:
            await self._read_rate.take(sum(len(view) for view in into))
            return await self.bucket.read(name, start, into)

    async def _delete_corrupt(self, last: BlockKey, etag: str | None) -> None:
        """Delete the version that failed its check; the next write of this name overwrites any version."""
        log.warning("g4: object %s failed its check twice and is deleted", last[SCOPE_BYTES:].hex()[:12])
        self.index.drop(last)
        self._overwrite[last] = None
        while len(self._overwrite) > LIST_PAGE:
            del self._overwrite[next(iter(self._overwrite))]
        with contextlib.suppress(TierError):
            await self.bucket.delete(self.names.stride(last), etag)

    # -- writing --------------------------------------------------------------------------------------------------

    def acceptable(self, blocks: Sequence[Sealed]) -> Sequence[Sealed]:
        """The leading blocks that may lie in this tier: those behind one that may not would have no parent. Pure."""
        wall_s = self._clock.wall()
        for count, block in enumerate(blocks):
            purged = self.tombstones.cover(scope_of_key(block.key), block.life.born)
            if purged or not block.life.servable(Depth.G4, wall_s):
                return blocks[:count]
        return blocks

    async def write(self, blocks: Sequence[Sealed]) -> Stored:
        """Make one object of these blocks durable, with at least the life that they share. FAILED on a TierError."""
        try:
            async with self._transfers:
                await self._write_rate.take(len(blocks) * self._block_bytes)
                return await self._write(blocks)
        except TierError:
            return Stored.FAILED

    async def _write(self, blocks: Sequence[Sealed]) -> Stored:
        keys = [block.key for block in blocks]
        last = keys[-1]
        life = Lifetime.common([block.life for block in blocks])
        if not life.servable(Depth.G4, self._clock.wall()):
            return Stored.REFUSED
        known = self.index.find(keys[0], last, blocks[-1].index)
        if known is not None and last not in self._overwrite:
            if self._clock.monotonic() - known.seen > TRUST_S:
                known = await self.probe(known.frame.keys, known.frame.depth)
            if known is not None and self.miss_of(known, self._clock.wall()) is None and _covers(known, life):
                await self._record_use(known)
                return Stored.PRESENT
        return await self._put(blocks, keys, life)

    async def _put(self, blocks: Sequence[Sealed], keys: Sequence[BlockKey], life: Lifetime) -> Stored:
        """Create the object, or replace the one that is there unless its life covers `life`."""
        name, last = self.names.stride(keys[-1]), keys[-1]
        hashes, digests = tuple(key[SCOPE_BYTES:] for key in keys), tuple(block.digest for block in blocks)
        scope, depth = scope_of_key(last), blocks[0].index
        frame = Frame(self.names.namespace, scope, depth, self._block_bytes, hashes, digests, life)
        data = _encode(frame, blocks)
        outcome = Stored.STORED
        for _ in range(REWRITES_MAX):
            if last in self._overwrite:
                stat = await self.bucket.replace(name, data, life.last_use, None)
                self._overwrite.pop(last, None)
            else:
                stat = await self.bucket.create(name, data, life.last_use)
            if stat is None:
                there = await self.probe(keys, depth)
                if there is None:
                    continue  # gone since, or deleted as corrupt: then the next round overwrites
                if self.miss_of(there, self._clock.wall()) is None:
                    if _covers(there, life):
                        await self._record_use(there)
                        return Stored.PRESENT
                    # Both lives apply; the bytes become ours, since a frame holds one writer's.
                    life = there.life.join(life, self._clock.wall())
                    frame, outcome = replace(frame, life=life), Stored.PRESENT
                    data = _encode(frame, blocks)
                stat = await self.bucket.replace(name, data, life.last_use, there.etag)
            if stat is not None:
                break
        else:
            return Stored.FAILED
        if self.tombstones.cover(scope, life.born):
            await self.bucket.delete(name, stat.etag)
            return Stored.REFUSED
        entry = ObjectEntry(frame, len(data), stat.etag, life, life.last_use, self._clock.monotonic())
        self.index.put(entry)
        self.deltas.add(entry)
        return outcome

    # -- renewal --------------------------------------------------------------------------------------------------

    async def _record_use(self, entry: ObjectEntry) -> None:
        """The object was stored again: that is a use, recorded in the bucket now or later."""
        wall_s = self._clock.wall()
        self.index.touch([entry.last], wall_s)
        if entry.life.renewal_time(entry.renewed, wall_s) <= wall_s:
            with contextlib.suppress(TierError):
                await self.renew(entry, wall_s)

    async def record_uses(self) -> None:
        """Record the uses that are worth a write by now. Raises TierError if one could not be; it stays due."""
        wall_s, due = self._clock.wall(), []
        for count, entry in enumerate(self.index.unrecorded()):
            at = entry.life.renewal_time(entry.renewed, wall_s)
            if at <= wall_s:
                due.append(entry)
            elif at == math.inf:
                self.index.mark_recorded(entry.last, at)
            if count % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)  # lookups share this loop
        renewals = (self.renew(entry, entry.life.last_use) for entry in due)
        for failed in await asyncio.gather(*renewals, return_exceptions=True):
            if failed is not None:
                raise failed

    async def renew(self, entry: ObjectEntry, used: Wall) -> None:
        """Record a use: by a copy of the object onto itself, or by rewriting it. Raises TierError."""
        async with self._renewals:
            if self.bucket.renewable:
                stat = await self.bucket.renew(self.names.stride(entry.last), entry.etag, used)
            else:
                stat = await self._rewrite(entry, used)
        if stat is None or stat.size != entry.size:
            self.index.drop(entry.last)
            return
        self.renewed += 1
        self.index.put(replace(entry, etag=stat.etag, renewed=used))
        self.index.mark_recorded(entry.last, used)

    async def _rewrite(self, entry: ObjectEntry, used: Wall) -> Stat | None:
        """Replace the header by one with the entry's life; None if this version is not there, or damaged."""
        name, data = self.names.stride(entry.last), bytearray(entry.size)
        view = memoryview(data)
        try:
            there = await self.bucket.read(name, 0, [view])
        except CorruptError:
            return None
        if there is None or there.etag != entry.etag:
            return None
        for index, digest in enumerate(entry.frame.digests):
            if not checksum.matches(digest, [view[slice(*entry.frame.span(index, index + 1))]]):
                return None
        header = replace(entry.frame, life=entry.life).encode()
        data[: len(header)] = header
        return await self.bucket.replace(name, data, used, entry.etag)

    # -- deletion -------------------------------------------------------------------------------------------------

    async def delete(self, lasts: Sequence[BlockKey]) -> None:
        """Delete the objects named by these blocks, whatever their version. Raises TierError."""
        for start in range(0, len(lasts), LIST_PAGE):
            some = lasts[start : start + LIST_PAGE]
            for last in some:
                self.index.drop(last)
            await self.bucket.delete_many([self.names.stride(last) for last in some])

    async def delete_version(self, entry: ObjectEntry) -> bool:
        """Delete an object in this very version; whether it was there. Raises TierError."""
        known = self.index.get(entry.last)
        if known is not None and known.etag == entry.etag:
            self.index.drop(entry.last)
        async with self._renewals:
            return await self.bucket.delete(self.names.stride(entry.last), entry.etag)


def _verified(entry: ObjectEntry, targets: Sequence[Target]) -> dict[int, Loaded | Miss]:
    """Compare the targets' bytes with the header's digests: Loaded or CORRUPT by depth."""
    results: dict[int, Loaded | Miss] = {}
    for target in targets:
        digest = entry.frame.digests[target.index - entry.frame.depth]
        matches = checksum.matches(digest, target.into)
        results[target.index] = Loaded(digest, entry.life) if matches else Miss.CORRUPT
    return results


def _covers(entry: ObjectEntry, life: Lifetime) -> bool:
    """Whether the object's stamps allow every use that `life` allows."""
    return all(any(old.covers(new) for old in entry.life.stamps) for new in life.stamps)


def _encode(frame: Frame, blocks: Sequence[Sealed]) -> bytearray:
    """The frame's bytes, in memory of their own: a request that outlives its caller must not read the caller's."""
    data = bytearray(frame.total_bytes)
    header = frame.encode()
    data[: len(header)] = header
    offset = len(header)
    for block in blocks:
        for piece in block.pieces:
            data[offset : offset + len(piece)] = piece
            offset += len(piece)
    return data
