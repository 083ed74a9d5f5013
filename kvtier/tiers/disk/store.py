"""A G3 store as this process has it open: lock, index, slab and threads, shared by the tiers on it.

Tiers of several namespaces on one directory share one Store. After an error that leaves the index or a file in doubt
the store is *quarantined*: every verb fails until the writer thread has opened it again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvtier.clock import Clock, SystemClock
from kvtier.errors import ClosedError, ConfigError, TierError, TierFull, TierUnavailable
from kvtier.supervisor import Failures, Service, Together
from kvtier.tiers.disk import recovery
from kvtier.tiers.disk.budget import COMMIT_BYTES, DailyBound
from kvtier.tiers.disk.damage_mark import MarkWatch
from kvtier.tiers.disk.dead_owners import DeadOwners
from kvtier.tiers.disk.directory import prepare
from kvtier.tiers.disk.faults import Unusable, is_damage, is_suspicious, unavailable
from kvtier.tiers.disk.group_commit import BLOCKS_PER_COMMIT_MAX, CommitJob, GroupCommit, admitted
from kvtier.tiers.disk.growth import CapacityGrowth
from kvtier.tiers.disk.idle_work import IdleWork
from kvtier.tiers.disk.index import Index, Use
from kvtier.tiers.disk.io_scheduler import IOScheduler
from kvtier.tiers.disk.open_stores import OpenStores
from kvtier.tiers.disk.own_thread import on_own_thread
from kvtier.tiers.disk.preallocate import Preallocator
from kvtier.tiers.disk.quarantine import Quarantine, is_full
from kvtier.tiers.disk.records import SLOT_ALIGN, SlotReservation, slot_class
from kvtier.tiers.disk.removals import Removals
from kvtier.tiers.disk.reserved_slots import ReservedSlots
from kvtier.tiers.disk.room_maker import RoomMaker
from kvtier.tiers.disk.shared_sync import SharedSyncs
from kvtier.tiers.disk.shrink import Shrink
from kvtier.tiers.disk.slab import Calls, Slab, SystemCalls
from kvtier.tiers.disk.slot_health import REST_S, TRIES, DeviceFault, SlotHealth, probe_device
from kvtier.tiers.disk.touches import Touches
from kvtier.tiers.disk.trials import Dropped, Trial, drop_unreadable
from kvtier.tiers.disk.volumes import Volumes
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.times import Wall

T = TypeVar("T")

log = logging.getLogger(__name__)

THREADS = 8
WRITERS_MAX = 2  # of them at once; see WRITE_BYTES
CLOSE_TIMEOUT_S = 5.0
IDLE_S = 0.5
HOLD_S = 10.0  # slots are held for writes that may follow


class Store:
    """Made by `attach` or `visit`, given back by `release`. Thread-safe."""

    def __init__(
        self,
        opened: recovery.Opened,
        calls: Calls,
        slot_bytes: int = 0,
        wall: Callable[[], Wall] = lambda: Wall(time.time()),
        *,
        maintained: bool = True,
    ) -> None:
        """`slot_bytes`: for which a new index would be cut. `maintained`: whether the writer thread cleans up, opens
        the store again and makes it as small as its capacity by itself."""
        self.parts, self._lock, index = opened.parts, opened.lock, opened.index
        self.owner = index.owner
        self.geometry = index.geometry()
        self.failures = Failures(SystemClock())
        self.services: list[Service] = []  # out while a thread keeps failing; called on that thread
        self.io = IOScheduler(THREADS, WRITERS_MAX, "kvtier-g3-io", partial(self._failed, "g3 io"))
        self.slab = Slab(self.parts, lambda segment: self.geometry.size_of(segment), calls, self.io.write_bytes)
        self.syncs = SharedSyncs(self)
        self.users, self.closing = 0, False
        self.evictions = 0  # blocks that this process's writes pushed out
        self.subscribers: list[Callable[[Sequence[bytes]], None]] = []  # take their names, on the writer thread
        self.touches = Touches()
        self.reserved = ReservedSlots()
        self.tick = 0  # of the last transaction
        self._state = Quarantine(index, self.parts[0])
        self._slot_bytes, self._maintained = slot_bytes, maintained
        self._calls, self._wall = calls, wall
        self._daily = DailyBound()
        self._preallocator = Preallocator(self.parts, lambda segment: self.geometry.size_of(segment), calls)
        self.health = SlotHealth(self.parts, calls)
        self.volumes = Volumes(self.parts, calls)
        self.idle = IdleWork(self, self._preallocator, lambda: not self._daily.bytes)  # zeros would cost half of it
        self._uuid, self._mark = index.uuid(), MarkWatch(self.parts[0])
        self._dead_owners = DeadOwners()
        self._removals = Removals(self.touches, wall, lambda: maintained and self._may_commit())
        self.shrink = Shrink(self.slab, self.parts[0], self._may_commit)
        if maintained:
            index.on_damage = self._reader_failed
            self.shrink.begin(index)
        self.room = RoomMaker(
            self.reserved, self.shrink, wall, lambda: maintained and self._may_commit(), self.idle.relocate
        )
        self.growth = CapacityGrowth(self.parts[0], self._lock)
        self._hold_until = 0.0  # of slots
        hooks = self._writer_failed, self.reserved.expected, self.room.evictions
        self._writer = GroupCommit(self._work, self._rest, IDLE_S, "kvtier-g3-writer", *hooks)

    # Life.

    @classmethod
    def attach(
        cls,
        parts: Sequence[Path],
        capacity_bytes: int,
        block_bytes: int,
        calls: Calls,
        wall: Callable[[], Wall] = lambda: Wall(time.time()),
    ) -> Store:
        """Open the store, or create it, or share the one that this process has open. Blocks, for seconds at most.

        `wall` is the clock by which blocks expire; that of the first to open it counts. Raises ConfigError, FormatError
        or TierError; TierUnavailable for a fault of the machine, which changes nothing.
        """
        slot_bytes = slot_class(block_bytes) * SLOT_ALIGN
        if capacity_bytes < slot_bytes:
            raise ConfigError(
                f"tiers.g3.capacity {capacity_bytes} is smaller than one block: at least {slot_bytes} bytes are needed"
            )
        with unavailable(parts[0]):
            prepare(parts)
            store = open_stores.share(
                parts[0],
                lambda: cls(recovery.attach(parts, capacity_bytes, slot_bytes), calls, slot_bytes, wall)._start(),
            )
        if store.geometry.size_of(0) < slot_bytes:
            store.release(CLOSE_TIMEOUT_S)
            raise ConfigError(
                f"tiers.g3: {parts[0]} has segments of {store.geometry.size_of(0)} bytes, too small for blocks of "
                f"{block_bytes}; raise tiers.g3.capacity, or remove the directory"
            )
        return store

    @classmethod
    def visit(cls, parts: Sequence[Path], *, capacity_bytes: int | None = None) -> Store:
        """Open a store that exists, as it is, for maintenance. Nothing is created or repaired; with `capacity_bytes` it
        gets another capacity, for which no other process may use it, and shrinks where that is smaller. Blocks. Raises
        FormatError, ConfigError or TierError."""
        for part in parts:
            if not part.is_dir():
                raise ConfigError(f"{part}: no such directory")
        with unavailable(parts[0]):
            return open_stores.share(parts[0], partial(cls._visit, parts, capacity_bytes))

    @classmethod
    def _visit(cls, parts: Sequence[Path], capacity_bytes: int | None) -> Store:
        store = cls(recovery.visit(parts, capacity_bytes), SystemCalls(), maintained=False)
        if capacity_bytes is not None:
            store.shrink.begin(store.index)
        return store._start()

    def _start(self) -> Store:
        try:
            self._writer.start()
        except RuntimeError as error:  # no thread can be started
            self._close()
            raise TierUnavailable("g3", "open", f"{self.parts[0]}: {error}") from error
        return self

    def release_soon(self) -> Future[None]:
        """One user less; the last one closes everything. Does not block; the future ends when that is done. Until then
        this process cannot open the store again: a thread may be stuck below LMDB's write lock or in the device. Where
        no thread can be started the future fails, and the store stays as it is for the next that opens it here."""
        with open_stores.lock:
            self.users -= 1
            last = not self.users and self.owner.pid == os.getpid()
            ended = on_own_thread("kvtier-g3-close", self._close if last else lambda: None)
            self.closing = last and not (ended.done() and ended.exception())
            return ended

    def release(self, timeout_s: float) -> None:
        """`release_soon`, and block until it is done, `timeout_s` at most."""
        if not wait([self.release_soon()], timeout_s).done:
            self.warn_of_close()

    def warn_of_close(self) -> None:
        """Log that the store is still being closed."""
        log.warning("g3: %s: still waiting for the device, or for a stopped process, to close", self.parts[0])

    def _close(self) -> None:
        # The writer thread ends last: what it does not free now, no other process frees before this one ends.
        stops = (self.room.stop, self.idle.stop, self.io.stop, self.reserved.return_held, self._writer.stop)
        for close in (*stops, self._preallocator.stop, self._state.close, self.slab.close, self._lock.release):
            try:
                close()
            except Exception:  # the rest is given back all the same
                log.exception("g3: %s: a part of it failed to close", self.parts[0])
        open_stores.forget(lambda store: store is self)

    # Use.

    @property
    def index(self) -> Index:
        """The open index. Raises TierError while the store is quarantined, ClosedError after a fork."""
        if self.owner.pid != os.getpid():
            raise ClosedError(f"{self.parts[0]} was opened by the process that forked this one")
        return self._state.usable()

    @property
    def index_in_use(self) -> Index | None:
        """The same; None while the store is quarantined or closed."""
        return self._state.index

    def submit(self, work: Callable[[WriteTxn], T], use: Use = Use.PUT, blocks: int = 1) -> CommitJob[T]:
        """Queue work on so many blocks for the next write transaction. Never blocks. Raises what `index` raises."""
        _ = self.index
        return self._writer.submit(work, use, blocks)

    def give_back(self, reservations: Sequence[SlotReservation], *, unused: bool = False) -> None:
        """Free slots that were reserved and not published, with the next transaction that succeeds. Never blocks.
        `unused`: nothing was written to them."""
        if reservations:
            self.reserved.give_back(reservations, unused=unused)
            self._writer.wake()

    def moving(self) -> AbstractContextManager[None]:
        """While inside, blocks may be read from or written to slots: the store is not opened anew. Entering raises
        what `index` raises."""
        _ = self.index
        return self._state.moving()

    def limit_writes(self, user: object, bytes_per_day: float, boot_s: Callable[[], float]) -> None:
        """Write at most so much a day, by a clock that counts since boot; the least bound of several users counts."""
        self._daily.limit(user, bytes_per_day, boot_s)

    def may_write(self, size: int) -> bool:
        """Whether the directory's budget allows so many bytes now. Raises what `index` raises."""
        if not self._daily.bytes:
            return True
        index = self.index
        return index.balance().allows(index.allowance(self._daily.bytes, self._daily.boot_s()), size)

    def _may_commit(self) -> bool:
        """Whether the budget allows a transaction that nobody waits for; none while the store is out of use. Raises
        what reading a damaged index raises."""
        try:
            return self.may_write(COMMIT_BYTES)
        except (TierError, ClosedError):
            return False

    def alone(self, segment: int, works: Sequence[Callable[[], None]], clock: Clock) -> list[OSError | None] | None:
        """`SlotHealth.alone`; None if the device is at fault, for which the store is out of use then."""
        try:
            return self.health.alone(segment, works, clock.monotonic)
        except DeviceFault as fault:
            self.quarantine(f"the device fails: {fault}", rest_s=fault.rest_s)
            return None

    def too_many_bad(self) -> None:
        """More places fail than may be set aside: take the store out of use for a while."""
        self.quarantine("the device fails: too many bad places for it to be theirs", rest_s=REST_S)

    def drop_unreadable(self, blocks: Sequence[tuple[bytes, bytes]], wall_s: Wall) -> CommitJob[list[Trial | Dropped]]:
        """Queue the removal of blocks, as (name, raw entry), whose slots failed alone. The slots are tried, when the
        disk is idle, before they are used again. Never blocks. Raises what `index` raises."""
        job = self.submit(
            lambda txn: [drop_unreadable(txn, name, raw, TRIES, wall_s) for name, raw in blocks], Use.DROP
        )
        self.idle.trials.follow(job)
        return job

    def volume_full(self, segment: int | None = None) -> None:
        """The volume of a segment, or of the index, took no more bytes: use the existing segments there, or everywhere,
        for a while. What is held for later writes may lie in a segment that was not made."""
        for part in range(len(self.parts)) if segment is None else [segment % len(self.parts)]:
            self.volumes.found_full(part)
        self.reserved.return_held()

    def quarantine(self, reason: str, *, damaged: bool = False, rest_s: float = 0.0) -> None:
        """Take the store out of use until the writer thread has opened it again, after `rest_s` at the earliest.
        `damaged`: with a new index if its tables are damaged."""
        self._state.begin(reason, damaged=damaged, rest_s=rest_s)

    def check(self) -> None:
        """Assert that the index is consistent and the files are within the capacity, or an earlier one while the store
        shrinks. Reads the whole index."""
        self.index.check()
        size, reach = self.slab.size(), self.index.reach().capacity
        assert size <= reach, f"slab files have {size} bytes"

    def _failed(self, thread: str, error: Exception) -> float:
        """A thread has failed; returns the seconds after which it is to go on."""
        return self.failures.record(thread, error, Together(self.services))

    # On the writer thread.

    def _work(self, jobs: Sequence[CommitJob[Any]]) -> bool:
        """Commit jobs. Whether that left something to `_rest`."""
        index = self._state.index
        more = self.room.due_jobs(index)
        if self._maintained and index is not None:
            more += self._dead_owners.due_jobs(index)
        return self._commit([*jobs, *more]) and (self.room.busy or self.touches.overdue or self.reserved.has_returned)

    def _commit(self, jobs: Sequence[CommitJob[Any]]) -> bool:
        """Commit the jobs with what else is due, or fail them. Whether a transaction was committed."""
        self._heed_mark()
        if self._state.index is None:
            self._probe()
        try:
            index = self._state.usable("commit")
        except TierError as error:
            for job in jobs:
                job.fail(error)
            return False
        jobs = admitted([*jobs, *self._removals.due_jobs(index)], index)
        if not jobs:
            return False
        returned, unused = self.reserved.take_returned()

        def work(txn: WriteTxn) -> tuple[WriteTxn, list[tuple[CommitJob[Any], Any]]]:
            running = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            for reservation in returned:
                txn.release(reservation)
            for reservation in unused:
                txn.release(reservation, refund=True)
            if txn.budget.allows(COMMIT_BYTES):
                touches, tick = self.touches.take(txn.tick, BLOCKS_PER_COMMIT_MAX - sum(job.blocks for job in jobs))
                for name, uses in touches.items():
                    txn.renew(name, uses, tick)
            return txn, [(job, job.work(txn)) for job in running]

        try:
            self.volumes.try_again()
            if (grown := self.growth.step(index, self.geometry)) != self.geometry:
                self.geometry = grown
                self.shrink.begin(index)
            txn, results = index.transact(
                work, may_grow=self.volumes.may_grow, per_day=self._daily.bytes, now_s=self._daily.boot_s()
            )
        except Exception as error:
            self.reserved.give_back(returned)
            self.reserved.give_back(unused, unused=True)
            failure = self._commit_failed(index, error)
            for job in jobs:
                job.fail(failure)
            return False
        try:
            self.evictions += len(txn.evicted)
            self._notify(list(txn.removed))
            self.tick = txn.tick
            if txn.segments.next is not None:
                self.idle.preallocate(txn.segments.next)
            if self.reserved.writes:
                self._hold_until = time.monotonic() + HOLD_S
        finally:
            for job, result in results:  # it is committed, whatever became of the rest
                job.future.set_result(result)
        return True

    def _notify(self, removed: Sequence[bytes]) -> None:
        for notify in self.subscribers if removed else ():
            try:
                notify(removed)
            except Exception as error:  # a subscriber's error says nothing about the index
                self._failed("g3 writer", error)

    def _commit_failed(self, index: Index, error: Exception) -> TierError:
        """The error for those who wait for the transaction. Quarantines the store where `error` leaves it in doubt."""
        import lmdb

        detail = f"{type(error).__name__}: {error}"
        if isinstance(error, lmdb.MapFullError):
            index.clear_dead_readers()
            return TierFull("g3", "commit", detail)
        if isinstance(error, lmdb.Error) and is_full(self.parts[0], error) and index.can_be_read():
            # Only the new pages found no space: the store can be read, and written to once there is space.
            self.volume_full()
            return TierFull("g3", "commit", detail)
        if not isinstance(error, (lmdb.Error, OSError)):
            log.error("g3: %s: a transaction failed", self.parts[0], exc_info=error)
        self.quarantine(detail, damaged=is_damage(error) or is_suspicious(error))
        return TierError("g3", "commit", detail)

    def _rest(self) -> bool:
        """When no job came for a while: write touches, free unused and dead owners' slots, or probe. Whether it
        left something."""
        self._heed_mark()
        if not self._maintained:
            jobs = self.room.due_jobs(self._state.index)
            return (not jobs or self._commit(jobs)) and self.room.busy
        self.volumes.try_again()
        if time.monotonic() >= self._hold_until:
            self.reserved.return_held()  # no write came for them
        index = self._state.index
        if index is None:
            self._probe()
            return False
        jobs = [*self._removals.due_jobs(index), *self.room.due_jobs(index)]
        jobs += [*self._dead_owners.due_jobs(index), *self.idle.trials.due_jobs(index, self._wall)]
        may_write = self._may_commit()  # where it may not, nobody asks for slots either
        wanted = jobs or (may_write and (self.touches or self.reserved.has_returned))
        if wanted and not self._commit(jobs or [CommitJob(lambda txn: None)]):
            return False
        return self.room.busy or (may_write and (self.reserved.has_returned or bool(self.touches)))

    def _probe(self) -> None:
        """Try to open the store again, at growing intervals, once no thread of this process moves blocks."""
        if not self._maintained or not self._state.probe_due():
            return
        try:
            self.slab.close()
            probe_device(self.parts, self._calls)
            size, damaged = self.geometry.capacity, self._state.damaged
            index = recovery.rejoin(self.parts, self._lock, self._uuid, size, self._slot_bytes, damaged=damaged)
        except Unusable as error:
            self._state.let_go(error)
        except Exception as error:  # of any kind: this thread must go on
            self._state.probe_failed(error)
        else:
            self.owner, self.geometry, index.on_damage = index.owner, index.geometry(), self._reader_failed
            self.shrink.begin(index)
            self.reserved.forget()  # the new owner took them back; nothing moves, so no write adds to them
            self.idle.forget()
            self._state.end(index)

    def _heed_mark(self) -> None:
        """Let go of the store if another process found its index damaged."""
        if self._mark.is_seen() and self._state.index is not None:
            self.quarantine("another process found its index damaged", damaged=True)

    def _reader_failed(self, error: Exception) -> None:
        self.quarantine(f"{type(error).__name__}: {error}", damaged=True)

    def _writer_failed(self, error: Exception) -> float:
        """After what only a damaged index raises, the store is opened anew. Returns as `_failed`."""
        if is_damage(error):
            self.quarantine(f"{type(error).__name__}: {error}", damaged=True)
        return self._failed("g3 writer", error)


open_stores: OpenStores[Store] = OpenStores()
