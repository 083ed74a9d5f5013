"""Tombstones: empty objects whose names say until when a scope is purged.

Every replica lists them at most some seconds before it serves anything, so that a purge takes effect everywhere; see
names.py for the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.clock import Clock
from kvtier.identity.keys import Scope
from kvtier.retention.lifetime import FUTURE_S
from kvtier.tiers.objects.bucket.protocol import Bucket, Stat
from kvtier.tiers.objects.names import ObjectNames
from kvtier.times import Wall


class Tombstones:
    """The namespace's tombstones, as last listed, and those of this replica's own purges."""

    def __init__(self, bucket: Bucket, names: ObjectNames, clock: Clock) -> None:
        self._bucket = bucket
        self._names = names
        self._clock = clock
        self._before: dict[Scope, Wall] = {}
        self._seen: dict[str, Wall] = {}  # name → the time that it is believed to say

    def cover(self, scope: Scope, created: Wall) -> bool:
        """Whether blocks that the scope made at `created` are purged."""
        return created <= self._before.get(scope, float("-inf"))

    def all(self) -> Mapping[Scope, Wall]:
        """Scope → the time until which it is purged."""
        return dict(self._before)

    def apply(self, scope: Scope, before: Wall) -> None:
        """From now on `cover` knows of this purge, whatever the bucket has."""
        self._before[scope] = max(before, self._before.get(scope, before))

    def take(self, listed: Sequence[Stat]) -> None:
        """Apply the tombstones among the listed objects."""
        for stat in listed:
            parsed = self._names.parse_tombstone(stat.name)
            if parsed is not None:
                if stat.name not in self._seen:
                    self._seen[stat.name] = self._believed(parsed[1], stat)
                self.apply(parsed[0], self._seen[stat.name])

    def _believed(self, before: Wall, stat: Stat) -> Wall:
        """A purge covers what was made before it. One from the future was made by a clock that is wrong, ours or the
        purger's: the server's own stamp decides, where it has one."""
        if stat.modified is None or before <= self._clock.wall() + FUTURE_S:
            return before
        return min(before, Wall(stat.modified + FUTURE_S))

    async def put(self, scope: Scope, before: Wall) -> None:
        """Store one. Raises TierError."""
        await self._bucket.create(self._names.tombstone(scope, before), bytearray(), self._clock.wall())

    async def drop_older(self, scope: Scope, before: Wall) -> None:
        """Delete those of the scope's that the one of `before` covers. Raises TierError."""
        mine = self._names.tombstone(scope, before)
        async for page in self._bucket.list(self._names.tombstones + scope.hex()):
            self.take(page)
            covered = [stat.name for stat in page if self._seen.get(stat.name, before) <= before]
            await self._bucket.delete_many([name for name in covered if name != mine])
