"""A G3 store as this process has it open: lock, index, slab and threads, shared by the tiers on it.

LMDB allows a process one environment per file, so tiers of several namespaces on one directory share one Store,
found through a table of what is open. After an error that leaves the index or a file in doubt the store is
*quarantined*: every verb fails until the writer thread has opened it again.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.errors import ClosedError, ConfigError, CorruptError, FormatError, TierError, TierFull
from kvtier.tiers.disk.directory import DirectoryLock, move_aside, prepare, read_marker
from kvtier.tiers.disk.expired import ExpiredScan
from kvtier.tiers.disk.group_commit import CommitJob, GroupCommit
from kvtier.tiers.disk.index import Index, Unusable
from kvtier.tiers.disk.io_scheduler import IOScheduler
from kvtier.tiers.disk.owner import Owner
from kvtier.tiers.disk.preallocate import Preallocator
from kvtier.tiers.disk.records import SLOT_ALIGN, SlotReservation
from kvtier.tiers.disk.recovery import open_index, probe, take_back
from kvtier.tiers.disk.slab import Calls, Slab, SystemCalls
from kvtier.tiers.disk.stock import ReservedSlots
from kvtier.tiers.disk.touches import Touches
from kvtier.tiers.disk.write_txn import WriteTxn

log = logging.getLogger(__name__)

THREADS = 8
WRITERS_MAX = 3  # of them at once; see WRITE_BYTES_MAX
LOCK_TIMEOUT_S = 5.0
IDLE_S = 0.5
RECLAIM_EVERY_S = 5.0
SEARCH_FIRST_S, SEARCH_EVERY_S = 10.0, 1.0  # for dead entries
PROBE_FIRST_S, PROBE_LAST_S = 0.5, 30.0
GROWTH_PAUSE_S = 30.0
FREE_BYTES_MIN = 1 << 20  # with less than this on the volume, a failed commit is taken for want of room
_CLOSED = "it is closed"

_open_stores: dict[tuple[int, int], Store] = {}  # (device, inode) of the first part; LMDB forces it on us
_open_lock = threading.Lock()


class Store:
    """Made by `attach`, given back by `release`. Thread-safe."""

    def __init__(
        self,
        parts: Sequence[Path],
        lock: DirectoryLock,
        index: Index,
        owner: Owner,
        calls: Calls,
        slot_bytes: int = 0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.parts = list(parts)
        self.owner = owner
        self.geometry = index.geometry()
        self.lanes = IOScheduler(THREADS, WRITERS_MAX, "kvtier-g3-io")
        self.slab = Slab(self.parts, self.geometry.size_of, calls)
        self._draft = Preallocator(self.parts, lambda segment: self.geometry.size_of(segment), calls)
        self._drafting = -1  # the last segment that was to be written ahead
        self.users = 0
        self.evictions = 0  # blocks that this process's writes pushed out
        self.watchers: list[Callable[[Sequence[bytes]], None]] = []  # take their names, on the writer thread
        self.touches = Touches()
        self.stock = ReservedSlots()
        self.tick = 0  # of the last transaction
        self._slot_bytes = slot_bytes or self.geometry.segment_bytes  # of whoever came first; a new index is cut for it
        self._tends = True  # whether the writer thread cleans up and reopens by itself
        self._lock = lock
        self._index: Index | None = index
        self._stale: Index | None = None
        self._calls = calls
        self._state = threading.Lock()
        self._quarantine: str | None = None
        self._damaged = False
        self._probe_at = 0.0
        self._probe_wait_s = PROBE_FIRST_S
        self._reclaim_at = 0.0
        self._wall = wall
        self._search = ExpiredScan()
        self._search_at = time.monotonic() + SEARCH_FIRST_S
        self._grow_at = 0.0
        self._moving = 0
        self._returned: list[SlotReservation] = []
        self._writer = GroupCommit(self._commit, self._rest, IDLE_S, "kvtier-g3-writer")

    # Life.

    @classmethod
    def attach(
        cls,
        parts: Sequence[Path],
        capacity: int,
        block_bytes: int,
        calls: Calls,
        wall: Callable[[], float] = time.time,
    ) -> Store:
        """Open the store, or create it, or share what this process has open. Blocks, for seconds at most.

        `wall` is the clock that says which blocks are dead; that of the first to open it counts.
        Raises ConfigError, FormatError or TierError.
        """
        prepare(parts)
        store = cls._share(parts, lambda: cls._open(parts, capacity, block_bytes, calls, wall))
        slot_bytes = -(-block_bytes // SLOT_ALIGN) * SLOT_ALIGN
        if store.geometry.size_of(0) < slot_bytes:
            store.release(LOCK_TIMEOUT_S)
            raise ConfigError(
                f"tiers.g3: {parts[0]} has segments of {store.geometry.size_of(0)} bytes, too small for blocks of "
                f"{block_bytes}; raise tiers.g3.capacity, or remove the directory"
            )
        return store

    @classmethod
    def visit(cls, parts: Sequence[Path], *, capacity: int | None = None) -> Store:
        """Open a store that exists, as it is, for looking after it. Nothing is created or repaired; with `capacity` it
        is resized, which nobody else may use it for. Blocks. Raises FormatError, ConfigError or TierError."""
        return cls._share(parts, lambda: cls._visit(parts, capacity))

    @classmethod
    def _share(cls, parts: Sequence[Path], opener: Callable[[], Store]) -> Store:
        try:
            status = parts[0].stat()
        except OSError as error:
            raise ConfigError(f"{parts[0]}: {error.strerror}") from None
        key = (status.st_dev, status.st_ino)
        with _open_lock:
            store = _open_stores.get(key)
            if store is not None and store.owner.pid != os.getpid():
                raise ClosedError(
                    f"{parts[0]} was opened by the process that forked this one; open it after the fork, or start "
                    "processes by spawn"
                )
            if store is not None and store.users == 0:
                raise TierError("g3", "open", f"{parts[0]} is still being closed by this process")
            if store is None:
                store = opener()
                _open_stores[key] = store
                store._writer.start()
            store.users += 1
            return store

    @classmethod
    def _visit(cls, parts: Sequence[Path], capacity: int | None) -> Store:
        markers = [read_marker(part) for part in parts]
        for part, marker in zip(parts, markers, strict=True):
            if marker is None:
                raise FormatError(f"{part} is not a G3 store: it has no readable STORE.json")
        if len({(marker.uuid, marker.parts) for marker in markers if marker}) > 1 or (
            markers[0] is not None and markers[0].parts != len(parts)
        ):
            raise ConfigError(f"{', '.join(map(str, parts))}: not all parts of one store; give them all, in order")
        owner = Owner.current(secrets.randbits(63))
        lock = DirectoryLock(parts[0])
        alone = lock.acquire(owner, LOCK_TIMEOUT_S)
        try:
            if capacity is not None and not alone:
                raise TierError("g3", "resize", f"{parts[0]} is in use by another process; stop it first")
            index = Index.attach(parts[0] / "index", owner, alone=alone)
            store = cls(parts, lock, index, owner, SystemCalls())
            store._tends = False
            if capacity is not None:
                store._resize(index, capacity)
            lock.share()
            return store
        except Unusable as error:
            lock.release()
            raise TierError("g3", "open", f"the index of {parts[0]} is unusable: {error}") from None
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open(
        cls, parts: Sequence[Path], capacity: int, block_bytes: int, calls: Calls, wall: Callable[[], float]
    ) -> Store:
        import lmdb

        owner = Owner.current(secrets.randbits(63))
        slot_bytes = -(-block_bytes // SLOT_ALIGN) * SLOT_ALIGN
        if capacity < slot_bytes:
            raise ConfigError(
                f"tiers.g3.capacity {capacity} is smaller than one block: at least {slot_bytes} bytes are needed"
            )
        lock = DirectoryLock(parts[0])
        alone = lock.acquire(owner, LOCK_TIMEOUT_S)
        try:
            index = open_index(parts, capacity, slot_bytes, owner, alone=alone)
            if alone and not take_back(index):
                index.close()
                log.warning("g3: %s is damaged; moved to %s", parts[0], move_aside(parts[0] / "index"))
                index = open_index(parts, capacity, slot_bytes, owner, alone=True)
            store = cls(parts, lock, index, owner, calls, slot_bytes, wall)
            if alone:
                store._resize(index, capacity)
                lock.share()
            elif capacity != store.geometry.capacity:
                log.warning(
                    "g3: %s has a capacity of %d bytes, not %d, for as long as others use it",
                    parts[0], store.geometry.capacity, capacity,
                )  # fmt: skip
            return store
        except (OSError, Unusable, lmdb.Error) as error:
            lock.release()
            raise TierError("g3", "open", str(error)) from error
        except BaseException:
            lock.release()
            raise

    def _resize(self, index: Index, capacity: int) -> None:
        """While alone: to `capacity`, index first, then the files; an interrupted one is completed here too."""
        if capacity != self.geometry.capacity:

            def work(ledger: WriteTxn) -> None:
                ledger.reclaim()
                ledger.resize(capacity)

            index.transact(work)
            self.geometry = index.geometry()
            self.slab = Slab(self.parts, self.geometry.size_of, self._calls)
        self.slab.cut()

    def release(self, timeout_s: float) -> None:
        """One user less; the last one closes everything. Returns after `timeout_s` at the latest.

        A thread that is stuck below LMDB's write lock or in the device is waited for in the background; until it
        comes back this process cannot open the store again.
        """
        with _open_lock:
            self.users -= 1
            if self.users:
                return
        if self.owner.pid != os.getpid():
            return
        closer = threading.Thread(target=self._close, name="kvtier-g3-close", daemon=True)
        closer.start()
        closer.join(timeout_s)
        if closer.is_alive():
            log.warning("g3: %s: still waiting for the device, or for a stopped process, to close", self.parts[0])

    def _close(self) -> None:
        self._writer.stop()
        self.lanes.stop()
        self._draft.stop()
        with self._state:
            self._quarantine = _CLOSED
            index, self._index = self._index or self._stale, None
        if index is not None:
            index.close()
        self.slab.close()
        self._lock.release()
        with _open_lock:
            for key in [key for key, store in _open_stores.items() if store is self]:
                del _open_stores[key]

    # Use.

    @property
    def index(self) -> Index:
        """The open index. Raises TierError while the store is quarantined, ClosedError after a fork."""
        if self.owner.pid != os.getpid():
            raise ClosedError(f"{self.parts[0]} was opened by the process that forked this one")
        index = self._index
        if index is None:
            raise TierError("g3", "use", f"{self.parts[0]} is quarantined: {self._quarantine}")
        return index

    def submit(self, work: Callable[[WriteTxn], Any]) -> CommitJob:
        """Queue work for the next write transaction. Never blocks."""
        _ = self.index
        return self._writer.submit(work)

    def give_back(self, reservations: Sequence[SlotReservation]) -> None:
        """Free slots that were reserved and not published, with the next transaction that succeeds. Never blocks."""
        if reservations:
            with self._state:
                self._returned.extend(reservations)
            self._writer.wake()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While inside, blocks may be read from or written to slots: the store is not opened anew."""
        with self._state:
            _ = self.index
            self._moving += 1
        try:
            yield
        finally:
            with self._state:
                self._moving -= 1

    def volume_full(self) -> None:
        """The volume took no more bytes: use the segments there are for a while."""
        self._grow_at = time.monotonic() + GROWTH_PAUSE_S

    def quarantine(self, reason: str, *, damaged: bool = False) -> None:
        """Take the store out of use until the writer thread has opened it again. `damaged`: with a new index."""
        with self._state:
            if self._quarantine is None:
                self._probe_wait_s = PROBE_FIRST_S
                log.warning("g3: %s: quarantined: %s", self.parts[0], reason)
            self._quarantine = reason
            self._damaged |= damaged
            self._probe_at = time.monotonic() + self._probe_wait_s
            # The writer thread may be inside a transaction: it closes the index, when it opens the next one.
            self._stale, self._index = self._index or self._stale, None

    # On the writer thread.

    def _commit(self, jobs: Sequence[CommitJob]) -> None:
        index = self._index
        if index is None:
            self._probe()
            index = self._index
        if index is None:
            _fail(jobs, TierError("g3", "commit", f"{self.parts[0]} is quarantined: {self._quarantine}"))
            return
        jobs = [*jobs, *self._burials(index)]
        running: list[CommitJob] = []
        results: list[Any] = []
        evicted: list[bytes] = []
        tick = 0
        soon: int | None = None
        with self._state:
            returned, self._returned = self._returned, []

        def started() -> bool:
            running.extend(job for job in jobs if job.future.set_running_or_notify_cancel())
            return True

        def work(ledger: WriteTxn) -> None:
            for reservation in returned:
                ledger.release(reservation)
            touches, touched = self.touches.take(ledger.tick)
            for name, uses in touches.items():
                ledger.renew(name, uses, touched)
            results.extend(job.work(ledger) for job in running)
            nonlocal evicted, tick, soon
            evicted, tick, soon = ledger.evicted, ledger.tick, ledger.soon

        try:
            index.transact(work, started=started, may_grow=time.monotonic() >= self._grow_at)
        except Exception as error:
            with self._state:
                self._returned = returned + self._returned
            _fail(running, self._suspect(index, error))
        else:
            self.evictions += len(evicted)
            for told in self.watchers if evicted else ():
                told(evicted)
            self.tick = tick
            if soon is not None and soon != self._drafting:
                self._drafting = soon
                self.lanes.spare(partial(self._write_ahead, soon))
            for job, result in zip(running, results, strict=True):
                job.future.set_result(result)

    def _write_ahead(self, segment: int) -> bool:
        """One step of it, on an I/O thread that has nothing better to do."""
        if self._quarantine is not None:
            self._draft.stop()
            return False
        return self._draft.step() if self._draft.serves(segment) else self._draft.start(segment)

    def _suspect(self, index: Index, error: Exception) -> TierError:
        """What a failed transaction says about the store; returns what to tell those who waited for it."""
        import lmdb

        detail = f"{type(error).__name__}: {error}"
        if isinstance(error, lmdb.MapFullError):
            index.forget_dead_readers()
            return TierFull("g3", "commit", detail)
        if isinstance(error, lmdb.Error) and self._volume_is_full():
            # Only the new pages found no room; what is there can be read, and written to once there is.
            self.volume_full()
            return TierFull("g3", "commit", detail)
        if not isinstance(error, (lmdb.Error, OSError)):
            log.error("g3: %s: a transaction failed", self.parts[0], exc_info=error)
        damage = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)
        self.quarantine(detail, damaged=isinstance(error, damage) or not isinstance(error, (lmdb.Error, OSError)))
        return TierError("g3", "commit", detail)

    def _volume_is_full(self) -> bool:
        try:
            status = os.statvfs(self.parts[0])
        except OSError:
            return False
        return status.f_bavail * status.f_frsize < FREE_BYTES_MIN

    def _rest(self) -> bool:
        """Nothing to do: bring touches to the medium, take back what dead owners left, probe."""
        if not self._tends:
            return False
        now = time.monotonic()
        unused = self.stock.clear()
        with self._state:
            self._returned += unused
        index = self._index
        if index is None:
            self._probe()
            return False
        due = now >= self._reclaim_at
        if due:
            self._reclaim_at = now + RECLAIM_EVERY_S
            index.forget_dead_readers()
        burials = self._burials(index)
        if self.touches or self._returned or burials or (due and index.has_reservations()):
            self._commit([*burials, CommitJob(lambda ledger: ledger.reclaim() if due else 0)])
        return self._index is not None and bool(self.touches)

    def _burials(self, index: Index) -> list[CommitJob]:
        """Now and then: what removes the dead among the next entries, if there are any."""
        now = time.monotonic()
        if not self._tends or now < self._search_at:
            return []
        self._search_at = now + SEARCH_EVERY_S
        try:
            dead = [name for name in self._search.step(index, self._wall()) if not self.touches.of(name)]
        except Exception:  # whatever damage makes of it: the transaction that follows will say so
            return []
        return [CommitJob(lambda ledger: ledger.bury_dead(dead, self._wall()))] if dead else []

    def _probe(self) -> None:
        """Try to open the store again, at growing intervals, once nothing of this process moves blocks.

        While quarantined nothing can begin to move, so what is seen idle stays idle, without the lock.
        """
        import lmdb

        with self._state:
            if not self._tends or self._quarantine == _CLOSED or time.monotonic() < self._probe_at or self._moving:
                return
            stale, self._stale = self._stale, None
        if stale is not None:
            stale.close()
        alone = self._lock.try_exclusive()
        index = None
        try:
            self.slab.close()
            probe(self.parts)
            owner = Owner.current(secrets.randbits(63))
            index = self._reopen(owner, alone=alone)
            geometry = index.geometry()
            self.stock.clear()  # the next owner took them back; nothing moves, so no write adds to it any more
            with self._state:
                self.owner, self.geometry = owner, geometry
                self.slab = Slab(self.parts, geometry.size_of, self._calls)
                self._index, self._quarantine, self._damaged = index, None, False
            log.warning("g3: %s: in use again", self.parts[0])
        except (Unusable, TierError, FormatError, ConfigError, CorruptError, OSError, lmdb.Error) as error:
            if index is not None:
                index.close()
            with self._state:
                self._quarantine = str(error)
                self._probe_wait_s = min(2 * self._probe_wait_s, PROBE_LAST_S)
                self._probe_at = time.monotonic() + self._probe_wait_s
        finally:
            if alone:
                self._lock.share()

    def _reopen(self, owner: Owner, *, alone: bool) -> Index:
        arguments = (self.parts, self.geometry.capacity, self._slot_bytes, owner)
        index = open_index(*arguments, alone=alone)
        if self._damaged:
            try:
                index.check()
            except Exception as error:  # whatever damaged records make of the code that reads them
                index.close()
                if not alone:
                    raise Unusable("it is damaged, and other processes use it") from None
                log.warning(
                    "g3: %s is damaged: %s; moved to %s", self.parts[0], error, move_aside(self.parts[0] / "index")
                )
                index = open_index(*arguments, alone=True)
        return index


def _fail(jobs: Sequence[CommitJob], error: Exception) -> None:
    for job in jobs:
        if not job.future.done() and (job.future.running() or job.future.set_running_or_notify_cancel()):
            job.future.set_exception(error)
