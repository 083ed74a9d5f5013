"""A file system in memory, through FUSE, that fails as it is told.

    python faulty_fs.py MOUNTPOINT MODE_FILE

Prints "mounted" and serves until it is unmounted. MODE_FILE holds one word, read again at every call:

    well              all calls succeed
    no-space          what writes new bytes fails with ENOSPC
    no-read           reads fail with EIO
    no-open           opening a file or listing a directory fails with EACCES
    frozen            reads and writes do not answer while the word stands, for at most FROZEN_S

Nothing is cached in the kernel beyond one opening of a file. Needs pyfuse3 and the right to mount.
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

_POLL_S = 0.05
FROZEN_S = 45.0
"""A call answers after that all the same: a process cannot be killed while it waits for a file system."""


def _opened(inode: int) -> Any:
    """A handle to a file whose pages of an earlier opening are forgotten."""
    return pyfuse3.FileInfo(fh=inode, keep_cache=False)


class FaultyFs(pyfuse3.Operations):
    """Files, directories and links."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, mode: Path) -> None:
        super().__init__()
        self._mode = mode
        self._folders: dict[int, dict[bytes, int]] = {pyfuse3.ROOT_INODE: {}}
        self._files: dict[int, bytearray] = {}
        self._links: dict[int, int] = {}
        self._last = pyfuse3.ROOT_INODE

    def _is(self, word: str) -> bool:
        return self._mode.read_text().strip() == word

    def _fail(self, word: str, number: int) -> None:
        if self._is(word):
            raise pyfuse3.FUSEError(number)

    async def _wait(self) -> None:
        until = trio.current_time() + FROZEN_S
        while self._is("frozen") and trio.current_time() < until:  # noqa: ASYNC110 - the word comes from another process
            await trio.sleep(_POLL_S)

    def _attributes(self, inode: int) -> Any:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.generation = inode, 0
        entry.entry_timeout = entry.attr_timeout = 0.0
        folder = inode in self._folders
        entry.st_mode = (stat.S_IFDIR | 0o700) if folder else (stat.S_IFREG | 0o600)
        entry.st_nlink = 1 if folder else self._links[inode]
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        entry.st_size = 0 if folder else len(self._files[inode])
        entry.st_blksize, entry.st_blocks = 4096, -(-entry.st_size // 512)
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = 0
        return entry

    def _child(self, parent: int, name: bytes) -> int:
        inode = self._folders[parent].get(name)
        if inode is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return inode

    def _resize(self, inode: int, size: int) -> None:
        data = self._files[inode]
        if size > len(data):
            self._fail("no-space", errno.ENOSPC)
        del data[size:]
        data.extend(bytes(size - len(data)))

    # Names.

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any) -> Any:
        return self._attributes(self._child(parent_inode, name))

    async def getattr(self, inode: int, ctx: Any) -> Any:
        if inode not in self._folders and inode not in self._files:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(inode)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Any) -> Any:
        self._fail("no-space", errno.ENOSPC)
        self._last += 1
        self._folders[self._last] = {}
        self._folders[parent_inode][name] = self._last
        return self._attributes(self._last)

    async def create(self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        self._fail("no-space", errno.ENOSPC)
        self._fail("no-open", errno.EACCES)
        self._last += 1
        self._files[self._last], self._links[self._last] = bytearray(), 1
        self._folders[parent_inode][name] = self._last
        return _opened(self._last), self._attributes(self._last)

    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: Any) -> Any:
        if new_name in self._folders[new_parent_inode]:
            raise pyfuse3.FUSEError(errno.EEXIST)
        self._folders[new_parent_inode][new_name] = inode
        self._links[inode] += 1
        return self._attributes(inode)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        inode = self._child(parent_inode, name)
        del self._folders[parent_inode][name]
        self._links[inode] -= 1

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        if self._folders[self._child(parent_inode, name)]:
            raise pyfuse3.FUSEError(errno.ENOTEMPTY)
        del self._folders[parent_inode][name]

    async def rename(self, parent_old: int, old: bytes, parent_new: int, new: bytes, flags: int, ctx: Any) -> None:
        inode = self._child(parent_old, old)
        if flags:
            raise pyfuse3.FUSEError(errno.EINVAL)
        del self._folders[parent_old][old]
        self._folders[parent_new][new] = inode

    async def opendir(self, inode: int, ctx: Any) -> int:
        self._fail("no-open", errno.EACCES)
        return inode

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        for number, (name, inode) in enumerate(list(self._folders[fh].items())[start_id:], start_id + 1):
            if not pyfuse3.readdir_reply(token, name, self._attributes(inode), number):
                return

    async def statfs(self, ctx: Any) -> Any:
        out = pyfuse3.StatvfsData()
        out.f_bsize = out.f_frsize = 4096
        out.f_blocks = 1 << 20
        out.f_bfree = out.f_bavail = 0 if self._is("no-space") else 1 << 19
        out.f_files = out.f_ffree = out.f_favail = 1 << 20
        out.f_namemax = 255
        return out

    # Contents.

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: int | None, ctx: Any) -> Any:
        if fields.update_size:
            self._resize(inode, attr.st_size)
        return self._attributes(inode)

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        self._fail("no-open", errno.EACCES)
        if flags & os.O_TRUNC:
            self._resize(inode, 0)
        return _opened(inode)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        self._fail("no-read", errno.EIO)
        await self._wait()
        return bytes(self._files[fh][off : off + size])

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        self._fail("no-space", errno.ENOSPC)
        await self._wait()
        data = self._files[fh]
        data.extend(bytes(max(0, off - len(data))))
        data[off : off + len(buf)] = buf
        return len(buf)

    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._wait()

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        pass

    async def flush(self, fh: int) -> None:
        pass


def main() -> None:
    point, mode = sys.argv[1:]
    pyfuse3.init(FaultyFs(Path(mode)), point, {*pyfuse3.default_options, "fsname=kvtier-faulty"})
    print("mounted", flush=True)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
