"""The trials of bad places that this process has begun and will make when the disk is idle."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvtier.tiers.disk.group_commit import CommitJob
from kvtier.tiers.disk.index import Index
from kvtier.tiers.disk.slab import Slab
from kvtier.tiers.disk.slot_health import SlotHealth
from kvtier.tiers.disk.trials import Dropped, Trial, begin_trials
from kvtier.times import Wall

TRY_FIRST_S, TRY_EVERY_S = 10.0, 60.0  # between two looks for places whose next try is due


class TrialQueue:
    """Thread-safe but for `due_jobs`, which is the writer thread's."""

    def __init__(self, health: SlotHealth, wake: Callable[[], None], too_many: Callable[[], None]) -> None:
        """`wake`: there is something to do. `too_many`: more places fail than may be set aside."""
        self._health = health
        self._wake = wake
        self._too_many = too_many
        self._trials: deque[Trial] = deque()
        self._look_at = time.monotonic() + TRY_FIRST_S

    def __bool__(self) -> bool:
        return bool(self._trials)

    def clear(self) -> None:
        """Forget them: their reservations are not this process's any more."""
        self._trials.clear()

    def follow(self, job: CommitJob[Any]) -> None:
        """Queue the trials among the results of a job, once they are committed: not before is a place free to be
        written to."""

        def committed(done: Future[list[Trial | Dropped]]) -> None:
            if done.cancelled() or done.exception() is not None:
                return
            results = done.result()
            self._trials.extend(one for one in results if isinstance(one, Trial))
            if self._trials:
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

    def try_next(self, slab: Slab) -> tuple[Trial, bool]:
        """Make the next trial. Returns it, for a transaction to end, and whether its place proved sound. Blocks on the
        device. Raises OSError if a sync failed."""
        trial = self._trials.popleft()
        return trial, self._health.try_place(slab, trial.place)
