"""The next segment's file, preallocated before it is needed.

The first write to each block of a new file costs extra metadata updates: on ext4 puts into a new segment run at about
half their later speed. So while the disk is idle the next segment's file is filled with zeros as

    PART/slab/ahead

and gets its own name when it is whole. A process that needs the segment earlier makes the file on the spot and removes
the draft's name, so `slab` never holds more than the segments' files would. One process at a time writes the draft,
under a lock; the draft of a killed process is written anew by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.tiers.disk.slab import DRAFT, WRITE_BYTES_MAX, Calls, open_direct

log = logging.getLogger(__name__)

_STEPS_PER_SYNC = 64


class Preallocator:
    """Preallocates the file of one segment, step by step. Not thread-safe. No verb raises: a segment that is not
    preallocated is made when it is needed, and the volume's error shows then."""

    def __init__(self, parts: Sequence[Path], size_of: Callable[[int], int], calls: Calls) -> None:
        self._parts = [part / "slab" for part in parts]
        self._size_of = size_of
        self._calls = calls
        self._fd = -1
        self._segment = 0
        self._done = 0
        self._written = 0
        self._zeros = memoryview(b"")

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return self._fd >= 0

    def advance(self, segment: int) -> bool:
        """Begin with the file of `segment`, or go on with it. Whether there is more to do. Blocks on the device."""
        return self.step() if self.busy and self._segment == segment else self.start(segment)

    def take_written(self) -> int:
        """Bytes written since the last call."""
        written, self._written = self._written, 0
        return written

    def start(self, segment: int) -> bool:
        """Begin with the file of `segment`. False: it exists, another process preallocates it, or that failed."""
        self.stop()
        self._segment, self._done = segment, 0
        if self._path.exists():
            return False
        try:
            self._fd, _direct = open_direct(self._calls, self._folder / DRAFT)
            if not self._owned():
                self._close()
                return False
            if self._path.exists():
                self.stop()
                return False
            os.ftruncate(self._fd, 0)
            self._calls.allocate(self._fd, self._size_of(segment))
            self._zeros = memoryview(mmap.mmap(-1, WRITE_BYTES_MAX))
        except OSError as error:
            log.info("g3: segment %d is not preallocated: %s", segment, error)
            self.stop()
        return self.busy

    def step(self) -> bool:
        """Write some more, or give the whole file its name. Whether there is more to do. Blocks on the device."""
        if not self.busy:
            return False
        try:
            if self._path.exists():
                self.stop()
            elif self._done < self._size_of(self._segment):
                self._write()
            else:
                self._finish()
        except OSError as error:
            log.info("g3: segment %d is not preallocated: %s", self._segment, error)
            self.stop()
        return self.busy

    def stop(self) -> None:
        """Discard an unfinished draft."""
        if self.busy:
            self._forget_name()
            self._close()

    @property
    def _folder(self) -> Path:
        return self._parts[self._segment % len(self._parts)]

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._segment:08x}.slab"

    def _owned(self) -> bool:
        """Whether the open file is a draft, and ours. It may have become a segment since its name was looked up, or
        before, if the process that renamed it was killed between link and unlink."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(self._fd)
            if not os.path.samestat(status, (self._folder / DRAFT).lstat()):
                return False
        except (BlockingIOError, FileNotFoundError):
            return False
        if status.st_nlink != 1:
            self._forget_name()
        return status.st_nlink == 1

    def _write(self) -> None:
        piece = self._zeros[: self._size_of(self._segment) - self._done]
        moved = self._calls.pwritev(self._fd, [piece], self._done)
        if moved <= 0 or moved % mmap.PAGESIZE:
            raise OSError(errno.EIO, "a short write")
        self._done += moved
        self._written += moved
        if self._done // WRITE_BYTES_MAX % _STEPS_PER_SYNC == 0:
            self._calls.fdatasync(self._fd)

    def _finish(self) -> None:
        """By a link to this very file that replaces none: a segment's file that was made meanwhile stays."""
        os.fsync(self._fd)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(FileExistsError):
                # `dst_dir_fd` makes it linkat: link does not follow the symbolic link in /proc.
                os.link(f"/proc/self/fd/{self._fd}", self._path.name, dst_dir_fd=folder)
            self.stop()
            os.fsync(folder)
        finally:
            os.close(folder)

    def _forget_name(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder / DRAFT).unlink()

    def _close(self) -> None:
        self._calls.close(self._fd)
        self._fd, self._zeros = -1, memoryview(b"")
