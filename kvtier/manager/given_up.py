"""Loads that nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvtier.identity.keys import BlockKey
from kvtier.manager.hierarchy import Hierarchy
from kvtier.manager.outcomes import Outcomes
from kvtier.tiers.host.pins import Hold
from kvtier.tiers.meter import Metered
from kvtier.times import Mono

STUCK_S = 5.0
"""So long after it was given up, a load is stuck: its blocks are misses of its tier, and other tiers may bring them."""

Load = asyncio.Task[Outcomes]
"""Reads a slice into reserved slots; its result is an outcome for each of them."""


@dataclass(slots=True)
class _GivenUp:
    tier: str
    since: Mono
    slots: Mapping[BlockKey, Hold]  # as it was given up: FILLING, or READY if it was ending
    taken: int = 0  # of these, by other loads


class GivenUpLoads:
    """They end some day; what they bring is kept, unless another load took the block over. On the manager's loop."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._loads: dict[Load, _GivenUp] = {}
        self.late = 0  # blocks that arrived after their deadline
        self.taken = 0  # slots that loads have whose blocks others took over: QUARANTINED

    def running(self) -> set[Load]:
        """Those that have not ended."""
        return set(self._loads)

    def add(self, tier: Metered, load: Load, slots: Mapping[BlockKey, Hold]) -> None:
        """Nobody waits for this load from `tier` into these slots any more: undo its pins when it ends."""
        waiting = 0 if load.done() else len(slots)
        tier.overdue += waiting
        self._loads[load] = _GivenUp(tier.name, self._hierarchy.clock.monotonic(), slots)

        def ended(load: Load) -> None:
            self.taken -= self._loads.pop(load).taken
            tier.overdue -= waiting
            if load.cancelled() or load.exception() is not None:
                return
            arrived = list(load.result().pinned())
            self.late += len(arrived)
            self._hierarchy.release((slot, slot.generation) for slot in arrived)

        load.add_done_callback(ended)

    def stuck(self, tier: str) -> Sequence[Collection[BlockKey]]:
        """The blocks of loads that are stuck in a tier, load by load."""
        since = self._hierarchy.clock.monotonic() - STUCK_S
        return [one.slots.keys() for one in self._loads.values() if one.tier == tier and one.since <= since]

    def take_over(self, load: Load, key: BlockKey) -> bool:
        """Whether another load may have this block: if this one is stuck. It keeps the slot. Under the lock."""
        known = self._loads.get(load)
        if known is None or self._hierarchy.clock.monotonic() < known.since + STUCK_S:
            return False
        slot, generation = known.slots[key]
        self._hierarchy.host.abort(slot, generation, in_flight=True)
        known.taken += 1
        self.taken += 1
        return True
