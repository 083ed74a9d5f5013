"""A file system that knows what it may forget: in memory, through FUSE, with a log of all that was done to it.

    python -m tests.tiers.disk.support.forgetting_fs MOUNTPOINT LOG

Prints "mounted", serves until unmounted, then writes LOG, one JSON array per line:

    ["mkdir", parent, name, inode]    ["create", parent, name, inode]    ["unlink", parent, name]
    ["rename", parent, name, parent, name]      ["truncate", inode, size]
    ["write", inode, offset, base64, durable]   ["sync", inode]

`sync` is that of a file or a directory; `durable` says that the descriptor was opened to write through. Inode 1 is the
root. Everything is handled one after another, in the order of the log. Needs pyfuse3 and the right to mount.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pyfuse3
import trio

_CACHED_S = 3600.0  # the kernel is the only one here


class Forgetful(pyfuse3.Operations):
    """Files, directories and the log of their changes."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self) -> None:
        super().__init__()
        self.log: list[list[Any]] = []
        self._folders: dict[int, dict[bytes, int]] = {pyfuse3.ROOT_INODE: {}}
        self._files: dict[int, bytearray] = {}
        self._flags: dict[int, tuple[int, int]] = {}  # handle → (inode, flags)
        self._last = pyfuse3.ROOT_INODE
        self._handles = 0

    def _record(self, *op: Any) -> None:
        self.log.append(list(op))

    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.generation = inode, 0
        entry.entry_timeout = entry.attr_timeout = _CACHED_S
        folder = inode in self._folders
        entry.st_mode = (stat.S_IFDIR | 0o700) if folder else (stat.S_IFREG | 0o600)
        entry.st_nlink = 1
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        entry.st_size = 0 if folder else len(self._files[inode])
        entry.st_blksize, entry.st_blocks = 4096, -(-entry.st_size // 512)
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = 0
        return entry

    def _handle(self, inode: int, flags: int) -> int:
        self._handles += 1
        self._flags[self._handles] = inode, flags
        return self._handles

    def _child(self, parent: int, name: bytes) -> int:
        inode = self._folders[parent].get(name)
        if inode is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return inode

    def _resize(self, inode: int, size: int) -> None:
        data = self._files[inode]
        del data[size:]
        data.extend(bytes(size - len(data)))
        self._record("truncate", inode, size)

    # Names.

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any) -> Any:
        return self._attributes(self._child(parent_inode, name))

    async def getattr(self, inode: int, ctx: Any) -> Any:
        return self._attributes(inode)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Any) -> Any:
        self._last += 1
        self._folders[self._last] = {}
        self._folders[parent_inode][name] = self._last
        self._record("mkdir", parent_inode, name.decode(), self._last)
        return self._attributes(self._last)

    async def create(self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        self._last += 1
        self._files[self._last] = bytearray()
        self._folders[parent_inode][name] = self._last
        self._record("create", parent_inode, name.decode(), self._last)
        return pyfuse3.FileInfo(fh=self._handle(self._last, flags)), self._attributes(self._last)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        self._child(parent_inode, name)
        del self._folders[parent_inode][name]
        self._record("unlink", parent_inode, name.decode())

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        if self._folders[self._child(parent_inode, name)]:
            raise pyfuse3.FUSEError(errno.ENOTEMPTY)
        await self.unlink(parent_inode, name, ctx)

    async def rename(self, parent_old: int, old: bytes, parent_new: int, new: bytes, flags: int, ctx: Any) -> None:
        inode = self._child(parent_old, old)
        if flags:
            raise pyfuse3.FUSEError(errno.EINVAL)
        del self._folders[parent_old][old]
        self._folders[parent_new][new] = inode
        self._record("rename", parent_old, old.decode(), parent_new, new.decode())

    # Contents.

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: int | None, ctx: Any) -> Any:
        if fields.update_size:
            self._resize(inode, attr.st_size)
        return self._attributes(inode)

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        if flags & os.O_TRUNC:
            self._resize(inode, 0)
        return pyfuse3.FileInfo(fh=self._handle(inode, flags))

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return bytes(self._files[self._flags[fh][0]][off : off + size])

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        inode, flags = self._flags[fh]
        data = self._files[inode]
        data.extend(bytes(max(0, off - len(data))))
        data[off : off + len(buf)] = buf
        self._record("write", inode, off, base64.b64encode(buf).decode(), bool(flags & os.O_DSYNC))
        return len(buf)

    async def fsync(self, fh: int, datasync: bool) -> None:
        self._record("sync", self._flags[fh][0])

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        self._record("sync", self._flags[fh][0])

    async def flush(self, fh: int) -> None:
        pass

    async def release(self, fh: int) -> None:
        del self._flags[fh]

    async def opendir(self, inode: int, ctx: Any) -> int:
        return self._handle(inode, 0)

    async def releasedir(self, fh: int) -> None:
        del self._flags[fh]

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        for number, (name, inode) in enumerate(self._folders[self._flags[fh][0]].items(), 1):
            if number > start_id and not pyfuse3.readdir_reply(token, name, self._attributes(inode), number):
                return

    async def statfs(self, ctx: Any) -> Any:
        answer = pyfuse3.StatvfsData()
        answer.f_bsize = answer.f_frsize = 4096
        answer.f_blocks = answer.f_bfree = answer.f_bavail = 1 << 20
        answer.f_files = answer.f_ffree = answer.f_favail = 1 << 16
        answer.f_namemax = 255
        return answer


def main(mountpoint: Path, log: Path) -> None:
    files = Forgetful()
    pyfuse3.init(files, str(mountpoint), {*pyfuse3.default_options, "fsname=forgetful"})
    print("mounted", flush=True)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)
    with log.open("w") as out:
        for op in files.log:
            out.write(json.dumps(op) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
