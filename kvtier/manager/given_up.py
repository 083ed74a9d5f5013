"""Loads that nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvtier.identity.key_map import KeyMap
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


@dataclass(slots=True, eq=False)
class _GivenUp:
    tier: str
    since: Mono
    slots: Mapping[BlockKey, Hold]  # as it was given up: FILLING, or READY if it was ending
    taken: int = 0  # of these, by other loads


class GivenUpLoads:
    """They end some day; what they bring is kept, unless another load or a put took the block over. On the manager's
    loop, but for `is_stuck` and `take_over`."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._loads: dict[Load, _GivenUp] = {}
        self._blocks: dict[str, KeyMap[_GivenUp]] = {}  # by tier; there may be a load per block
        self.late = 0  # blocks that arrived after their deadline
        self.taken = 0  # slots that loads have whose blocks others took over: QUARANTINED. Under the lock

    def running(self) -> set[Load]:
        """Those that have not ended."""
        return set(self._loads)

    def add(self, tier: Metered, load: Load, slots: Mapping[BlockKey, Hold]) -> None:
        """Nobody waits for this load from `tier` into these slots any more: undo its pins when it ends."""
        waiting = 0 if load.done() else len(slots)
        tier.overdue += waiting
        self._loads[load] = known = _GivenUp(tier.name, self._hierarchy.clock.monotonic(), slots)
        blocks = self._blocks.setdefault(tier.name, KeyMap())
        blocks.set_all(slots, known)

        def ended(load: Load) -> None:
            del self._loads[load]
            for key in slots:
                if blocks.get(key) is known:
                    del blocks[key]
            with self._hierarchy.lock:
                self.taken -= known.taken
            tier.overdue -= waiting
            if load.cancelled() or load.exception() is not None:
                return
            arrived = list(load.result().pinned())
            self.late += len(arrived)
            self._hierarchy.release((slot, slot.generation) for slot in arrived)

        load.add_done_callback(ended)

    def stuck(self, tier: str) -> Callable[[BlockKey], bool] | None:
        """Tells of a block whether a load of it is stuck in a tier; None: no load is."""
        blocks, since = self._blocks.get(tier), self._hierarchy.clock.monotonic() - STUCK_S
        if not blocks:
            return None
        return lambda key: (known := blocks.get(key)) is not None and known.since <= since

    def patience_s(self, load: Load) -> float:
        """So many seconds at least it will not be stuck; 0: it is."""
        known = self._loads.get(load)
        return STUCK_S if known is None else max(0.0, known.since - (self._hierarchy.clock.monotonic() - STUCK_S))

    def is_stuck(self, load: Load) -> bool:
        """Whether it is. On any thread."""
        return not self.patience_s(load)

    def take_over(self, load: Load, key: BlockKey) -> None:
        """Another load, or a put, has this block of one that is stuck, which keeps the slot. Under the lock; on any
        thread."""
        known = self._loads[load]
        slot, generation = known.slots[key]
        self._hierarchy.host.abort(slot, generation, in_flight=True)
        known.taken += 1
        self.taken += 1

    async def wait(self, loads: Iterable[Load], deadline: Mono, *, shared: bool = False) -> bool:
        """Until all have ended, or the deadline; whether all have. `shared` ones are waited for until they are stuck.
        One after the other: a wait for a thousand that end together would be called a thousand times in one turn."""
        ended = True
        for load in list(loads):
            while not load.done() and not (shared and self.is_stuck(load)):
                left_s = max(0.0, deadline - self._hierarchy.clock.monotonic())
                wait_s = min(left_s, self.patience_s(load)) if shared else left_s
                done, _ = await asyncio.wait({load}, timeout=wait_s)
                if not done and wait_s == left_s:
                    return False
            ended = ended and load.done()
        return ended
