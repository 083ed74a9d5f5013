"""Blocks of several sizes on one G3 index without payload: traffic, and the best static split of it in hindsight."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from kvtier.checksum import DIGEST_BYTES
from kvtier.identity.keys import NAMESPACE_BYTES, SCOPE_BYTES
from kvtier.retention.lifetime import Lifetime
from kvtier.retention.terms import BUILTIN, PRIORITY
from kvtier.tiers.disk.allocator import promises_in
from kvtier.tiers.disk.drain import Drain
from kvtier.tiers.disk.geometry import Geometry
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.records import SEGMENTS, SLOT_ALIGN, Entry, NewBlock, Segment, SlotReservation, number_key
from kvtier.tiers.disk.relocation import Copied, Relocation, end_relocation
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Stored
from kvtier.times import Wall

NOW = Wall(1_000_000.0)
LIFE = Lifetime.of(BUILTIN["24h"], NOW)
BATCH = 16
STEPS_BETWEEN = 8
"""Steps of the drain between two batches, where it has something to do: while the device writes BATCH blocks, which
takes it longer than so many commits of a slice, the writer thread goes on."""
TRIES_MAX = 10_000

T = TypeVar("T")
Access = tuple[int, int]
"""Of a block: (class, number). The class is its slot's size in units of SLOT_ALIGN."""


def name_of(access: Access) -> bytes:
    """A block's full name."""
    slot_cls, number = access
    return slot_cls.to_bytes(NAMESPACE_BYTES, "little") + bytes(SCOPE_BYTES) + number.to_bytes(32, "big")


def new_block(access: Access, priority: int = PRIORITY) -> NewBlock:
    """What is stored for it: without parent or payload."""
    return NewBlock(name_of(access), access[0] * SLOT_ALIGN, LIFE, digest=bytes(DIGEST_BYTES), priority=priority)


class ClassStore:
    """An index and what the writer thread does around it. `hits` and `results` count bytes and outcomes by class;
    `cpu_s_max` is the longest transaction's time on this thread, `evictions_max` the most blocks that one evicted."""

    def __init__(self, path: Path, segments: int, segment_bytes: int) -> None:
        self.capacity = segments * segment_bytes
        geometry = Geometry(self.capacity, segment_bytes, 1)
        self.index = Index.create(path, bytes(16), geometry, 64 << 20, Owner.current())
        self.drain = Drain()
        self.hits = Counter[int]()
        self.results = Counter[tuple[int, Stored]]()
        self.cpu_s_max = 0.0
        self.evictions_max = 0
        self._relocating: list[Relocation] = []

    def transact(self, work: Callable[[WriteTxn], T], *, drain: bool = True) -> T:
        """One transaction: `work`, and the next step of the drain. Guests that go back have been copied by the next."""
        step = self.drain.step(self.index, NOW) if drain else None
        copied, self._relocating = self._relocating, []

        def run(txn: WriteTxn) -> tuple[T, object]:
            for one in copied:
                end_relocation(txn, one, Copied.DURABLE)
            result = work(txn)
            begun = None if step is None else step(txn)
            self.evictions_max = max(self.evictions_max, len(txn.evicted))
            return result, begun

        began = time.thread_time()
        result, begun = self.index.transact(run)
        self.cpu_s_max = max(self.cpu_s_max, time.thread_time() - began)
        for one in copied:
            one.ended = True
        if isinstance(begun, list):
            self.drain.relocations.began(begun)
            self._relocating = begun
        return result

    def put(self, access: Access, priority: int = PRIORITY) -> Stored:
        """Store one block, as `WriteBatch` does: again for as long as room may come."""
        for _ in range(TRIES_MAX):
            result = self.transact(lambda txn: self.try_put(txn, access, priority))
            if result is not None:
                self.results[access[0], result] += 1
                return result
        raise AssertionError("room is made for ever")

    def run(self, accesses: Iterable[Access]) -> None:
        """Use each block or, where it is missing, store it."""
        batch: list[Access] = []
        for access in accesses:
            batch.append(access)
            if len(batch) == BATCH:
                self._run(batch)
                batch = []
        self._run(batch)

    def resident(self, slot_cls: int, numbers: Iterable[int]) -> int:
        """How many of these are here."""
        return sum(raw is not None for raw, _ in self.index.find([name_of((slot_cls, number)) for number in numbers]))

    def settle(self) -> None:
        """Transactions until nothing drains."""
        for _ in range(TRIES_MAX):
            self.transact(lambda txn: None)
            if not self.drain.busy and not self._relocating:
                return
        raise AssertionError("it drains for ever")

    def draining(self) -> list[int]:
        """Segments that give out no slots."""
        with self.index.reading() as txn:
            return sorted(promises_in(txn))

    def class_of(self, segment: int) -> int:
        """The class that has it."""
        with self.index.reading() as txn:
            return Segment.decode(txn.get(number_key(SEGMENTS, segment))).slot_class

    def place_of(self, access: Access) -> tuple[int, int]:
        """(segment, slot) of a block that is here."""
        ((raw, _),) = self.index.find([name_of(access)])
        assert raw is not None
        entry = Entry.decode(name_of(access), raw)
        return entry.segment, entry.slot

    def segment_of(self, access: Access) -> int | None:
        """Where the block lies, if it is here."""
        return self.place_of(access)[0] if self.resident(access[0], [access[1]]) else None

    def _run(self, batch: Sequence[Access]) -> None:
        def use(txn: WriteTxn) -> list[Access]:
            missing = []
            for access in batch:
                if txn.find(name_of(access)) is not None:
                    txn.renew(name_of(access), [NOW], txn.tick)
                    self.hits[access[0]] += access[0] * SLOT_ALIGN
                elif (result := self.try_put(txn, access)) is None:
                    missing.append(access)
                else:
                    self.results[access[0], result] += 1
            return missing

        for access in self.transact(use):
            self.put(access)
        for _ in range(STEPS_BETWEEN):
            if self.drain.busy or self._relocating:
                self.transact(lambda txn: None)

    def try_put(self, txn: WriteTxn, access: Access, priority: int = PRIORITY) -> Stored | None:
        """Store one block; None if room for it may come."""
        block = new_block(access, priority)
        slot = txn.reserve(block, NOW)
        if slot is Stored.FULL and (txn.order.cut_short or self.drain.serves(self.index, access[0])):
            return None
        return txn.publish(slot, block, NOW) if isinstance(slot, SlotReservation) else slot


Stretch = tuple[Sequence[Access], int]
"""Traffic, and how many slots of each class writes hold meanwhile."""


def lru_hit_bytes(traffic: Iterable[Stretch], slot_cls: int, capacity: int) -> int:
    """Hit bytes of one class alone in so many bytes."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for accesses, held in traffic:
        slots = max(0, capacity // (slot_cls * SLOT_ALIGN) - held)
        for cls, number in accesses:
            if cls != slot_cls:
                continue
            if number in resident:
                hits += slot_cls * SLOT_ALIGN
                resident.move_to_end(number)
            elif slots:
                resident[number] = None
            while len(resident) > slots:
                resident.popitem(last=False)
    return hits


def best_split(traffic: Sequence[Stretch], classes: tuple[int, int], segments: int, segment_bytes: int) -> int:
    """Hit bytes of the best static split of the segments in hindsight, among those with the slots that writes hold."""
    held = max(held for _accesses, held in traffic)
    splits = [(count * segment_bytes, (segments - count) * segment_bytes) for count in range(segments + 1)]
    return max(
        sum(lru_hit_bytes(traffic, cls, size) for cls, size in zip(classes, split, strict=True))
        for split in splits
        if all(held * cls * SLOT_ALIGN <= size for cls, size in zip(classes, split, strict=True))
    )
