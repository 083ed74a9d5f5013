"""What time it is for expiry, when the wall clock may jump.

Wall time is what leaves the process, and it can be set. So it is compared with the last trusted wall time plus the
time that has passed since by the monotonic clock, which counts suspension (`kvtier.clock`). While the two agree
within a skew there is one time. While they do not:

    serving    goes by the later of the two, so that nothing expired is served whichever is right
    stamping   goes by the earlier, so that nothing made now outlives its terms whichever is right
    deletion   waits: what looks dead may be alive again once an operator has set the clock right

A new time that keeps its pace for `settle_s` is adopted. What carries a stamp from its future then was stamped by a
clock that was wrong, and has to be dropped by the owner: it could come back to life when that time is reached.
"""

from __future__ import annotations

import struct
import threading
from pathlib import Path
from typing import NamedTuple

from kvtier.checksum import DIGEST_BYTES, digest_of
from kvtier.clock import Clock
from kvtier.errors import CorruptError

SKEW_S = 120.0
SETTLE_S = 600.0
SLEW = 0.001
"""Share of elapsed time by which the trusted time follows the wall clock: NTP slews by at most half of that."""


class Anchor(NamedTuple):
    """A wall time that was trusted at a monotonic time. Worth storing together with the boot's id: within one boot
    it carries the rule over a restart."""

    wall: float
    monotonic: float


class Reading(NamedTuple):
    """The time, for three purposes, in seconds since the epoch. `delete` None: delete nothing now. A tuple: each call
    of an engine's step makes one.

    `adopted`: a jump has just been accepted. Drop what carries a stamp later than `serve` plus the skew.
    """

    serve: float
    stamp: float
    delete: float | None
    adopted: bool = False


class WallClockGuard:
    """The rule above over an injected clock. Not thread-safe; `read` never blocks."""

    def __init__(
        self, clock: Clock, anchor: Anchor | None = None, *, skew_s: float = SKEW_S, settle_s: float = SETTLE_S
    ) -> None:
        """`anchor`: of an earlier process of this boot; without, the wall clock is trusted as it is now."""
        self._clock = clock
        self._skew_s = skew_s
        self._settle_s = settle_s
        self._trusted = anchor or Anchor(clock.wall(), clock.monotonic())
        self._other: Anchor | None = None  # a time that disagrees, and since when it has kept its pace

    @property
    def anchor(self) -> Anchor:
        """What to store for the next process of this boot."""
        return self._trusted

    def read(self) -> Reading:
        """The time now. Call it at least once in `settle_s`, or a jump is adopted later."""
        monotonic, wall = self._clock.monotonic(), self._clock.wall()
        passed = monotonic - self._trusted.monotonic
        expected = self._trusted.wall + passed
        if abs(wall - expected) <= self._skew_s:
            self._other = None
            follow = max(-SLEW * passed, min(SLEW * passed, wall - expected))
            self._trusted = Anchor(expected + follow, monotonic)
            return Reading(max(wall, expected), min(wall, expected), min(wall, expected))
        if self._other is None or abs(wall - self._other.wall - (monotonic - self._other.monotonic)) > self._skew_s:
            self._other = Anchor(wall, monotonic)
        if monotonic - self._other.monotonic >= self._settle_s:
            self._trusted, self._other = Anchor(wall, monotonic), None
            return Reading(wall, wall, wall, adopted=True)
        return Reading(max(wall, expected), min(wall, expected), None)


class TrustedClock:
    """A `kvtier.clock.Clock` whose `wall` is the time to serve by under the rule above. Thread-safe.

    Wrapped once, around the clock of a whole cache: the manager and its tiers must agree about the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._expiry = WallClockGuard(clock)
        self.adopted = 0  # times that a jump was accepted

    @classmethod
    def around(cls, clock: Clock) -> TrustedClock:
        """`clock` itself if it is one already."""
        return clock if isinstance(clock, TrustedClock) else cls(clock)

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    def read(self) -> Reading:
        """The time for all purposes at once."""
        with self._lock:
            reading = self._expiry.read()
            self.adopted += reading.adopted
            return reading

    def wall(self) -> float:
        """The time to serve by."""
        return self.read().serve

    def resume(self, raw: bytes, boot: bytes) -> None:
        """Go on from the anchor that an earlier process of this boot stored. Raises CorruptError; one of another boot,
        or from after now, is ignored."""
        anchor = decode_anchor(raw, boot)
        if anchor is not None and anchor.monotonic <= self._clock.monotonic():
            with self._lock:
                self._expiry = WallClockGuard(self._clock, anchor)

    def anchor(self, boot: bytes) -> bytes:
        """What `resume` takes."""
        with self._lock:
            return encode_anchor(self._expiry.anchor, boot)


class RelayedClock:
    """A `kvtier.clock.Clock` in a process that works for another one: its wall time is what the other one last said,
    and what has passed since. The two must agree about the time, too. Thread-safe."""

    STALE_S = 60.0
    """Told longer ago than this, nothing is deleted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told = (Reading(clock.wall(), clock.wall(), None), clock.monotonic())

    def tell(self, reading: Reading) -> None:
        """The other process's time now."""
        self._told = (reading, self._clock.monotonic())

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    def read(self) -> Reading:
        """The time for all purposes at once."""
        told, at = self._told
        passed = self._clock.monotonic() - at
        delete = None if told.delete is None or passed > self.STALE_S else told.delete + passed
        return Reading(told.serve + passed, told.stamp + passed, delete)

    def wall(self) -> float:
        """The time to serve by."""
        return self.read().serve


def deletion_time(clock: Clock) -> float | None:
    """What is dead at this time may be deleted; None: nothing now."""
    return clock.read().delete if isinstance(clock, TrustedClock | RelayedClock) else clock.wall()


_ANCHOR = struct.Struct("<8sdd36s")
_MAGIC = b"KVCLOCK1"


def boot_id() -> bytes:
    """The kernel's name for this boot; empty where it has none. Reads a file of the kernel's."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:36]
    except OSError:
        return b""


def encode_anchor(anchor: Anchor, boot: bytes) -> bytes:
    """Magic, wall f64, monotonic f64, boot id (36), XXH3-128 of all that. Pure."""
    body = _ANCHOR.pack(_MAGIC, anchor.wall, anchor.monotonic, boot)
    return body + digest_of([body])


def decode_anchor(raw: bytes, boot: bytes) -> Anchor | None:
    """The inverse of `encode_anchor`; None if it is another boot's. Raises CorruptError."""
    if len(raw) != _ANCHOR.size + DIGEST_BYTES or digest_of([raw[: _ANCHOR.size]]) != raw[_ANCHOR.size :]:
        raise CorruptError("no anchor of a clock")
    magic, wall, monotonic, its_boot = _ANCHOR.unpack_from(raw)
    if magic != _MAGIC or not (0 <= wall < 2**40 and 0 <= monotonic < 2**40):
        raise CorruptError("an anchor with impossible fields")
    return Anchor(wall, monotonic) if boot and its_boot.rstrip(b"\0") == boot else None
