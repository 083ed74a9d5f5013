"""Blocks on their way from RAM into their slots: reserved, written, synced, published.

A large write is taken for one of a stream: the transaction that publishes it also reserves slots for the next one, so
that a stream of writes commits once per write, not twice.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvtier.clock import Clock
from kvtier.retention.terms import Depth
from kvtier.tiers.disk.io_scheduler import Work
from kvtier.tiers.disk.records import SCOPED_BYTES, SLOT_ALIGN, NewBlock, SlotReservation, slot_class
from kvtier.tiers.disk.slab import neighbours
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Sealed, Stored
from kvtier.times import Mono, Wall

T = TypeVar("T")

STREAM_BYTES_MIN = 8 << 20  # from this size on a write reserves for the next one, too,
STREAM_SHARE = 32  # unless it is more than this part of the capacity
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class WriteBatch:
    """One `write`. All blocks have the same length. `share_bytes`: as in `WriteTxn.publish`."""

    def __init__(
        self, store: Store, namespace: bytes, blocks: Sequence[Sealed], clock: Clock, share_bytes: int
    ) -> None:
        self._store = store
        self._clock = clock
        self._share_bytes = share_bytes
        self._block_bytes = length = sum(map(len, blocks[0].pieces)) if blocks else 0
        self._pieces = [block.pieces for block in blocks]
        self._blocks = []
        for block in blocks:
            name, parent = namespace + block.key, None if block.parent is None else namespace + block.parent
            self._blocks.append(NewBlock(name, length, block.life, block.index, block.digest, parent, block.priority))
        self._reserved: dict[int, SlotReservation] = {}  # by place in the batch
        self._results: dict[int, Stored] = {}  # the same
        self._lock = threading.Lock()

    async def run(self, deadline: Mono) -> list[Stored]:
        """Per block, its result. When it returns or raises no thread reads a piece and no slot stays reserved.

        Raises TierTimeout, TierFull or TierError.
        """
        try:
            await self._reserve(deadline)
            await self._store.io.write(self.jobs(deadline)).wait()
            await self._publish(deadline)
        finally:
            self._store.give_back(list(self._reserved.values()))
        return [self._results[place] for place in range(len(self._blocks))]

    async def _reserve(self, deadline: Mono) -> None:
        wall_s = self._clock.wall()
        # Parents first: where space ends, the deepest blocks are refused.
        places = sorted(range(len(self._blocks)), key=lambda place: self._blocks[place].depth)

        def reserve(txn: WriteTxn) -> list[SlotReservation | Stored]:
            slots = [txn.reserve(self._blocks[place], wall_s, self._share_bytes) for place in places]
            if Stored.FULL not in slots or not self._store.makes_room(slot_class(self._block_bytes)):
                return slots
            for slot in slots:
                if isinstance(slot, SlotReservation):
                    txn.release(slot, refund=True)
            return []

        def undo(slots: Sequence[SlotReservation | Stored]) -> None:
            self._store.give_back([one for one in slots if isinstance(one, SlotReservation)])

        slots = self._take_reserved(wall_s)
        if not slots:
            places = self._within_budget(places)
        while places and not slots:  # each transaction makes some more room, from other classes
            slots = await self._commit(reserve, deadline, undo)
        for place, slot in zip(places, slots, strict=True):
            if isinstance(slot, SlotReservation):
                self._reserved[place] = slot
            else:
                self._results[place] = slot

    def _within_budget(self, places: list[int]) -> list[int]:
        """The places that are worth a transaction: where the budget is spent, those of blocks that are here."""
        store = self._store
        if store.may_write(slot_class(self._block_bytes) * SLOT_ALIGN):
            return places
        found = store.index.find([block.name for block in self._blocks])
        self._results = {place: Stored.BUDGET for place, (raw, _) in enumerate(found) if raw is None}
        return [place for place in places if place not in self._results]

    def _take_reserved(self, wall_s: Wall) -> Sequence[SlotReservation | Stored]:
        """Slots that an earlier write reserved for this one; none if a transaction must decide about a block.

        A block whose parent is in the batch is not looked up: where the parent is absent, it is absent too. If it is
        there all the same, publishing finds it.
        """
        store = self._store
        if not self._streams(len(self._blocks)):
            return []
        names = {block.name for block in self._blocks}
        heads = [block.name for block in self._blocks if block.parent not in names]
        purged: dict[bytes, Wall] = {}
        for name, (raw, purged_until) in zip(heads, store.index.find(heads), strict=True):
            if raw is not None:
                return []
            purged[name[:SCOPED_BYTES]] = purged_until
        for block in self._blocks:
            purged_until = purged.get(block.name[:SCOPED_BYTES], Wall("inf"))
            if not block.life.servable(Depth.G3, wall_s) or block.life.born <= purged_until:
                return []
        return store.reserved.take(slot_class(self._block_bytes), len(self._blocks), store.tick)

    def _streams(self, count: int) -> bool:
        """Whether a write is so large that more like it will come, and small beside the store."""
        size = count * slot_class(self._block_bytes) * SLOT_ALIGN
        return STREAM_BYTES_MIN <= size <= self._store.geometry.capacity // STREAM_SHARE

    async def _publish(self, deadline: Mono) -> None:
        store, wall_s = self._store, self._clock.wall()
        written = {place: slot for place, slot in self._reserved.items() if place not in self._results}
        if not written:
            return
        count = len(written) if self._streams(len(written)) and store.reserved.wants(len(written)) else 0

        def publish(txn: WriteTxn) -> tuple[list[Stored], list[SlotReservation]]:
            results = [
                txn.publish(slot, self._blocks[place], wall_s, self._share_bytes) for place, slot in written.items()
            ]
            return results, txn.reserve_slots(slot_class(self._block_bytes), count)

        results, spare = await self._commit(publish, deadline, lambda result: store.give_back(result[1]))
        store.reserved.add(spare)
        for place, result in zip(written, results, strict=True):
            self._results[place] = result
            del self._reserved[place]

    async def _commit(self, work: Callable[[WriteTxn], T], deadline: Mono, undo: Callable[[T], object]) -> T:
        timeout_s = max(0.0, deadline - self._clock.monotonic())
        return await self._store.submit(work).result(timeout_s, undo)

    # Writing.

    def jobs(self, deadline: Mono) -> list[Work]:
        """One job per run of neighbouring slots, for I/O threads; the one that finishes a segment syncs it. A job that
        has not begun by the deadline fails its blocks."""
        runs = list(neighbours(list(self._reserved), self._place_of, self._block_bytes))
        self._left = Counter(self._reserved[run[0]].segment for run in runs)
        return [partial(self._write, run, deadline) for run in runs]

    def _place_of(self, place: int) -> tuple[int, int]:
        return self._reserved[place].segment, self._reserved[place].slot

    def _write(self, run: Sequence[int], deadline: Mono) -> None:
        first = self._reserved[run[0]]
        try:
            if self._clock.monotonic() > deadline:
                self._fail(run, Stored.FAILED)
            else:
                pieces = [piece for place in run for piece in self._pieces[place]]
                self._store.slab.write(first.segment, first.offset, pieces)
        except OSError as error:
            self._fail(run, self._result_of(error))
        except Exception:
            self._fail(run, Stored.FAILED)
            raise
        finally:
            with self._lock:
                self._left[first.segment] -= 1
                last = self._left[first.segment] == 0
            if last:
                self._sync(first.segment)

    def _sync(self, segment: int) -> None:
        written = [
            place for place, slot in self._reserved.items() if slot.segment == segment and place not in self._results
        ]
        if not written:
            return
        try:
            self._store.slab.sync(segment)
        except Exception as error:
            if not isinstance(error, OSError):
                self._fail(written, Stored.FAILED)
                raise
            result = self._result_of(error)
            self._fail(written, result)
            if result is Stored.FAILED:
                # After a failed sync the next one proves nothing: the store is opened anew.
                self._store.quarantine(f"fdatasync of segment {segment}: {error}")

    def _fail(self, places: Sequence[int], result: Stored) -> None:
        with self._lock:
            self._results.update(dict.fromkeys(places, result))

    def _result_of(self, error: OSError) -> Stored:
        if error.errno in _NO_ROOM:
            self._store.volume_full()
            return Stored.FULL
        return Stored.FAILED
