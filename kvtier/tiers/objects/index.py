"""What a replica knows of the bucket: an index of units it wrote, read or probed. Hints only; a read decides."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from kvtier.identity.keys import BlockKey, scope_of_key
from kvtier.retention.lifetime import Lifetime
from kvtier.tiers.objects.frame import Frame

UNITS_MAX = 200_000
"""UnitIndex remembered, about 2 KiB each: 6 TiB of 32 MiB strides. Past it the longest unseen is forgotten."""

ABSENT_MAX = 100_000


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One object as last seen. `life.last_use` includes uses here that the server has not been told of yet;
    `renewed` is the one it knows. `seen`: monotonic time of the last proof that it is there."""

    frame: Frame
    size: int
    etag: str
    life: Lifetime
    renewed: float
    seen: float

    @property
    def first(self) -> BlockKey:
        return self.frame.key(0)

    @property
    def last(self) -> BlockKey:
        return self.frame.key(len(self.frame.hashes) - 1)

    @property
    def blocks(self) -> int:
        return len(self.frame.hashes)

    def holds(self, key: BlockKey, depth: int) -> bool:
        """Whether the block `key` at `depth` of its chain is in here (a hash commits to all before it)."""
        index = depth - self.frame.depth
        return 0 <= index < self.blocks and self.frame.key(index) == key


class ObjectIndex:
    """The index, by first and by last block. Thread-safe; every verb takes microseconds."""

    def __init__(self, units_max: int = UNITS_MAX) -> None:
        self._lock = threading.Lock()
        self._units_max = units_max
        self._by_last: OrderedDict[BlockKey, ObjectEntry] = OrderedDict()
        self._by_first: dict[BlockKey, list[BlockKey]] = {}
        self._absent: OrderedDict[BlockKey, float] = OrderedDict()
        self._touched: set[BlockKey] = set()
        self._blocks = 0
        self._bytes = 0

    def put(self, unit: ObjectEntry) -> None:
        """Learn of a unit, or of its new state. A use that only this replica knows of is kept."""
        with self._lock:
            last = unit.last
            known = self._by_last.get(last)
            if known is not None:
                if last in self._touched and known.frame.life.stamps == unit.frame.life.stamps:
                    newer = max(known.life.last_use, unit.life.last_use)
                    unit = replace(unit, life=Lifetime(newer, unit.life.stamps))
                self._forget(last)
            self._by_last[last] = unit
            self._by_first.setdefault(unit.first, []).append(last)
            self._blocks += unit.blocks
            self._bytes += unit.size
            self._absent.pop(last, None)
            while len(self._by_last) > self._units_max:
                oldest = next(iter(self._by_last))
                self._forget(oldest)
                self._touched.discard(oldest)

    def drop(self, last: BlockKey) -> None:
        """The unit is not in the bucket any more."""
        with self._lock:
            self._forget(last)
            self._touched.discard(last)

    def _forget(self, last: BlockKey) -> None:
        unit = self._by_last.pop(last, None)
        if unit is None:
            return
        lasts = self._by_first[unit.first]
        lasts.remove(last)
        if not lasts:
            del self._by_first[unit.first]
        self._blocks -= unit.blocks
        self._bytes -= unit.size

    def get(self, last: BlockKey) -> ObjectEntry | None:
        """The unit whose last block is `last`."""
        with self._lock:
            return self._by_last.get(last)

    def find(self, first: BlockKey, key: BlockKey, depth: int) -> ObjectEntry | None:
        """The longest known unit that begins with the block `first` and holds `key` at `depth` of the chain."""
        with self._lock:
            best: ObjectEntry | None = None
            for last in self._by_first.get(first, ()):
                unit = self._by_last[last]
                if unit.holds(key, depth) and (best is None or unit.blocks > best.blocks):
                    best = unit
            return best

    def some(self, rng: random.Random) -> ObjectEntry | None:
        """Any unit, by chance among those that were learnt of last; None if there is none."""
        with self._lock:
            place = rng.randrange(min(len(self._by_last), 256)) if self._by_last else 0
            return next(islice(reversed(self._by_last.values()), place, None), None)

    def holding(self, keys: Iterable[BlockKey]) -> list[ObjectEntry]:
        """All units that hold any of `keys`. Searches the whole index: for administration."""
        wanted = set(keys)
        with self._lock:
            return [
                unit
                for unit in self._by_last.values()
                if any(unit.frame.key(index) in wanted for index in range(unit.blocks))
            ]

    def in_scope(self, scope: bytes) -> list[ObjectEntry]:
        """All units of a scope. Searches the whole index."""
        with self._lock:
            return [unit for last, unit in self._by_last.items() if scope_of_key(last) == scope]

    def touch(self, keys: Iterable[BlockKey], now: float) -> None:
        """Units whose last block is among `keys` were used, all of each: chains are used from their heads on. One of
        which only the first blocks were used was not, or the others would outlive their terms. A dead one is not
        revived."""
        with self._lock:
            for last in self._by_last.keys() & set(keys):
                unit = self._by_last[last]
                self._by_last[last] = replace(unit, life=unit.life.used(now))
                self._by_last.move_to_end(last)
                self._touched.add(last)

    def touched(self) -> list[ObjectEntry]:
        """Units with uses that the server has not been told of."""
        with self._lock:
            return [self._by_last[last] for last in self._touched]

    def told(self, last: BlockKey, used: float) -> None:
        """The server knows of this unit's uses until `used`, or need not."""
        with self._lock:
            unit = self._by_last.get(last)
            if unit is None or unit.life.last_use <= used:
                self._touched.discard(last)

    def miss(self, last: BlockKey, until: float) -> None:
        """A probe found nothing to serve there: do not ask again before monotonic `until`."""
        with self._lock:
            self._absent[last] = until
            self._absent.move_to_end(last)
            while len(self._absent) > ABSENT_MAX:
                self._absent.popitem(last=False)

    def missing(self, last: BlockKey, now: float) -> bool:
        """Whether a recent probe found nothing there."""
        with self._lock:
            return self._absent.get(last, 0.0) > now

    def clear(self) -> None:
        with self._lock:
            self._by_last.clear()
            self._by_first.clear()
            self._absent.clear()
            self._touched.clear()
            self._blocks = self._bytes = 0

    def totals(self) -> tuple[int, int]:
        """(blocks, bytes) of all known units."""
        return self._blocks, self._bytes

    def check(self, stride: int) -> None:
        """Assert the index's invariants."""
        with self._lock:
            units = list(self._by_last.values())
            assert self._blocks == sum(unit.blocks for unit in units), "block count drifted"
            assert self._bytes == sum(unit.size for unit in units), "byte count drifted"
            assert sum(len(lasts) for lasts in self._by_first.values()) == len(units), "index halves disagree"
            for last, unit in self._by_last.items():
                assert unit.last == last and last in self._by_first[unit.first], "unit under another's name"
                assert unit.frame.depth % stride == 0 and unit.blocks <= stride, "unit is no stride"
            assert len(units) <= self._units_max and self._touched <= set(self._by_last), "index past its bounds"
