"""A bucket in memory, by a virtual clock: sorted names, the server's stamps, requests counted by verb."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kvtier.errors import CorruptError
from kvtier.testing.clock import VirtualClock
from kvtier.tiers.objects.bucket.protocol import LIST_PAGE, Bucket, Scatter, Stat
from kvtier.times import Wall

_LAST = chr(0x10FFFF)
"""Behind whatever may stand in a name."""


@dataclass
class StoredObject:
    """An object as the server has it. `modified`: the server's stamp."""

    data: bytes
    etag: str
    used: Wall
    modified: float
    listed: Stat | None = None
    """As the last listing had it: a thousand replicas list it."""

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass
class VirtualServer:
    """What all replicas share. `clock`: any; a VirtualClock where none is given. `stamps`: whether it tells when an
    object was written."""

    clock: Any = field(default_factory=VirtualClock)
    stamps: bool = True
    objects: dict[str, StoredObject] = field(default_factory=dict)
    versions: int = 0
    _names: list[str] = field(default_factory=list)  # in order, those of `_gone` among them
    _gone: set[str] = field(default_factory=set)

    def fill(self, objects: Mapping[str, StoredObject]) -> None:
        """Add many objects at once."""
        self.objects.update(objects)
        self._names, self._gone = sorted(self.objects), set()

    @property
    def names(self) -> list[str]:
        """Of all objects, in order."""
        if self._gone:
            self._names, self._gone = [name for name in self._names if name in self.objects], set()
        return self._names

    def put(self, name: str, data: bytes | bytearray, used: float = 0.0, modified: float | None = None) -> StoredObject:
        self.versions += 1
        if name in self._gone:
            self._gone.remove(name)
        elif name not in self.objects:
            insort(self._names, name)
        at = self.clock.wall() if modified is None else modified
        self.objects[name] = StoredObject(bytes(data), f'"{self.versions}"', used, at)  # type: ignore[arg-type]
        return self.objects[name]

    def drop(self, name: str) -> None:
        if self.objects.pop(name, None) is not None:
            self._gone.add(name)
            if len(self._gone) > 1000 + len(self.objects) // 8:
                _ = self.names  # a million names are not moved for each that goes

    def page(self, prefix: str, after: str) -> list[str]:
        """The first names that begin with `prefix`, behind `after`, at most LIST_PAGE."""
        begin = max(bisect_left(self._names, prefix), bisect_right(self._names, after))
        end = bisect_left(self._names, prefix + _LAST, begin)
        found = self._names[begin : min(end, begin + LIST_PAGE)]
        if not self._gone:
            return found
        return list(islice((name for name in islice(self._names, begin, end) if name in self.objects), LIST_PAGE))

    def under(self, part: str) -> list[str]:
        return [name for name in self.names if f"/{part}/" in name]

    def strides(self) -> int:
        return sum(len(name.rpartition("/")[2]) == 64 for name in self.names)


class VirtualBucket(Bucket):
    """One replica's client of the server. `latency_s`: seconds per read, by the event loop.

    A subclass delays, fails or answers otherwise in `_asked`, before a request takes effect, and in `_answering`,
    when it has.
    """

    renewable = True
    keeps_proof = True

    def __init__(self, server: VirtualServer, latency_s: float = 0.0) -> None:
        self.server = server
        self.latency_s = latency_s
        self.requests: Counter[str] = Counter()

    def _stat(self, name: str, there: StoredObject, listed: bool = False) -> Stat:
        modified = float(int(there.modified)) if self.server.stamps else None
        return Stat(name, there.size, there.etag, None if listed else there.used, modified)

    async def _asked(self, verb: str, name: str) -> None:
        """A request is on its way: "put", "head", "get", "copy", "delete" or "list" of a name or prefix."""
        self.requests[verb] += 1

    async def _answering(self, verb: str, name: str) -> None:
        """It took effect, and its answer is on its way."""

    async def start(self) -> None:
        pass

    async def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        await self._asked("put", name)
        stat = None if name in self.server.objects else self._stat(name, self.server.put(name, data, used))
        await self._answering("put", name)
        return stat

    async def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        await self._asked("put", name)
        there = self.server.objects.get(name)
        refused = etag is not None and (there is None or there.etag != etag)
        stat = None if refused else self._stat(name, self.server.put(name, data, used))
        await self._answering("put", name)
        return stat

    async def head(self, name: str) -> Stat | None:
        await self._asked("head", name)
        there = self.server.objects.get(name)
        stat = None if there is None else self._stat(name, there)
        await self._answering("head", name)
        return stat

    async def read(self, name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        await self._asked("get", name)
        await asyncio.sleep(self.latency_s)
        there = self.server.objects.get(name)
        if there is None:
            return None
        stop = start + sum(map(len, into))
        if there.size < (start + 1 if clipped else stop):
            raise CorruptError("the object ends before that")
        Scatter(into).feed(memoryview(there.data)[start:stop])
        await self._answering("get", name)
        return self._stat(name, there)

    async def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        await self._asked("copy", name)
        there = self.server.objects.get(name)
        gone = there is None or there.etag != etag
        stat = None if gone else self._stat(name, self.server.put(name, there.data, used))  # type: ignore[union-attr]
        await self._answering("copy", name)
        return stat

    async def delete(self, name: str, etag: str | None = None) -> bool:
        await self._asked("delete", name)
        there = self.server.objects.get(name)
        if there is None or (etag is not None and there.etag != etag):
            return False
        self.server.drop(name)
        await self._answering("delete", name)
        return True

    async def delete_many(self, names: Sequence[str]) -> None:
        if not names:
            return
        await self._asked("delete", names[0])
        for name in names:
            self.server.drop(name)
        await self._answering("delete", names[0])

    def _page(self, prefix: str, after: str) -> list[Stat]:
        objects, found = self.server.objects, list[Stat]()
        for name in self.server.page(prefix, after):
            there = objects[name]
            if there.listed is None or there.listed.size != there.size:
                there.listed = self._stat(name, there, True)
            found.append(there.listed)
        return found

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        while True:
            await self._asked("list", prefix)
            page = self._page(prefix, after)
            await self._answering("list", prefix)
            if page:
                yield page
            if len(page) < LIST_PAGE:
                return
            after = page[-1].name

    async def close(self) -> None:
        pass
