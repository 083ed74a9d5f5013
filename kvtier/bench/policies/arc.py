"""ARC (Megiddo and Modha, FAST 2003), for comparison.

Two lists, seen once (T1) and seen again (T2), and the ghosts of what left them (B1, B2). A hit on a ghost moves
the target size of T1 towards the list that would have kept the block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier.bench.policies.arrivals import Fresh, Ungraded
from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.terms import PRIORITY_MAX
from kvtier.times import Mono


class ARC(Ungraded):
    """Adaptive replacement over single blocks; knows of chains only that a tail enters before its head."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # of T1, in blocks
        self._once: OrderedDict[BlockKey, None] = OrderedDict()
        self._again: OrderedDict[BlockKey, None] = OrderedDict()
        self._ghosts_once: OrderedDict[BlockKey, None] = OrderedDict()
        self._ghosts_again: OrderedDict[BlockKey, None] = OrderedDict()
        self._fresh = Fresh()

    def reference(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        self._settle()
        for key in reversed(chain):
            if key in self._once:
                del self._once[key]
                self._again[key] = None
            elif key in self._again:
                self._again.move_to_end(key)
            elif key in self._ghosts_once:
                gain = max(1.0, len(self._ghosts_again) / len(self._ghosts_once))
                self._target = min(self._capacity, self._target + gain)
            elif key in self._ghosts_again:
                gain = max(1.0, len(self._ghosts_once) / len(self._ghosts_again))
                self._target = max(0.0, self._target - gain)

    def insert(self, key: BlockKey, depth: int = 0) -> None:
        if key not in self._once and key not in self._again:
            self._fresh.add(key)

    def chain_stored(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        """Nothing: arrivals are counted when they arrive."""

    def remove(self, key: BlockKey, depth: int = 0, *, returns: bool = False) -> None:
        if key in self._once:
            del self._once[key]
            self._ghosts_once[key] = None
            if len(self._once) + len(self._ghosts_once) > self._capacity:
                self._ghosts_once.popitem(last=False)
        elif key in self._again:
            del self._again[key]
            self._ghosts_again[key] = None
            if len(self._ghosts_once) + len(self._ghosts_again) > self._capacity:
                self._ghosts_again.popitem(last=False)
        else:
            self._fresh.discard(key)

    def victim(
        self,
        newcomer: BlockKey | None,
        movable: Callable[[BlockKey], bool],
        *,
        depth: int = 0,
        scope: Scope | None = None,
        priority_max: int = PRIORITY_MAX,
    ) -> BlockKey | None:
        seen_once = len(self._once) + len(self._fresh)
        known = newcomer in self._ghosts_again
        first = bool(self._once) and (seen_once > self._target or (known and seen_once == self._target))
        for order in (self._once, self._again) if first else (self._again, self._once):
            for key in order:
                if movable(key):
                    return key
        return self._fresh.deepest(movable) if newcomer is None else None

    def check(self, resident: set[BlockKey]) -> None:
        held = [*self._once, *self._again, *self._fresh]
        assert len(held) == len(set(held)) and set(held) == resident, "policy and tier disagree"
        assert len(self._ghosts_once) + len(self._ghosts_again) <= 2 * self._capacity

    def _settle(self) -> None:
        for key in self._fresh.drain():  # tail first
            if key in self._ghosts_once or key in self._ghosts_again:
                self._ghosts_once.pop(key, None)
                self._ghosts_again.pop(key, None)
                self._again[key] = None
            else:
                self._once[key] = None
