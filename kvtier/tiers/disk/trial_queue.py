"""The trials of bad places that this process has begun and will make when the disk is idle."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from kvtier.tiers.disk.group_commit import CommitJob
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.records import SlotReservation
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.slot_health import SlotHealth
from kvtier.tiers.disk.trials import Dropped, Trial, begin_trials
from kvtier.times import Wall

TRY_FIRST_S, TRY_EVERY_S = 10.0, 60.0  # between two looks for places whose next try is due


class TrialQueue:
    """Thread-safe but for `due_jobs`, which is the writer thread's."""

    def __init__(
        self,
        health: SlotHealth,
        wake: Callable[[], None],
        too_many: Callable[[], None],
        give_back: Callable[[Sequence[SlotReservation]], None],
    ) -> None:
        """`wake`: there is something to do. `too_many`: more places fail than may be set aside. `give_back`: the slots
        of a trial that is not made."""
        self._health = health
        self._wake = wake
        self._too_many = too_many
        self._give_back = give_back
        self._stopped = False
        self._trials: deque[Trial] = deque()
        self._look_at = time.monotonic() + TRY_FIRST_S

    def __bool__(self) -> bool:
        return bool(self._trials)

    def clear(self) -> None:
        """Forget them: their reservations are not this process's any more."""
        self._trials.clear()

    def stop(self) -> None:
        """Make no further one: their places are tried another time, by any process."""
        self._stopped = True
        while (trial := self._next()) is not None:
            self._give_back(trial.reservations)

    def _next(self) -> Trial | None:
        with contextlib.suppress(IndexError):
            return self._trials.popleft()
        return None

    def follow(self, job: CommitJob[Any]) -> None:
        """Queue the trials among the results of a job, once they are committed: not before is a place free to be
        written to."""

        def committed(done: Future[list[Trial | Dropped]]) -> None:
            if done.cancelled() or done.exception() is not None:
                return
            results = done.result()
            self._trials.extend(one for one in results if isinstance(one, Trial))
            if self._stopped:
                self.stop()
            elif self._trials:
                self._wake()
            if Dropped.TOO_MANY in results:
                self._too_many()

        job.future.add_done_callback(committed)

    def due_jobs(self, index: Index, wall_s: Callable[[], Wall]) -> list[CommitJob[Any]]:
        """Every TRY_EVERY_S: a job that begins trials, if there are bad places."""
        if time.monotonic() < self._look_at:
            return []
        self._look_at = time.monotonic() + TRY_EVERY_S
        if not index.bad_places():
            return []
        job: CommitJob[Any] = CommitJob(lambda txn: begin_trials(txn, wall_s()))
        self.follow(job)
        return [job]

    def try_next(self, slab: Slab) -> tuple[Trial, bool] | None:
        """Make the next trial, if there is one. Returns it, for a transaction to end, and whether its place proved
        sound. Blocks on the device. Raises OSError if a sync failed."""
        trial = self._next()
        return None if trial is None else (trial, self._health.try_place(slab, trial.place))
