"""Judges failed reads and writes: is a place of a slab file at fault, or the device?

A place is to blame if it fails twice, the second time alone, while a page that is written, synced and read back beside
it is right before and after, or finds no space on a full volume. Many places within a minute, beside few that were read
or written well, are the device's fault. Nothing is recorded then, and the store is out of use for a while.
"""

from __future__ import annotations

import errno
import logging
import mmap
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.tiers.disk.bad_places import BadPlace
from kvtier.tiers.disk.faults import MEDIUM, NO_SPACE
from kvtier.tiers.disk.records import SLOT_ALIGN
from kvtier.tiers.disk.slab import WRITE_BYTES_MAX, Calls, FileFault, Slab, open_direct
from kvtier.times import Mono

log = logging.getLogger(__name__)

TRIES = 2
"""Of a place, together with others and alone, before it is set aside."""
FAILURES_PER_MINUTE_MAX = 64
FAILURES_SHARE = 0.01
"""Of the blocks that were read and written in that minute: so many may fail in any case."""
REST_S = 60.0
PROBE = "PROBE"


class DeviceFault(Exception):
    """The device, not a place on it, is to blame. The store should be left alone for `rest_s`."""

    def __init__(self, reason: str, rest_s: float = 0.0) -> None:
        super().__init__(reason)
        self.rest_s = rest_s


def is_place_fault(error: BaseException | None) -> bool:
    """Whether a read or write failed as a bad place on a medium does. Pure."""
    return isinstance(error, OSError) and error.errno in MEDIUM and not isinstance(error, FileFault)


class SlotHealth:
    """What one process knows of a store's failing places. Thread-safe; its verbs block on the device."""

    def __init__(self, parts: Sequence[Path], calls: Calls) -> None:
        self._parts = parts
        self._calls = calls
        self._lock = threading.Lock()
        self._moved = 0  # blocks, in all
        self._failures: deque[tuple[Mono, int]] = deque()  # of the last minute: when, and how many had moved by then
        self.counts = Counter(set_aside_slots=0, restored_slots=0, unreadable_blocks=0)
        """Since it was opened. There from the start: an alert on their growth is to see the first one."""

    def moved(self, count: int) -> None:
        """So many blocks were read or written well."""
        with self._lock:
            self._moved += count

    def alone(
        self, segment: int, works: Sequence[Callable[[], None]], mono_s: Callable[[], Mono]
    ) -> list[OSError | None]:
        """Do reads or writes of single slots of a segment that failed together. Per work its error, if any: a place
        fault is that place's own. Raises DeviceFault if it is the device's."""
        part = self._parts[segment % len(self._parts)]
        self._check(part)
        outcomes = [_outcome(work) for work in works]
        count = sum(map(is_place_fault, outcomes))
        if count:
            self._check(part)
            self._limit(count, mono_s())
        return outcomes

    def _check(self, part: Path) -> None:
        try:
            probe_device([part], self._calls)
        except OSError as error:
            raise DeviceFault(f"{part}: {error}") from error

    def _limit(self, count: int, mono_s: Mono) -> None:
        with self._lock:
            while self._failures and self._failures[0][0] < mono_s - 60:
                self._failures.popleft()
            self._failures.extend([(mono_s, self._moved)] * count)
            many, beside = len(self._failures), self._moved - self._failures[0][1]
        if many > max(FAILURES_PER_MINUTE_MAX, FAILURES_SHARE * beside):
            raise DeviceFault(f"{many} places failed within a minute", REST_S)

    def try_place(self, slab: Slab, place: BadPlace) -> bool:
        """Write, sync and read back a place that is set aside. False if that failed or gave other bytes. Raises OSError
        if the sync failed, which says nothing about the place."""
        start, size = place.first * SLOT_ALIGN, place.units * SLOT_ALIGN
        length = min(size, WRITE_BYTES_MAX)
        with mmap.mmap(-1, length) as memory, memoryview(memory) as view:
            pattern = secrets.token_bytes(length)
            spans = [(offset, min(length, size - offset)) for offset in range(0, size, length)]
            try:
                view[:] = pattern
                for offset, count in spans:
                    slab.write(place.segment, start + offset, [view[:count]])
            except OSError as error:
                log.info("g3: place %s is still bad: %s", place[:3], error)
                return False
            slab.sync(place.segment)
            try:
                for offset, count in spans:
                    view[:] = bytes(length)
                    slab.read(place.segment, start + offset, [view[:count]])
                    if view[:count] != pattern[:count]:
                        return False
            except OSError as error:
                log.info("g3: place %s is still bad: %s", place[:3], error)
                return False
        return True


def _outcome(work: Callable[[], None]) -> OSError | None:
    try:
        work()
    except OSError as error:
        return error
    return None


def probe_device(parts: Sequence[Path], calls: Calls) -> None:
    """`probe`, but a volume that has no space for the page says nothing about its device: only how many places fail
    does there. Raises OSError."""
    for part in parts:
        try:
            probe([part], calls)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise


def probe(parts: Sequence[Path], calls: Calls) -> None:
    """Write, sync and read back a page in each part, in a file that has no name by then. Raises OSError."""
    for part in parts:
        fd = _open_probe(part / PROBE, calls)
        try:
            with mmap.mmap(-1, SLOT_ALIGN) as memory, memoryview(memory) as view:
                page = secrets.token_bytes(SLOT_ALIGN)
                view[:] = page
                if calls.pwritev(fd, [view], 0) != SLOT_ALIGN:
                    raise OSError(errno.EIO, "a short write", str(part / PROBE))
                calls.fdatasync(fd)
                view[:] = bytes(SLOT_ALIGN)
                if calls.preadv(fd, [view], 0) != SLOT_ALIGN or view != page:
                    raise OSError(errno.EIO, "reads back other bytes than were written", str(part / PROBE))
        finally:
            calls.close(fd)


def _open_probe(path: Path, calls: Calls) -> int:
    """Every caller gets a file of its own."""
    for _ in range(8):
        path.unlink(missing_ok=True)
        try:
            fd, _direct = open_direct(calls, path, exclusive=True)
        except FileExistsError:
            continue
        path.unlink(missing_ok=True)
        return fd
    raise OSError(errno.EBUSY, "others make it all the time", str(path))
