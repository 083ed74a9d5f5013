"""S3-FIFO (Yang et al., SOSP 2023), for comparison.

A small queue in front filters what is never used again; what is used again there, or comes back while its ghost
is remembered, goes to the main queue, which gives each block one round per use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier.bench.policies.arrivals import Fresh, Ungraded
from kvtier.identity.keys import BlockKey, Scope
from kvtier.retention.terms import PRIORITY_MAX
from kvtier.times import Mono

SMALL_SHARE = 0.1
USES_MAX = 3


class S3FIFO(Ungraded):
    """Three queues over single blocks; knows of chains only that a tail enters before its head."""

    def __init__(self, capacity: int) -> None:
        self._small_max = max(1, int(capacity * SMALL_SHARE))
        self._ghosts_max = max(1, capacity - self._small_max)
        self._small: OrderedDict[BlockKey, None] = OrderedDict()
        self._main: OrderedDict[BlockKey, None] = OrderedDict()
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._uses: dict[BlockKey, int] = {}
        self._fresh = Fresh()

    def reference(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        self._settle()
        uses = self._uses
        for key in chain:
            if key in uses:
                uses[key] = min(USES_MAX, uses[key] + 1)

    def insert(self, key: BlockKey, depth: int = 0) -> None:
        if key not in self._uses:
            self._uses[key] = 0
            self._fresh.add(key)

    def chain_stored(self, chain: Sequence[BlockKey], resident: int, mono_s: Mono) -> None:
        """Nothing: arrivals are counted when they arrive."""

    def remove(self, key: BlockKey, depth: int = 0, *, returns: bool = False) -> None:
        if self._uses.pop(key, None) is None:
            return
        self._fresh.discard(key)
        self._main.pop(key, None)
        if key in self._small:
            del self._small[key]
            self._ghosts[key] = None
            if len(self._ghosts) > self._ghosts_max:
                self._ghosts.popitem(last=False)

    def victim(
        self,
        newcomer: BlockKey | None,
        movable: Callable[[BlockKey], bool],
        *,
        depth: int = 0,
        scope: Scope | None = None,
        priority_max: int = PRIORITY_MAX,
    ) -> BlockKey | None:
        # Every turn lowers a count, moves small to main, or passes over what cannot be moved.
        turns = (USES_MAX + 2) * len(self._main) + 2 * len(self._small)
        for _ in range(turns):
            small = self._small and (len(self._small) + len(self._fresh) >= self._small_max or not self._main)
            queue = self._small if small else self._main
            if not queue:
                break
            key = next(iter(queue))
            if small and self._uses[key] > 1:
                del self._small[key]
                self._main[key] = None
                self._uses[key] = 0
            elif not small and self._uses[key] > 0:
                self._main.move_to_end(key)
                self._uses[key] -= 1
            elif movable(key):
                return key
            else:
                queue.move_to_end(key)
        # The queue whose turn it is holds nothing that can be moved.
        moved = next((key for key in (*self._small, *self._main) if movable(key)), None)
        return self._fresh.deepest(movable) if moved is None and newcomer is None else moved

    def check(self, resident: set[BlockKey]) -> None:
        held = [*self._small, *self._main, *self._fresh]
        assert len(held) == len(set(held)) and set(held) == resident == self._uses.keys(), "policy and tier disagree"
        assert len(self._ghosts) <= self._ghosts_max

    def _settle(self) -> None:
        for key in self._fresh.drain():  # tail first
            if key in self._ghosts:
                del self._ghosts[key]
                self._main[key] = None
            else:
                self._small[key] = None
