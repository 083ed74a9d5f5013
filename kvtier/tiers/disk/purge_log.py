"""Purges on their way into the index of a G3 store: in force for every process before the index has space for them.

    PART 0/PURGES     RECORDS records of 64 bytes, made whole when the store is opened

    record 0          "kvtpurge", u64 drawn with each change, 40 bytes 0, u64 XXH3-64 over those 56
    any other         namespace (32) ‖ scope (16) ‖ f64 time ‖ u64 XXH3-64 over those 56; all 0: unused

A commit needs new pages of the index, which a full volume or a process that stands still may deny; this file needs
none. A purge is recorded here and synced. The next transaction of any process carries it into the index, and is durable
before the record is cleared. A record of 64 bytes lies within a sector; one that fails its check was never confirmed.
When all are used they become one: namespace and scope 0, the latest of their times, for every block of the store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import xxhash

from kvtier.errors import TierTimeout
from kvtier.tiers.disk.records import SCOPED_BYTES
from kvtier.tiers.disk.slab import SystemCalls
from kvtier.tiers.fsync import sync_directory
from kvtier.times import Wall

RECORDS = 1024
LOCK_TIMEOUT_S = 1.0  # a holder needs microseconds, unless it is stopped
ALL = bytes(SCOPED_BYTES)
"""In place of namespace ‖ scope: the whole store."""
_RECORD = struct.Struct(f"<{SCOPED_BYTES}sdQ")
_HEADER = struct.Struct("<8sQ40xQ")
_MAGIC = b"kvtpurge"
_POLL_S = 0.001


class PurgeLog:
    """The file as this process has it open. Thread-safe. Purges are times by namespace ‖ scope."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1  # until the file is there
        self._closed = False
        self._prepared = False  # whether the file is whole and durable, as far as this process knows
        self._gate = threading.Lock()  # around the next, for moments
        self._users = 0  # threads that hold the file open
        self._lock = threading.Lock()  # of the thread that changes records
        self._seen: tuple[bytes, dict[bytes, Wall]] = b"", {}  # a header, and what was there after it was read

    def prepare(self) -> None:
        """Make the file, unless it is there, and durable: who made it may have ended before. Raises OSError."""
        with self._held(os.O_CREAT), self._lock:
            if self._prepared:
                return
            if os.fstat(self._fd).st_size < RECORDS * _RECORD.size:  # what another process has recorded by now stays
                SystemCalls().allocate(self._fd, RECORDS * _RECORD.size)
            os.fsync(self._fd)
            sync_directory(self._path.parent)
            self._prepared = True

    def pending(self) -> Mapping[bytes, Wall]:
        """Purges that may not be in the index yet. One small read where nothing changed. Raises OSError: where the file
        cannot be opened, nobody knows what is purged."""
        if self._fd < 0:
            try:
                with self._held():
                    pass
            except FileNotFoundError:  # another process may make it at any time
                return {}
        header = os.pread(self._fd, _HEADER.size, 0)
        seen, found = self._seen
        if header != seen:
            found = {scoped: until for _, scoped, until in self._records()}
            self._seen = header, found
        return found

    def record(self, scoped: bytes, until: Wall) -> None:
        """Blocks of namespace ‖ scope that were born until then are dead, durably. Raises OSError or TierTimeout."""
        self.prepare()
        with self._held(), self._syncing() as sync:
            with self._alone():
                used = {place: (name, time) for place, name, time in self._records()}
                place = next((place for place, (name, _) in used.items() if name == scoped), 0)
                if place:  # written anew if it says enough: it is not durable if a sync failed, or has not ended
                    until = max(until, used[place][1])
                place = place or next((place for place in range(1, RECORDS) if place not in used), 0)
                if not place:
                    scoped, until, place = ALL, max(until, *(time for _, time in used.values())), 1
                os.pwrite(self._fd, _encoded(scoped, until), place * _RECORD.size)
                if scoped == ALL:
                    sync()  # before those that it replaces are gone
                    os.pwrite(self._fd, bytes((RECORDS - 2) * _RECORD.size), 2 * _RECORD.size)
                self._changed()
            sync()

    def settle(self, purges: Mapping[bytes, Wall]) -> None:
        """Forget these: the index has them, durably. Raises OSError or TierTimeout."""
        if not purges:
            return
        with self._held(), self._alone():
            for place, scoped, until in self._records():
                if scoped in purges and until <= purges[scoped]:
                    os.pwrite(self._fd, bytes(_RECORD.size), place * _RECORD.size)
            self._changed()

    def close(self) -> None:
        """Idempotent; what comes later raises OSError. Never blocks: a verb that is under way ends with the file."""
        self._closed = True
        self._close_unused()

    @contextlib.contextmanager
    def _held(self, flags: int = 0) -> Iterator[None]:
        """While inside, the file is open: closed meanwhile, its descriptor might be another file's. Raises OSError."""
        try:
            with self._gate:
                if self._closed:
                    raise OSError(errno.EBADF, "it is closed", str(self._path))
                if self._fd < 0:
                    self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
                self._users += 1
            try:
                yield
            finally:
                with self._gate:
                    self._users -= 1
        finally:
            self._close_unused()

    @contextlib.contextmanager
    def _syncing(self) -> Iterator[Callable[[], None]]:
        """Makes durable what was written since, or raises OSError: also where that was lost with another thread's sync,
        which the kernel tells each opening of a file once. Inside of `_held`."""
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)  # this very file, removed or not
        try:
            yield lambda: os.fsync(fd)
        finally:
            os.close(fd)

    def _close_unused(self) -> None:
        """Close the file once that is wanted and no thread holds it; one that does, or has the gate, comes here after
        it."""
        if self._closed and self._gate.acquire(blocking=False):
            fd = -1
            if not self._users:
                fd, self._fd = self._fd, -1
            self._gate.release()
            if fd >= 0:
                os.close(fd)

    def _records(self) -> Iterator[tuple[int, bytes, Wall]]:
        """(place, namespace ‖ scope, time) of each record that passes its check."""
        raw = os.pread(self._fd, RECORDS * _RECORD.size, 0)
        for place in range(1, len(raw) // _RECORD.size):
            scoped, until, check = _RECORD.unpack_from(raw, place * _RECORD.size)
            if check and _encoded(scoped, until)[-8:] == check.to_bytes(8, "little"):
                yield place, scoped, Wall(until)

    def _changed(self) -> None:
        """Tell those that have read the file. Without a sync: after a loss of power all read it anew."""
        # Drawn: a clock may stand still between two changes, and a count comes twice where a failed sync takes it back.
        head = _HEADER.pack(_MAGIC, secrets.randbits(64), 0)[:-8]
        os.pwrite(self._fd, head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little"), 0)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Alone among threads and processes. Inside of `_held`."""
        end = time.monotonic() + LOCK_TIMEOUT_S
        with self._lock:
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        detail = f"{self._path} is locked by a process that stands still"
                        raise TierTimeout("g3", "purge", detail) from None
                    time.sleep(_POLL_S)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)


def _encoded(scoped: bytes, until: Wall) -> bytes:
    body = scoped + struct.pack("<d", until)
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
