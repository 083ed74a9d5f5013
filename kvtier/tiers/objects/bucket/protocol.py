"""The seam to object storage: what G4 needs of a bucket, whoever serves it.

    bucket_s3         S3 through s3fs (aiobotocore)
    bucket_obstore    S3, GCS, Azure through obstore
    bucket_directory  a local directory
    bucket_fsspec     fsspec's in-memory file system; any other fsspec file system

Names are relative to the bucket, already hexadecimal. A bucket maps its library's exceptions to `Transient`
(worth another attempt), TierError (not), CorruptError (the object cannot be what it should be). No message
carries a server's text, since that may echo what was signed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvtier.errors import TierError

T = TypeVar("T")
TIER = "g4"
LIST_PAGE = 1000


class Transient(TierError):
    """The request may succeed if it is made again."""


@dataclass(frozen=True, slots=True)
class Stat:
    """What a server says about an object.

    `size` in bytes, of the whole object. `etag` names this version of its bytes ("" if the server has no such
    thing). `used`: wall time of the last use that was recorded with it, None where that cannot be recorded.
    `modified`: the server's own stamp of this version, None if it has none that can be trusted.
    """

    name: str
    size: int
    etag: str = ""
    used: float | None = None
    modified: float | None = None


class Bucket(Protocol):
    """Objects by name. All verbs run on one event loop and may be cancelled at any await."""

    renewable: bool
    """Whether `renew` can work here; if not, the holder rewrites the object."""

    async def start(self) -> None:
        """Get ready, without a request. Raises ConfigError or TierError."""

    async def create(self, name: str, data: bytearray, used: float) -> Stat | None:
        """Make an object whose bytes are all there or none; None if the name is taken."""

    async def replace(self, name: str, data: bytearray, used: float, etag: str | None) -> Stat | None:
        """Overwrite the version `etag` (None: whatever is there); None if another version is there."""

    async def head(self, name: str) -> Stat | None:
        """None if there is no such object."""

    async def read(self, name: str, start: int, into: Sequence[memoryview]) -> Stat | None:
        """Fill `into` with the bytes from `start` on; None if there is no such object. Raises CorruptError if the
        object ends before that. Nothing is written to `into` after this returns, raises or is cancelled."""

    async def renew(self, name: str, etag: str, used: float) -> Stat | None:
        """Record a use of this version; its new state, or None if it is not there any more."""

    async def delete(self, name: str, etag: str | None = None) -> bool:
        """Delete the version `etag` if the server can check that, else whatever is there; False if it knows that
        nothing was deleted."""

    async def delete_many(self, names: Sequence[str]) -> None:
        """Delete up to LIST_PAGE objects; absent ones are ignored."""

    def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        """Pages of objects whose name starts with `prefix` and sorts behind `after`, in order of names.

        `used` is None in listings."""

    async def close(self) -> None:
        """Let go of connections. Idempotent."""


class RetryingBucket:
    """A bucket that tries again what failed for a while: at most `attempts` times, exponential with full jitter.

    The caller's deadline bounds the whole. Conditional verbs stay correct: a create that took effect although
    its answer was lost shows up as a taken name, which its caller checks.
    """

    def __init__(self, inner: Bucket, *, attempts: int = 4, first_s: float = 0.1, seed: int | None = None) -> None:
        self._inner = inner
        self._attempts = attempts
        self._first_s = first_s
        self._random = random.Random(seed)
        self.renewable = inner.renewable
        self.retries = 0
        self._bare_etags = False

    async def _again(self, call: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(self._attempts - 1):
            try:
                return await call()
            except Transient:
                self.retries += 1
                await asyncio.sleep(self._random.uniform(0, self._first_s * 2**attempt))
        return await call()

    async def start(self) -> None:
        await self._inner.start()

    async def create(self, name: str, data: bytearray, used: float) -> Stat | None:
        return await self._again(lambda: self._inner.create(name, data, used))

    async def replace(self, name: str, data: bytearray, used: float, etag: str | None) -> Stat | None:
        """Some servers (Ceph 16) know an ETag in If-Match only without its quotes: when one refuses the version that it
        says is there, it is asked again that way, from then on at once."""
        asked = etag.strip('"') if etag is not None and self._bare_etags else etag
        stat = await self._again(lambda: self._inner.replace(name, data, used, asked))
        if stat is None and etag is not None and asked == etag and etag.startswith('"'):
            there = await self.head(name)
            if there is not None and there.etag == etag:
                stat = await self._again(lambda: self._inner.replace(name, data, used, etag.strip('"')))
                self._bare_etags = stat is not None
        return stat

    async def head(self, name: str) -> Stat | None:
        return await self._again(lambda: self._inner.head(name))

    async def read(self, name: str, start: int, into: Sequence[memoryview]) -> Stat | None:
        return await self._again(lambda: self._inner.read(name, start, into))

    async def renew(self, name: str, etag: str, used: float) -> Stat | None:
        return await self._again(lambda: self._inner.renew(name, etag, used))

    async def delete(self, name: str, etag: str | None = None) -> bool:
        return await self._again(lambda: self._inner.delete(name, etag))

    async def delete_many(self, names: Sequence[str]) -> None:
        await self._again(lambda: self._inner.delete_many(names))

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        failures = 0
        while True:
            try:
                async for page in self._inner.list(prefix, after):
                    yield page
                    after, failures = page[-1].name if page else after, 0
                return
            except Transient:
                failures += 1
                self.retries += 1
                if failures >= self._attempts:
                    raise
                await asyncio.sleep(self._random.uniform(0, self._first_s * 2**failures))

    async def close(self) -> None:
        await self._inner.close()


async def first_page(bucket: Bucket, prefix: str, after: str = "") -> list[Stat]:
    """The first page of a listing, and no request for a second; empty if nothing is there."""
    async with aclosing(bucket.list(prefix, after)) as pages:  # type: ignore[type-var]
        async for page in pages:
            return page
    return []


def scatter(source: memoryview, into: Sequence[memoryview]) -> None:
    """Copy `source` into the buffers one after another; together they are as long."""
    start = 0
    for buffer in into:
        buffer[:] = source[start : start + len(buffer)]
        start += len(buffer)


class Sink:
    """Takes a body in chunks and lays it into buffers in order, skipping what comes before and after them."""

    def __init__(self, into: Sequence[memoryview], skip: int = 0) -> None:
        self._into = [view for view in into if len(view)]
        self._which = 0
        self._offset = 0
        self._skip = skip

    @property
    def full(self) -> bool:
        return self._which == len(self._into)

    def feed(self, chunk: memoryview) -> None:
        """Take the next bytes of the body."""
        if self._skip:
            dropped = min(self._skip, len(chunk))
            self._skip -= dropped
            chunk = chunk[dropped:]
        while len(chunk) and not self.full:
            buffer = self._into[self._which]
            count = min(len(chunk), len(buffer) - self._offset)
            buffer[self._offset : self._offset + count] = chunk[:count]
            chunk = chunk[count:]
            self._offset += count
            if self._offset == len(buffer):
                self._which += 1
                self._offset = 0
