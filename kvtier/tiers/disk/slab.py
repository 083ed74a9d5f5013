"""Slab segments: files of fixed-size slots, read and written around the page cache.

    PART/slab/SSSSSSSS.slab      segment SSSSSSSS (hexadecimal); slot i starts at i × slot size
    PART/slab/ahead              the next segment while it is preallocated (kvtier.tiers.disk.preallocate)

A slot holds a block's bytes and nothing else: name, length and digest are in the index. So a block moves
between the disk and the caller's memory in one `preadv` or `pwritev` over its ranks' pieces, without a copy,
wherever those pieces are aligned; through an aligned buffer of the thread's own otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import stat
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from kvtier.tiers.disk.records import SLOT_ALIGN
from kvtier.tiers.fsync import sync_directory

T = TypeVar("T")

log = logging.getLogger(__name__)

DRAFT = "ahead"
OPEN_FILES_MAX = 64
WRITE_BYTES_MAX = 1 << 20
"""Per system call, where nobody says how many. A device finishes the writes it has before a later read or sync: few
small writes in flight keep it about as busy as many large ones, and a read behind them waits a fraction as long."""
RUN_BYTES_MAX = 4 << 20
"""Of neighbouring blocks that a thread moves together, where nobody says how many."""
_IOV_MAX = 1024


class ShortIO(OSError):
    """A file ended early, or took fewer bytes than it was given."""


class FileFault(OSError):
    """A segment's file cannot be opened or made: no place in it is to blame."""


class Calls(Protocol):
    """The system calls that move blocks: the seam for tests that count, fail or forget them."""

    def open(self, path: Path, flags: int) -> int: ...
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def allocate(self, fd: int, length: int) -> None: ...
    def fdatasync(self, fd: int) -> None: ...
    def close(self, fd: int) -> None: ...


class SystemCalls:
    """The kernel's calls."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, length: int) -> None:
        """Make the file `length` long and allocate its blocks, so that a full volume shows now."""
        try:
            os.posix_fallocate(fd, 0, length)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)


@dataclass(slots=True)
class _File:
    fd: int
    direct: bool
    path: str
    place: tuple[int, int] = (0, 0)  # (device, inode)
    users: int = 0


class Slab:
    """The segment files of one store. Thread-safe; every verb but `close` may block on the device."""

    def __init__(
        self, parts: Sequence[Path], size_of: Callable[[int], int], calls: Calls,
        write_bytes: Callable[[], int] = lambda: WRITE_BYTES_MAX,
    ) -> None:  # fmt: skip
        """`size_of`: a segment's bytes, 0 if there is none. `write_bytes`: how many a system call may write; asked
        before each."""
        self._write_bytes = write_bytes
        self._parts = [part / "slab" for part in parts]
        self._size_of = size_of
        self._calls = calls
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._named: dict[int, tuple[int, int]] = {}  # by segment, the file whose name is durable, as far as known here
        self._lock = threading.Lock()
        self._making = threading.Lock()  # of files; taken before `_lock`
        self._local = threading.local()

    def path_of(self, segment: int) -> Path:
        """The segment's file."""
        return self._parts[segment % len(self._parts)] / f"{segment:08x}.slab"

    def read(self, segment: int, offset: int, pieces: Sequence[memoryview]) -> None:
        """Fill `pieces` from `offset` (a multiple of SLOT_ALIGN) on. Raises OSError; ShortIO past the end."""
        with self._open(segment) as file:
            if not file.direct or all(map(_aligned, pieces)):
                _whole(self._calls.preadv, file.fd, pieces, offset)
                return
            buffer = self._buffer(sum(map(len, pieces)))
            _whole(self._calls.preadv, file.fd, [buffer], offset)
            for piece in pieces:
                piece[:] = buffer[: len(piece)]
                buffer = buffer[len(piece) :]

    def write(self, segment: int, offset: int, pieces: Sequence[memoryview]) -> None:
        """Write `pieces` at `offset` (a multiple of SLOT_ALIGN). Not durable before `sync`. Raises OSError."""
        with self._open(segment) as file:
            if not file.direct or all(map(_aligned, pieces)):
                _whole(self._calls.pwritev, file.fd, pieces, offset, self._write_bytes)
                return
            buffer = self._buffer(sum(map(len, pieces)))
            start = 0
            for piece in pieces:
                buffer[start : start + len(piece)] = piece
                start += len(piece)
            buffer[start:] = bytes(len(buffer) - start)
            _whole(self._calls.pwritev, file.fd, [buffer], offset, self._write_bytes)

    def sync(self, segment: int) -> None:
        """Make durable what `write` has written into the segment. Raises OSError."""
        with self._open(segment) as file:
            self._calls.fdatasync(file.fd)

    def cut(self) -> Iterator[None]:
        """Shorten files that are longer than their segment may be, and remove those of no segment, a file with each
        step. No block may lie behind, for any process. Raises OSError."""
        for path in [path for folder in self._parts for path in folder.glob("[0-9a-f]" * 8 + ".slab")]:
            number = int(path.stem, 16)
            with contextlib.suppress(FileNotFoundError):  # another process cuts the files, too
                status, size = path.lstat(), self._size_of(number)
                if not stat.S_ISREG(status.st_mode) or (status.st_size <= size and size > 0):
                    continue  # a foreign one fails when it is read or written
                os.truncate(path, size)  # its space is given back, whoever has it open
                if size == 0:
                    path.unlink()
                    self._forget(number)
            yield

    def remove_drafts(self) -> None:
        """Remove files that were not completed. The caller uses the store alone."""
        for folder in self._parts:
            with contextlib.suppress(OSError):
                (folder / DRAFT).unlink()

    def _forget(self, segment: int) -> None:
        """The segment's file is gone."""
        with self._lock:
            self._named.pop(segment, None)
            if (file := self._files.pop(segment, None)) is not None:
                self._close_unused(segment, file)

    def size(self) -> int:
        """Bytes that the files have, all drafts and leftovers included. Raises OSError."""
        files = [path.lstat() for folder in self._parts for path in folder.iterdir()]
        ours = [status for status in files if stat.S_ISREG(status.st_mode)]
        return sum({(status.st_dev, status.st_ino): status.st_size for status in ours}.values())

    def close(self) -> None:
        """Close the files, and forget them: the next call opens what is there then. No other call may run."""
        with self._lock:
            self._named.clear()
            while self._files:
                self._close(self._files.popitem()[1].fd)

    def _buffer(self, length: int) -> memoryview:
        """This thread's aligned buffer, cut to `length` rounded up to SLOT_ALIGN."""
        wanted = -(-length // SLOT_ALIGN) * SLOT_ALIGN
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < wanted:
            buffer = self._local.buffer = mmap.mmap(-1, wanted)
        return memoryview(buffer)[:wanted]

    @contextmanager
    def _open(self, segment: int) -> Iterator[_File]:
        file = self._use(segment)
        if file is None:
            # Made and synced without the lock of all: that takes as long as the device has other work. One at a time,
            # since others that come to the same segment meanwhile are to have the same file.
            with self._making:
                file = self._use(segment)
                if file is None:
                    file = self._made(segment)
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1
                self._close_unused(segment, file)

    def _use(self, segment: int) -> _File | None:
        """The segment's open file, with one user more; None if there is none in its place."""
        with self._lock:
            file = self._files.get(segment)
            if file is not None and not _in_place(file):
                log.warning("g3: %s was removed or replaced; its blocks are lost", self.path_of(segment))
                del self._files[segment]
                self._close_unused(segment, file)
                file = None
            if file is not None:
                self._files.move_to_end(segment)
                file.users += 1
            return file

    def _made(self, segment: int) -> _File:
        """The segment's file, opened or made by now, with one user. Raises FileFault."""
        try:
            file = self._attach(segment)
        except OSError as error:
            raise FileFault(error.errno, error.strerror, str(self.path_of(segment))) from error
        with self._lock:
            self._files[segment] = file
            file.users += 1
            self._trim()
        return file

    def _close(self, fd: int) -> None:
        """The descriptor is gone whatever the kernel answers, and `sync` has told of bytes that were not written."""
        with contextlib.suppress(OSError):
            self._calls.close(fd)

    def _close_unused(self, segment: int, file: _File) -> None:
        """Close a file that is not the segment's any more, once nobody uses it."""
        if file.users == 0 and self._files.get(segment) is not file:
            self._close(file.fd)

    def _trim(self) -> None:
        while len(self._files) > OPEN_FILES_MAX:
            idle = next((number for number, file in self._files.items() if file.users == 0), None)
            if idle is None:
                return
            self._close(self._files.pop(idle).fd)

    def _attach(self, segment: int) -> _File:
        path = self.path_of(segment)
        _set_aside(path)
        file = _File(*open_direct(self._calls, path), str(path))
        try:
            status = os.fstat(file.fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            file.place = status.st_dev, status.st_ino
            size = self._size_of(segment)
            if status.st_size < size:
                self._named.pop(segment, None)  # it may be new, and have the number of one that was removed
                with contextlib.suppress(OSError):
                    (path.parent / DRAFT).unlink()  # the draft of this very segment comes too late
                try:
                    self._calls.allocate(file.fd, size)
                except OSError:
                    os.ftruncate(file.fd, status.st_size)  # give back the part that was allocated
                    raise
                os.fsync(file.fd)
            if self._named.get(segment) != file.place:  # the process that made it may not have synced its name yet
                sync_directory(path.parent)
                self._named[segment] = file.place
        except BaseException:
            self._close(file.fd)
            raise
        return file


def _in_place(file: _File) -> bool:
    """Whether the segment's name still leads to the open file."""
    try:
        status = os.lstat(file.path)
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) == file.place


def _set_aside(path: Path) -> None:
    """Rename what has a segment's name and is no file of ours: a link, a pipe, a directory. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            aside = path.with_suffix(".foreign")
            log.warning("g3: %s is not a regular file; it is %s now", path, aside)
            path.rename(aside)


def open_direct(calls: Calls, path: Path, *, exclusive: bool = False) -> tuple[int, bool]:
    """A descriptor of the file, made if need be (`exclusive`: always), and whether it goes around the page cache: not
    every file system can. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if exclusive else 0)
    try:
        return calls.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return calls.open(path, flags), False


def neighbours(
    items: Sequence[T], place_of: Callable[[T], tuple[int, int]], block_bytes: int, run_bytes: int = RUN_BYTES_MAX
) -> Iterator[list[T]]:
    """Runs of items whose places, as (segment, slot), follow one another, of up to `run_bytes`; one by one where slots
    have padding. Pure."""
    run: list[T] = []
    last = (-1, -1)
    limit = 1 if block_bytes % SLOT_ALIGN else max(1, run_bytes // max(1, block_bytes))
    for item in sorted(items, key=place_of):
        segment, slot = place_of(item)
        if run and ((segment, slot) != (last[0], last[1] + 1) or len(run) == limit):
            yield run
            run = []
        run.append(item)
        last = segment, slot
    if run:
        yield run


def _aligned(piece: memoryview) -> bool:
    return len(piece) % SLOT_ALIGN == 0 and _address(piece) % SLOT_ALIGN == 0


def _address(piece: memoryview) -> int:
    if piece and not piece.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(piece))
    import numpy as np  # five times as slow, for each block

    return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])


def _whole(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    pieces: Sequence[memoryview],
    offset: int,
    most: Callable[[], int] = lambda: sys.maxsize,
) -> None:
    """`call` with up to `most()` bytes until all pieces are moved; the kernel may move fewer bytes at a time."""
    left = [piece.cast("B") for piece in pieces]
    while left:
        some, rest = [], most()
        for piece in left[:_IOV_MAX]:
            some.append(piece[:rest])
            rest -= len(some[-1])
            if not rest:
                break
        moved = call(fd, some, offset)
        if moved <= 0:
            raise ShortIO(errno.EIO, f"{sum(map(len, left))} bytes short at offset {offset}")
        offset += moved
        while left and moved >= len(left[0]):
            moved -= len(left[0])
            left.pop(0)
        if moved:
            left[0] = left[0][moved:]
