"""Blocks of G2 that are here and may not be served: purged ones, and those that a wrong clock has stamped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from kvtier.identity.keys import Scope, tenant_of
from kvtier.tiers.host.slot_table import SlotTable
from kvtier.times import Wall

_ANY_TIME, _NEVER = Wall("inf"), Wall("-inf")


class Refusals:
    """Tombstones by tenant, and the latest time that a block may carry. Used under the lock of its tier's owner.

    `dropping` while blocks that are refused may still be in the index: lookups ask `covers` then.
    """

    __slots__ = ("_made_max", "_purging", "dropping", "table", "tombstones")

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self.tombstones: dict[Scope, Wall] = {}
        self.dropping = False
        self._purging: Counter[Scope] = Counter()  # whose purged blocks are still being dropped
        self._made_max = _ANY_TIME  # later blocks are still being dropped

    def purge(self, tombstones: Mapping[Scope, Wall]) -> dict[Scope, Wall]:
        """Refuse blocks of these scopes' tenants that were made until the given times; returns what is new of it."""
        news = {tenant_of(scope): before for scope, before in tombstones.items() if before > self.purged_until(scope)}
        self.tombstones.update(news)
        return news

    def begin(self, tenants: Collection[Scope]) -> None:
        """Purged blocks of these are being dropped, until `end` was called as often."""
        self._purging.update(tenants)
        self.dropping = True

    def end(self, tenants: Collection[Scope]) -> None:
        self._purging.subtract(tenants)
        self._purging = +self._purging
        self._settle()

    def begin_later_than(self, wall_s: Wall) -> None:
        """Blocks that carry a later time are refused, and being dropped, until `end_later_than`."""
        self._made_max, self.dropping = min(wall_s, self._made_max), True

    def end_later_than(self, wall_s: Wall) -> None:
        """All of those are dropped. Does nothing if an earlier time is refused by now."""
        if self._made_max == wall_s:
            self._made_max = _ANY_TIME
            self._settle()

    def _settle(self) -> None:
        self.dropping = bool(self._purging) or self._made_max < _ANY_TIME

    def forget(self, tombstones: Mapping[Scope, Wall]) -> None:
        """Forget these, unless their blocks are still being dropped."""
        for scope, before in tombstones.items():
            if self.tombstones.get(scope) == before and scope not in self._purging:
                del self.tombstones[scope]

    def purged_until(self, scope: Scope) -> Wall:
        """The time of the tombstone of the scope's tenant; -inf: none is known."""
        return self.tombstones.get(tenant_of(scope), _NEVER)

    def covers(self, number: int) -> bool:
        """Whether the block in a slot is refused."""
        return self.made(number) > self._made_max or self.has_purged(number)

    def at_commit(self, latest: Wall) -> Callable[[int], bool] | None:
        """Which slots have blocks that must not become visible: purged ones, and those that carry a time later than
        `latest`; None: no slot has."""
        if latest < _ANY_TIME:
            return lambda number: self.made(number) > latest or self.has_purged(number)
        return self.has_purged if self.tombstones else None

    def has_purged(self, number: int) -> bool:
        """Whether a tombstone covers the block in a slot."""
        return self.table.life(number).born <= self.tombstones.get(tenant_of(self.table.keys[number]), _NEVER)

    def made(self, number: int) -> Wall:
        """The latest time that the block in a slot carries."""
        life = self.table.life(number)
        return max(life.last_use, life.born)
