"""Space moves to the class that is worth more there: against static splits in hindsight, in slices, over restarts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from kvtier.tiers.disk.allocator import promises_in
from kvtier.tiers.disk.class_worth import worths_in
from kvtier.tiers.disk.drain import EVICTIONS_PER_TXN, Drain
from kvtier.tiers.disk.records import SLOT_ALIGN
from kvtier.tiers.protocol import Stored
from tests.tiers.disk.support.classes import BATCH, NOW, Access, ClassStore, best_split, name_of

SMALL = 1
SEGMENTS = 32
Numbers = Iterator[int]


def uniform(rng: random.Random, blocks: int) -> Numbers:
    return (rng.randrange(blocks) for _ in itertools.count())


def skewed(rng: random.Random, blocks: int) -> Numbers:
    """Zipf's law, exponent 0.9, over four times as many."""
    weights = list(itertools.accumulate((rank + 1) ** -0.9 for rank in range(4 * blocks)))
    names = rng.sample(range(4 * blocks), 4 * blocks)
    while True:
        yield from rng.choices(names, cum_weights=weights, k=64)


def loop(_rng: random.Random, blocks: int) -> Numbers:
    return (number % (9 * blocks // 10) for number in itertools.count())


def once(_rng: random.Random, _blocks: int) -> Numbers:
    return itertools.count()


DEMANDS: dict[str, Callable[[random.Random, int], Numbers]] = {
    "uniform": uniform, "skewed": skewed, "loop": loop, "half": lambda rng, blocks: uniform(rng, blocks // 2),
    "once": once,
}  # fmt: skip


def swings(demand: tuple[str, str], large: int, minor: float, swings: int) -> list[list[Access]]:
    """Traffic of ten capacities per swing, first of large blocks, then of small ones, with a part of `minor` of the
    other ones."""
    capacity = SEGMENTS * 2 * large
    rng = random.Random(5)
    picks = {cls: DEMANDS[kind](rng, capacity // cls) for cls, kind in zip((large, SMALL), demand, strict=True)}
    out = []
    for swing in range(swings):
        main, other = (large, SMALL) if swing % 2 == 0 else (SMALL, large)
        odds = [(1 - minor) / main, minor / other]
        out.append([])
        left = 10 * capacity
        while left > 0:
            (cls,) = rng.choices((main, other), odds)
            out[-1].append((cls, next(picks[cls])))
            left -= cls
    return out


def ratio(path: Path, demand: tuple[str, str], *, large: int, minor: float = 0.0, count: int = 4) -> float:
    """Hit bytes, of those of the best static split in hindsight. Bounds of every transaction hold."""
    traffic = swings(demand, large, minor, count)
    segment_bytes = 2 * large * SLOT_ALIGN
    store = ClassStore(path, SEGMENTS, segment_bytes)
    for swing in traffic:
        store.run(swing)
        check(store)
    assert {outcome for _cls, outcome in store.results} <= {Stored.STORED, Stored.PRESENT}
    assert store.evictions_max <= EVICTIONS_PER_TXN + BATCH
    return store.hits.total() / best_split([*itertools.chain(*traffic)], (large, SMALL), SEGMENTS, segment_bytes)


def check(store: ClassStore) -> None:
    """The index agrees with itself, and the counts by age with the bytes that there are."""
    store.index.check()
    with store.index.reading() as txn:
        worths = worths_in(txn, store.capacity)
    if worths:
        assert sum(worth.ages.total for worth in worths.values()) == store.index.usage()[1]


@pytest.fixture(autouse=True)
def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine stops here."""
    environment = lmdb.open
    monkeypatch.setattr(lmdb, "open", lambda *args, **kwargs: environment(*args, **kwargs | {"sync": False}))


@pytest.mark.parametrize(
    ("demand", "minor"),
    [
        (("uniform", "uniform"), 0.0),
        (("skewed", "skewed"), 0.1),
        (("loop", "loop"), 0.0),
        (("half", "half"), 0.0),
        (("uniform", "once"), 0.0),
    ],
)
def test_swings_cost_little_against_the_best_static_split(
    tmp_path: Path, demand: tuple[str, str], minor: float
) -> None:
    assert ratio(tmp_path / "index", demand, large=8, minor=minor) >= 0.95


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("minor", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("small", [*DEMANDS])
@pytest.mark.parametrize("large", [*DEMANDS])
def test_swings_of_all_kinds(tmp_path: Path, large: str, small: str, minor: float) -> None:
    """Blocks of 32 : 1, as 2 MiB and 64 KiB."""
    if large != "once" or small != "once":
        assert ratio(tmp_path / "index", (large, small), large=32, minor=minor, count=6) >= 0.95


def half_drained(path: Path) -> ClassStore:
    """A store whose second class has wanted space, and not yet got it."""
    store = ClassStore(path, 8, 256 * SLOT_ALIGN)
    store.run((SMALL, number) for number in range(8 * 256))
    while not store.draining():
        store.transact(lambda txn: store.try_put(txn, (64, 0)))
    return store


def test_another_process_goes_on_with_what_was_left(tmp_path: Path) -> None:
    store = half_drained(tmp_path / "index")
    (segment,) = store.draining()
    store.drain = Drain()  # of a process that knows nothing
    store.settle()
    assert not store.draining()
    with store.index.reading() as txn:
        assert promises_in(txn) == {}
    assert store.class_of(segment) == 64
    assert store.resident(SMALL, range(8 * 256)) == 7 * 256
    assert store.put((64, 0)) is Stored.STORED
    check(store)


def test_a_block_retained_meanwhile_stays_and_so_does_its_segment(tmp_path: Path) -> None:
    store = half_drained(tmp_path / "index")
    (segment,) = store.draining()
    kept = [(SMALL, number) for number in range(8 * 256) if store.segment_of((SMALL, number)) == segment][-1]
    store.transact(lambda txn: txn.retain([name_of(kept)], NOW + 3600, None, NOW), drain=False)
    assert store.put((64, 0)) is Stored.STORED, "from another segment"
    assert store.resident(SMALL, [kept[1]]) == 1
    assert store.class_of(segment) == SMALL
    store.run((SMALL, number) for number in range(10_000, 10_000 + 7 * 256))
    check(store)
    assert store.resident(SMALL, [kept[1]]) == 1
