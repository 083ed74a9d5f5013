"""Buckets in file systems of fsspec: its in-memory one, and any other that has no client of its own here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.times import Wall


class _FileSystem:
    """A root, and no time of use that could be renewed."""

    renewable = False
    keeps_proof = False

    def __init__(self, file_system: Any, root: str) -> None:
        self._fs = file_system
        self._root = root.rstrip("/") + "/"

    def start(self) -> None:
        pass

    def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        return None


class MemoryFiles(_FileSystem):
    """Objects in fsspec's in-memory file system, which is one for the whole process.

    Uses its dict of files directly, since its file objects have one position for all readers. The dict's operations
    are atomic, which makes a create exclusive.
    """

    def _file(self, name: str, data: bytearray) -> Any:
        from fsspec.implementations.memory import MemoryFile

        return MemoryFile(self._fs, self._root + name, bytes(data))

    def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        file = self._file(name, data)
        return self._stat(name, file) if self._fs.store.setdefault(self._root + name, file) is file else None

    def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
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

    def delete(self, name: str, etag: str | None) -> bool:
        there = self.head(name)
        if there is None or (etag is not None and there.etag != etag):
            return False
        return self._fs.store.pop(self._root + name, None) is not None

    def list(self, prefix: str, after: str) -> Iterator[Stat]:
        for path, file in sorted(self._fs.store.items(), key=lambda item: item[0]):
            name = path.removeprefix(self._root)
            if path.startswith(self._root + prefix) and name > after:
                yield self._stat(name, file)

    @staticmethod
    def _stat(name: str, file: Any) -> Stat:
        return Stat(name, len(file.getbuffer()), f"{id(file):x}-{file.created.timestamp():.6f}")


class AnyFiles(_FileSystem):
    """Objects in any fsspec file system, through its blocking interface.

    Only as good as that file system: a create is exclusive if its `pipe_file(mode="create")` is, and versions are
    compared by the ETag that `info` returns, or time and size.
    """

    def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        if self.head(name) is not None:
            return None
        self._parent(name)
        try:
            self._fs.pipe_file(self._root + name, bytes(data), mode="create")
        except FileExistsError:
            return None
        return self.head(name)

    def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
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
        for path, info in sorted(found.items()):
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
