"""The purge log: which tenants were purged, in an order that no clock decides.

    {prefix}/ctl/{ns}/log/{number, 16 hex digits}     create-only, numbered from 1 without gaps

    offset size
    0      8     magic "KVTPURGE"
    8      8     number
    16     16    XXH3-128 of the entry before, as stored; zeros before the first
    32     8     floor: blocks written at a position below are purged, whosesoever they are
    40     4     count of tenants
    44     16·n  per tenant: first 8 bytes of its scopes ‖ number of its last purge
    …      24    signature (kvtier.tiers.objects.signed)

All integers little-endian. An entry with one tenant, whose number is its own, is a purge. Any other is a *snapshot*: it
has all that the entries before it say, so that these can be deleted and need not be read, as where the key that signed
them was retired. Every unit carries the *position*, the number of the last entry that its writer had read and applied
when it took the blocks: it is served only if no later entry purged its tenant. So what a late writer, a wrong clock or
a replay brings is purged, too.

A replica remembers the last entry that it read, over restarts where it can. A log that has lost that entry, or has
another in its place, was rolled back or forked: purges may be missing, so nothing is served by it until an operator
has looked at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import threading
from collections.abc import Callable, Mapping, Sequence

from kvtier.checksum import DIGEST_BYTES, digest_of
from kvtier.clock import Clock
from kvtier.errors import CorruptError, TierError
from kvtier.identity.keys import SCOPE_BYTES, TENANT_BYTES, Scope, tenant_of
from kvtier.retention.marks import mark_below
from kvtier.tiers.objects.bucket.protocol import TIER, Bucket, Stat, first_page
from kvtier.tiers.objects.loop_thread import PerLoop
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.signed import NotAccepted, Signer
from kvtier.times import Mono, Wall

log = logging.getLogger(__name__)

MAGIC = b"KVTPURGE"
SNAPSHOT_EVERY = 256
"""Entries after which whoever purges writes a snapshot."""

TENANTS_MAX = 1 << 16
"""Tenants in a snapshot. Of more, the half that was purged longest ago gives way to the floor."""

APPENDS_MAX = 64
"""Entries of others that may come first while one is appended."""

READS_AT_ONCE = 16
ENTRY_BYTES_MAX = 2 << 20
_HEAD = struct.Struct(f"<8sQ{DIGEST_BYTES}sQI")
_TENANT = struct.Struct(f"<{TENANT_BYTES}sQ")
_MEMORY = struct.Struct(f"<8sQ{DIGEST_BYTES}s")
_MEMORY_MAGIC = b"KVPLOG01"


class _Held:
    """One call of `TenantLog.hold`. `number`: that its entry was to have."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


_NOTHING = _Held(0)


class LogBroken(TierError):
    """The log does not go on from what this replica has read of it."""

    def __init__(self, what: str) -> None:
        super().__init__(TIER, "purge log", f"{what}: see docs/operations.md, purging a tenant")


class _Passed(LogBroken):
    """So it would be, but for a later snapshot."""


class TenantLog:
    """One replica's reading of the log, on the tier's event loop. `covers`, `all`, `mark`, `hold` and `holds` are for
    any thread."""

    def __init__(self, bucket: Bucket, names: ObjectNames, signer: Signer, clock: Clock) -> None:
        self._bucket = bucket
        self._names = names
        self._signer = signer
        self._clock = clock
        self._last: dict[Scope, int] = {}  # tenant → number of its last purge
        self._digest = bytes(DIGEST_BYTES)
        self._etag = ""  # of the last entry, as a listing gave it
        self._snapshot = 0  # number of the latest snapshot
        self._old_key = False  # whether it, or an entry behind it, was signed by a key that is not the active one
        self._remembered: tuple[int, bytes] | None = None  # of an earlier process, to be found in the log
        self._turn = PerLoop(asyncio.Lock)  # one reads or writes at a time
        self.position = 0
        """Number of the last entry that was read."""
        self.read_at = Mono("-inf")
        """When the last listing began that was read to its end."""
        self._held: dict[Scope, _Held] = {}  # tenant → its purge that the log lacks yet
        self._holding = threading.Lock()
        self.floor = 0
        """What was written at a position below is purged, whosesoever it is."""
        self.faults = 0
        """Times that the log did not go on from what was read."""

    # -- asking ---------------------------------------------------------------------------------------------------

    def covers(self, scope: Scope, position: int) -> bool:
        """Whether blocks of the scope that were written at this position are purged."""
        tenant = tenant_of(scope)
        return position < max(self.floor, self._last.get(tenant, 0), self._held.get(tenant, _NOTHING).number)

    def mark(self, scope: Scope) -> Wall:
        """The mark up to which the scope's tenant is purged; -inf where it never was."""
        number = max(self.floor, self._last.get(tenant_of(scope), 0))
        return mark_below(number) if number else Wall("-inf")

    def all(self) -> Mapping[Scope, Wall]:
        """Tenant → the mark up to which it is purged (`kvtier.retention.marks`), for purges behind the floor."""
        return {tenant: mark_below(number) for tenant, number in self._last.copy().items()}

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self) -> bytes:
        """For `remember` in the next process."""
        return _MEMORY.pack(_MEMORY_MAGIC, self.position, self._digest)

    def remember(self, raw: bytes) -> int:
        """An earlier process had read this far: the log must have that entry, which the next `take` checks. Returns its
        position; 0 for what `memory` cannot have made."""
        if len(raw) != _MEMORY.size or not raw.startswith(_MEMORY_MAGIC):
            return 0
        _, number, digest = _MEMORY.unpack(raw)
        if number:
            self._remembered = (number, digest)
        return int(number)

    @property
    def doubtful(self) -> bool:
        """Whether what `remember` took has not been found in the log yet."""
        return self._remembered is not None

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def after(self) -> str:
        """Where a listing of the log is to start: the last entry read is in it again."""
        return self._names.entry(max(self.position - 1, 0))

    async def take(self, listed: Sequence[Stat], known: int) -> None:
        """Read the entries that are new among the listed objects, those behind `after` when `position` was `known`.
        Raises LogBroken, and then nothing is to be served, or TierError; what was read is kept."""
        async with self._turn():
            await self._take_listed(listed, known)

    async def _take_listed(self, listed: Sequence[Stat], known: int) -> None:
        entries = {number: stat for stat in listed if (number := self._names.parse_entry(stat.name)) is not None}
        try:
            await self._take(dict(sorted(entries.items())), known)
        except LogBroken as broken:
            self.faults += 1
            log.error("%s", broken)
            raise

    async def _take(self, entries: dict[int, Stat], known: int) -> None:
        if known:
            await self._check_last(entries, known)
        new = [(number, stat) for number, stat in entries.items() if number > self.position]
        passed: _Passed | None = None
        for start in range(0, len(new), READS_AT_ONCE):
            some = new[start : start + READS_AT_ONCE]
            raws = await asyncio.gather(*(self._read(stat) for _, stat in some))
            for (number, stat), raw in zip(some, raws, strict=True):
                if raw is not None:
                    try:
                        self._apply(number, raw)
                        self._etag, passed = stat.etag, None
                    except _Passed as why:
                        passed = passed or why
                elif number == new[-1][0]:
                    raise TierError(TIER, "purge log", f"entry {number} is gone since it was listed")
                # else deleted behind a snapshot that is among the rest
        if passed is not None:
            raise passed
        if self._remembered is not None:
            await self._check_remembered(*self._remembered)
            self._remembered = None

    async def _check_remembered(self, number: int, digest: bytes) -> None:
        """The entry that an earlier process read is there as it was; or a snapshot stands for it."""
        if number > self.position:
            raise LogBroken(f"it ends at {self.position}, and {number} was read before")
        there = await self._bucket.head(self._names.entry(number))
        raw = await self._read(there) if there is not None else None
        if digest_of([raw]) != digest if raw is not None else number > self._snapshot:
            raise LogBroken(f"entry {number} is not the one that was read before")

    async def _check_last(self, entries: Mapping[int, Stat], known: int) -> None:
        """The last entry read is there as it was; or a snapshot stands for it."""
        stat = entries.get(known)
        if stat is None:
            if max(entries, default=0) < known:
                raise LogBroken(f"entry {known} was read before and is gone")
        elif known == self.position and (not stat.etag or stat.etag != self._etag):
            raw = await self._read(stat)
            if raw is None or digest_of([raw]) != self._digest:
                raise LogBroken(f"entry {known} is not the one that was read before")
            self._etag = stat.etag

    async def _read(self, stat: Stat) -> bytes | None:
        if stat.size > ENTRY_BYTES_MAX:
            raise LogBroken(f"{stat.name.rpartition('/')[2]} has {stat.size} bytes")
        raw = bytearray(stat.size)
        try:
            there = await self._bucket.read(stat.name, 0, [memoryview(raw)])
        except CorruptError as error:
            raise LogBroken(str(error)) from None
        return None if there is None else bytes(raw)

    def _opened(self, number: int, raw: bytes) -> tuple[bytes, int, dict[Scope, int]]:
        """See `decode`. Raises LogBroken for what no replica wrote."""
        try:
            return decode(self._signer.open(self._names.entry(number), raw), number)
        except NotAccepted as error:
            raise _Passed(f"entry {number}: {error}") from None
        except CorruptError as error:
            raise LogBroken(f"entry {number}: {error}") from None

    def _apply(self, number: int, raw: bytes) -> None:
        before, floor, tenants = self._opened(number, raw)
        snapshot = list(tenants.values()) != [number]
        if number == self.position + 1:
            if before != self._digest:
                raise LogBroken(f"entry {number} does not follow entry {self.position}")
        elif not snapshot:
            raise _Passed(f"entries {self.position + 1} to {number - 1} are missing")
        self._last.update((tenant, max(at, self._last.get(tenant, 0))) for tenant, at in tenants.items())
        if floor > self.floor:
            self.floor = floor
            self._last = {tenant: at for tenant, at in self._last.items() if at > floor}
        self._digest, self.position = digest_of([raw]), number
        if snapshot:
            self._snapshot = number
        self._old_key = not self._signer.is_active(raw) or (self._old_key and not snapshot)

    # -- writing --------------------------------------------------------------------------------------------------

    def hold(self, scope: Scope) -> None:
        """What the scope's tenant wrote until now is purged for this replica, whether or not `append` succeeds."""
        with self._holding:
            self._held[tenant_of(scope)] = _Held(self.position + 1)

    def holds(self, scope: Scope) -> bool:
        """Whether there was no `append` since `hold` that began later and succeeded. An entry of others is none: blocks
        may have been stored behind it before `hold`."""
        return tenant_of(scope) in self._held

    async def append(self, scope: Scope) -> int:
        """Purge the scope's tenant: what was written until now is gone for every replica that reads the log on. Returns
        the number of the entry. Raises TierError, and then nothing is known to be purged."""
        async with self._turn():
            if self.position - self._snapshot >= SNAPSHOT_EVERY:
                await self._write_snapshot()
            tenant = tenant_of(scope)
            held = self._held.get(tenant)
            number = await self._create(lambda number: (self.floor, {tenant: number}))
            with self._holding:
                if self._held.get(tenant) is held:  # a later one may be of after the entry
                    self._held.pop(tenant, None)
            return number

    async def _create(self, content: Callable[[int], tuple[int, Mapping[Scope, int]]]) -> int:
        """The next entry. `content`: its floor and tenants under a number, when all entries before that are in force
        here; it is asked anew where another replica's entry comes first."""
        for _ in range(APPENDS_MAX):
            number = self.position + 1
            floor, rows = content(number)
            raw = self._signer.sign(self._names.entry(number), encode(number, self._digest, floor, rows))
            stat = await self._bucket.create(self._names.entry(number), raw, self._clock.wall())
            entry, etag = bytes(raw), stat.etag if stat is not None else ""
            if stat is None:
                # Somebody else's, or ours, created by a request whose answer was lost. An earlier purge of the same
                # tenant looks the same and does not cover what was written since: another entry is written.
                there = await self._bucket.head(self._names.entry(number))
                if there is None:
                    raise LogBroken(f"entry {number} is taken, and gone")
                theirs = await self._read(there)
                if theirs is None:
                    continue
                entry, etag = theirs, there.etag
            if not await self._goes_on(number, entry):
                await self._bucket.delete(self._names.entry(number), etag)
                await self._catch_up()
                continue
            self._apply(number, entry)
            self._etag = etag
            if stat is not None:
                return number
        raise TierError(TIER, "purge log", f"{APPENDS_MAX} others were faster")

    async def _goes_on(self, number: int, raw: bytes) -> bool:
        """Whether this entry is the log's last, or the next one follows it. If not, its number was free for whoever had
        not read on for long: a snapshot stands for the entries there. Nobody reads it but who begins there, and to them
        the log is broken. Raises LogBroken for an entry that no replica wrote."""
        self._opened(number, raw)
        behind = await first_page(self._bucket, self._names.log, self._names.entry(number))
        numbers = [at for stat in behind if (at := self._names.parse_entry(stat.name)) is not None]
        if number + 1 not in numbers:
            return not numbers
        there = await self._bucket.head(self._names.entry(number + 1))
        next_one = await self._read(there) if there is not None else None
        if next_one is None:
            raise TierError(TIER, "purge log", f"entry {number + 1} is gone since it was listed")
        return self._opened(number + 1, next_one)[0] == digest_of([raw])

    async def _catch_up(self) -> None:
        """Read the entries that are new."""
        known = self.position
        listed = [stat async for page in self._bucket.list(self._names.log, self.after) for stat in page]
        await self._take_listed(listed, known)

    async def sign_anew(self) -> None:
        """Have a snapshot by the active key stand for entries that another one has signed: they are not to be read when
        that key is retired. Raises TierError."""
        async with self._turn():
            if self._old_key:
                await self._write_snapshot()

    async def _write_snapshot(self) -> None:
        """All that is in force as one entry; then entries before the snapshot before it go, where they may be
        deleted."""
        old = self._snapshot
        await self._create(lambda _: self._in_force())
        with contextlib.suppress(TierError):
            async for page in self._bucket.list(self._names.log):
                gone = [stat.name for stat in page if (self._names.parse_entry(stat.name) or old) < old]
                await self._bucket.delete_many(gone)

    def _in_force(self) -> tuple[int, Mapping[Scope, int]]:
        """Floor and tenants of a snapshot."""
        tenants, floor = self._last, self.floor
        if len(tenants) > TENANTS_MAX:
            numbers = sorted(tenants.values())
            floor = max(floor, numbers[len(numbers) // 2])
            tenants = {tenant: number for tenant, number in tenants.items() if number > floor}
        return floor, tenants


def encode(number: int, before: bytes, floor: int, tenants: Mapping[Scope, int]) -> bytes:
    """The body of an entry. Pure."""
    rows = [_TENANT.pack(tenant[:TENANT_BYTES], at) for tenant, at in tenants.items()]
    return _HEAD.pack(MAGIC, number, before, floor, len(rows)) + b"".join(rows)


def decode(body: bytes, number: int) -> tuple[bytes, int, dict[Scope, int]]:
    """(digest of the entry before, floor, tenant → number of its purge). Raises CorruptError unless `encode` made it
    under this number."""
    if len(body) < _HEAD.size:
        raise CorruptError("no entry of a purge log")
    magic, own, before, floor, count = _HEAD.unpack_from(body)
    if magic != MAGIC or own != number or floor > number or len(body) != _HEAD.size + count * _TENANT.size:
        raise CorruptError("no entry of a purge log under this number")
    rest = bytes(SCOPE_BYTES - TENANT_BYTES)
    tenants = {Scope(tenant + rest): at for tenant, at in _TENANT.iter_unpack(body[_HEAD.size :])}
    if not tenants or any(not 1 <= at <= number for at in tenants.values()):
        raise CorruptError("an entry of a purge log with impossible fields")
    return before, floor, tenants
