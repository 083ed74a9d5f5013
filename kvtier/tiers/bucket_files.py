"""Buckets without a server: a local directory, fsspec's in-memory file system, any other fsspec file system."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvtier.errors import CorruptError, TierError, TierFull
from kvtier.tiers.bucket import LIST_PAGE, TIER, Stat, Transient, scatter

T = TypeVar("T")
_TEMPORARY = ".tmp-"
_STALE_S = 3600.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Files(Protocol):
    """The blocking verbs behind `Threaded`; names, ETags and results as in `Bucket`."""

    renewable: bool

    def start(self) -> None: ...
    def create(self, name: str, data: bytearray, used: float) -> Stat | None: ...
    def replace(self, name: str, data: bytearray, used: float, etag: str | None) -> Stat | None: ...
    def head(self, name: str) -> Stat | None: ...
    def read(self, name: str, start: int, length: int) -> tuple[Stat, bytes | bytearray] | None: ...
    def renew(self, name: str, etag: str, used: float) -> Stat | None: ...
    def delete(self, name: str, etag: str | None) -> bool: ...
    def list(self, prefix: str, after: str) -> Iterator[Stat]: ...


class Threaded:
    """A `Bucket` over blocking verbs, on a few threads of its own.

    A thread cannot be interrupted, so it works on memory of its own: a call that is cancelled leaves the caller's
    buffers alone, however long the thread still hangs.
    """

    def __init__(self, files: Files, threads: int = 8) -> None:
        self._files = files
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvtier-g4")
        self.renewable = files.renewable

    async def _call(self, verb: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, partial(verb, *args))
        except OSError as error:
            raise _mapped(verb.__name__, error) from None

    async def start(self) -> None:
        await self._call(self._files.start)

    async def create(self, name: str, data: bytearray, used: float) -> Stat | None:
        return await self._call(self._files.create, name, data, used)

    async def replace(self, name: str, data: bytearray, used: float, etag: str | None) -> Stat | None:
        return await self._call(self._files.replace, name, data, used, etag)

    async def head(self, name: str) -> Stat | None:
        return await self._call(self._files.head, name)

    async def read(self, name: str, start: int, into: Sequence[memoryview]) -> Stat | None:
        length = sum(len(buffer) for buffer in into)
        got = await self._call(self._files.read, name, start, length)
        if got is None:
            return None
        stat, data = got
        if len(data) != length:
            raise CorruptError(f"the object ends at {stat.size}, before {start + length}")
        scatter(memoryview(data), into)
        return stat

    async def renew(self, name: str, etag: str, used: float) -> Stat | None:
        return await self._call(self._files.renew, name, etag, used)

    async def delete(self, name: str, etag: str | None = None) -> bool:
        return await self._call(self._files.delete, name, etag)

    async def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            await self._call(self._files.delete, name, None)

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        found = await self._call(lambda: sorted(self._files.list(prefix, after), key=lambda stat: stat.name))
        for start in range(0, len(found), LIST_PAGE):
            yield found[start : start + LIST_PAGE]

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _mapped(verb: str, error: OSError) -> TierError:
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    if error.errno in _FULL:
        return TierFull(TIER, verb, name)
    transient = error.errno in (errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT)
    return (Transient if transient else TierError)(TIER, verb, name)


class LocalFiles:
    """Objects as files below `root`: whole, fsynced and linked into place, or not there at all.

    The modification time of a file is the time of its last use; its ETag is inode, size and that time.
    """

    renewable = True

    def __init__(self, root: Path) -> None:
        self._root = root

    def start(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable")
        self._sweep_temporaries()

    def create(self, name: str, data: bytearray, used: float) -> Stat | None:
        final = self._root / name
        with self._temporary(final, data, used) as temporary:
            try:
                os.link(temporary, final)
            except FileExistsError:
                return None
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise
                # No hard links here: two writers may then both succeed, with frames that are both whole.
                if final.exists():
                    return None
                temporary.rename(final)
            _sync_directory(final.parent)
            return self.head(name)

    def replace(self, name: str, data: bytearray, used: float, etag: str | None) -> Stat | None:
        final = self._root / name
        if etag is not None:
            there = self.head(name)
            if there is None or there.etag != etag:
                return None
        with self._temporary(final, data, used) as temporary:
            temporary.replace(final)
            _sync_directory(final.parent)
        return self.head(name)

    def head(self, name: str) -> Stat | None:
        try:
            return _file_stat(name, (self._root / name).stat())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str, start: int, length: int) -> tuple[Stat, bytes | bytearray] | None:
        try:
            descriptor = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            data = bytearray(length)
            view, done = memoryview(data), 0
            while done < length:
                count = os.preadv(descriptor, [view[done:]], start + done)
                if count == 0:
                    break
                done += count
            return _file_stat(name, os.fstat(descriptor)), bytes(view[:done]) if done < length else data
        finally:
            os.close(descriptor)

    def renew(self, name: str, etag: str, used: float) -> Stat | None:
        there = self.head(name)
        if there is None or there.etag != etag:
            return None
        os.utime(self._root / name, ns=(_ns(used), _ns(used)))
        return self.head(name)

    def delete(self, name: str, etag: str | None) -> bool:
        there = self.head(name)
        if there is None or (etag is not None and there.etag != etag):
            return False
        try:
            (self._root / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str, after: str) -> Iterator[Stat]:
        base = self._root / prefix.rpartition("/")[0]
        for folder, _, files in os.walk(base):
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self._root).as_posix()
                if not file.startswith(_TEMPORARY) and name.startswith(prefix) and name > after:
                    with contextlib.suppress(FileNotFoundError):
                        yield _file_stat(name, path.stat())

    @contextlib.contextmanager
    def _temporary(self, final: Path, data: bytearray, used: float) -> Iterator[Path]:
        """A fsynced file with `data` next to `final`; gone at the end unless it was renamed."""
        _make_directories(final.parent, self._root)
        path = final.with_name(f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}-{final.name[:16]}")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.utime(descriptor, ns=(_ns(used), _ns(used)))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _sweep_temporaries(self) -> None:
        """What writers that died left behind, once it is old by the volume's own clock."""
        probe = self._root / f"{_TEMPORARY}{os.getpid()}-clock"
        probe.touch()
        now = probe.stat().st_ctime
        probe.unlink(missing_ok=True)
        for folder, _, files in os.walk(self._root):
            for file in files:
                if file.startswith(_TEMPORARY):
                    path = Path(folder, file)
                    with contextlib.suppress(FileNotFoundError):
                        if now - path.stat().st_ctime > _STALE_S:
                            path.unlink()


def _ns(seconds: float) -> int:
    # Through microseconds, so that a time survives the way to the volume and back unchanged.
    return round(seconds * 1e6) * 1000


def _file_stat(name: str, stat: os.stat_result) -> Stat:
    return Stat(name, stat.st_size, f"{stat.st_ino:x}-{stat.st_size:x}-{stat.st_mtime_ns:x}", stat.st_mtime_ns / 1e9)


def _make_directories(folder: Path, root: Path) -> None:
    """mkdir -p that makes each new directory's entry durable."""
    if folder == root or folder.is_dir():
        return
    _make_directories(folder.parent, root)
    folder.mkdir(exist_ok=True)
    _sync_directory(folder.parent)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class MemoryFiles:
    """Objects in fsspec's in-memory file system, which all of a process shares.

    Goes to its dict of files directly, since its file objects have one position for all readers. The dict's own
    operations are atomic, which is what makes a create exclusive.
    """

    renewable = False

    def __init__(self, file_system: Any, root: str) -> None:
        self._fs = file_system
        self._root = root.rstrip("/") + "/"

    def start(self) -> None:
        pass

    def _file(self, name: str, data: bytearray) -> Any:
        from fsspec.implementations.memory import MemoryFile

        return MemoryFile(self._fs, self._root + name, bytes(data))

    def create(self, name: str, data: bytearray, used: float) -> Stat | None:
        file = self._file(name, data)
        return self._stat(name, file) if self._fs.store.setdefault(self._root + name, file) is file else None

    def replace(self, name: str, data: bytearray, used: float, etag: str | None) -> Stat | None:
        there = self.head(name)
        if etag is not None and (there is None or there.etag != etag):
            return None
        file = self._fs.store[self._root + name] = self._file(name, data)
        return self._stat(name, file)

    def head(self, name: str) -> Stat | None:
        file = self._fs.store.get(self._root + name)
        return None if file is None else self._stat(name, file)

    def read(self, name: str, start: int, length: int) -> tuple[Stat, bytes | bytearray] | None:
        file = self._fs.store.get(self._root + name)
        return None if file is None else (self._stat(name, file), file.getvalue()[start : start + length])

    def renew(self, name: str, etag: str, used: float) -> Stat | None:
        return None

    def delete(self, name: str, etag: str | None) -> bool:
        there = self.head(name)
        if there is None or (etag is not None and there.etag != etag):
            return False
        return self._fs.store.pop(self._root + name, None) is not None

    def list(self, prefix: str, after: str) -> Iterator[Stat]:
        for path, file in tuple(self._fs.store.items()):
            name = path.removeprefix(self._root)
            if path.startswith(self._root + prefix) and name > after:
                yield self._stat(name, file)

    @staticmethod
    def _stat(name: str, file: Any) -> Stat:
        return Stat(name, len(file.getbuffer()), f"{id(file):x}-{file.created.timestamp():.6f}")


class AnyFiles:
    """Objects in whatever fsspec file system, through its blocking interface.

    Best effort where that file system is: a create is exclusive if its `pipe_file(mode="create")` is, and versions
    are compared by what `info` tells (ETag, or time and size).
    """

    renewable = False

    def __init__(self, file_system: Any, root: str) -> None:
        self._fs = file_system
        self._root = root.rstrip("/") + "/"

    def start(self) -> None:
        pass

    def create(self, name: str, data: bytearray, used: float) -> Stat | None:
        if self.head(name) is not None:
            return None
        self._parent(name)
        try:
            self._fs.pipe_file(self._root + name, bytes(data), mode="create")
        except FileExistsError:
            return None
        return self.head(name)

    def replace(self, name: str, data: bytearray, used: float, etag: str | None) -> Stat | None:
        there = self.head(name)
        if etag is not None and (there is None or there.etag != etag):
            return None
        self._parent(name)
        self._fs.pipe_file(self._root + name, bytes(data))
        return self.head(name)

    def _parent(self, name: str) -> None:
        with contextlib.suppress(NotImplementedError, FileExistsError):
            self._fs.makedirs((self._root + name).rpartition("/")[0], exist_ok=True)

    def head(self, name: str) -> Stat | None:
        try:
            self._fs.invalidate_cache()
            info = self._fs.info(self._root + name)
        except FileNotFoundError:
            return None
        return None if info.get("type") == "directory" else _any_stat(name, info)

    def read(self, name: str, start: int, length: int) -> tuple[Stat, bytes | bytearray] | None:
        there = self.head(name)
        if there is None:
            return None
        try:
            return there, bytes(self._fs.cat_file(self._root + name, start=start, end=start + length))
        except FileNotFoundError:
            return None

    def renew(self, name: str, etag: str, used: float) -> Stat | None:
        return None

    def delete(self, name: str, etag: str | None) -> bool:
        there = self.head(name)
        if there is None or (etag is not None and there.etag != etag):
            return False
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._root + name)
        return True

    def list(self, prefix: str, after: str) -> Iterator[Stat]:
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(self._root + prefix.rpartition("/")[0], detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            _, _, name = path.rpartition(self._root.lstrip("/"))
            if name.startswith(prefix) and name > after:
                yield _any_stat(name, info)


def _any_stat(name: str, info: dict[str, Any]) -> Stat:
    for field in ("ETag", "etag", "e_tag", "mtime", "LastModified", "last_modified", "updated", "created"):
        if info.get(field):
            value = info[field]
            stamp = value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)
            return Stat(name, info["size"], f"{stamp}-{info['size']}")
    return Stat(name, info["size"])
