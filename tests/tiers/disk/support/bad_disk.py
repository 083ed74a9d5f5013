"""A real block device with bad pages: a file below FUSE that fails at fixed pages, for a loop device to lie on.

    python -m tests.tiers.disk.support.bad_disk MOUNTPOINT IMAGE PAGES

Prints "mounted", then serves IMAGE as MOUNTPOINT/disk until unmounted. PAGES, read again when it changes, names
the pages of 4096 bytes that cannot be read or written. Needs pyfuse3 and the right to mount, and no device mapper, as
dm-error and dm-flakey do.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pyfuse3
import trio

PAGE = 4096
_NAME, _INODE = b"disk", 2


class BadDisk(pyfuse3.Operations):
    """One file."""

    def __init__(self, image: Path, pages: Path) -> None:
        super().__init__()
        self._fd = os.open(image, os.O_RDWR)
        self._size = os.fstat(self._fd).st_size
        self._pages = pages
        self._bad: set[int] = set()
        self._read_at = 0

    def _check(self, offset: int, size: int) -> None:
        if self._pages.exists() and self._pages.stat().st_mtime_ns != self._read_at:
            self._read_at = self._pages.stat().st_mtime_ns
            self._bad = set(map(int, self._pages.read_text().split()))
        if not self._bad.isdisjoint(range(offset // PAGE, -(-(offset + size) // PAGE))):
            raise pyfuse3.FUSEError(errno.EIO)

    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_nlink = inode, 1
        entry.entry_timeout = entry.attr_timeout = 3600.0
        folder = inode == pyfuse3.ROOT_INODE
        entry.st_mode = (stat.S_IFDIR | 0o700) if folder else (stat.S_IFREG | 0o600)
        entry.st_size = 0 if folder else self._size
        entry.st_blksize, entry.st_blocks = PAGE, entry.st_size // 512
        return entry

    async def getattr(self, inode: int, ctx: Any = None) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: Any, ctx: Any) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> pyfuse3.EntryAttributes:
        if name != _NAME:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(_INODE)

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        self._check(offset, size)
        return os.pread(self._fd, size, offset)

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        self._check(offset, len(data))
        return os.pwrite(self._fd, data, offset)

    async def fsync(self, fh: int, datasync: bool) -> None:
        pass

    async def flush(self, fh: int) -> None:
        pass


def main() -> None:
    point, image, pages = sys.argv[1:]
    pyfuse3.init(BadDisk(Path(image), Path(pages)), point, {*pyfuse3.default_options, "fsname=kvtier-bad-disk"})
    print("mounted", flush=True)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
