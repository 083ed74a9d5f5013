"""What G3's modules find in place of `os`, `time`, `threading`, `secrets` and LMDB: calls of simulated processes on the
drives of simulated machines. Whatever is no file of a drive is the real machine's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvtier.sim.drive import Content, Drive
from kvtier.sim.loop import VirtualLoop, process_now
from kvtier.sim.threads import Killed, PerProcess, Primitives, Threads
from kvtier.tiers.disk.store import open_stores

if TYPE_CHECKING:
    import lmdb

EPOCH_S = 1_800_000_000.0
SEGMENT_BYTES = 32 << 10
"""So that a small store has several segments."""
SMALL_SHARE = 16
"""So that some writes find slots reserved by earlier ones."""
COLD_RATE = 0.05
"""Of looks at how many pages a look-up waited for."""
SHORT_RATE = 0.02
"""Of writes: the kernel takes a part."""


@dataclass
class _File:
    """An open file of a drive, or a folder of it, which has no content."""

    drive: Drive
    process: int
    path: Path
    inode: int

    @property
    def content(self) -> Content:
        return self.drive.content(self.inode)


class Kernel:
    """`os` of all simulated processes; what it does not define is the real one's."""

    def __init__(self, threads: Threads, rng: random.Random, open_lmdb: Callable[..., Any]) -> None:
        self.threads = threads
        self.rng = rng
        self.open_lmdb = open_lmdb
        self._drives: list[Drive] = []
        self._files: dict[int, _File] = {}
        self._environments: dict[int, list[Environment]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def add(self, drive: Drive) -> None:
        """A machine's."""
        self._drives.append(drive)

    def kill(self, process: int, drive: Drive) -> None:
        """Threads, descriptors and environments of the process, which was the only one on that drive, are gone."""
        self.threads.kill(process)
        for fd in [fd for fd, file in self._files.items() if file.process == process]:
            del self._files[fd]
            os.close(fd)
        for environment in self._environments.pop(process, []):
            environment.close()
        open_stores.forget(lambda store: store.parts[0].is_relative_to(drive.folder))

    def drive_of(self, path: str | Path) -> Drive | None:
        """The drive that a path lies on."""
        return next((drive for drive in self._drives if Path(path).is_relative_to(drive.folder)), None)

    # -- names ------------------------------------------------------------------------------------------------------

    def open(self, path: str | Path, flags: int, mode: int = 0o777) -> int:
        drive = self.drive_of(path)
        if drive is None:
            return os.open(path, flags, mode)
        self.threads.alive()
        there = os.path.lexists(path)
        if not there and flags & os.O_CREAT:
            drive.move("grow")
            there = os.path.lexists(path)
        fd = os.open(path, flags & ~os.O_DIRECT, mode)
        file = self._files[fd] = _File(drive, process_now(), Path(path), os.fstat(fd).st_ino)
        if not file.path.is_dir():
            drive.opened(file.path, file.inode, made=not there)
        return fd

    def close(self, fd: int) -> None:
        if fd in self._files:
            self.threads.alive()
            del self._files[fd]
        os.close(fd)

    def link(self, src: str, dst: str, *, dst_dir_fd: int) -> None:
        self.threads.alive()
        os.link(src, dst, dst_dir_fd=dst_dir_fd)
        folder = self._files[dst_dir_fd]
        path = folder.path / dst
        folder.drive.linked(path, path.stat().st_ino)

    def statvfs(self, path: str | Path) -> Any:
        drive = self.drive_of(path)
        return SimpleNamespace(f_bavail=0, f_frsize=4096) if drive is not None and drive.full else os.statvfs(path)

    # -- content ----------------------------------------------------------------------------------------------------

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """The bytes come at the end."""
        if (file := self._files.get(fd)) is None:
            return os.preadv(fd, buffers, offset)
        span = range(offset, offset + sum(map(len, buffers)))
        file.drive.move("read", file.content, span)
        file.drive.has_read(file.content, span)
        return os.preadv(fd, buffers, offset)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """From memory."""
        self.threads.alive()
        return os.pread(fd, size, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """The bytes are taken at the end: so late a device may read the caller's memory."""
        if (file := self._files.get(fd)) is None:
            return os.pwritev(fd, buffers, offset)
        size = sum(map(len, buffers))
        try:
            how = file.drive.move("write", file.content, range(offset, offset + size))
        except Killed:
            file.drive.killed_inside(fd, file.content, b"".join(buffers), offset)
            raise
        data = b"".join(buffers)
        if not how and size > 4096 and self.rng.random() < SHORT_RATE:
            data = data[: 4096 * self.rng.randrange(1, -(-size // 4096))]
        file.drive.write(fd, file.content, data, offset, how)
        if how == "torn":
            raise OSError(errno.EIO, "injected")
        return len(data)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """Into memory."""
        self.threads.alive()
        if (file := self._files.get(fd)) is None:
            return os.pwrite(fd, data, offset)
        file.drive.write(fd, file.content, data, offset)
        return len(data)

    def fsync(self, fd: int) -> None:
        if (file := self._files.get(fd)) is None:
            return
        if file.path.is_dir():
            file.drive.move("sync")
            file.drive.names_synced(file.path)
        else:
            file.drive.sync(fd, file.content)

    fdatasync = fsync

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        if (file := self._files.get(fd)) is not None:
            file.drive.move("grow")
            file.drive.resized(file.content, max(length, os.fstat(fd).st_size))
        os.posix_fallocate(fd, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        self.threads.alive()
        if (file := self._files.get(fd)) is not None:
            file.drive.resized(file.content, length)
        os.ftruncate(fd, length)

    def truncate(self, path: str | Path, length: int) -> None:
        self.threads.alive()
        drive = self.drive_of(path)
        if drive is not None and Path(path).suffix == ".slab":
            inode = Path(path).stat().st_ino
            drive.opened(Path(path), inode, made=False)
            drive.resized(drive.content(inode), length)
        os.truncate(path, length)

    # -- LMDB -------------------------------------------------------------------------------------------------------

    def environment(self, path: str, **options: Any) -> Environment:
        """`lmdb.open`."""
        self.threads.alive()
        drive = self.drive_of(path)
        assert drive is not None, "an index outside every drive"
        made = Environment(self.open_lmdb(path, **{**options, "sync": False, "metasync": False}), drive, self)
        self._environments.setdefault(process_now(), []).append(made)
        return made


class Environment:
    """`lmdb.Environment`, whose commits are whole and durable, or fail, and take their time."""

    def __init__(self, env: lmdb.Environment, drive: Drive, kernel: Kernel) -> None:
        self._env = env
        self._drive = drive
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def begin(self, write: bool = False) -> AbstractContextManager[Any]:
        self._kernel.threads.alive()
        return self._writing() if write else self._env.begin()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Any]:
        import lmdb

        txn = self._env.begin(write=True)
        try:
            yield txn
            try:
                how = self._drive.move("commit")
            except OSError as error:
                raise lmdb.Error(f"mdb_txn_commit: {os.strerror(error.errno or errno.EIO)}") from None
        except BaseException:
            txn.abort()
            raise
        txn.commit()
        if how == "torn":  # it is there, and nobody knows
            raise lmdb.Error("mdb_txn_commit: Input/output error")
        here = self._kernel.threads.here()
        if here is not None:
            here.yield_turn()  # durable, and not answered yet


@contextlib.contextmanager
def installed(loop: VirtualLoop, seed: int) -> Iterator[Kernel]:
    """G3's modules run on the kernel that this gives, on the threads of `loop`."""
    import lmdb

    rng = random.Random(seed)
    threads = Threads(loop, rng.getrandbits(32))
    kernel = Kernel(threads, rng, lmdb.open)
    times = SimpleNamespace(
        monotonic=loop.time,
        monotonic_ns=lambda: int(loop.time() * 1e9),
        clock_gettime=lambda _: loop.time(),
        CLOCK_BOOTTIME=time.CLOCK_BOOTTIME,
        time=lambda: EPOCH_S + loop.time(),
        time_ns=lambda: int((EPOCH_S + loop.time()) * 1e9),
        thread_time=lambda: 0.0,
        sleep=threads.sleep,
    )
    faults = itertools.count()
    stand_ins = {
        os: kernel,
        time: times,
        threading: Primitives(threads),
        random: rng,
        secrets: SimpleNamespace(token_bytes=rng.randbytes, randbits=rng.getrandbits),
        uuid: SimpleNamespace(uuid4=lambda: uuid.UUID(int=rng.getrandbits(128))),
    }
    with contextlib.ExitStack() as undo:
        for name, module in sorted(sys.modules.items()):
            if name.startswith("kvtier.tiers.disk.") or name in ("kvtier.tiers.fsync", "kvtier.clock"):
                for what, stand_in in stand_ins.items():
                    if vars(module).get(what.__name__) is what:
                        undo.enter_context(mock.patch.object(module, what.__name__, stand_in))
        for place, stand_in in (
            ("lmdb.open", kernel.environment),
            ("kvtier.tiers.disk.store.open_stores.lock", PerProcess(threads)),
            ("kvtier.tiers.disk.recovery.SEGMENT_BYTES_SMALL", SEGMENT_BYTES),
            ("kvtier.tiers.disk.write.SMALL_SHARE", SMALL_SHARE),
            ("kvtier.tiers.disk.budget.thread_written", lambda: None),
            # Of a look-up that finds its pages in memory, but for some that wait for the device.
            ("kvtier.tiers.disk.index._page_faults", lambda: next(faults) * 9 if rng.random() < COLD_RATE else 0),
        ):
            undo.enter_context(mock.patch(place, stand_in))
        yield kernel
