"""Taking units out of a bucket for good: by key, by scope, or all of a namespace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvtier.clock import Clock
from kvtier.errors import CorruptError
from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.tiers.objects.bucket.protocol import Stat
from kvtier.tiers.objects.index import ObjectEntry
from kvtier.tiers.objects.store import ObjectStore


class Remover:
    """Deletes units of a store, with counts of blocks. Lives on the tier's event loop; all verbs raise TierError."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def some(self, keys: Sequence[BlockKey]) -> int:
        """Delete the units that hold `keys`, their neighbours with them; how many of `keys` there were.

        What the index knows goes at once. For the rest, the headers in their scopes are read that are not in the
        index: a name says only its unit's last block.
        """
        wanted = set(keys)
        gone = await self._drop(self._store.index.holding(keys), wanted)
        for scope in {scope_of_key(key) for key in wanted - gone}:
            async for named in self._units(self._store.names.scope(scope)):
                strange = [(last, stat.size) for last, stat in named if self._store.index.get(last) is None]
                found = await asyncio.gather(*(self._header(last, size) for last, size in strange))
                gone |= await self._drop([unit for unit in found if unit is not None], wanted)
        return len(gone)

    async def _header(self, last: BlockKey, size: int) -> ObjectEntry | None:
        try:
            return await self._store.header_of(last, size)
        except CorruptError:
            return None

    async def _drop(self, units: Sequence[ObjectEntry], wanted: set[BlockKey]) -> set[BlockKey]:
        """Delete those of `units` that hold some of `wanted`; which those are."""
        held = {unit.last: wanted.intersection(map(unit.frame.key, range(unit.blocks))) for unit in units}
        await self._store.delete([last for last, some in held.items() if some])
        return set().union(*held.values())

    async def all(self) -> int:
        """Delete every unit of the namespace, and what tells of them."""
        blocks = 0
        async for page in self._store.bucket.list(self._store.names.deltas):
            await self._store.bucket.delete_many([stat.name for stat in page])
        async for named in self._units(self._store.names.root):
            blocks += sum(self._store.blocks_in(stat.size) for _, stat in named)
            await self._store.delete([last for last, _ in named])
        self._store.index.clear()
        return blocks

    async def purge(self, scope: Scope, before: float) -> int:
        """Lay a tombstone, end the scope's pins, then delete what it covers."""
        await self._store.bucket.create(self._store.names.tombstone(scope, before), bytearray(), self._clock.wall())
        await self._store.pins.purge(scope, before)
        blocks = 0
        async for named in self._units(self._store.names.scope(scope)):
            covered = await asyncio.gather(*(self._store.covered(last, stat.size) for last, stat in named))
            doomed = [each for each, gone in zip(named, covered, strict=True) if gone]
            blocks += sum(self._store.blocks_in(stat.size) for _, stat in doomed)
            await self._store.delete([last for last, _ in doomed])
        await self._drop_older_tombstones(scope)
        return blocks

    async def _drop_older_tombstones(self, scope: Scope) -> None:
        older = []
        async for page in self._store.bucket.list(self._store.names.tombstones + scope.hex()):
            older += [stat.name for stat in page]
        await self._store.bucket.delete_many(older[:-1])

    async def _units(self, prefix: str) -> AsyncIterator[list[tuple[BlockKey, Stat]]]:
        """Last blocks of the units below `prefix`, with what the listing says of them, page by page."""
        async for page in self._store.bucket.list(prefix):
            yield [(last, stat) for stat in page if (last := self._store.names.parse_unit(stat.name)) is not None]
