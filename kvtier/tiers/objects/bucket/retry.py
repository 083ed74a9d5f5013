"""Retries of requests to a bucket."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from kvtier.tiers.objects.bucket.protocol import Bucket, Stat, Transient
from kvtier.times import Wall

T = TypeVar("T")


class RetryingBucket:
    """A bucket whose requests are repeated after a Transient: at most `attempts` times, exponential with full jitter.

    The caller's deadline bounds the whole. Conditional verbs stay correct: a create that took effect although
    its answer was lost shows up as a taken name, which its caller checks.
    """

    def __init__(self, inner: Bucket, *, attempts: int = 4, first_s: float = 0.1, seed: int | None = None) -> None:
        self._inner = inner
        self._attempts = attempts
        self._first_s = first_s
        self._random = random.Random(seed)
        self.renewable = inner.renewable
        self.keeps_proof = inner.keeps_proof
        self.retries = 0
        self._bare_etags = False

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(self._attempts - 1):
            try:
                return await call()
            except Transient:
                await self._back_off(attempt)
        return await call()

    async def _back_off(self, attempt: int) -> None:
        self.retries += 1
        await asyncio.sleep(self._random.uniform(0, self._first_s * 2**attempt))

    async def start(self) -> None:
        await self._inner.start()

    async def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        return await self._retry(lambda: self._inner.create(name, data, used))

    async def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        """Some servers (Ceph 16) know an ETag in If-Match only without its quotes: when one refuses the version that it
        reports as current, it is asked again that way, from then on at once."""
        asked = etag.strip('"') if etag is not None and self._bare_etags else etag
        stat = await self._retry(lambda: self._inner.replace(name, data, used, asked))
        if stat is None and etag is not None and asked == etag and etag.startswith('"'):
            there = await self.head(name)
            if there is not None and there.etag == etag:
                stat = await self._retry(lambda: self._inner.replace(name, data, used, etag.strip('"')))
                self._bare_etags = stat is not None
        return stat

    async def head(self, name: str) -> Stat | None:
        return await self._retry(lambda: self._inner.head(name))

    async def read(self, name: str, start: int, into: Sequence[memoryview], clipped: bool = False) -> Stat | None:
        return await self._retry(lambda: self._inner.read(name, start, into, clipped))

    async def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        return await self._retry(lambda: self._inner.renew(name, etag, used))

    async def delete(self, name: str, etag: str | None = None) -> bool:
        return await self._retry(lambda: self._inner.delete(name, etag))

    async def delete_many(self, names: Sequence[str]) -> None:
        await self._retry(lambda: self._inner.delete_many(names))

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
                if failures >= self._attempts:
                    raise
                await self._back_off(failures)

    async def close(self) -> None:
        await self._inner.close()
