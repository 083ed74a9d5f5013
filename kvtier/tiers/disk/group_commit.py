"""The one thread of a process that takes a store's write lock.

The process that holds LMDB's write lock may be stopped for any time by a signal or a debugger, so only this thread may
wait for the lock. Jobs that came together are committed together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from kvtier.errors import TierError, TierFull, TierTimeout
from kvtier.tiers.disk.index import Index, Use
from kvtier.tiers.disk.own_thread import outcome
from kvtier.tiers.disk.write_txn import WriteTxn

T = TypeVar("T")

JOBS_PER_COMMIT_MAX = 64
BLOCKS_PER_COMMIT_MAX = 128
"""At a million blocks each costs 50 to 140 µs of CPU below the write lock, for which other processes wait."""
BLOCKS_PER_JOB_MAX = 64
"""Into which callers cut their work."""
GATHER_S_MIN, GATHER_S_MAX = 0.005, 0.02
"""How long a commit waits for more jobs. It writes 20 KB of the index for itself, and costs as much CPU time as a dozen
blocks. As long as writes of a stream are apart, since a commit that waits for several leaves a fast disk idle; and long
enough for those that one sync made durable."""


class CommitJob(Generic[T]):
    """Work for one transaction, on so many blocks. `future` can be cancelled until the transaction has begun."""

    __slots__ = ("blocks", "future", "use", "work")

    def __init__(self, work: Callable[[WriteTxn], T], use: Use = Use.PUT, blocks: int = 1) -> None:
        self.work = work
        self.use = use
        self.blocks = blocks
        self.future: Future[T] = Future()

    async def result(self, timeout_s: float | None = None, undo: Callable[[T], object] = lambda _: None) -> T:
        """The result of the work, once it is committed.

        Raises TierError, TierFull, or TierTimeout after `timeout_s`. After a timeout or a cancellation the work is not
        done, or, where it is too late for that, `undo` is called with its result, on the committing thread.
        """
        try:
            return await outcome(self.future, timeout_s)
        except TimeoutError:
            self._abandon(undo)
            raise TierTimeout("g3", "commit", "the index was not to be had within the deadline") from None
        except asyncio.CancelledError:
            self._abandon(undo)
            raise

    def _abandon(self, undo: Callable[[T], object]) -> None:
        if not self.future.cancel():
            self.future.add_done_callback(lambda done: undo(done.result()) if done.exception() is None else None)

    def fail(self, error: Exception) -> None:
        """Give those who wait an error instead of a result, unless it was cancelled."""
        if not self.future.done() and (self.future.running() or self.future.set_running_or_notify_cancel()):
            self.future.set_exception(error)


class GroupCommit:
    """A queue of jobs and the thread that commits them.

    `commit(jobs)` is called on that thread; it gives every job's future its result or error. `idle()` is called there
    when no job came for `idle_s`, and at the end. Both return whether `idle` has more to do, and is called soon then.
    Where one of them raises, `failed(error)` says after how many seconds the thread goes on, and the jobs in hand fail.
    `expected()` tells how many jobs are about to come, and how many seconds apart: a commit waits for those, as long as
    for one of them, within GATHER_S_MIN and GATHER_S_MAX. `beside()` tells on how many blocks `commit` works besides:
    the jobs come to so many fewer than BLOCKS_PER_COMMIT_MAX, but one is taken in any case.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[CommitJob[Any]]], bool],
        idle: Callable[[], bool],
        idle_s: float,
        name: str,
        failed: Callable[[Exception], float],
        expected: Callable[[], tuple[int, float]],
        beside: Callable[[], int],
    ) -> None:
        self._beside = beside
        self._commit = commit
        self._idle = idle
        self._idle_s = idle_s
        self._failed = failed
        self._expected = expected
        self._queue: deque[CommitJob[Any]] = deque()
        self._lock = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Callable[[WriteTxn], T], use: Use = Use.PUT, blocks: int = 1) -> CommitJob[T]:
        """Queue `work`; it fails with TierError after `stop`. Never blocks; the callers' own bounds (leases, slots)
        bound the queue."""
        job = CommitJob(work, use, blocks)
        with self._lock:
            if not self._stopping:
                self._queue.append(job)
                self._lock.notify()
                return job
        job.fail(TierError("g3", "commit", "the store is closed"))
        return job

    def wake(self) -> None:
        """Call `idle` soon."""
        with self._lock:
            self._lock.notify()

    def stop(self) -> None:
        """Commit the queue and end. Blocks until that is done, for as long as another process holds the write lock."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join()

    def _gather(self) -> None:
        """Wait a little until as many jobs are there as are expected. Under the lock."""
        began = time.monotonic()
        while self._queue and not self._stopping:
            count, apart_s = self._expected()
            left_s = began + min(max(apart_s, GATHER_S_MIN), GATHER_S_MAX) - time.monotonic()
            if len(self._queue) >= min(count, JOBS_PER_COMMIT_MAX) or not self._lock.wait(left_s):
                return

    def _take(self) -> list[CommitJob[Any]]:
        """The next jobs for one transaction. Under the lock."""
        jobs: list[CommitJob[Any]] = []
        left = BLOCKS_PER_COMMIT_MAX - self._beside()
        while self._queue and len(jobs) < JOBS_PER_COMMIT_MAX and (self._queue[0].blocks <= left or not jobs):
            jobs.append(self._queue.popleft())
            left -= jobs[-1].blocks
        return jobs

    def _run(self) -> None:
        more, stopping = False, False
        while not stopping or more:
            jobs: list[CommitJob[Any]] = []
            try:
                with self._lock:
                    if not self._queue and not self._stopping and not more:
                        self._lock.wait(self._idle_s)
                    self._gather()
                    jobs = self._take()
                    stopping = self._stopping and not jobs
                more = self._commit(jobs) if jobs else self._idle()
            except Exception as error:
                more = False
                pause_s = self._failed(error)
                for job in jobs:
                    job.fail(TierError("g3", "commit", f"{type(error).__name__}: {error}"))
                with self._lock:
                    self._lock.wait_for(lambda: self._stopping, pause_s)


def admitted(jobs: Sequence[CommitJob[Any]], index: Index) -> Sequence[CommitJob[Any]]:
    """The jobs whose pages the index has space for; the others fail: some process stands still inside a read."""
    pinned = {use: index.pinned_by(use) for use in {job.use for job in jobs}}
    for job in jobs:
        if (pid := pinned[job.use]) is not None:
            detail = f"process {pid} stands still inside a read, so that no page of the index can be used again; end it"
            job.fail(TierFull("g3", "commit", detail))
    return [job for job in jobs if pinned[job.use] is None]
