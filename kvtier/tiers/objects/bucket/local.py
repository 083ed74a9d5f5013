"""A bucket in a local directory, on one machine or on a file system that several of them mount."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.tiers.fsync import sync_directory
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.times import Wall

_TEMPORARY = ".tmp-"
_STALE_S = 3600.0


class LocalFiles:
    """Objects as files below `root`, each fsynced and linked into place whole.

    The modification time of a file is the time of its last use; its ETag is inode, size and that time. What writers
    that died have left goes when a listing comes by: to look for it through all folders may take minutes.
    """

    renewable = True
    keeps_proof = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self._volume_s = float("-inf")  # the volume's own clock when the monotonic one was 0

    def start(self) -> None:
        self._root.mkdir(0o700, parents=True, exist_ok=True)
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable")
        probe, descriptor = _new_file(self._root)
        self._volume_s = os.fstat(descriptor).st_ctime - time.monotonic()
        os.close(descriptor)
        probe.unlink(missing_ok=True)
        with os.scandir(self._root) as entries:  # which no listing of a tier reads
            for entry in entries:
                if entry.name.startswith(_TEMPORARY):
                    self._delete_old(entry)

    def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        final = self._root / name
        with self._temporary(final, data, used) as temporary:
            try:
                os.link(temporary, final)
            except FileExistsError:
                return None
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise
                # No hard links here: two writers may both succeed, each with a whole frame.
                if final.exists():
                    return None
                temporary.rename(final)
            sync_directory(final.parent)
            return self.head(name)

    def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        final = self._root / name
        if etag is not None:
            there = self.head(name)
            if there is None or there.etag != etag:
                return None
        with self._temporary(final, data, used) as temporary:
            temporary.replace(final)
            sync_directory(final.parent)
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

    def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
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
        """Folder by folder, as far as it is asked for: a page costs no walk over all objects. A folder that cannot be
        read is an error, since what lies in it may be a purge."""
        yield from self._files_in(prefix.rpartition("/")[0], prefix, after)

    def _files_in(self, folder: str, prefix: str, after: str) -> Iterator[Stat]:
        above = f"{folder}/" if folder else ""
        try:
            with os.scandir(self._root / folder) as entries:
                named = {f"{above}{each.name}{'/' if each.is_dir() else ''}": each for each in entries}
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, entry in sorted(named.items()):
            if name.endswith("/"):
                holds = (name.startswith(prefix) or prefix.startswith(name)) and not entry.is_symlink()
                if holds and (name > after or after.startswith(name)):
                    yield from self._files_in(name[:-1], prefix, after)
            elif entry.name.startswith(_TEMPORARY):
                self._delete_old(entry)
            elif name.startswith(prefix) and name > after:
                with contextlib.suppress(FileNotFoundError):
                    yield _file_stat(name, entry.stat())

    @contextlib.contextmanager
    def _temporary(self, final: Path, data: bytearray, used: Wall) -> Iterator[Path]:
        """A fsynced file with `data` next to `final`; gone at the end unless it was renamed."""
        _make_directories(final.parent, self._root)
        path, descriptor = _new_file(final.parent)
        try:
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

    def _delete_old(self, temporary: os.DirEntry[str]) -> None:
        """Delete the file of a writer that died, once it is old by the volume's own clock."""
        with contextlib.suppress(OSError):
            created = temporary.stat(follow_symlinks=False).st_ctime
            if self._volume_s + time.monotonic() - created > _STALE_S:
                Path(temporary).unlink()


def _new_file(folder: Path) -> tuple[Path, int]:
    """A new file for writing. Its name cannot be guessed: nobody who may write to `folder` can lay a link there."""
    path = folder / f"{_TEMPORARY}{secrets.token_hex(12)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return path, os.open(path, flags, 0o600)


def _ns(seconds: float) -> int:
    # In whole microseconds, so that a time read back from the volume is the one written.
    return round(seconds * 1e6) * 1000


def _file_stat(name: str, stat: os.stat_result) -> Stat:
    return Stat(
        name, stat.st_size, f"{stat.st_ino:x}-{stat.st_size:x}-{stat.st_mtime_ns:x}", Wall(stat.st_mtime_ns / 1e9)
    )


def _make_directories(folder: Path, root: Path) -> None:
    """mkdir -p for this user alone, each new directory entry durable."""
    if folder == root or folder.is_dir():
        return
    _make_directories(folder.parent, root)
    folder.mkdir(0o700, exist_ok=True)
    sync_directory(folder.parent)
