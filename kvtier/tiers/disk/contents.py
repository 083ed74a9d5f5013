"""The contents of a namespace's blocks, as an engine described them: a ring of pages beside the index of a G3 store.

    PART 0/contents/NAMESPACE    the head, then `pages` places of PAGE_BYTES; page n lies at place (n - 1) mod pages

    head     u64 XXH3-64 over the rest ‖ "kvtcont1" ‖ pages u64 ‖ number of the newest page u64 ‖ purges u64 ‖
             tenants of the last PURGES_KEPT purges (8 each), that of purge p at place p mod PURGES_KEPT
    page     u64 XXH3-64 over the rest ‖ number u64 ‖ length of the parts u32 ‖ parts: length u32 ‖ tenant (8) ‖ …

Not in the index: its rows cost a commit each, twice the bytes, and pages of the tree that lookups need. These are read
once per process, and a page that is lost costs nobody a block: so nothing is synced but a purge, which overwrites every
page that has a part of its tenant, or removes the file where it cannot. Since pages are written again as they fill up,
a writer says how many purges it knew of, and is told whose they were.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvtier.errors import TierTimeout
from kvtier.identity.keys import TENANT_BYTES, Scope
from kvtier.tiers.fsync import sync_directory
from kvtier.tiers.protocol import CONTENT_BYTES_MAX

log = logging.getLogger(__name__)

PAGE_BYTES = 16384
PAGES_MIN, BYTES_MAX = 4, 256 << 20
LOCK_TIMEOUT_S = 1.0  # a holder needs microseconds, but for a purge
PURGE_TIMEOUT_S = 10.0  # for the lock: every process of a fleet has the same purge at once
SCANS_S, SCANS_SHARE = 5.0, 0.01
"""CPU time for the purges of one process: at once, and of all time after that. A tier that missed ten thousand is not
to look through the file for each of them: it removes it."""
_POLL_S = 0.001
PURGES_KEPT = 64
_MAGIC = b"kvtcont1"
_HEAD = struct.Struct(f"<Q8sQQQ{PURGES_KEPT * TENANT_BYTES}s")
_PAGE = struct.Struct("<QQI")
_PART = struct.Struct("<I")
_CHECK_BYTES = 8
_NO_PURGES = bytes(PURGES_KEPT * TENANT_BYTES)


class _Head(NamedTuple):
    newest: int
    purges: int
    tenants: bytes = _NO_PURGES

    def purged(self, tenant: bytes) -> _Head:
        """After a purge."""
        purges = self.purges + 1
        at = purges % PURGES_KEPT * TENANT_BYTES
        return _Head(self.newest, purges, self.tenants[:at] + tenant + self.tenants[at + TENANT_BYTES :])

    def since(self, purges: int) -> list[bytes] | None:
        """The tenants of the purges after so many; None where some are not known any more."""
        if not 0 <= self.purges - purges <= PURGES_KEPT:
            return None
        places = (number % PURGES_KEPT * TENANT_BYTES for number in range(purges + 1, self.purges + 1))
        return [self.tenants[at : at + TENANT_BYTES] for at in places]


def pages_for(blocks: int, block_tokens: int) -> int:
    """How many pages hold the contents of so many blocks: 32 bytes of hash, and 19 bits for each token. Pure."""
    size = blocks * (32 + -(-19 * block_tokens // 8))
    return max(PAGES_MIN, min(size, BYTES_MAX) // PAGE_BYTES)


class ContentRing:
    """The file of one namespace, shared with other processes. Thread-safe. Verbs raise OSError, or TierTimeout where
    another process holds the file too long."""

    def __init__(self, part: Path, namespace: bytes, pages: int) -> None:
        """Opens nothing. A file of another number of pages is begun anew."""
        self._path = part / "contents" / namespace.hex()
        self.pages = pages
        self._scanned_s = self._scanned_at = 0.0

    def write(self, number: int, parts: Sequence[bytes], purges: int) -> tuple[int, int, list[bytes] | None]:
        """See `kvtier.tiers.protocol.Describing`."""
        body = b"".join(_PART.pack(len(part)) + part for part in parts)
        if len(body) > CONTENT_BYTES_MAX:
            raise ValueError(f"a page of {len(body)} bytes is too large")
        with self._locked(make=True) as fd:
            head = self._head(fd)
            if head is None:
                _tidy(self._path, (1 + self.pages) * PAGE_BYTES)
                os.ftruncate(fd, 0)
                head = _Head(0, time.time_ns())  # more than any that a writer of an earlier file knew
                self._set_head(fd, head)
            if not body or purges != head.purges:
                return 0, head.purges, head.since(purges)
            if not 0 < number <= head.newest or number <= head.newest - self.pages:
                number = head.newest + 1
                self._set_head(fd, head._replace(newest=number))
            self._set_page(fd, number, body)
            return number, head.purges, []

    def read(self, below: int) -> tuple[int, list[bytes]]:
        """See `kvtier.tiers.protocol.Describing`."""
        with contextlib.suppress(FileNotFoundError), self._locked() as fd:
            head = self._head(fd) or _Head(0, 0)
            first = min(below - 1, head.newest) if below else head.newest
            for number in range(first, max(0, head.newest - self.pages), -1):
                found, parts = _decoded(os.pread(fd, PAGE_BYTES, self._offset(number)))
                if found == number:
                    return number, parts
        return 0, []

    def purge(self, tenant: Scope) -> int:
        """Overwrite the tenant's parts, durably; returns how many there were. Damaged pages go, whosesoever they are,
        and the whole file where it fails, is none, or is held too long, and where purges take SCANS_S: a purge of
        blocks is not to wait for that. Raises OSError where it cannot be removed."""
        try:
            with self._locked(timeout_s=PURGE_TIMEOUT_S) as fd, self._scanning():
                count = self._overwrite(fd, tenant[:TENANT_BYTES])
                os.fsync(fd)
                return count
        except FileNotFoundError:
            return 0
        except (OSError, TierTimeout) as error:
            log.info("g3: what blocks hold is forgotten, since a purge cannot change it: %s", error)
        self.remove()
        return 0

    def remove(self) -> None:
        """Forget everything, durably. Raises OSError."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):  # none of ours
            self._path.unlink()
            sync_directory(self._path.parent)

    @contextlib.contextmanager
    def _scanning(self) -> Iterator[None]:
        """Raises TierTimeout where purges have taken too long."""
        now, began = time.monotonic(), time.thread_time()
        self._scanned_s = max(0.0, self._scanned_s - SCANS_SHARE * (now - self._scanned_at))
        self._scanned_at = now
        if self._scanned_s > SCANS_S:
            raise TierTimeout("g3", "contents", "there are too many purges to look through it for each")
        yield
        self._scanned_s += time.thread_time() - began

    def _overwrite(self, fd: int, name: bytes) -> int:
        head, count = self._head(fd), 0
        if head is None:
            os.ftruncate(fd, 0)
            return 0
        self._set_head(fd, head.purged(name))
        for place in range(1, 1 + min(self.pages, head.newest)):
            number, parts = _decoded(os.pread(fd, PAGE_BYTES, place * PAGE_BYTES))
            others = [part for part in parts if part[:TENANT_BYTES] != name]
            if not number:
                os.pwrite(fd, bytes(PAGE_BYTES), place * PAGE_BYTES)
            elif len(others) < len(parts):
                self._set_page(fd, number, b"".join(_PART.pack(len(part)) + part for part in others))
                count += len(parts) - len(others)
        return count

    def _offset(self, number: int) -> int:
        return (1 + (number - 1) % self.pages) * PAGE_BYTES

    def _set_page(self, fd: int, number: int, body: bytes) -> None:
        rest = struct.pack("<QI", number, len(body)) + body
        os.pwrite(fd, (_check(rest) + rest).ljust(PAGE_BYTES, b"\0"), self._offset(number))

    def _head(self, fd: int) -> _Head | None:
        raw = os.pread(fd, _HEAD.size, 0)
        if len(raw) < _HEAD.size or raw[:_CHECK_BYTES] != _check(raw[_CHECK_BYTES:]):
            return None
        _, magic, pages, newest, purges, tenants = _HEAD.unpack(raw)
        return _Head(newest, purges, tenants) if magic == _MAGIC and pages == self.pages else None

    def _set_head(self, fd: int, head: _Head) -> None:
        rest = _HEAD.pack(0, _MAGIC, self.pages, *head)[_CHECK_BYTES:]
        os.pwrite(fd, _check(rest) + rest, 0)

    @contextlib.contextmanager
    def _locked(self, *, make: bool = False, timeout_s: float | None = None) -> Iterator[int]:
        """The open file, alone among threads and processes, within LOCK_TIMEOUT_S or another time."""
        end = time.monotonic() + (LOCK_TIMEOUT_S if timeout_s is None else timeout_s)
        if make:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
        while (fd := self._taken(os.O_CREAT if make else 0, end)) is None:
            pass
        try:
            yield fd
        finally:
            os.close(fd)  # and with it the lock

    def _taken(self, flags: int, end: float) -> int | None:
        """The locked file, open; None where it was removed meanwhile: another one may be in its place."""
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            self._lock(fd, end)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _lock(self, fd: int, end: float) -> None:
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TierTimeout("g3", "contents", f"{self._path} is locked") from None
                time.sleep(_POLL_S)


def _check(rest: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(rest).to_bytes(_CHECK_BYTES, "little")


def _decoded(raw: bytes) -> tuple[int, list[bytes]]:
    """Number and parts of what lies at a page's place; (0, []) unless that is a whole page. Pure."""
    if len(raw) < _PAGE.size:
        return 0, []
    check, number, length = _PAGE.unpack_from(raw)
    end = _PAGE.size + length
    if end > len(raw) or check != xxhash.xxh3_64_intdigest(raw[_CHECK_BYTES:end]):
        return 0, []
    parts, at = [], _PAGE.size
    while at + _PART.size <= end:
        (size,) = _PART.unpack_from(raw, at)
        at += _PART.size + size
        parts.append(raw[at - size : at])
    return (number, parts) if at == end else (0, [])


def _tidy(path: Path, bytes_max: int) -> None:
    """Remove the files of other namespaces that were not written to for longest, until the rest has `bytes_max`."""
    with contextlib.suppress(FileNotFoundError):  # another process does the same
        stats = [(other.stat(), other) for other in path.parent.iterdir() if other != path]
        total = sum(stat.st_size for stat, _ in stats)
        for stat, other in sorted(stats, key=lambda pair: pair[0].st_mtime_ns):
            if total > bytes_max:
                total -= stat.st_size
                other.unlink()
