"""The time to expire by, when the wall clock may jump.

Wall time is what leaves the process, and it can be set. So it is compared with the last trusted wall time plus the
time that has passed since by the monotonic clock, which counts suspension (`kvtier.clock`). Within STEP_S the trusted
time follows the wall clock slowly. Up to SKEW_S it goes on as if the clock had not been set: no life is wrong by more.
Beyond:

    serving    goes by the later of the two, so that nothing expired is served whichever is right
    stamping   goes by the earlier, so that nothing made now outlives its terms whichever is right
    deletion   waits: blocks that look expired may be alive again once an operator has set the clock right

A new time that keeps its pace for `settle_s` is adopted, however near. Blocks with a stamp from its future were stamped
by a clock that was wrong. The owner has to drop them: they could come back to life when that time is reached.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from kvtier.checksum import DIGEST_BYTES, digest_of
from kvtier.clock import Clock
from kvtier.errors import CorruptError
from kvtier.times import Mono, Wall

STEP_S = 2.0
"""Apart by more, the wall clock was set, and is not just being slewed."""
SKEW_S = 120.0
"""Apart by more, times differ by purpose until one is adopted."""
SETTLE_S = 600.0
SLEW = 0.001
"""Share of elapsed time by which the trusted time follows the wall clock: NTP slews by at most half of that."""


class Anchor(NamedTuple):
    """A wall time that was trusted at a monotonic time. Worth storing together with the boot's id: within one boot
    it carries the rule over a restart."""

    wall_s: Wall
    mono_s: Mono


class Reading(NamedTuple):
    """The wall time for three purposes. `delete` None: delete nothing now. A tuple: each call of an engine's step
    makes one.

    `adopted`: a jump has just been accepted. Drop what carries a stamp later than `serve` plus the skew.
    """

    serve: Wall
    stamp: Wall
    delete: Wall | None
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
        self.anchor = anchor or Anchor(clock.wall(), clock.monotonic())  # to store for the next process of this boot
        self._candidate: Anchor | None = None  # a time that disagrees, and since when it has kept its pace

    def read(self) -> Reading:
        """The time now. Call it at least once in `settle_s`, or a jump is adopted later."""
        mono_s, wall_s = self._clock.monotonic(), self._clock.wall()
        passed_s = mono_s - self.anchor.mono_s
        expected = self.anchor.wall_s + passed_s
        apart_s, earlier = abs(wall_s - expected), min(wall_s, expected)
        if apart_s <= STEP_S:
            self._candidate = None
            follow_s = max(-SLEW * passed_s, min(SLEW * passed_s, wall_s - expected))
            self.anchor = Anchor(expected + follow_s, mono_s)
            return Reading(max(wall_s, expected), earlier, earlier)
        new = self._candidate
        if new is None or abs(wall_s - new.wall_s - (mono_s - new.mono_s)) > STEP_S:
            new = self._candidate = Anchor(wall_s, mono_s)
        if mono_s - new.mono_s >= self._settle_s:
            self.anchor, self._candidate = Anchor(wall_s, mono_s), None
            return Reading(wall_s, wall_s, wall_s, adopted=True)
        if apart_s <= self._skew_s:
            return Reading(expected, expected, earlier)
        return Reading(max(wall_s, expected), earlier, None)


class CheckedClock(ABC):
    """A `kvtier.clock.Clock` that says, beside the time to serve by, the time to stamp and to delete by."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @abstractmethod
    def read(self) -> Reading:
        """The time for all purposes at once."""

    def wall(self) -> Wall:
        """The time to serve by."""
        return self.read().serve

    def monotonic(self) -> Mono:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


class TrustedClock(CheckedClock):
    """The rule above, thread-safe.

    Wrapped once, around the clock of a whole cache: the manager and its tiers must agree about the time.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._lock = threading.Lock()
        self._guard = WallClockGuard(clock)
        self.adopted = 0  # times that a jump was accepted
        self.stamped = Wall("-inf")  # the latest time to stamp by that was read

    @classmethod
    def around(cls, clock: Clock) -> TrustedClock:
        """`clock` itself if it is one already."""
        return clock if isinstance(clock, TrustedClock) else cls(clock)

    def read(self) -> Reading:
        with self._lock:
            reading = self._guard.read()
            self.adopted += reading.adopted
            self.stamped = max(self.stamped, reading.stamp)
            return reading

    def resume(self, raw: bytes, boot: bytes) -> None:
        """Go on from the anchor that an earlier process of this boot stored. Raises CorruptError; one of another boot,
        or from after now, is ignored."""
        anchor = decode_anchor(raw, boot)
        if anchor is not None and anchor.mono_s <= self._clock.monotonic():
            with self._lock:
                self._guard = WallClockGuard(self._clock, anchor)

    def resume_stamped(self, raw: bytes) -> None:
        """Take over the latest stamp that an earlier process stored. Raises CorruptError."""
        stamped = decode_stamp(raw)
        with self._lock:
            self.stamped = max(self.stamped, stamped)

    def stamped_ahead(self) -> bytes | None:
        """The argument of `resume_stamped` in the next process; None: nothing was stamped by a time that lies ahead."""
        ahead = self.stamped > self.read().serve
        return encode_stamp(self.stamped) if ahead else None

    def anchor(self, boot: bytes) -> bytes:
        """The argument of `resume` in the next process of this boot."""
        with self._lock:
            return encode_anchor(self._guard.anchor, boot)


class RelayedClock(CheckedClock):
    """The clock of a process that works for another one, whose time it relays: the last reading that `set` took, plus
    the time that has passed since. The two processes must agree about the time, too. Thread-safe."""

    STALE_S = 60.0
    """Nothing is deleted by a reading older than this."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._latest = (Reading(clock.wall(), clock.wall(), None), clock.monotonic())

    def set(self, reading: Reading) -> None:
        """Go on from the other process's time now."""
        self._latest = (reading, self._clock.monotonic())

    def read(self) -> Reading:
        reading, since = self._latest
        passed_s = self._clock.monotonic() - since
        delete = None if reading.delete is None or passed_s > self.STALE_S else reading.delete + passed_s
        return Reading(reading.serve + passed_s, reading.stamp + passed_s, delete)


def deletion_time(clock: Clock) -> Wall | None:
    """Blocks that are dead at this time may be deleted; None: nothing may be now."""
    return clock.read().delete if isinstance(clock, CheckedClock) else clock.wall()


def expired_by(clock: Clock) -> Wall:
    """The same; -inf: nothing may be now."""
    wall_s = deletion_time(clock)
    return Wall("-inf") if wall_s is None else wall_s


_ANCHOR, _STAMP = struct.Struct("<8sdd36s"), struct.Struct("<8sd")
_MAGIC, _STAMP_MAGIC = b"KVCLOCK1", b"KVSTAMP1"


def boot_id() -> bytes:
    """The kernel's name for this boot, read from /proc; empty where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:36]
    except OSError:
        return b""


def encode_anchor(anchor: Anchor, boot: bytes) -> bytes:
    """Magic, wall f64, monotonic f64, boot id (36), XXH3-128 of all that. Pure."""
    body = _ANCHOR.pack(_MAGIC, *anchor, boot)
    return body + digest_of([body])


def decode_anchor(raw: bytes, boot: bytes) -> Anchor | None:
    """The inverse of `encode_anchor`; None if it is another boot's. Raises CorruptError."""
    if len(raw) != _ANCHOR.size + DIGEST_BYTES or digest_of([raw[: _ANCHOR.size]]) != raw[_ANCHOR.size :]:
        raise CorruptError("not the anchor of a clock")
    magic, wall_s, mono_s, its_boot = _ANCHOR.unpack_from(raw)
    if magic != _MAGIC or not (0 <= wall_s < 2**40 and 0 <= mono_s < 2**40):
        raise CorruptError("an anchor with impossible fields")
    return Anchor(wall_s, mono_s) if boot and its_boot.rstrip(b"\0") == boot else None


def encode_stamp(stamped: Wall) -> bytes:
    """Magic, wall f64, XXH3-128 of both. Pure."""
    body = _STAMP.pack(_STAMP_MAGIC, stamped)
    return body + digest_of([body])


def decode_stamp(raw: bytes) -> Wall:
    """The inverse of `encode_stamp`. Raises CorruptError."""
    body = raw[:-DIGEST_BYTES]
    if len(body) != _STAMP.size or digest_of([body]) != raw[-DIGEST_BYTES:]:
        raise CorruptError("not a stamp")
    magic, wall_s = _STAMP.unpack(body)
    if magic != _STAMP_MAGIC or not 0 <= wall_s < 2**40:
        raise CorruptError("a stamp with impossible fields")
    return Wall(wall_s)
