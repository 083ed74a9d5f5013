"""Single objects in a bucket: read and verify, delete. Chains are known above this, writer.py creates them.

An object that fails its check is read a second time before it counts as damaged, and then deleted in exactly the
version that was read, if its header is authentic. Any other object is foreign: a miss with its reason, and left as it
is. Every object seen goes into the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence

from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.identity.keys import BlockKey
from kvtier.keyring import Keyring
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.pins import PINS_MAX
from kvtier.retention.terms import Depth
from kvtier.tiers.data_keys import DataKeys
from kvtier.tiers.objects.bucket.open import BucketLimits
from kvtier.tiers.objects.bucket.protocol import LIST_PAGE, Stat, first_page
from kvtier.tiers.objects.bucket.retry import RetryingBucket
from kvtier.tiers.objects.compression import landed, landing
from kvtier.tiers.objects.deltas import Deltas
from kvtier.tiers.objects.encryption import UnitEncryption
from kvtier.tiers.objects.frame import HEADER_ALIGN, ForeignFrame, Frame, check_version, decode, header_bytes_of
from kvtier.tiers.objects.hints import UnitHint
from kvtier.tiers.objects.index import ObjectEntry, ObjectIndex
from kvtier.tiers.objects.loop_thread import PerLoop
from kvtier.tiers.objects.names import ObjectNames, fingerprint_of
from kvtier.tiers.objects.payload_work import PayloadWork
from kvtier.tiers.objects.pins import SharedPins
from kvtier.tiers.objects.purge_log import TenantLog
from kvtier.tiers.objects.renewal import Renewer
from kvtier.tiers.objects.signed import Signer
from kvtier.tiers.objects.strides import runs
from kvtier.tiers.objects.uses import UseProofs
from kvtier.tiers.protocol import Loaded, Miss, Pieces, Target
from kvtier.tiers.rate_limiter import TokenBucket
from kvtier.times import Mono, Wall

log = logging.getLogger(__name__)

ABSENT_S = 5.0
"""For how long a probe that found nothing to serve is not repeated."""

READS_MAX = 3

MEASURE_S = 600.0
"""Between two comparisons of this replica's clock with the server's."""


class ObjectStore:
    """The objects of one namespace, on one event loop and within `limits`; probes may be four times as many as
    transfers. `deltas`, `pins` and `purges` are kept fresh by the tier."""

    def __init__(
        self, bucket: RetryingBucket, names: ObjectNames, keyring: Keyring, block_bytes: int, stride: int,
        clock: Clock, limits: BucketLimits, keys: DataKeys | None = None, compress: bool = False, *, replica: int,
    ) -> None:  # fmt: skip
        """`compress`: units written are coded, where that saves enough; coded ones are read in any case. `replica`: 32
        bits that tell the replicas apart."""
        self.bucket = bucket
        self.names = names
        self.stride = stride
        self.index = ObjectIndex(stride, names.fingerprint)
        signer = Signer(keyring, names.root)
        self.deltas = Deltas(bucket, names, keyring, self.index, stride, clock, replica)
        self.purges = TenantLog(bucket, names, signer, clock)
        self.pins = SharedPins(bucket, names, signer, self.purges, clock)
        self.encryption = UnitEncryption(keys)
        self.payloads = PayloadWork(names.namespace, block_bytes, keyring, self.encryption, compress)
        self.renewer = Renewer(bucket, names, keyring, self.index, clock, self.payloads)
        self._keyring = keyring
        self._proofs = UseProofs(keyring, names.root)
        self.block_bytes = block_bytes
        self.ahead_s = 0.0  # how far our clock is ahead of the server's, behind it below 0; as last measured
        self._measured = Mono("-inf")
        self._server_s = float("-inf")  # the server's clock at monotonic time 0, or earlier
        self.foreign = 0  # times that a foreign object was met
        self._clock = clock
        self.transfers = PerLoop(lambda: asyncio.Semaphore(limits.concurrency))
        self._probes = PerLoop(lambda: asyncio.Semaphore(4 * limits.concurrency))
        stride_bytes = float(stride * block_bytes)
        self._read_rate = TokenBucket(clock, limits.read_rate, max(limits.read_rate / 10, stride_bytes))
        self.damaged: dict[BlockKey, str] = {}  # versions that the next write of this name replaces

    def known(self, first: BlockKey, key: BlockKey, depth: int) -> ObjectEntry | UnitHint | None:
        """An object that seems to begin with the block `first` and to hold `key` at `depth`, by the index."""
        return self.index.find(first, key, depth) or self.index.find_hint(first, key, depth)

    def miss_of(self, unit: ObjectEntry | UnitHint, wall_s: Wall) -> Miss | None:
        """Why the object may not be served at `wall_s`, as far as header or hint tell; None if it may. Pure."""
        known = unit if isinstance(unit, UnitHint) else unit.frame
        if self.purges.covers(known.scope, known.position):
            return Miss.PURGED
        if not unit.life.servable(Depth.G4, wall_s) and not self.pins.cover(unit, wall_s):
            return Miss.EXPIRED
        return None if isinstance(known, UnitHint) else self.encryption.miss_of(known)

    async def close(self) -> None:
        """Close connections and threads. Idempotent; the store can be used again."""
        self.payloads.close()
        await self.bucket.close()

    async def refresh(self) -> None:
        """List purges and pins, in one listing, and read new purges; `pins.settle` reads the pins. Raises TierError."""
        purges, pins = list[Stat](), list[Stat]()
        known, began = self.purges.position, self._clock.monotonic()
        async for page in self.bucket.list(self.names.control, self.purges.after):
            purges += [stat for stat in page if stat.name.startswith(self.names.log)]
            pins += [stat for stat in page if stat.name.startswith(self.names.pins)][: PINS_MAX - len(pins)]
        await self.purges.take(purges, known)
        self.purges.read_at = began
        self.pins.take(pins, began)

    async def measure_clock(self) -> None:
        """Have `ahead_s` tell of now, or of MEASURE_S ago at most. Where nothing can be written, since the bucket is
        full, it is at most that: by the server's stamps, and the time that has passed since one was seen. Raises
        TierError."""
        if self._clock.monotonic() - self._measured <= MEASURE_S:
            return
        try:
            skew = await self.deltas.measure_skew()
        except TierError:
            page = await first_page(self.bucket, self.names.root)
            if not page:
                raise
            now = self._clock.monotonic()
            latest = max((stat.modified - now for stat in page if stat.modified is not None), default=float("-inf"))
            self._server_s = max(self._server_s, latest)
            self.ahead_s = 0.0 if self._server_s == float("-inf") else self._clock.wall() - self._server_s - now
        else:
            self.ahead_s, self._measured = skew or 0.0, self._clock.monotonic()
            if skew is not None:
                self._server_s = self._clock.wall() - skew - self._measured

    async def settled_miss_of(self, entry: ObjectEntry) -> Miss | None:
        """`miss_of` now; an object that seems expired waits for the pins that are not read yet."""
        miss = self.miss_of(entry, self._clock.wall())
        if miss is Miss.EXPIRED and not self.pins.settled:
            with contextlib.suppress(TierError):
                await self.pins.settle()
            miss = self.miss_of(entry, self._clock.wall())
        return miss

    def dead_at(self, entry: ObjectEntry, wall_s: Wall) -> bool:
        """Whether the object was purged, or had ended for good by `wall_s`. Pure."""
        if self.purges.covers(entry.frame.scope, entry.frame.position):
            return True
        return entry.life.ends(Depth.G4) < wall_s and not self.pins.cover(entry, wall_s)

    # -- headers --------------------------------------------------------------------------------------------------

    async def probe(self, keys: Sequence[BlockKey], depth: int) -> ObjectEntry | None:
        """Read and check the header of the object that is to hold `keys` from `depth` on. None if it is not there, is
        foreign, or was damaged twice in a row, and then it is deleted. Raises TierError."""
        try:
            return await self.header(keys, depth)
        except ForeignFrame as other:
            self._note_foreign(keys[-1], other)
            return None

    def _note_foreign(self, last: BlockKey, other: ForeignFrame) -> Miss:
        self.foreign += 1
        self.index.drop(last)
        self.index.put_absent(last, self._clock.monotonic() + ABSENT_S, other.miss)
        return other.miss

    async def header(self, keys: Sequence[BlockKey], depth: int) -> ObjectEntry | None:
        """`probe`, which raises ForeignFrame for a foreign object."""
        failed: list[str | None] = []  # versions, None: not told
        for _ in range(2):
            stat: Stat | None = None
            raw = bytearray(header_bytes_of(len(keys)))
            try:
                async with self._probes():
                    stat = await self.bucket.read(self.names.unit(keys[-1]), 0, [memoryview(raw)])
                if stat is None:
                    self.index.drop(keys[-1])
                    return None
                entry = self._checked(decode(memoryview(raw), self._keyring), stat, keys, depth)
            except ForeignFrame as other:
                other.etag = stat.etag if stat is not None else ""
                raise
            except CorruptError:
                failed.append(stat.etag if stat is not None else None)
                continue
            self.index.put(entry)
            return entry
        await self._condemn(keys, depth, failed[0] if failed[0] == failed[1] else None)
        return None

    async def inspect(self, name: str, size: int) -> ObjectEntry | None:
        """The object of this name, of which a listing gave the size, by its header; None if it is gone, damaged or not
        ours. Changes neither bucket nor index. Raises TierError."""
        raw = bytearray(min(size, header_bytes_of(self.stride)))  # more blocks are another stride's
        with contextlib.suppress(CorruptError):
            async with self._probes():
                stat = await self.bucket.read(name, 0, [memoryview(raw)])
            if stat is None:
                return None
            frame = decode(memoryview(raw), self._keyring)
            if self.names.unit(frame.keys[-1]) == name:
                return self._checked(frame, stat, frame.keys, frame.depth)
        return None

    def named(self, name: str) -> UnitHint | None:
        """What the index has of the object of this name."""
        return self.index.named(fingerprint_of(name))

    async def entry_of(self, hint: UnitHint, key: BlockKey, depth: int) -> ObjectEntry | None:
        """The index's entry of an object that seems to hold `key` at `depth` by a hint, after its header was read; None
        if it does not. One that is gone, damaged or another's is no longer in the index. Raises TierError."""
        entry = self.index.get(hint.last)
        if entry is None:
            entry = await self.inspect(self.names.unit(hint.last), header_bytes_of(hint.blocks))
            fits = entry is not None and (entry.frame.depth, entry.blocks) == (hint.depth, hint.blocks)
            if entry is None or not fits:
                self.index.drop(hint.last)
                return None
            self.index.put(entry)
        return entry if entry.holds(key, depth) else None

    def _checked(self, frame: Frame, stat: Stat, keys: Sequence[BlockKey], depth: int) -> ObjectEntry:
        """The entry of an object with this header. Raises ForeignFrame unless it holds just `keys` from `depth` on, and
        CorruptError if it is not whole."""
        expected = (self.names.namespace, depth, self.block_bytes, list(keys))
        if (frame.namespace, frame.depth, frame.block_bytes, frame.keys) != expected:
            raise ForeignFrame("another object's frame under this name")
        if stat.size != frame.total_bytes:
            raise CorruptError(f"object of {stat.size} bytes, its frame has {frame.total_bytes}")
        # The server's stamp tells a replica whose clock is behind that a later use is none of the future.
        used = self._proofs.last_use(frame, stat, Wall(max(self._clock.wall(), stat.modified or 0.0)))
        life = Lifetime(used, frame.life.stamps)
        return ObjectEntry(frame, stat.size, stat.etag, life, used, self._clock.monotonic())

    # -- reading --------------------------------------------------------------------------------------------------

    async def read(
        self, keys: Sequence[BlockKey], depth: int, entry: ObjectEntry | None, targets: Sequence[Target]
    ) -> dict[int, Loaded | Miss]:
        """Read `targets` out of the object that holds `keys` from `depth` on, with its header unless `entry` is given.
        Returns the result of each by its depth; ABSENT for all if there is no such object. Raises TierError.

        Blocks that fail their check are read again, header included: a version is deleted when it has failed twice,
        since the cause may be the network. RACED if others replace it faster than it can be read.
        """
        results: dict[int, Loaded | Miss] = {}
        miss: Miss | None = None
        failed: Counter[str | None] = Counter()  # checks, by version; None: its header
        for attempt in range(READS_MAX):
            pending = [target for target in targets if not isinstance(results.get(target.index), Loaded)]
            known, entry = None if attempt else entry, None
            try:
                stored: dict[int, Pieces] = {}
                entry, miss = await self._fill(keys, depth, known, pending, stored)
                if miss is Miss.RACED or (miss is Miss.EXPIRED and not attempt):
                    continue  # another replica replaced it, or may have renewed it
                if entry is None or miss is not None:
                    break
                results |= await self.payloads.verify(entry, pending, stored)
                miss = self.miss_of(entry, self._clock.wall())  # last: a purge may have come meanwhile
                if miss is not None:
                    break
                if Miss.CORRUPT not in results.values():
                    return results
                failed[entry.etag] += 1
                if failed[entry.etag] == 2:
                    await self._condemn(keys, depth, entry.etag)
                    break
            except ForeignFrame as other:
                miss = self._note_foreign(keys[-1], other)
                break
            except CorruptError:
                miss, failed[None] = Miss.CORRUPT, failed[None] + 1
                if failed[None] == 2:
                    break
            except TierError:
                if not results:
                    raise
                return results
        if failed[None] == 2:
            try:
                miss = await self._condemn(keys, depth, None)
            except ForeignFrame as other:
                miss = self._note_foreign(keys[-1], other)
        return {target.index: miss for target in targets} if miss is not None else results

    async def _fill(
        self, keys: Sequence[BlockKey], depth: int, entry: ObjectEntry | None, targets: Sequence[Target],
        stored: dict[int, Pieces],
    ) -> tuple[ObjectEntry | None, Miss | None]:  # fmt: skip
        """Read the targets' stored bytes, unverified, and first the header if `entry` is not given. Returns the
        object's entry if it is there, and why it may not be served: then not all was read. `stored` gets, by depth,
        where each target's bytes lie.

        Neighbours are read in one request, all from the version of the header; RACED if another has replaced it.
        """
        name = self.names.unit(keys[-1])
        into = {target.index: target.into for target in targets}
        spans = list(runs(sorted(into)))
        if entry is None:
            raw = bytearray(header_bytes_of(len(keys)))
            lead = range(*spans.pop(0)) if spans and spans[0][0] == depth else range(0)
            stat = await self._get(name, 0, [memoryview(raw), *(view for at in lead for view in into[at])], True)
            if stat is None:
                self.index.drop(keys[-1])
                return None, Miss.ABSENT
            entry = self._checked(decode(memoryview(raw), self._keyring), stat, keys, depth)
            self.index.put(entry)
            stored.update(zip(lead, landed(entry.frame, [into[at] for at in lead]), strict=True))
        miss = await self.settled_miss_of(entry)
        if miss is not None:
            return entry, miss
        for first, stop in spans:
            stored.update((at, landing(entry.frame, at - depth, into[at])) for at in range(first, stop))
            views = [view for at in range(first, stop) for view in stored[at]]
            stat = await self._get(name, entry.frame.span(first - depth, first - depth)[0], views)
            if stat is None:
                self.index.drop(keys[-1])
                return None, Miss.ABSENT
            if stat.etag != entry.etag:
                return entry, Miss.RACED
        return entry, await self.settled_miss_of(entry)

    async def _get(self, name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        await self._read_rate.take(sum(len(view) for view in into))
        async with self.transfers():
            return await self.bucket.read(name, start, into, clipped)

    async def _condemn(self, keys: Sequence[BlockKey], depth: int, etag: str | None) -> Miss:
        """Delete the version that failed its check twice, None: the one that is there, if its head is that of a damaged
        frame of ours; the next write of this name replaces that version. Returns why the object cannot be had; nothing
        is deleted but for CORRUPT. Raises ForeignFrame or TierError, and then nothing is."""
        last = keys[-1]
        if etag is None:
            etag = await self._damaged_version(keys, depth)
            if etag is None:
                return Miss.RACED
        log.warning("g4: an object of %d blocks failed its check twice and is deleted", len(keys))
        self.index.drop(last)
        self.damaged[last] = etag
        while len(self.damaged) > LIST_PAGE:
            del self.damaged[next(iter(self.damaged))]
        with contextlib.suppress(TierError):
            await self.bucket.delete(self.names.unit(last), etag)
        return Miss.CORRUPT

    async def _damaged_version(self, keys: Sequence[BlockKey], depth: int) -> str | None:
        """The ETag of the object that is to hold `keys`, of which only the head is looked at; None if there is none, or
        its head is right. Raises ForeignFrame for a foreign one."""
        name = self.names.unit(keys[-1])
        there = await self.bucket.head(name)
        if there is None:
            return None
        raw = bytearray(min(there.size, header_bytes_of(len(keys))))
        try:
            if raw and await self.bucket.read(name, 0, [memoryview(raw)]) is None:
                return None
        except CorruptError:
            return None  # another object by now, or the server contradicts itself: its bytes were not seen
        try:
            check_version(memoryview(raw))
            if there.size >= HEADER_ALIGN or self._keyring.trusted:  # less is no whole frame of any stride
                self._checked(decode(memoryview(raw), self._keyring), there, keys, depth)
                return None
        except ForeignFrame as other:
            other.etag = there.etag
            raise
        except CorruptError:
            pass
        return there.etag

    # -- deletion -------------------------------------------------------------------------------------------------

    async def delete(self, lasts: Sequence[BlockKey]) -> None:
        """Delete the objects named by these blocks, whatever their version. Raises TierError."""
        for start in range(0, len(lasts), LIST_PAGE):
            some = lasts[start : start + LIST_PAGE]
            for last in some:
                self.index.drop(last)
            await self.bucket.delete_many([self.names.unit(last) for last in some])

    async def delete_version(self, entry: ObjectEntry) -> bool:
        """Delete an object in this very version; whether it was there. Raises TierError."""
        known = self.index.get(entry.last)
        if known is not None and known.etag == entry.etag:
            self.index.drop(entry.last)
        return await self.bucket.delete(self.names.unit(entry.last), entry.etag)

    async def delete_named(self, names: Sequence[str]) -> None:
        """Delete the units of these names, at most LIST_PAGE, whatever they hold. Raises TierError."""
        for name in names:
            known = self.named(name)
            if known is not None:
                self.index.drop(known.last)
        await self.bucket.delete_many(names)
