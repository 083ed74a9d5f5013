"""Two clients of one bucket: one that is fast, and one for the requests that the fast one lacks."""

from __future__ import annotations

import asyncio

from kvtier.tiers.objects.bucket.obstore import TokenForwarded
from kvtier.tiers.objects.bucket.protocol import Bucket, Stat
from kvtier.tiers.objects.loop_thread import PerLoop
from kvtier.times import Wall


class CombinedBucket:
    """`primary` for everything but self-copies and deletions of one version, which go through `secondary`.

    `secondary` is started at its first use: importing and connecting it takes longer than a short process runs.
    """

    renewable = True
    keeps_proof = True

    def __init__(self, primary: Bucket, secondary: Bucket) -> None:
        self._primary = primary
        self._secondary = secondary
        self._started = False
        self._starting = PerLoop(asyncio.Lock)
        self._use(primary)

    def _use(self, bucket: Bucket) -> None:
        self.create, self.replace, self.head = bucket.create, bucket.replace, bucket.head
        self.read, self.delete_many, self.list = bucket.read, bucket.delete_many, bucket.list
        self._deletes = bucket

    async def start(self) -> None:
        """`secondary` does everything where `primary` would give a token away."""
        try:
            await self._primary.start()
            self._use(self._primary)
        except TokenForwarded:
            self._use(await self._connected())

    async def _connected(self) -> Bucket:
        async with self._starting():
            if not self._started:
                await self._secondary.start()
                self._started = True
        return self._secondary

    async def renew(self, name: str, etag: str, used: Wall) -> Stat | None:
        return await (await self._connected()).renew(name, etag, used)

    async def delete(self, name: str, etag: str | None = None) -> bool:
        bucket = self._deletes if etag is None else await self._connected()
        return await bucket.delete(name, etag)

    async def close(self) -> None:
        await self._primary.close()
        if self._started:
            self._started = False
            await self._secondary.close()
