"""What a process does to a store's files while the disk is idle: trials of bad places, copies of guests that go back to
their own class, and the next segment's zeros."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeVar

from kvtier.errors import ClosedError, TierError
from kvtier.tiers.disk.faults import NO_SPACE
from kvtier.tiers.disk.group_commit import CommitJob
from kvtier.tiers.disk.index import Index, Use
from kvtier.tiers.disk.io_scheduler import IOScheduler
from kvtier.tiers.disk.preallocate import Preallocator
from kvtier.tiers.disk.records import SlotReservation
from kvtier.tiers.disk.relocation import Copied, Relocation, copy_block, end_relocation
from kvtier.tiers.disk.shared_sync import SharedSyncs
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.slot_health import SlotHealth
from kvtier.tiers.disk.trial_queue import TrialQueue
from kvtier.tiers.disk.trials import Trial, end_trial
from kvtier.tiers.disk.write_txn import WriteTxn

T = TypeVar("T")

log = logging.getLogger(__name__)


class IdleStore(Protocol):
    """What is needed of `kvtier.tiers.disk.store.Store`."""

    health: SlotHealth
    io: IOScheduler
    slab: Slab
    syncs: SharedSyncs

    @property
    def index_in_use(self) -> Index | None: ...
    def moving(self) -> AbstractContextManager[None]: ...
    def submit(self, work: Callable[[WriteTxn], T], use: Use) -> CommitJob[T]: ...
    def give_back(self, reservations: Sequence[SlotReservation], *, unused: bool = False) -> None: ...
    def quarantine(self, reason: str) -> None: ...
    def too_many_bad(self) -> None: ...
    def volume_full(self, segment: int) -> None: ...


class IdleWork:
    """Step by step, on an I/O thread that has nothing else to do."""

    def __init__(self, store: IdleStore, preallocator: Preallocator, may_preallocate: Callable[[], bool]) -> None:
        self.counts = Counter(relocated_blocks=0)
        """Since the store was opened. There from the start."""
        self.trials = TrialQueue(store.health, self.wake, store.too_many_bad, store.give_back)
        self._store = store
        self._preallocator = preallocator
        self._may_preallocate = may_preallocate
        self._segment = -1  # the last that was to be preallocated
        self._ahead: int | None = None  # the one that is
        self._relocations = deque[Relocation]()
        self._stopped = False

    def wake(self) -> None:
        """Begin, if the disk is idle. Never blocks."""
        self._store.io.when_idle(self._step)

    def preallocate(self, segment: int) -> None:
        """Preallocate a segment's file, once. Never blocks."""
        if segment != self._segment:
            self._segment = self._ahead = segment
            self.wake()

    def relocate(self, some: Sequence[Relocation]) -> None:
        """Copy blocks to the slots that are reserved for them. Never blocks."""
        self._relocations.extend(some)
        try:
            if some:
                self.wake()
        except TierError:  # no thread can be started
            self._give_up_all()
        if self._stopped:
            self._give_up_all()

    def stop(self) -> None:
        """Make none of the trials and copies that have not begun, and none that come. From any thread; a step may
        run."""
        self._stopped = True
        self._give_up_all()
        self.trials.stop()

    def _give_up_all(self) -> None:
        while (one := self._next()) is not None:
            self._give_up(one, unused=True)

    def forget(self) -> None:
        """The store was opened anew. No step may run."""
        self.trials.clear()
        for one in self._relocations:
            one.ended = True
        self._relocations.clear()
        self._segment, self._ahead = -1, None

    def _step(self) -> bool:
        """Whether there is more to do."""
        index = self._store.index_in_use
        if index is None or not self._may_preallocate():
            self._preallocator.stop()
            self._ahead = None
        if index is None:
            return False
        if self.trials:
            self._try_place()
        elif self._relocations:
            self._relocate_next()
        elif self._ahead is not None:
            self._advance(index, self._ahead)
        return bool(self.trials) or bool(self._relocations) or self._ahead is not None

    def _advance(self, index: Index, segment: int) -> None:
        if not self._preallocator.advance(segment):
            self._ahead = None
        if written := self._preallocator.take_written():
            index.debt.owe(written)

    def _try_place(self) -> None:
        store = self._store
        with contextlib.suppress(TierError, ClosedError), store.moving():
            try:
                tried = self.trials.try_next(store.slab)
            except OSError as error:
                store.quarantine(f"fdatasync at a bad place: {error}")
                return
            if tried is not None:  # the store is not being closed
                trial, sound = tried
                job = store.submit(partial(end_trial, trial=trial, sound=sound), Use.DROP)
                job.future.add_done_callback(partial(self._ended, trial, sound))

    def _ended(self, trial: Trial, sound: bool, done: Future[None]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._store.give_back(trial.reservations)  # they stay set aside; the place is tried again another time
        else:
            self._store.health.counts["restored_slots"] += sound * len(trial.reservations)

    def _relocate_next(self) -> None:
        with contextlib.suppress(TierError, ClosedError), self._store.moving():
            # Taken while blocks move: the store is not opened anew meanwhile, so its slot is ours.
            if (one := self._next()) is not None:
                self._relocate(one)

    def _next(self) -> Relocation | None:
        with contextlib.suppress(IndexError):
            return self._relocations.popleft()
        return None

    def _relocate(self, one: Relocation) -> None:
        try:
            copied = self._copy(one)
            job = self._store.submit(partial(end_relocation, one=one, copied=copied), Use.DROP)
        except (TierError, ClosedError):
            one.ended = True  # the slot is taken back when the store is opened anew
        except Exception:
            self._give_up(one)
            self._give_up_all()  # nobody would come back to them soon
            raise
        else:
            job.future.add_done_callback(partial(self._relocated, one))

    def _copy(self, one: Relocation) -> Copied:
        """A copy is durable only if no sync failed meanwhile, another's included: that may have lost it."""
        store, failures = self._store, self._store.syncs.failures
        try:
            copied = copy_block(store.slab, one)
        except OSError as error:
            log.info("g3: a guest of segment %d stays: %s", one.source.segment, error)
            if error.errno in NO_SPACE:
                store.volume_full(one.to.segment)
            return Copied.FAILED
        if copied is Copied.DURABLE:
            try:
                store.slab.sync(one.to.segment)
            except OSError as error:
                store.quarantine(f"fdatasync of a copy: {error}")
                return Copied.FAILED
        return Copied.FAILED if store.syncs.failures != failures else copied

    def _relocated(self, one: Relocation, done: Future[bool]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._give_up(one)
        else:
            self.counts["relocated_blocks"] += done.result()
        one.ended = True

    def _give_up(self, one: Relocation, *, unused: bool = False) -> None:
        self._store.give_back([one.to], unused=unused)
        one.ended = True
