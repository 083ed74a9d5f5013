"""Deltas: small objects in which each replica lists the objects it wrote, so that the rest find them without probes.

    {prefix}/{namespace hex}/delta/{µs hex}-{replica hex}     named by its writer's wall time

    offset size
    0      8     magic "KVTDELTA"
    8      2     version (1)
    10     2     zero
    12     4     count of entries
    …            per object: header length u32 ‖ etag length u16 ‖ last use f64 ‖ header without its zero end ‖ etag
    …      16    XXH3-128 of everything before

All integers little-endian. Hints only: a read verifies. They are listed with start-after, from OVERLAP_S before the
youngest name seen, since writers' clocks differ, and deleted after KEEP_S. Names further in the future than OVERLAP_S
are not believed. A delta may be empty: the server's stamp on it tells its writer how far its clock is off.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from kvtier.checksum import DIGEST_BYTES, digest_of
from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.trusted_clock import deletion_time
from kvtier.tiers.objects.bucket.protocol import LIST_PAGE, Bucket, Stat, first_page
from kvtier.tiers.objects.frame import HEADER_BYTES_MAX, decode, header_bytes_of
from kvtier.tiers.objects.index import ObjectEntry, ObjectIndex
from kvtier.tiers.objects.names import ObjectNames
from kvtier.times import Mono

MAGIC = b"KVTDELTA"
VERSION = 1
ENTRIES_MAX = 1024
DELTA_BYTES_MAX = 8 << 20

PUBLISH_S = 5.0
POLL_S = 10.0
OVERLAP_S = 120.0
"""How far writers' clocks may differ before a delta is missed, and its objects are left to probes."""

SKEW_OLD_S = 600.0
"""Age at which a delta says nothing any more of its writer's clock."""

KEEP_S = 3600.0
"""Age at which a delta is deleted; a replica that opens later starts with probes."""

READS_MAX = 64
"""Deltas read per poll."""

READ_BYTES_MAX = 16 << 20
"""Bytes of deltas read per poll; what is left is read by the next."""

UNREAD_MAX = 4096
PAGES_MAX = 8
"""Pages listed per poll."""

SWEEP_MAX_S = 10.0
SLICE = 32
"""Entries of a delta that are indexed in one turn of the event loop: about a millisecond."""

_HEAD = struct.Struct("<8sHHI")
_ENTRY = struct.Struct("<IHd")


def encode(entries: Sequence[ObjectEntry]) -> bytearray:
    """At most ENTRIES_MAX entries as one delta. Pure."""
    out = bytearray(_HEAD.pack(MAGIC, VERSION, 0, len(entries)))
    for entry in entries:
        header, etag = entry.frame.encode().rstrip(b"\0"), entry.etag.encode()
        out += _ENTRY.pack(len(header), len(etag), entry.life.last_use) + header + etag
    return out + digest_of([out])


def parse(raw: bytes | bytearray, namespace: bytes) -> Iterator[ObjectEntry]:
    """The inverse, for objects of `namespace`, lazily: some ten microseconds each. Raises CorruptError for anything
    `encode` cannot have written."""
    if len(raw) < _HEAD.size + DIGEST_BYTES or digest_of([raw[:-DIGEST_BYTES]]) != raw[-DIGEST_BYTES:]:
        raise CorruptError("a delta that does not match its checksum")
    magic, version, zero, count = _HEAD.unpack_from(raw)
    if magic != MAGIC or version != VERSION or zero or count > ENTRIES_MAX:
        raise CorruptError("no delta of this version")
    view, offset = memoryview(raw)[:-DIGEST_BYTES], _HEAD.size
    for _ in range(count):
        if offset + _ENTRY.size > len(view):
            raise CorruptError("a delta that ends inside an entry")
        header_length, etag_length, used = _ENTRY.unpack_from(view, offset)
        start, offset = offset + _ENTRY.size, offset + _ENTRY.size + header_length + etag_length
        if header_length > HEADER_BYTES_MAX or offset > len(view) or not 0 <= used < 2**40:
            raise CorruptError("a delta entry with impossible fields")
        header = bytes(view[start : start + header_length])
        # Restores the zeros that were cut off: the header has a count of its blocks, which fixes its length.
        blocks = int.from_bytes(header[10:12], "little")
        frame = decode(header.ljust(header_bytes_of(min(blocks, 1024)), b"\0"))
        if frame.namespace != namespace:
            raise CorruptError("a delta of another namespace")
        etag = bytes(view[start + header_length : offset]).decode("ascii", "replace")
        life = Lifetime(used, frame.life.stamps)
        yield ObjectEntry(frame, frame.total_bytes, etag, life, used, Mono("-inf"))


class Deltas:
    """One replica's deltas: collects and publishes its own, and reads those of the rest into the index."""

    def __init__(self, bucket: Bucket, names: ObjectNames, index: ObjectIndex, stride: int, clock: Clock) -> None:
        """`stride`: entries of another one are ignored."""
        self._bucket = bucket
        self._names = names
        self._index = index
        self._stride = stride
        self._clock = clock
        self._replica = os.urandom(4).hex()
        self._pending: list[ObjectEntry] = []
        self._published = clock.monotonic()
        self._last_published: tuple[str, Mono] | None = None  # name, and when
        self._polled = float("-inf")
        self._youngest_us = 0
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._unread: deque[Stat] = deque(maxlen=UNREAD_MAX)
        self.received = 0  # entries indexed from deltas

    def add(self, entry: ObjectEntry) -> None:
        """This replica wrote an object. Of those not published only the last ENTRIES_MAX are kept."""
        self._pending.append(entry)
        del self._pending[:-ENTRIES_MAX]

    @property
    def pending(self) -> int:
        """Objects written and not published yet."""
        return len(self._pending)

    @property
    def publishing_due(self) -> bool:
        now = self._clock.monotonic()
        return bool(self._pending) and (now - self._published >= PUBLISH_S or len(self._pending) > ENTRIES_MAX // 2)

    async def publish(self) -> None:
        """Write the pending entries as a delta. On failure they stay pending. Raises TierError."""
        if self._pending:
            await self._create()

    async def _create(self) -> None:
        entries, self._pending = self._pending, []
        self._published = self._clock.monotonic()
        name = f"{self._names.deltas}{round(self._clock.wall() * 1e6):016x}-{self._replica}"
        try:
            self._remember(name)
            await self._bucket.create(name, encode(entries), self._clock.wall())
            self._last_published = (name, self._published)
        except BaseException:
            self._pending = [*entries, *self._pending][-ENTRIES_MAX:]
            raise

    async def measure_skew(self) -> float | None:
        """How many seconds this replica's wall clock is ahead of the server's, by a delta of its own, an empty one if
        need be; None if the server does not stamp its objects. Raises TierError."""
        last = self._last_published
        if last is None or self._clock.monotonic() - last[1] > SKEW_OLD_S:
            await self._create()
            last = self._last_published
        there = await self._bucket.head(last[0]) if last is not None else None
        if last is None or there is None or there.modified is None:
            return None
        written = self._clock.wall() - (self._clock.monotonic() - last[1])
        return written - there.modified

    @property
    def polling_due(self) -> bool:
        return bool(self._unread) or self._clock.monotonic() - self._polled >= POLL_S

    async def poll(self) -> None:
        """List new deltas, at most every POLL_S, and index READS_MAX of them at most, youngest first. One that cannot
        be read is skipped. Raises TierError if they cannot be listed."""
        now = self._clock.monotonic()
        if now - self._polled >= POLL_S:
            self._polled = now
            oldest = int((self._clock.wall() - KEEP_S) * 1e6)
            after_us = max(self._youngest_us - int(OVERLAP_S * 1e6), oldest, 0)
            future_us = int((self._clock.wall() + OVERLAP_S) * 1e6)
            pages = 0
            async for page in self._bucket.list(self._names.deltas, f"{self._names.deltas}{after_us:016x}"):
                for stat in page:
                    at_us = _stamp_us(stat.name)
                    if at_us <= future_us and stat.name not in self._seen and stat.size <= DELTA_BYTES_MAX:
                        self._remember(stat.name)
                        self._youngest_us = max(self._youngest_us, at_us)
                        self._unread.append(stat)
                pages += 1
                if pages == PAGES_MAX or (page and _stamp_us(page[-1].name) > future_us):
                    break
        left = READ_BYTES_MAX
        for _ in range(min(len(self._unread), READS_MAX)):
            left -= self._unread[-1].size
            if left < 0:
                break
            await self._read(self._unread.pop())

    def _remember(self, name: str) -> None:
        self._seen[name] = None
        while len(self._seen) > 16 * LIST_PAGE:
            self._seen.popitem(last=False)

    async def _read(self, stat: Stat) -> None:
        raw = bytearray(stat.size)
        try:
            if await self._bucket.read(stat.name, 0, [memoryview(raw)]) is None:
                return
            for count, entry in enumerate(parse(raw, self._names.namespace)):
                fits = entry.frame.depth % self._stride == 0 and entry.blocks <= self._stride
                if fits and self._index.get(entry.last) is None:
                    self._index.put(entry)
                    self.received += 1
                if count % SLICE == SLICE - 1:
                    await asyncio.sleep(0)  # lookups share this loop
        except (TierError, CorruptError):
            pass  # probes find its objects

    async def sweep(self) -> int:
        """Delete all deltas older than KEEP_S; those that are left after SWEEP_MAX_S are for the next time. Returns how
        many. Raises TierError."""
        now = deletion_time(self._clock)
        if now is None:
            return 0
        limit = now - KEEP_S - OVERLAP_S
        deleted, end = 0, self._clock.monotonic() + SWEEP_MAX_S
        while self._clock.monotonic() <= end:
            page = await first_page(self._bucket, self._names.deltas)
            old = [stat.name for stat in page if _stamp_us(stat.name) < limit * 1e6]
            await self._bucket.delete_many(old)
            deleted += len(old)
            if not old or len(old) < len(page):
                break
        return deleted


def _stamp_us(name: str) -> int:
    try:
        return int(name.rpartition("/")[2].partition("-")[0], 16)
    except ValueError:
        return 0
