"""Named pins as objects: pinned blocks are served and kept until their pin ends, whatever their other terms.

    {prefix}/ctl/{ns}/pins/{keyed digest of the name, 32 digits}

One object per pin, the bytes of `kvtier.retention.pins.encode`, signed. They are listed with the purges, and those that
are new are read beside the callers: only who finds an object expired waits for them. A purge ends the pins of its
tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvtier.clock import Clock
from kvtier.errors import CorruptError, InvalidRequest, TierError
from kvtier.identity.keys import BlockKey, scope_of_key
from kvtier.retention import pins as codec
from kvtier.retention.lifetime import FUTURE_S
from kvtier.retention.pins import PINS_MAX, Pin
from kvtier.tiers.objects.bucket.protocol import Bucket, Stat
from kvtier.tiers.objects.hints import UnitHint, seeming
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.loop_thread import PerLoop
from kvtier.tiers.objects.names import ObjectNames
from kvtier.tiers.objects.purge_log import TenantLog
from kvtier.tiers.objects.signed import Signer
from kvtier.times import Mono, Wall

PIN_BYTES_MAX = 16 << 20
"""One pin's object: about 300,000 blocks."""

ALL_BYTES_MAX = 64 << 20
"""All pins together; those beyond do not count."""

PIN_S_MAX = 2.0**31
"""68 years: half of what a block's stamps can say."""

READS_AT_ONCE = 16

UNREADABLE_S = 24 * 3600.0
"""For so long the sweep spares what a pin may hold that cannot be read."""


class _Known(NamedTuple):
    """A pin that was read. `listed`: the ETag that a listing had for it, of another kind on some servers than `etag`,
    that of the version that was read."""

    listed: str
    pin: Pin
    etag: str


class SharedPins:
    """The namespace's pins, as last read."""

    def __init__(self, bucket: Bucket, names: ObjectNames, signer: Signer, purges: TenantLog, clock: Clock) -> None:
        self._bucket = bucket
        self._purges = purges
        self._signer = signer
        self._names = names
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._until: dict[BlockKey, Wall] = {}
        self._ends: dict[BlockKey, Wall] = {}
        self._seeming: dict[bytes, Wall] = {}  # the same, as hints know them
        self._ended: set[str] = set()  # of those known: by a purge
        self._unread: dict[str, Stat] = {}
        self._junk: dict[str, tuple[str, Wall]] = {}  # ETags of those that do not count, and until when
        self._failing: dict[str, Mono] = {}  # of those unread: since when they cannot be read
        self._written: dict[str, Mono] = {}  # when `put` wrote them
        self._taken = Mono("-inf")  # when the listing began that was taken last
        self._reading = PerLoop(asyncio.Lock)

    @property
    def settled(self) -> bool:
        """Whether all pins of the last listing were read."""
        return not self._unread

    @property
    def doubtful(self) -> bool:
        """Whether a pin may hold what no known one does: one is not read yet, nor has failed to be for UNREADABLE_S."""
        now = self._clock.monotonic()
        return any(now - self._failing.get(name, now) < UNREADABLE_S for name in self._unread)

    def __bool__(self) -> bool:
        return bool(self._known)

    def cover(self, unit: ObjectEntry | UnitHint, wall_s: Wall) -> bool:
        """Whether a pin holds a block of the object at `wall_s`, as far as can be told: the object ends inside a pinned
        chain, or the chain ends inside the object. Pure."""
        if self._until.get(unit.last, 0.0) > wall_s:
            return True
        if isinstance(unit, UnitHint):
            return bool(self._seeming) and any(self._seeming.get(each, 0.0) > wall_s for each in unit.seemings)
        return bool(self._ends) and any(self._ends.get(key, 0.0) > wall_s for key in unit.frame.keys)

    def list(self) -> list[Pin]:
        """The pins that have not ended, by name."""
        now = self._clock.wall()
        pins = (known.pin for known in self._known.values())
        alive = (pin for pin in pins if pin.until > now and not self._is_purged(pin))
        return sorted(alive, key=lambda pin: pin.name)

    def take(self, listed: Sequence[Stat], began: Mono) -> None:
        """The pins that are among the listed objects, and no others, were in the bucket when the listing `began`: those
        that are new or changed are to be read. Those past the bounds on count and bytes do not count. What was `put`
        since then is newer than the list."""
        if began < self._taken:
            return  # a later listing ended first
        self._taken = began
        found: dict[str, Stat] = {}
        total = 0
        self._written = {name: at for name, at in self._written.items() if at >= began}
        for stat in listed:
            if stat.name.startswith(self._names.pins) and stat.size <= PIN_BYTES_MAX:
                total += stat.size
                if total > ALL_BYTES_MAX or len(found) == PINS_MAX:
                    break
                found[stat.name] = stat
        unread = {
            name: stat for name, stat in found.items() if name not in self._written and not self._same(name, stat)
        }
        ended = {name for name, known in self._known.items() if self._is_purged(known.pin)}
        there = found.keys() | self._written.keys()
        if self._known.keys() - there or ended != self._ended:
            self._set({name: known for name, known in self._known.items() if name in there})
        self._unread = unread
        self._junk = {name: known for name, known in self._junk.items() if name in found}
        self._failing = {name: since for name, since in self._failing.items() if name in unread}

    def _same(self, name: str, stat: Stat) -> bool:
        known = self._known.get(name)
        if known is not None and known.listed == stat.etag != "":
            return True
        etag, until = self._junk.get(name, ("", 0.0))
        return etag == stat.etag != "" and self._clock.wall() < until

    async def settle(self) -> None:
        """Read what is unread, each once, READS_AT_ONCE at once; what was read stays read, however this ends. One that
        is no pin does not count until it changes. Raises TierError, when the others have been read."""
        failed: BaseException | None = None
        async with self._reading():
            tried: set[Stat] = set()
            while some := [stat for stat in self._unread.values() if stat not in tried][:READS_AT_ONCE]:
                tried.update(some)
                results = await asyncio.gather(*map(self._settle_one, some), return_exceptions=True)
                failed = next((error for error in results if isinstance(error, BaseException)), failed)
        if failed is not None:
            raise failed

    async def _settle_one(self, stat: Stat) -> None:
        junk = False
        try:
            read = await self._read(stat)
        except CorruptError:
            read, junk = None, True
        except TierError:
            self._failing.setdefault(stat.name, self._clock.monotonic())
            raise
        if self._unread.get(stat.name) is not stat:
            return  # listed anew meanwhile
        del self._unread[stat.name]
        self._failing.pop(stat.name, None)
        self._junk.pop(stat.name, None)
        if junk:
            self._junk[stat.name] = stat.etag, Wall(math.inf)
        elif read is not None and not self._possible(read.pin):
            # One from the future may be right when our own clock is.
            self._junk[stat.name], read = (stat.etag, Wall(self._clock.wall() + FUTURE_S)), None
        old = self._known.pop(stat.name, None)
        if read is not None:
            self._known[stat.name] = read
        if old is not None:
            self._set(self._known)
        elif read is not None:
            self._cover(stat.name, read.pin)

    async def _read(self, stat: Stat) -> _Known | None:
        """None: it is gone, and may be put again as it was. Raises CorruptError for what is no pin, or TierError."""
        raw = bytearray(stat.size)
        there = await self._bucket.read(stat.name, 0, [memoryview(raw)])
        if there is None:
            return None
        pins = codec.decode(self._signer.open(stat.name, raw))
        if len(pins) != 1 or self._name(pins[0].name) != stat.name:
            raise CorruptError("not the pin of this name")
        return _Known(stat.etag, pins[0], there.etag)

    def _possible(self, pin: Pin) -> bool:
        """Whether a replica whose clock is right can have made it."""
        return 0 <= pin.created <= self._clock.wall() + FUTURE_S and pin.until - pin.created <= PIN_S_MAX

    def _set(self, known: dict[str, _Known]) -> None:
        self._known, self._until, self._ends, self._seeming, self._ended = known, {}, {}, {}, set()
        for name, each in known.items():
            self._cover(name, each.pin)

    def _cover(self, name: str, pin: Pin) -> None:
        if self._is_purged(pin):
            self._ended.add(name)
            return
        for key in pin.chain:
            self._until[key] = max(pin.until, self._until.get(key, pin.until))
        end = pin.chain[-1]
        self._ends[end] = max(pin.until, self._ends.get(end, pin.until))
        self._seeming[seeming(end)] = max(pin.until, self._seeming.get(seeming(end), pin.until))

    async def put(self, pin: Pin) -> None:
        """Create a pin, or replace the one of that name. Raises InvalidRequest or TierError."""
        codec.check_name(pin.name)
        pin = replace(pin, position=self._purges.position)
        name = self._name(pin.name)
        raw = self._signer.sign(name, codec.encode([pin]))
        if not pin.chain or len(raw) > PIN_BYTES_MAX:
            raise InvalidRequest(f"pin {pin.name!r}: {len(pin.chain)} blocks; one pin has 1 … {PIN_BYTES_MAX // 50}")
        if not pin.until - pin.created <= PIN_S_MAX:
            raise InvalidRequest(f"pin {pin.name!r}: ttl must be at most {PIN_S_MAX:.0f} s")
        stat = await self._bucket.replace(name, raw, self._clock.wall(), None)
        self._unread.pop(name, None)
        self._written[name] = self._clock.monotonic()
        etag = stat.etag if stat is not None else ""
        self._set({**self._known, name: _Known(etag, pin, etag)})

    async def delete(self, name: str) -> bool:
        """Whether there was such a pin, which is gone. Raises TierError."""
        place = self._name(name)
        await self.settle()
        there = place in self._known
        await self._bucket.delete(place)
        self._forget(place)
        return there

    async def delete_ended(self, pin: Pin, now: Wall | None) -> bool:
        """Delete this pin, if it is still that in the bucket, and is over for everybody: purged, or ended by `now`, by
        all evidence (None: none). Whether it was deleted. Raises TierError."""
        place = self._name(pin.name)
        stat = await self._bucket.head(place)
        read = None
        with contextlib.suppress(CorruptError):
            read = await self._read(stat) if stat is not None else None
        if read is None or replace(read.pin, position=pin.position) != pin:
            return False
        if not self._is_over(read.pin, now) or not await self._bucket.delete(place, read.etag):
            return False
        self._forget(place)
        return True

    def _forget(self, place: str) -> None:
        self._written.pop(place, None)
        self._set({at: known for at, known in self._known.items() if at != place})

    async def purge(self) -> None:
        """Delete the pins of purged tenants that were made before the purge. Raises TierError."""
        await self.settle()
        await self._drop(lambda _, pin: self._is_purged(pin))

    def _is_purged(self, pin: Pin) -> bool:
        return self._purges.covers(scope_of_key(pin.chain[0]), pin.position)

    def _is_over(self, pin: Pin, now: Wall | None) -> bool:
        return self._is_purged(pin) or (now is not None and pin.until <= now)

    async def sweep(self, now: Wall | None) -> int:
        """Delete pins that had ended at `now` by all evidence (None: none), but for those that the last listing shows
        to have changed; returns how many. Raises TierError."""
        if now is None:
            return 0
        return await self._drop(lambda at, pin: at not in self._unread and self._is_over(pin, now))

    async def _drop(self, over: Callable[[str, Pin], bool]) -> int:
        """Delete those known that are over, in the versions that are known: a pin may be put anew at any time."""
        versions = [(at, known.etag) for at, known in self._known.items() if over(at, known.pin)]
        for start in range(0, len(versions), READS_AT_ONCE):
            some = versions[start : start + READS_AT_ONCE]
            await asyncio.gather(*(self._bucket.delete(*version) for version in some))
            self._set({at: known for at, known in self._known.items() if (at, known.etag) not in some})
        return len(versions)

    def _name(self, name: str) -> str:
        return self._names.pin(name)
