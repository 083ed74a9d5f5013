"""Tombstones: empty objects whose names say until when a scope is purged.

Every replica lists them at most some seconds before it serves anything, so that a purge takes effect everywhere; see
names.py for the names.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.clock import Clock
from kvtier.identity.keys import Scope
from kvtier.tiers.objects.bucket.protocol import Bucket
from kvtier.tiers.objects.names import ObjectNames
from kvtier.times import Wall


class Tombstones:
    """The namespace's tombstones, as last listed, and those of this replica's own purges."""

    def __init__(self, bucket: Bucket, names: ObjectNames, clock: Clock) -> None:
        self._bucket = bucket
        self._names = names
        self._clock = clock
        self._before: dict[Scope, Wall] = {}

    def cover(self, scope: Scope, created: Wall) -> bool:
        """Whether blocks that the scope made at `created` are purged."""
        return created <= self._before.get(scope, float("-inf"))

    def all(self) -> Mapping[Scope, Wall]:
        """Scope → the time until which it is purged."""
        return dict(self._before)

    def apply(self, scope: Scope, before: Wall) -> None:
        """From now on `cover` knows of this purge, whatever the bucket has."""
        self._before[scope] = max(before, self._before.get(scope, before))

    async def refresh(self) -> None:
        """List and apply them. Raises TierError."""
        async for page in self._bucket.list(self._names.tombstones):
            for stat in page:
                parsed = self._names.parse_tombstone(stat.name)
                if parsed is not None:
                    self.apply(*parsed)

    async def put(self, scope: Scope, before: Wall) -> None:
        """Store one. Raises TierError."""
        await self._bucket.create(self._names.tombstone(scope, before), bytearray(), self._clock.wall())

    async def drop_older(self, scope: Scope) -> None:
        """Delete all of the scope's but the latest. Raises TierError."""
        found = [stat.name async for page in self._bucket.list(self._names.tombstones + scope.hex()) for stat in page]
        await self._bucket.delete_many(found[:-1])
