"""Deleting objects for good: by key, by scope, or all of a namespace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.store import ObjectStore
from kvtier.times import Wall


class Remover:
    """Deletes objects of a store; each verb returns a count of blocks. Lives on the tier's event loop. All raise
    TierError."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def blocks(self, keys: Sequence[BlockKey]) -> int:
        """Delete the objects that hold `keys`, with all their blocks; returns how many of `keys` there were.

        Objects in the index go at once. For the remaining keys, the headers in their scopes are read that the index
        lacks: a name has only the object's last block.
        """
        wanted = set(keys)
        gone = await self._delete_holding(self._store.index.holding(keys), wanted)
        for scope in {scope_of_key(key) for key in wanted - gone}:
            async for page in self._list(self._store.names.scope(scope)):
                unknown = [(last, stat.size) for last, stat in page if self._store.index.get(last) is None]
                found = await asyncio.gather(*(self._store.inspect(last, size) for last, size in unknown))
                gone |= await self._delete_holding([entry for entry in found if entry is not None], wanted)
        return len(gone)

    async def _delete_holding(self, entries: Sequence[ObjectEntry], wanted: set[BlockKey]) -> set[BlockKey]:
        """Delete those of `entries` that hold some of `wanted`; returns which of `wanted`."""
        held = {entry.last: wanted.intersection(entry.frame.keys) for entry in entries}
        await self._store.delete([last for last, some in held.items() if some])
        return set().union(*held.values())

    async def everything(self) -> int:
        """Delete all blocks of the namespace, and its deltas."""
        blocks = 0
        async for page in self._store.bucket.list(self._store.names.deltas):
            await self._store.bucket.delete_many([stat.name for stat in page])
        async for strides in self._list(self._store.names.root):
            blocks += await self._delete(strides)
        self._store.index.clear()
        return blocks

    async def purge(self, scope: Scope, before: Wall) -> int:
        """Store a tombstone, end the scope's pins, then delete the objects that the tombstone covers."""
        await self._store.tombstones.put(scope, before)
        await self._store.pins.purge(scope, before)
        blocks = 0
        async for page in self._list(self._store.names.scope(scope)):
            purged = await asyncio.gather(*(self._store.is_purged(last, stat.size) for last, stat in page))
            blocks += await self._delete([each for each, gone in zip(page, purged, strict=True) if gone])
        await self._store.tombstones.drop_older(scope, before)
        return blocks

    async def _delete(self, strides: Sequence[tuple[BlockKey, Stat]]) -> int:
        await self._store.delete([last for last, _ in strides])
        return sum(self._store.blocks_in(stat.size) for _, stat in strides)

    async def _list(self, prefix: str) -> AsyncIterator[list[tuple[BlockKey, Stat]]]:
        """The strides below `prefix`, page by page: last block, and the listing's description of the object."""
        async for page in self._store.bucket.list(prefix):
            yield [(last, stat) for stat in page if (last := self._store.names.parse_stride(stat.name)) is not None]
