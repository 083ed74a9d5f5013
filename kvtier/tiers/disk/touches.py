"""Uses of blocks on their way into the index: recorded at any time, written with the next transaction."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import Depth
from kvtier.times import Wall

NAMES_MAX = 1 << 18
NAMES_PER_COMMIT_MAX, NAMES_PER_COMMIT_MIN = 96, 16  # a transaction must not hold the lock for long
USES_MAX = 16  # of one block between two transactions; the latest replaces the last


def life_after(life: Lifetime, uses: Sequence[Wall]) -> Lifetime:
    """`life` after uses at these times, in order; once it is over they do nothing. Pure."""
    for wall_s in uses:
        if not life.servable(Depth.G3, wall_s):
            break
        life = life.used(wall_s)
    return life


class Touches:
    """Uses by block name, in seconds since the epoch. Thread-safe. Past NAMES_MAX blocks further ones are dropped: that
    costs them rank, not their bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[bytes, list[Wall]] = {}
        self._overdue: dict[bytes, list[Wall]] = {}  # left for the next transaction by the last one,
        self._tick = 0  # with the tick that they all get

    def record(self, names: Sequence[bytes], wall_s: Wall) -> None:
        """These blocks were used, heads of chains first."""
        with self._lock:
            for name in names:
                if len(self._new) + len(self._overdue) >= NAMES_MAX and name not in self._new:
                    return
                uses = self._new.setdefault(name, [])
                del uses[USES_MAX - 1 :]
                uses.append(wall_s)

    def __bool__(self) -> bool:
        """Whether uses wait for a transaction."""
        return bool(self._new or self._overdue)

    @property
    def overdue(self) -> bool:
        """Whether the last transaction left some to the next."""
        return bool(self._overdue)

    def of(self, name: bytes) -> Sequence[Wall]:
        """The uses of a block that wait for a transaction."""
        with self._lock:
            return (*self._overdue.get(name, ()), *self._new.get(name, ()))

    def take(self, tick: int, most: int = NAMES_PER_COMMIT_MAX) -> tuple[dict[bytes, list[Wall]], int]:
        """Uses of up to `most` blocks, but some at least, for the transaction of `tick`, the oldest first, and their
        tick: blocks that wait together get one, since a chain's head must not get less than its tail."""
        with self._lock:
            if not self._overdue:
                self._overdue, self._new = self._new, {}
                self._tick = tick
            count = min(max(most, NAMES_PER_COMMIT_MIN), NAMES_PER_COMMIT_MAX)
            names = list(itertools.islice(self._overdue, count))
            return {name: self._overdue.pop(name) for name in names}, self._tick
