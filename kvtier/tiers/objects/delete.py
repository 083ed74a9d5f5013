"""Deleting objects for good: by key, by tenant, or all of a namespace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.tiers.objects.bucket.protocol import Stat, first_page
from kvtier.tiers.objects.frame import blocks_in
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.store import ObjectStore


class Remover:
    """Deletes objects of a store; each verb returns a count of blocks. Lives on the tier's event loop. All raise
    TierError."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def blocks(self, keys: Sequence[BlockKey]) -> int:
        """Delete the objects that hold `keys`, with all their blocks; returns how many of `keys` there were.

        Objects whose entries are in the index go at once. For the remaining keys the headers in their scopes are read:
        a name has only the object's last block.
        """
        wanted = set(keys)
        gone = await self._delete_holding(self._store.index.holding(keys), wanted)
        for scope in {scope_of_key(key) for key in wanted - gone}:
            async for page in self._list(self._store.names.scope(scope)):
                unknown = [stat for stat in page if not self._has_entry(stat.name)]
                found = await asyncio.gather(*(self._store.inspect(stat.name, stat.size) for stat in unknown))
                gone |= await self._delete_holding([entry for entry in found if entry is not None], wanted)
        return len(gone)

    def _has_entry(self, name: str) -> bool:
        known = self._store.named(name)
        return known is not None and self._store.index.get(known.last) is not None

    async def _delete_holding(self, entries: Sequence[ObjectEntry], wanted: set[BlockKey]) -> set[BlockKey]:
        """Delete those of `entries` that hold some of `wanted`; returns which of `wanted`."""
        held = {entry.last: wanted.intersection(entry.frame.keys) for entry in entries}
        await self._store.delete([last for last, some in held.items() if some])
        return set().union(*held.values())

    async def everything(self) -> int:
        """Delete all blocks of the namespace, and its deltas."""
        blocks = 0
        names = self._store.names
        for hints in (names.deltas, names.merged):
            async for page in self._store.bucket.list(hints):
                await self._store.bucket.delete_many([stat.name for stat in page])
        cursor: str = ""
        while page := await first_page(self._store.bucket, names.units, cursor):
            blocks += await self._delete([stat for stat in page if names.is_unit(stat.name)])
            cursor = names.behind(page[-1].name)
        self._store.index.clear()
        return blocks

    async def purge(self, scope: Scope) -> int:
        """Write the purge of the scope's tenant to the log, then delete all that lies under its prefix but what this
        replica knows to be newer, and the tenant's pins."""
        await self._store.purges.append(scope)
        blocks = 0
        async for page in self._list(self._store.names.tenant(scope)):
            blocks += await self._delete([stat for stat in page if not self._is_newer(stat.name)])
        await self._store.pins.purge()
        return blocks

    def _is_newer(self, name: str) -> bool:
        known = self._store.named(name)
        return known is not None and not self._store.purges.covers(known.scope, known.position)

    async def _delete(self, units: Sequence[Stat]) -> int:
        known = [self._store.named(stat.name) for stat in units]
        await self._store.delete_named([stat.name for stat in units])
        return sum(
            entry.blocks if entry is not None else blocks_in(stat.size, self._store.block_bytes)
            for entry, stat in zip(known, units, strict=True)
        )

    async def _list(self, prefix: str) -> AsyncIterator[list[Stat]]:
        """The units below `prefix`, page by page."""
        async for page in self._store.bucket.list(prefix):
            yield [stat for stat in page if self._store.names.is_unit(stat.name)]
