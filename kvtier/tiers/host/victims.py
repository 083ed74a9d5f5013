"""Which blocks of G2 give up their slots for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.identity.keys import BlockKey, Scope, scope_of_key
from kvtier.policies.policy import Policy
from kvtier.retention.terms import PRIORITY_MAX
from kvtier.tiers.host.slot_table import SlotTable
from kvtier.times import Wall


class Victims:
    """A search for blocks to evict, among the READY ones in `parts`. `levels`: the priorities that these have."""

    __slots__ = ("_levels", "_limit", "_movable", "_pinned", "_policy", "_scope", "_table")

    def __init__(
        self,
        table: SlotTable,
        parts: Sequence[dict[BlockKey, int]],
        policy: Policy,
        levels: Sequence[int],
        exempt: Callable[[BlockKey], bool] | None,
        wall_s: Wall,
    ) -> None:
        """Neither pinned nor `exempt` blocks leave; one that has expired at `wall_s` has no priority."""
        self._table, self._policy, self._levels = table, policy, levels
        self._pinned: list[int] = []
        self._limit = PRIORITY_MAX
        self._scope: Scope | None = None
        pins, priorities, ended, pinned = table.pins, table.priorities, table.has_ended, self._pinned

        def movable(key: BlockKey) -> bool:
            number = parts[key[-1]][key]
            if pins[number]:
                pinned.append(number)
                return False
            if (priorities[number] > self._limit and not ended(number, wall_s)) or (exempt and exempt(key)):
                return False
            return self._scope is None or scope_of_key(key) == self._scope

        self._movable = movable

    def evict(
        self, newcomers: Sequence[BlockKey | None], depth: int, *, insist: bool, priority: int, scope: Scope | None
    ) -> list[BlockKey]:
        """A block for each of the leading `newcomers`, which lie at `depth` and below, taken from the policy.

        The lowest priority leaves first, and none above `priority`. With `insist` the policy may choose, but not
        refuse, and any priority gives way. May serve fewer than it could; empty: there is none for the first."""
        self._scope = scope
        limits: Sequence[int] = (priority,)
        if len(self._levels) > 1:
            limits = sorted({min(level, priority) for level in self._levels})
        for limit in limits:
            if victims := self._up_to(limit, newcomers if limit == limits[-1] else newcomers[:1], depth):
                return victims
        for limit in [*self._levels, PRIORITY_MAX] if insist else ():
            if victims := self._up_to(limit, (None,), depth):
                return victims
        return []

    def _up_to(self, limit: int, newcomers: Sequence[BlockKey | None], depth: int) -> list[BlockKey]:
        self._limit = limit
        victims = self._policy.evict(newcomers, self._movable, depth=depth, scope=self._scope, priority_max=limit)
        for number in self._pinned:  # the policy leaves these out until their last unpin
            self._table.waiting[number] = True
            self._policy.suspend(self._table.keys[number])
        self._pinned.clear()
        return victims
