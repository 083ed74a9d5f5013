"""Blocks on their way from RAM into their slots: reserved, written, synced (`shared_sync`), published.

The transaction that publishes a write also reserves slots for the next ones, as many as were on their way together of
late, so that each write commits once, not twice: a commit costs as much of the index as a small block. Small blocks are
reserved for in batches, since the blocks that leave for them change pages all over the index and share some of those.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kvtier.clock import Clock
from kvtier.encryption import EncryptionHeader
from kvtier.errors import TierError, TierTimeout
from kvtier.keyring import TAG_BYTES
from kvtier.retention.terms import PRIORITY, Depth
from kvtier.retention.trusted_clock import expired_by
from kvtier.tiers.data_keys import obtain
from kvtier.tiers.disk.encryption import Encryption, encrypt, scope_in_name
from kvtier.tiers.disk.faults import NO_SPACE
from kvtier.tiers.disk.group_commit import BLOCKS_PER_JOB_MAX
from kvtier.tiers.disk.io_scheduler import Work
from kvtier.tiers.disk.read import miss_of
from kvtier.tiers.disk.records import SCOPED_BYTES, SLOT_ALIGN, NewBlock, SlotReservation, slot_class
from kvtier.tiers.disk.shared_sync import Outcome
from kvtier.tiers.disk.slab import neighbours
from kvtier.tiers.disk.slot_health import TRIES, is_place_fault
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.trials import set_aside
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.protocol import Sealed, Stored
from kvtier.times import Mono, Wall

T = TypeVar("T")
Published = tuple[list[Stored], list[SlotReservation]]
"""Results, and slots for later writes."""

RUN_BYTES = 8 << 20
"""Of neighbouring slots that one I/O thread writes, one system call after another: a thread that comes to other work
finds the processor's caches cold."""
SLOTS_PER_BLOCK_MAX = 3  # that a block is written to, one after another, while they fail
STREAM_BYTES_MIN = 8 << 20  # a write of this size is one of a stream, and reserves for the next one, too,
STREAM_SHARE = 32  # unless it is more than this part of the capacity;
SMALL_SHARE = 1024  # so does a smaller one, unless it is more than this part,
AHEAD_BLOCKS = 64  # and for so many blocks, of as many bytes at most


class WriteBatch:
    """One `write`. All blocks have the same length. `share_bytes`: as in `WriteTxn.publish`."""

    def __init__(
        self, store: Store, namespace: bytes, blocks: Sequence[Sealed], clock: Clock, share_bytes: int,
        encryption: Encryption | None = None,
    ) -> None:  # fmt: skip
        self._store = store
        self._encryption = encryption
        self._headers: dict[int, EncryptionHeader] = {}  # by place in the batch, of what was encrypted last
        self._clock = clock
        self._share_bytes = share_bytes
        self._block_bytes = length = sum(map(len, blocks[0].pieces)) if blocks else 0
        self._pieces = [block.pieces for block in blocks]
        self._blocks = []
        for block in blocks:
            name, parent = namespace + block.key, None if block.parent is None else namespace + block.parent
            self._blocks.append(
                NewBlock(
                    name, length, block.life, block.index, block.digest, parent, block.priority, position=block.position
                )
            )
        self._reserved: dict[int, SlotReservation] = {}  # by place in the batch
        self._results: dict[int, Stored] = {}  # the same
        self._began = sys.maxsize  # tick of the first transaction
        self._bad: list[int] = []  # places in the batch whose slots failed alone
        self._lock = threading.Lock()
        self._jobs_left = 0  # jobs that have not ended
        self._synced = Future[dict[int, Outcome]]()  # ends when they and the syncs have

    async def run(self, deadline: Mono) -> list[Stored]:
        """Per block, its result. When it returns or raises no thread reads a piece and no slot stays reserved.

        Raises TierTimeout, TierFull or TierError.
        """
        if self._encryption is not None:
            scopes = {scope_in_name(block.name) for block in self._blocks}
            keys = await obtain(self._encryption.keys, scopes, self._left_s(deadline))
            self._blocks = [one._replace(digest=b"", key=keys[scope_in_name(one.name)]) for one in self._blocks]
        count = len(self._blocks)
        with self._store.reserved.writing(count if self._streams(count) else 0):
            try:
                await self._reserve(deadline)
                places, failures = list(self._reserved), self._store.syncs.failures
                for _ in range(SLOTS_PER_BLOCK_MAX):
                    await self._write_and_sync(places, deadline)
                    places = await self._replace_bad(deadline)
                    if not places:
                        break
                self._judge(failures)
                await self._publish(deadline)
            finally:
                self._store.give_back(list(self._reserved.values()))
        return [self._results[place] for place in range(len(self._blocks))]

    async def _reserve(self, deadline: Mono) -> None:
        wall_s, expired = self._clock.wall(), expired_by(self._clock)
        # Parents first: where space ends, the deepest blocks are refused.
        places = sorted(range(len(self._blocks)), key=self._depth_of)
        slots = self._take_reserved(wall_s)
        if slots:
            self._assign(places, slots)
            return
        for some in in_jobs(self._within_budget(places)):
            slots = []
            while not slots:  # each transaction makes some more room, from other classes, or searches on for it
                work = partial(self._reserve_some, places=some, wall_s=wall_s, expired=expired)
                slots = await self._commit(work, deadline, self._undo, len(some))
            self._assign(some, slots)

    def _reserve_some(
        self, txn: WriteTxn, places: Sequence[int], wall_s: Wall, expired: Wall
    ) -> list[SlotReservation | Stored]:
        """Slots for these blocks, or why they get none; nothing if room for them is being made or searched for."""
        self._began = min(self._began, txn.tick)
        with txn.going_on(self._began, [self._blocks[place] for place in self._reserved]):
            share = self._share_bytes
            slots = [txn.reserve(self._blocks[place], wall_s, share, expired_by=expired) for place in places]
        index = self._store.index_in_use  # it may be out of use by now: that is for the commit to find out
        goes_on = index is not None and self._store.room.serves(index, slot_class(self._block_bytes))
        if Stored.FULL not in slots or not (txn.order.cut_short or goes_on):
            return slots
        for slot in slots:
            if isinstance(slot, SlotReservation):
                txn.release(slot, refund=True)
        return []

    def _undo(self, slots: Sequence[SlotReservation | Stored]) -> None:
        self._store.give_back([one for one in slots if isinstance(one, SlotReservation)])

    def _assign(self, places: Sequence[int], slots: Sequence[SlotReservation | Stored]) -> None:
        """Slots that came in several transactions get one tick, since a head must not be colder than its tail."""
        for place, slot in zip(places, slots, strict=True):
            if isinstance(slot, SlotReservation):
                self._reserved[place] = slot if slot.tick <= self._began else slot._replace(tick=self._began)
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
        if not self._streams(len(self._blocks)) or any(block.priority < PRIORITY for block in self._blocks):
            return []
        names = {block.name for block in self._blocks}
        above = {block.parent for block in self._blocks if block.parent is not None} - names
        heads = [block.name for block in self._blocks if block.parent not in names]
        asked = [*above, *heads]
        found = dict(zip(asked, store.index.find(asked), strict=True))
        if any(miss_of(name, *found[name], store.touches, wall_s) for name in above):
            return []
        if any(found[name][0] is not None for name in heads):
            return []
        purged = {name[:SCOPED_BYTES]: purged_until for name, (_, purged_until) in found.items()}
        # Nearly always one put's, with one life.
        kinds = {(block.name[:SCOPED_BYTES], id(block.life), block.position): block for block in self._blocks}
        for (scoped, _, _), block in kinds.items():
            if not block.life.servable(Depth.G3, wall_s) or block.mark <= purged.get(scoped, Wall("inf")):
                return []
        return store.reserved.take(slot_class(self._block_bytes), len(self._blocks), store.tick)

    def _ahead(self, count: int) -> tuple[int, int]:
        """The arguments of `ReservedSlots.reserving` for a write of `count` blocks."""
        if not self._streams(count):
            return 0, 0
        slot_bytes = slot_class(self._block_bytes) * SLOT_ALIGN
        most = min(STREAM_BYTES_MIN, self._store.geometry.capacity // SMALL_SHARE)
        return count, min(AHEAD_BLOCKS, most // slot_bytes)

    def _streams(self, count: int) -> bool:
        """Whether a write is small beside the store, so that slots may be held for one that follows."""
        size = count * slot_class(self._block_bytes) * SLOT_ALIGN
        share = STREAM_SHARE if size >= STREAM_BYTES_MIN else SMALL_SHARE
        return 0 < size <= self._store.geometry.capacity // share

    async def _replace_bad(self, deadline: Mono) -> list[int]:
        """Set aside the slots that failed alone. Returns the places in the batch that have other slots now."""
        bad, self._bad = sorted(self._bad, key=self._depth_of), []
        if not bad:
            return []
        store, wall_s = self._store, self._clock.wall()
        slots = [self._reserved[place] for place in bad]

        def replace(txn: WriteTxn) -> list[SlotReservation] | None:
            if not set_aside(txn, slots, TRIES, wall_s):
                return None
            return txn.reserve_slots(slot_class(self._block_bytes), len(slots))

        fresh = await self._commit(replace, deadline, lambda fresh: store.give_back(fresh or []), len(bad))
        if fresh is None:
            store.too_many_bad()
            return []
        store.health.counts["set_aside_slots"] += len(slots)
        for place in bad:
            del self._reserved[place]
        self._reserved.update(zip(bad, fresh, strict=False))
        return bad[: len(fresh)]

    def _depth_of(self, place: int) -> int:
        return self._blocks[place].depth

    async def _publish(self, deadline: Mono) -> None:
        store, wall_s, expired = self._store, self._clock.wall(), expired_by(self._clock)
        whole = (place for place in self._reserved if place not in self._results)
        for places in in_jobs(sorted(whole, key=self._depth_of)):
            with store.reserved.reserving(*self._ahead(len(places))) as ahead:
                work = partial(self._publish_some, places=places, wall_s=wall_s, expired=expired, ahead=ahead)
                results, spare = await self._commit(
                    work, deadline, lambda result: store.give_back(result[1]), len(places) + ahead
                )
                store.reserved.add(spare)
            for place, result in zip(places, results, strict=True):
                self._results[place] = result
                del self._reserved[place]

    def _publish_some(self, txn: WriteTxn, places: Sequence[int], wall_s: Wall, expired: Wall, ahead: int) -> Published:
        """Publish these blocks and reserve slots for later writes."""
        results = []
        for place in places:
            block = self._blocks[place]
            if place in self._headers:
                block = block._replace(encryption=self._headers[place])
            reservation, share = self._reserved[place], self._share_bytes
            results.append(txn.publish(reservation, block, wall_s, share, expired_by=expired))
        return results, txn.reserve_slots(slot_class(self._block_bytes), ahead)

    async def _commit(
        self, work: Callable[[WriteTxn], T], deadline: Mono, undo: Callable[[T], object], blocks: int
    ) -> T:
        return await self._store.submit(work, blocks=blocks).result(self._left_s(deadline), undo)

    def _left_s(self, deadline: Mono) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    # Writing.

    def jobs(self, places: Sequence[int], deadline: Mono) -> list[Work]:
        """One job per run of neighbouring slots, for I/O threads. A job that has not begun by the deadline fails its
        blocks."""
        for place in places:
            self._results.pop(place, None)
        runs = neighbours(places, self._place_of, self._block_bytes, RUN_BYTES)
        return [partial(self._write, run, deadline) for run in runs]

    def _place_of(self, place: int) -> tuple[int, int]:
        return self._reserved[place].segment, self._reserved[place].slot

    async def _write_and_sync(self, places: Sequence[int], deadline: Mono) -> None:
        """Write to these slots, and sync what is written so far. The thread that ends the last write asks for the
        syncs, so that the event loop wakes once. Returns when no thread reads a piece and the syncs have ended, or are
        late. Those that are late, or are under way at a cancellation, are left to themselves: they touch no piece, and
        a slot that is given back may be synced."""
        jobs = self.jobs(places, deadline)
        if not jobs:
            return
        self._jobs_left, self._synced = len(jobs), Future()
        self._synced.set_running_or_notify_cancel()
        batch = self._store.io.write(jobs)
        try:
            async with asyncio.timeout(self._left_s(deadline)):
                await asyncio.wrap_future(self._synced)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            batch.cancel()
            raise
        finally:
            await batch.wait()

    def _write(self, run: Sequence[int], deadline: Mono) -> None:
        try:
            self._write_run(run, deadline)
        except Exception:
            self._fail(run, Stored.FAILED)
            raise
        finally:
            with self._lock:
                self._jobs_left -= 1
                last = not self._jobs_left
            if last:
                self._sync()

    def _sync(self) -> None:
        """Make durable what was written, on the thread that wrote the last of it."""
        segments = {slot.segment for place, slot in self._reserved.items() if place not in self._results}
        self._store.syncs.request_all(segments, self._synced)

    def _write_run(self, run: Sequence[int], deadline: Mono) -> None:
        if self._clock.monotonic() > deadline:
            self._fail(run, Stored.FAILED)
            return
        first = self._reserved[run[0]]
        try:
            self._store.slab.write(first.segment, first.offset, self._bytes_of(run))
            self._store.health.moved(len(run))
        except OSError as error:
            if is_place_fault(error):
                self._write_alone(run, deadline)
            else:
                self._fail(run, self._result_of(error, first.segment))

    def _bytes_of(self, run: Sequence[int]) -> Sequence[memoryview]:
        """What is to be written for these places: their pieces, or their ciphertext in this thread's memory."""
        if self._encryption is None:
            return [piece for place in run for piece in self._pieces[place]]
        size = self._block_bytes
        memory = self._encryption.memory(len(run) * size)
        for number, place in enumerate(run):
            block, out = self._blocks[place], memory[number * size : (number + 1) * size + TAG_BYTES]
            assert block.key is not None
            self._headers[place] = encrypt(block.key, block.name, block.depth, self._pieces[place], out)
        return [memory[:-TAG_BYTES]]

    def _write_alone(self, run: Sequence[int], deadline: Mono) -> None:
        """Slot by slot, after the run failed."""

        def write(place: int) -> None:
            if self._clock.monotonic() > deadline:
                raise TimeoutError
            slot = self._reserved[place]
            self._store.slab.write(slot.segment, slot.offset, self._bytes_of([place]))

        segment = self._reserved[run[0]].segment
        outcomes = self._store.alone(segment, [partial(write, place) for place in run], self._clock)
        if outcomes is None:
            self._fail(run, Stored.FAILED)
            return
        for place, error in zip(run, outcomes, strict=True):
            if error is not None:
                self._fail([place], self._result_of(error, segment))
            if is_place_fault(error):
                with self._lock:
                    self._bad.append(place)

    def _judge(self, failures: int) -> None:
        """Fail what is not durable. `failures`: of syncs, when the write began."""
        written = defaultdict[int, list[int]](list)
        for place, slot in self._reserved.items():
            if place not in self._results:
                written[slot.segment].append(place)
        if written and not self._synced.done():
            raise TierTimeout("g3", "write", "the device made nothing durable within the deadline")
        for segment, places in written.items():
            outcome = self._synced.result()[segment]
            if isinstance(outcome, TierError):  # the store is out of use: nothing can be published
                raise outcome
            if isinstance(outcome, OSError):
                self._fail(places, self._result_of(outcome, segment))
            elif outcome is not None or self._store.syncs.failures != failures:
                self._fail(places, Stored.FAILED)

    def _fail(self, places: Sequence[int], result: Stored) -> None:
        with self._lock:
            self._results.update(dict.fromkeys(places, result))

    def _result_of(self, error: OSError, segment: int) -> Stored:
        if error.errno in NO_SPACE:
            self._store.volume_full(segment)
            return Stored.FULL
        return Stored.FAILED


def in_jobs(places: Sequence[int]) -> Iterator[Sequence[int]]:
    """Parts of which each is worked on in one transaction. Pure."""
    for start in range(0, len(places), BLOCKS_PER_JOB_MAX):
        yield places[start : start + BLOCKS_PER_JOB_MAX]
