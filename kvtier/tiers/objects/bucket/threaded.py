"""A bucket over blocking verbs that run on threads."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

from kvtier.errors import CorruptError, TierError, TierFull
from kvtier.tiers.objects.bucket.protocol import LIST_PAGE, TIER, Scatter, Stat, Transient
from kvtier.times import Wall

T = TypeVar("T")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Files(Protocol):
    """The blocking verbs behind `Threaded`; names, ETags and results as in `Bucket`. `list` is by name, and may do its
    work while it is iterated, on any thread."""

    renewable: bool
    keeps_proof: bool

    def start(self) -> None: ...
    def create(self, name: str, data: bytearray, used: Wall) -> Stat | None: ...
    def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None: ...
    def head(self, name: str) -> Stat | None: ...
    def read(self, name: str, start: int, length: int) -> tuple[Stat, bytes | bytearray] | None: ...
    def renew(self, name: str, etag: str, used: Wall) -> Stat | None: ...
    def delete(self, name: str, etag: str | None) -> bool: ...
    def list(self, prefix: str, after: str) -> Iterator[Stat]: ...


class Threaded:
    """A `Bucket` over blocking verbs, on a few threads of its own.

    A thread cannot be interrupted, so it works on memory of its own: a cancelled call writes to no buffer of its
    caller, however long the thread still hangs.
    """

    def __init__(self, files: Files, threads: int = 8) -> None:
        self._files = files
        self._threads = threads
        self._pool = self._new_pool()
        self.renewable = files.renewable
        self.keeps_proof = files.keeps_proof

    def _new_pool(self) -> ThreadPoolExecutor:
        """Starts its threads as they are needed."""
        return ThreadPoolExecutor(self._threads, thread_name_prefix="kvtier-g4")

    async def _call(self, verb: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, partial(verb, *args))
        except OSError as error:
            raise _mapped(verb.__name__, error) from None

    async def start(self) -> None:
        await self._call(self._files.start)

    async def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        return await self._call(self._files.create, name, data, used)

    async def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        return await self._call(self._files.replace, name, data, used, etag)

    async def head(self, name: str) -> Stat | None:
        return await self._call(self._files.head, name)

    async def read(self, name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        length = sum(len(buffer) for buffer in into)
        got = await self._call(self._files.read, name, start, length)
        if got is None:
            return None
        stat, data = got
        if len(data) != length and not (clipped and data and start + len(data) == stat.size):
            raise CorruptError(f"the object ends at {stat.size}, before {start + length}")
        Scatter(into).feed(memoryview(data))
        return stat

    async def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        return await self._call(self._files.renew, name, etag, used)

    async def delete(self, name: str, etag: str | None = None) -> bool:
        return await self._call(self._files.delete, name, etag)

    async def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            await self._call(self._files.delete, name, None)

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        names = self._files.list(prefix, after)

        def listing() -> list[Stat]:
            return list(islice(names, LIST_PAGE))

        while page := await self._call(listing):
            yield page

    async def close(self) -> None:
        pool, self._pool = self._pool, self._new_pool()
        pool.shutdown(wait=False, cancel_futures=True)


def _mapped(verb: str, error: OSError) -> TierError:
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    if error.errno in _FULL:
        return TierFull(TIER, verb, name)
    transient = error.errno in (errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT)
    return (Transient if transient else TierError)(TIER, verb, name)
