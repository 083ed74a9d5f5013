"""Two clients of one bucket: a fast one for bytes, and one that can say what the fast one has no words for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvtier.tiers.objects.bucket.protocol import Bucket, Stat


class CombinedBucket:
    """`fast` for everything but copies onto themselves and deletions of one version, which are `able`'s.

    `able` is started when it is first needed: importing and connecting it takes longer than all a short life needs.
    """

    renewable = True

    def __init__(self, fast: Bucket, able: Bucket) -> None:
        self._fast = fast
        self._able = able
        self._started = False
        self._starting = asyncio.Lock()

    async def _ready(self) -> Bucket:
        async with self._starting:
            if not self._started:
                await self._able.start()
                self._started = True
        return self._able

    async def start(self) -> None:
        await self._fast.start()

    async def create(self, name: str, data: bytearray, used: float) -> Stat | None:
        return await self._fast.create(name, data, used)

    async def replace(self, name: str, data: bytearray, used: float, etag: str | None) -> Stat | None:
        return await self._fast.replace(name, data, used, etag)

    async def head(self, name: str) -> Stat | None:
        return await self._fast.head(name)

    async def read(self, name: str, start: int, into: Sequence[memoryview]) -> Stat | None:
        return await self._fast.read(name, start, into)

    async def renew(self, name: str, etag: str, used: float) -> Stat | None:
        return await (await self._ready()).renew(name, etag, used)

    async def delete(self, name: str, etag: str | None = None) -> bool:
        bucket = self._fast if etag is None else await self._ready()
        return await bucket.delete(name, etag)

    async def delete_many(self, names: Sequence[str]) -> None:
        await self._fast.delete_many(names)

    def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        return self._fast.list(prefix, after)

    async def close(self) -> None:
        await self._fast.close()
        if self._started:
            self._started = False
            await self._able.close()
