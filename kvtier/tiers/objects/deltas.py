"""Deltas: small objects in which each replica lists the objects it wrote, so that the rest find them without probes.

    {prefix}/ctl/{ns}/delta/{µs hex}-{replica hex}     named by its writer's wall time

Their bytes are in delta_format.py. Hints only: a read verifies. They are listed with start-after, from some time before
the youngest name seen and the last listing, since writers' clocks differ, and deleted after KEEP_S. Names further in
the future than OVERLAP_S are not believed. A delta may be empty: the server's stamp on it tells its writer how far its
clock is off.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import cast

from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.keyring import Keyring
from kvtier.retention.lifetime import FUTURE_S
from kvtier.tiers.objects.bucket.protocol import LIST_PAGE, Bucket, Stat, first_page
from kvtier.tiers.objects.catalogue import Catalogue, stamp_us, window_of
from kvtier.tiers.objects.delta_format import encode, join, parse
from kvtier.tiers.objects.hints import UnitHint
from kvtier.tiers.objects.index import ObjectIndex
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.signed import Signer
from kvtier.times import Mono, Wall

ENTRIES_MAX = 1024
DELTA_BYTES_MAX = 8 << 20

PUBLISH_S = 5.0
"""Between two deltas of one replica, and PUBLISH_SHARE_S for each replica that writes: twenty in a second at most."""

PUBLISH_SHARE_S = 1 / 20
POLL_S = 10.0
IDLE_POLL_S = 60.0
"""The same while there is nothing new."""

MERGED_KEEP_S = 300.0
"""Age at which a delta is deleted whose window was merged."""
OVERLAP_S = 120.0
"""How far writers' clocks may differ before a delta is missed, and its objects are left to probes."""

NEAR_S = 20.0
"""How far they may differ before a delta is found late, by a listing that goes OVERLAP_S back. Others go back as far as
this: in two minutes a large fleet writes more names than a page has."""

OVERLAP_EVERY_S = 60.0
"""Between two listings that go OVERLAP_S back."""

SKEW_OLD_S = 600.0
"""Age at which a delta says nothing any more of its writer's clock."""

KEEP_S = 3600.0
"""Age at which a delta is deleted; a replica that opens later starts with probes."""

_SAME_US = 1000  # deltas in one reading of a coarse clock

READS_MAX = 8
"""Deltas read per poll, one fewer for each doubling of the replicas that write, down to one. The rest come with their
windows: the more there are, the smaller the share that reads one by one could bring, at a request each."""

WINDOWS_READ_MAX = 64
"""Merged windows read per poll."""

READ_BYTES_MAX = 16 << 20
"""Bytes of deltas read per poll; what is left is read by the next."""

UNREAD_MAX = 4096
PAGES_MAX = 8
"""Pages listed per poll."""

FIRST_PAGES_MAX = 64
"""The same for the first."""

SWEEP_MAX_S = 10.0
SLICE = 32
"""Entries of a delta that are indexed or merged in one turn of the event loop: about a millisecond."""


class Deltas:
    """One replica's deltas: collects and publishes its own, and reads those of the rest into the index."""

    def __init__(
        self, bucket: Bucket, names: ObjectNames, keyring: Keyring, index: ObjectIndex, stride: int, clock: Clock,
        replica: int,
    ) -> None:  # fmt: skip
        """`stride`: entries of another one are ignored. `replica`: 32 bits that tell the replicas apart."""
        self._bucket = bucket
        self._keyring = keyring
        self._signer = Signer(keyring, names.root)
        self._names = names
        self._index = index
        self._stride = stride
        self._clock = clock
        self._named_us = 0  # the latest delta's
        self._replica = f"{replica:08x}"
        self._pending: list[UnitHint] = []
        self._published = clock.monotonic()
        self._last_published: tuple[str, Mono] | None = None  # name, and when
        self._polled = float("-inf")
        self._youngest_us = 0
        self._listed_s = Wall(0.0)
        self._overlapped = Mono("-inf")  # when a listing went OVERLAP_S back
        self._seen: OrderedDict[str, bool] = OrderedDict()  # deltas; whether what they tell is known
        self._unread: OrderedDict[str, Stat] = OrderedDict()
        self._windows: deque[Stat] = deque()  # merged, to be read
        self._poll_s = POLL_S
        self._replicas = 1
        self._catalogue = Catalogue(bucket, names, self._signer, clock, self._replica, self._join)
        self.received = 0  # entries indexed from deltas

    def add(self, hint: UnitHint) -> None:
        """This replica wrote an object. Of those not published only the last ENTRIES_MAX are kept."""
        self._pending.append(hint)
        del self._pending[:-ENTRIES_MAX]

    @property
    def pending(self) -> int:
        """Objects written and not published yet."""
        return len(self._pending)

    @property
    def publishing_due(self) -> bool:
        now = self._clock.monotonic()
        wait_s = max(PUBLISH_S, self._replicas * PUBLISH_SHARE_S)
        return bool(self._pending) and (now - self._published >= wait_s or len(self._pending) > ENTRIES_MAX // 2)

    async def publish(self) -> None:
        """Write the pending entries as a delta. On failure they stay pending. Raises TierError."""
        if self._pending:
            await self._create()

    async def _create(self) -> None:
        entries, self._pending = self._pending, []
        self._published = self._clock.monotonic()
        at_us = round(self._clock.wall() * 1e6)
        if at_us <= self._named_us < at_us + _SAME_US:
            at_us = self._named_us + 1  # else it would have the name of the one before, and be lost
        self._named_us = at_us
        name = f"{self._names.deltas}{at_us:016x}-{self._replica}"
        try:
            self._remember(name, known=True)
            body = encode(entries)
            stat = await self._bucket.create(name, self._signer.sign(name, body), self._clock.wall())
            if stat is not None:
                self._note(stat, at_us)
            self._last_published = (name, self._published)
        except BaseException:
            self._pending = [*entries, *self._pending][-ENTRIES_MAX:]
            raise

    async def measure_skew(self) -> float | None:
        """How many seconds this replica's wall clock is ahead of the server's, by a delta of its own, an empty one if
        need be; None if the server does not stamp its objects. Raises TierError."""
        last, there = self._last_published, None
        if last is not None and self._clock.monotonic() - last[1] <= SKEW_OLD_S:
            there = await self._bucket.head(last[0])
        if there is None:  # or it was deleted since, which says nothing of the server
            await self._create()
            last = self._last_published
            there = await self._bucket.head(last[0]) if last is not None else None
        if last is None or there is None or there.modified is None:
            return None
        written = self._clock.wall() - (self._clock.monotonic() - last[1])
        return written - there.modified

    @property
    def polling_due(self) -> bool:
        return bool(self._windows) or self._clock.monotonic() - self._polled >= self._poll_s

    async def poll(self) -> None:
        """Learn what others published, at most every POLL_S: from merged windows, and from some of the deltas since,
        youngest first. Then merge what is this replica's to merge. What cannot be read is skipped. Raises
        TierError."""
        left = READ_BYTES_MAX
        now = self._clock.monotonic()
        if now - self._polled >= POLL_S:
            first, self._polled = self._polled == float("-inf"), now
            new = await self._catalogue.list_merged(KEEP_S)
            found = await self._list(FIRST_PAGES_MAX if first else PAGES_MAX)
            self._prefer_windows(new)
            self._replicas = self._catalogue.count_replicas()
            self._poll_s = POLL_S if new or found or self._unread else min(IDLE_POLL_S, 2 * self._poll_s)
            reads_max = max(1, READS_MAX - self._replicas.bit_length() + 1)
            for _ in range(min(len(self._unread), reads_max)):
                left -= next(reversed(self._unread.values())).size
                if left < 0:
                    break
                await self._read(self._unread.popitem()[1])
            await self._catalogue.merge_due()
        for _ in range(min(len(self._windows), WINDOWS_READ_MAX)):
            left -= self._windows[-1].size
            if left < 0:
                break
            await self._read(self._windows.pop())

    async def _list(self, pages_max: int) -> int:
        """List deltas; returns how many are new and to be read."""
        wall_s, now = self._clock.wall(), self._clock.monotonic()
        future_us, pages = int((wall_s + OVERLAP_S) * 1e6), 0
        whole = now - self._overlapped >= OVERLAP_EVERY_S
        back_s = OVERLAP_S if whole else NEAR_S
        # Not only from the youngest name on: that of a writer whose clock is ahead would hide the others'.
        known_s = min(self._youngest_us / 1e6, self._listed_s)
        after_us = int(max(known_s - back_s, wall_s - KEEP_S, 0) * 1e6)
        new = 0
        async for page in self._bucket.list(self._names.deltas, f"{self._names.deltas}{after_us:016x}"):
            for stat in page:
                if stat.name in self._seen:  # nearly all: two minutes of names are listed each time
                    continue
                at_us = stamp_us(stat.name)
                if at_us > future_us or stat.size > DELTA_BYTES_MAX:
                    continue
                self._note(stat, at_us)
                self._remember(stat.name)
                self._unread[stat.name] = stat
                new += 1
            pages += 1
            if pages == pages_max or (page and stamp_us(page[-1].name) > future_us):
                break
        self._listed_s = wall_s if pages < pages_max else Wall(min(wall_s, self._youngest_us / 1e6))
        if whole:
            self._overlapped = now
        while len(self._unread) > UNREAD_MAX:
            self._unread.popitem(last=False)
        return new

    def _prefer_windows(self, new: Sequence[int]) -> None:
        """Read a merged window in place of its deltas, unless nearly all are known: to a replica that opens beside
        a thousand others most are not, and more than UNREAD_MAX do not even wait to be read."""
        for window in new:
            deltas = self._catalogue.deltas_of(window)
            unknown = [name for name in deltas if not self._seen.get(name)]
            if len(unknown) >= 2 or not deltas:
                for name in unknown:
                    self._unread.pop(name, None)
                self._windows.append(self._catalogue.merged[window])
        for name in self._catalogue.lone():
            if name in self._unread:
                self._windows.append(self._unread.pop(name))

    def _note(self, delta: Stat, at_us: int) -> None:
        """A delta is there, of this replica or of another."""
        self._catalogue.note(delta)
        self._youngest_us = max(self._youngest_us, at_us)

    def _remember(self, name: str, known: bool = False) -> None:
        self._seen[name] = known
        while len(self._seen) > 16 * LIST_PAGE:
            self._seen.popitem(last=False)

    async def _join(self, bodies: Sequence[bytes]) -> bytearray:
        steps = join(bodies, self._names.namespace, self._keyring)
        while True:
            try:
                for _ in range(SLICE):
                    next(steps)
            except StopIteration as end:
                return cast(bytearray, end.value)
            await asyncio.sleep(0)  # lookups share this loop

    async def _read(self, stat: Stat) -> None:
        raw = bytearray(stat.size)
        try:
            if await self._bucket.read(stat.name, 0, [memoryview(raw)]) is None:
                return
            body = self._signer.open(stat.name, raw)
            for count, hint in enumerate(parse(body, self._names.namespace, self._keyring)):
                fits = hint.depth % self._stride == 0 and hint.blocks <= self._stride
                if fits and hint.life.last_use <= self._clock.wall() + FUTURE_S and self._index.learn(hint):
                    self.received += 1
                if count % SLICE == SLICE - 1:
                    await asyncio.sleep(0)  # lookups share this loop
            if stat.name in self._seen:  # a delta, not a window
                self._seen[stat.name] = True
        except (TierError, CorruptError):
            pass  # probes find its objects

    async def any_old(self) -> bool:
        """Whether `sweep` may have something to delete, by this replica's clock. Raises TierError."""
        page = await first_page(self._bucket, self._names.deltas)
        return bool(page) and stamp_us(page[0].name) < (self._clock.wall() - MERGED_KEEP_S - OVERLAP_S) * 1e6

    async def sweep(self, now: Wall | None) -> int:
        """Delete all deltas that were older than KEEP_S at `now` by all evidence (None: none), and those older than
        MERGED_KEEP_S whose window was merged; what is left after SWEEP_MAX_S is for the next time. Returns how many.
        Raises TierError."""
        if now is None:
            return 0
        limit_us, merged_us = ((now - keep - OVERLAP_S) * 1e6 for keep in (KEEP_S, MERGED_KEEP_S))
        deleted, end = 0, self._clock.monotonic() + SWEEP_MAX_S
        async for page in self._bucket.list(self._names.deltas):
            old = [stat.name for stat in page if stamp_us(stat.name) < limit_us]
            old += [
                stat.name
                for stat in page
                if limit_us <= stamp_us(stat.name) < merged_us and window_of(stat.name) in self._catalogue.merged
            ]
            await self._bucket.delete_many(old)
            deleted += len(old)
            if self._clock.monotonic() > end or (page and stamp_us(page[-1].name) >= merged_us):
                break
        await self._catalogue.sweep(now - KEEP_S - OVERLAP_S)
        return deleted
