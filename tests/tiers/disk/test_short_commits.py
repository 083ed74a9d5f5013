"""At 100,000 blocks no transaction takes 20 ms of the processor: those of guests and of scopes' shares either."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import lmdb
import pytest

from kvtier.bench.tiers.class_store import LIFE, NOW, ClassStore, name_of
from kvtier.checksum import DIGEST_BYTES
from kvtier.identity.keys import NAMESPACE_BYTES, SCOPE_BYTES
from kvtier.retention.terms import PRIORITY
from kvtier.tiers.disk.allocator import Promise
from kvtier.tiers.disk.drain import EVICTIONS_PER_TXN, evict
from kvtier.tiers.disk.guests import Guests, Held, guests_in
from kvtier.tiers.disk.quota import shares_of
from kvtier.tiers.disk.records import SLOT_ALIGN, NewBlock, SlotReservation
from kvtier.tiers.disk.write_txn import EXTRA_EVICTIONS_MAX, WriteTxn
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall
from tests.support.cpu import slowness

T = TypeVar("T")

CPU_S_MAX = 0.02
BESIDE_OTHERS = 2.0
"""Times that the longest of thousands takes on cores that others use, beyond what `slowness` sees a moment later. What
grew with the store took hundreds of milliseconds."""
JOB = 64
"""Blocks of one job, as `WriteBatch` cuts them."""
SEGMENTS, SLOTS = 8, 1 << 14
WRITES = 1536
"""Under way in each segment."""
LARGE = 512
"""Slots of a large block: 2 MiB beside 4 KiB."""


@pytest.fixture(autouse=True)
def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine stops here."""
    environment = lmdb.open
    monkeypatch.setattr(lmdb, "open", lambda *args, **kwargs: environment(*args, **kwargs | {"sync": False}))


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """Going over the test runner's own objects takes longer than any transaction."""
    gc.disable()
    yield
    gc.enable()


def block_of(scope: int, slot_cls: int, number: int) -> NewBlock:
    digest = slot_cls.to_bytes(NAMESPACE_BYTES, "little")
    name = digest + scope.to_bytes(SCOPE_BYTES, "little") + number.to_bytes(32, "big")
    return NewBlock(name, slot_cls * SLOT_ALIGN, LIFE, digest=bytes(DIGEST_BYTES), priority=PRIORITY)


def store_at(path: Path) -> ClassStore:
    store = ClassStore(path, SEGMENTS, SLOTS * SLOT_ALIGN)
    store.index.enlarge(256 << 20)
    return store


def in_jobs(store: ClassStore, items: Sequence[T], work: Callable[[WriteTxn, Sequence[T]], object]) -> None:
    """Work on JOB of them per transaction."""
    for start in range(0, len(items), JOB):
        store.transact(partial(_swapped, work, items[start : start + JOB]))


def _swapped(work: Callable[[WriteTxn, T], object], items: T, txn: WriteTxn) -> None:
    work(txn, items)


def put_all(store: ClassStore, blocks: Iterable[NewBlock], share_bytes: int = 0) -> Counter[Stored]:
    """Store blocks of one size as `WriteBatch` does, in jobs of two transactions or more."""
    waiting, done = list(blocks), Counter[Stored]()
    for start in range(0, len(waiting), JOB):
        job = waiting[start : start + JOB]
        slots: Sequence[SlotReservation | Stored] = []
        while not slots:
            slots = store.transact(partial(reserve, store, job, share_bytes))
        done.update(store.transact(partial(publish, job, slots, share_bytes)))
    return done


def reserve(
    store: ClassStore, blocks: Sequence[NewBlock], share_bytes: int, txn: WriteTxn
) -> Sequence[SlotReservation | Stored]:
    slots = [txn.reserve(block, NOW, share_bytes) for block in blocks]
    slot_cls = blocks[0].length // SLOT_ALIGN
    if Stored.FULL not in slots or not (txn.order.cut_short or store.drain.serves(store.index, slot_cls)):
        return slots
    for slot in slots:
        if isinstance(slot, SlotReservation):
            txn.release(slot, refund=True)
    return []


def publish(
    blocks: Sequence[NewBlock], slots: Sequence[SlotReservation | Stored], share_bytes: int, txn: WriteTxn
) -> list[Stored]:
    return [
        txn.publish(slot, block, NOW, share_bytes) if isinstance(slot, SlotReservation) else slot
        for block, slot in zip(blocks, slots, strict=True)
    ]


def bounded(store: ClassStore) -> None:
    """Since the last call no transaction was long."""
    assert store.cpu_s_max <= CPU_S_MAX * BESIDE_OTHERS * slowness()
    assert store.evictions_max <= 2 * EVICTIONS_PER_TXN + EXTRA_EVICTIONS_MAX
    store.cpu_s_max, store.evictions_max = 0.0, 0


def test_shares_of_scopes(tmp_path: Path) -> None:
    store = store_at(tmp_path / "index")
    mine = 4096 * SLOT_ALIGN
    put_all(store, (block_of(1, 1, number) for number in range(4096)))
    put_all(store, (block_of(2 + number % 5000, 1, number) for number in range(100_000)))
    bounded(store)
    assert put_all(store, [block_of(1, LARGE // 4, 0)], mine) == {Stored.STORED: 1}  # all are counted first
    with store.index.reading() as txn:
        assert len(shares_of(txn) or {}) == 5001
    store.index.check()
    bounded(store)
    many = put_all(store, (block_of(1, LARGE // 4, number) for number in range(1, 31)), mine)
    assert many == {Stored.STORED: 30}, "each takes the place of many small ones of its scope"
    store.index.check()
    bounded(store)
    less = put_all(store, (block_of(1, LARGE // 4, number) for number in range(100, 130)), mine // 8)
    assert less[Stored.FULL] and not less[Stored.STORED], "a scope that holds too much shrinks, and nobody waits for it"
    store.index.check()
    bounded(store)


def test_guests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lodged = Counter[Guests]()
    add = Guests.add

    def counted(self: Guests, held: Held) -> None:
        lodged[self] += 1
        add(self, held)

    monkeypatch.setattr(Guests, "add", counted)
    store = store_at(tmp_path / "index")
    small = [block_of(0, 1, number) for number in range(SEGMENTS * SLOTS)]
    put_all(store, small)
    for segment in range(SEGMENTS):
        some = small[segment * SLOTS + 1024 : segment * SLOTS + 1024 + WRITES]
        in_jobs(store, [one.name for one in some], WriteTxn.drop_all)
    writes: list[SlotReservation] = []
    while len(writes) < SEGMENTS * WRITES:
        writes += store.transact(lambda txn: txn.reserve_slots(1, JOB))
    bounded(store)

    def retain(txn: WriteTxn, names: Sequence[bytes]) -> None:
        txn.retain(names, Wall(NOW + 3600), None, NOW)

    cold = [one.name for one in small[:1024]]

    def release(txn: WriteTxn, slots: Sequence[SlotReservation]) -> None:
        for slot in slots:
            txn.release(slot)

    in_jobs(store, cold, retain)
    assert store.put((LARGE, 0)) is Stored.STORED
    assert store.class_of(0) == LARGE and sum(lodged.values()) > WRITES
    assert max(lodged.values()) <= EVICTIONS_PER_TXN, "writes and blocks become guests some at a time"
    store.index.check()
    bounded(store)

    store.transact(lambda txn: txn.release_retained(cold))
    assert put_all(store, (block_of(1, 1, number) for number in range(256))) == {Stored.STORED: 256}
    with store.index.reading() as txn:
        assert len(guests_in(txn, 0)) < WRITES + 1024, "guests are the coldest of their class"
    store.index.check()
    bounded(store)

    large = [(LARGE, number) for number in range(24)]
    assert {store.put(one) for one in large} == {Stored.STORED, Stored.PRESENT}
    in_jobs(store, [name_of(one) for one in large], retain)
    in_jobs(store, writes, release)
    store.transact(lambda txn: txn.segments.drain(0, LARGE, Promise(1, PRIORITY)))
    store.transact(lambda txn: evict(txn, [name_of(one) for one in large], NOW))
    while store.class_of(0) != 1:
        store.transact(lambda txn: None)
    bounded(store)
    stored = put_all(store, (block_of(2, 1, number) for number in range(SEGMENTS * WRITES + 4096)))
    assert set(stored) == {Stored.STORED}
    assert store.resident(LARGE, range(24)) == 24 and store.class_of(0) == 1
    store.index.check()
    bounded(store)
    store.transact(lambda txn: txn.release_retained([name_of(one) for one in large]))
    assert store.transact(lambda txn: txn.drop_all([name_of(one) for one in large])) == 24
    store.index.check()
    bounded(store)
