"""How many of the arena's slots G2 uses: all of them, unless its capacity was made smaller while it ran."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvtier.identity.keys import Scope
from kvtier.tiers.host.quota import Quota

SLICE_NS = 500_000
"""Thread CPU time of one slice of work under the lock of a tier's owner."""


class SlotsInUse:
    """The capacity in slots, and the numbers of those that are out of use, which are FREE. Used under the lock of its
    tier's owner."""

    def __init__(self, slots: int, free: deque[int]) -> None:
        """`slots`: those of the arena. `free`: the numbers of those that may be taken, which the tier owns, too."""
        self.capacity = slots
        self.unused: list[int] = []
        self._all = slots
        self._free = free

    @property
    def surplus(self) -> int:
        """Slots in use beyond the capacity; negative: so many may be taken back."""
        return self.used - self.capacity

    @property
    def used(self) -> int:
        """Slots that have blocks, or may have."""
        return self._all - len(self.unused)

    def shrink_steps(self, quota: Quota, evict: Callable[[Scope | None], bool]) -> Iterator[int]:
        """Put slots out of use until none is beyond the capacity; then evict what is beyond a scope's quota. `evict`
        makes a slot free, of a block of a scope if one is given; False: none may leave now. Each step takes SLICE_NS
        or so, and gives how many blocks went. What cannot leave is left to a later call."""
        evicted, began = 0, time.thread_time_ns()
        while self.surplus > 0:
            if not self._free:
                if not evict(None):
                    break
                evicted += 1
            self.unused.append(self._free.pop())
            if time.thread_time_ns() - began > SLICE_NS:
                yield evicted
                evicted, began = 0, time.thread_time_ns()
        for scope in quota.beyond():
            while quota.over(scope) and evict(scope):
                evicted += 1
                if time.thread_time_ns() - began > SLICE_NS:
                    yield evicted
                    evicted, began = 0, time.thread_time_ns()
        yield evicted

    def take_back(self, last: Sequence[int], count: int) -> None:
        """`last` are the last of `unused`, in any order: use the first `count` of them again."""
        del self.unused[len(self.unused) - len(last) :]
        self.unused += last[count:]
        self._free.extend(last[:count])
