"""Two clients of one bucket: one that is fast, and one for the requests that the fast one lacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvtier.tiers.objects.bucket.protocol import Bucket, Stat
from kvtier.times import Wall


class CombinedBucket:
    """`primary` for everything but self-copies and deletions of one version, which go through `secondary`.

    `secondary` is started at its first use: importing and connecting it takes longer than a short process runs.
    """

    renewable = True

    def __init__(self, primary: Bucket, secondary: Bucket) -> None:
        self._primary = primary
        self._secondary = secondary
        self._started = False
        self._starting = asyncio.Lock()

    async def _connected(self) -> Bucket:
        async with self._starting:
            if not self._started:
                await self._secondary.start()
                self._started = True
        return self._secondary

    async def start(self) -> None:
        await self._primary.start()

    async def create(self, name: str, data: bytearray, used: Wall) -> Stat | None:
        return await self._primary.create(name, data, used)

    async def replace(self, name: str, data: bytearray, used: Wall, etag: str | None) -> Stat | None:
        return await self._primary.replace(name, data, used, etag)

    async def head(self, name: str) -> Stat | None:
        return await self._primary.head(name)

    async def read(self, name: str, start: int, into: Sequence[memoryview]) -> Stat | None:
        return await self._primary.read(name, start, into)

    async def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        return await (await self._connected()).renew(name, etag, used)

    async def delete(self, name: str, etag: str | None = None) -> bool:
        bucket = self._primary if etag is None else await self._connected()
        return await bucket.delete(name, etag)

    async def delete_many(self, names: Sequence[str]) -> None:
        await self._primary.delete_many(names)

    def list(self, prefix: str, after: str = "") -> AsyncIterator[list[Stat]]:
        return self._primary.list(prefix, after)

    async def close(self) -> None:
        await self._primary.close()
        if self._started:
            self._started = False
            await self._secondary.close()
