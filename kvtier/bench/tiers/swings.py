"""Two block sizes in one G3 store, the demand swinging between them: hit bytes against the better static split.

Traffic of each kind of demand comes in swings of ten capacities, first of large blocks, then of small ones, with a
share of the other size beside. The best static split is chosen in hindsight, by segments, with LRU on either side.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.bench.tiers.class_store import NOW, Access, ClassStore, best_split, name_of
from kvtier.tiers.disk.class_worth import worths_in
from kvtier.tiers.disk.records import SLOT_ALIGN, SlotReservation
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall

SMALL = 1
SEGMENTS = 32
CAPACITIES_PER_SWING = 10
RETAINED_SHARE = 0.02
"""Of the capacity, in blocks of the size that the demand swings away from: they must stay for the swing."""
WRITES = 4
"""Slots of either size that writes hold for the swing."""
Numbers = Iterator[int]


def _uniform(rng: random.Random, blocks: int) -> Numbers:
    return (rng.randrange(blocks) for _ in itertools.count())


def _skewed(rng: random.Random, blocks: int) -> Numbers:
    """Zipf's law, exponent 0.9, over four times as many."""
    weights = list(itertools.accumulate((rank + 1) ** -0.9 for rank in range(4 * blocks)))
    names = rng.sample(range(4 * blocks), 4 * blocks)
    while True:
        yield from rng.choices(names, cum_weights=weights, k=64)


def _half(rng: random.Random, blocks: int) -> Numbers:
    return _uniform(rng, blocks // 2)


def _loop(_rng: random.Random, blocks: int) -> Numbers:
    return (number % (9 * blocks // 10) for number in itertools.count())


def _once(_rng: random.Random, _blocks: int) -> Numbers:
    return itertools.count()


DEMANDS: dict[str, Callable[[random.Random, int], Numbers]] = {
    "uniform": _uniform, "skewed": _skewed, "loop": _loop, "half": _half, "once": _once,
}  # fmt: skip
"""Block numbers of one size, by how often blocks come again; `blocks` is as many as the capacity holds."""


@dataclass(frozen=True)
class Swings:
    """`ratio`: hit bytes of those of the best static split, in which the writes that are in the way hold as many slots;
    `ratio_free`: of one in which they hold none. `evictions_max` and `cpu_ms_max` are of one transaction."""

    ratio: float
    ratio_free: float
    outcomes: frozenset[Stored]
    evictions_max: int
    cpu_ms_max: float


def traffic_of(demand: tuple[str, str], large: int, minor: float, swings: int) -> list[list[Access]]:
    """By swing. `demand`: of the large and of the small blocks, whose sizes are `large` : 1; `minor`: the share of
    the traffic that is of the other size. Pure."""
    capacity = SEGMENTS * 2 * large
    rng = random.Random(5)
    picks = {cls: DEMANDS[kind](rng, capacity // cls) for cls, kind in zip((large, SMALL), demand, strict=True)}
    out: list[list[Access]] = []
    for swing in range(swings):
        main, other = (large, SMALL) if swing % 2 == 0 else (SMALL, large)
        odds = [(1 - minor) / main, minor / other]
        out.append([])
        left = CAPACITIES_PER_SWING * capacity
        while left > 0:
            (cls,) = rng.choices((main, other), odds)
            out[-1].append((cls, next(picks[cls])))
            left -= cls
    return out


def swing(
    path: Path, demand: tuple[str, str], *, large: int, minor: float = 0.0, swings: int = 4, in_the_way: bool = False
) -> Swings:
    """Run the traffic on a new index at `path`. `in_the_way`: retained blocks and writes that do not end lie in the
    segments that are to go to the other size. Asserts that the index agrees with itself after each swing."""
    traffic = traffic_of(demand, large, minor, swings)
    segment_bytes = 2 * large * SLOT_ALIGN
    store = ClassStore(path, SEGMENTS, segment_bytes)
    try:
        for number, accesses in enumerate(traffic):
            obstacles = _Obstacles(store, traffic[number - 1], large) if in_the_way and number else None
            store.run(accesses)
            if obstacles is not None:
                obstacles.clear()
            _check(store)
        outcomes = frozenset(outcome for _cls, outcome in store.results)
        ratios = []
        for held in (WRITES if in_the_way else 0, 0):
            stretches = [(accesses, held if number else 0) for number, accesses in enumerate(traffic)]
            ratios.append(store.hits.total() / best_split(stretches, (large, SMALL), SEGMENTS, segment_bytes))
        ratio, ratio_free = ratios
        return Swings(ratio, ratio_free, outcomes, store.evictions_max, 1000 * store.cpu_s_max)
    finally:
        store.index.close()


class _Obstacles:
    """What must stay, of the latest accesses: retained blocks, and slots that are being written to."""

    def __init__(self, store: ClassStore, before: Sequence[Access], large: int) -> None:
        self._store = store
        self._names: list[bytes] = []
        size = int(RETAINED_SHARE * store.capacity)
        latest = dict.fromkeys(reversed(before))
        for access in random.Random(7).sample([*latest], len(latest)):
            if size >= access[0] * SLOT_ALIGN and store.resident(access[0], [access[1]]):
                size -= access[0] * SLOT_ALIGN
                self._names.append(name_of(access))
        until = Wall(NOW + 3600)
        store.transact(lambda txn: txn.retain(self._names, until, None, NOW), drain=False)

        def reserve(txn: WriteTxn) -> list[SlotReservation]:
            return [*txn.reserve_slots(SMALL, WRITES), *txn.reserve_slots(large, WRITES)]

        self._writes = store.transact(reserve, drain=False)

    def clear(self) -> None:
        """The blocks may leave again, and the writes have failed."""

        def end(txn: WriteTxn) -> None:
            txn.release_retained(self._names)
            for one in self._writes:
                txn.release(one)

        self._store.transact(end, drain=False)


def _check(store: ClassStore) -> None:
    """The index agrees with itself, and the counts by age with the bytes that there are."""
    store.index.check()
    with store.index.reading() as txn:
        worths = worths_in(txn, store.capacity)
    if worths:
        assert sum(worth.ages.total for worth in worths.values()) == store.index.usage()[1]
