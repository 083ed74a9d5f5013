"""The next segment's file, written through before it is needed.

The first write to a block of a file costs the file system an entry in its own books: on ext4 puts into a new segment
run at about half their later speed. So while nobody reads or writes, the file that follows is filled with zeros as

    PART/slab/ahead

and gets its own name when it is whole. Whoever needs the segment earlier makes the file on the spot and removes the
draft's name, so what lies in `slab` is never more than the segments' files would be. One process at a time writes,
under a lock; what a killed one leaves behind is the next one's.
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

from kvtier.tiers.disk.slab import DRAFT, WRITE_BYTES_MAX, Calls

log = logging.getLogger(__name__)

_STEPS_PER_SYNC = 64


class Preallocator:
    """Writes the file of one segment ahead, step by step. Not thread-safe. No verb raises: a segment that is not
    written ahead is made when it is needed, or the volume says then what it lacks."""

    def __init__(self, parts: Sequence[Path], size_of: Callable[[int], int], calls: Calls) -> None:
        self._parts = [part / "slab" for part in parts]
        self._size_of = size_of
        self._calls = calls
        self._fd = -1
        self._segment = 0
        self._done = 0
        self._zeros = memoryview(b"")

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return self._fd >= 0

    def serves(self, segment: int) -> bool:
        """Whether it is at this segment's file."""
        return self.busy and self._segment == segment

    def start(self, segment: int) -> bool:
        """Begin with the file of `segment`. False: it is there, another process is at it, or it cannot be."""
        self.stop()
        self._segment, self._done = segment, 0
        if self._path.exists():
            return False
        try:
            self._fd = self._open()
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
            log.info("g3: segment %d is not written ahead: %s", segment, error)
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
            log.info("g3: segment %d is not written ahead: %s", self._segment, error)
            self.stop()
        return self.busy

    def stop(self) -> None:
        """Let go of what is not finished."""
        if self.busy:
            self._forget_name()
            self._close()

    @property
    def _folder(self) -> Path:
        return self._parts[self._segment % len(self._parts)]

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._segment:08x}.slab"

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT
        try:
            return self._calls.open(self._folder / DRAFT, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._calls.open(self._folder / DRAFT, flags)

    def _owned(self) -> bool:
        """Whether the open file is a draft, and ours. It may have become a segment since its name was looked up, or
        before, if whoever did that was killed between giving it one name and taking the other."""
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
        if self._done // WRITE_BYTES_MAX % _STEPS_PER_SYNC == 0:
            self._calls.fdatasync(self._fd)

    def _finish(self) -> None:
        """By a link to this very file that replaces none; the one who made the segment's file meanwhile wins."""
        os.fsync(self._fd)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(FileExistsError):
                # By linkat, which `dst_dir_fd` makes of it: link does not follow the symbolic link in /proc.
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
