"""The one thread of a process that takes a store's write lock.

Whoever holds LMDB's write lock may be stopped for any time by a signal or a debugger, so nobody may wait for it
but this thread. Jobs that came together are committed together.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from kvtier.tiers.disk.write_txn import WriteTxn

JOBS_PER_COMMIT_MAX = 64


class CommitJob:
    """Work for one transaction. `future` can be cancelled until the transaction has begun."""

    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[WriteTxn], Any]) -> None:
        self.work = work
        self.future: Future[Any] = Future()


class GroupCommit:
    """A queue of jobs and the thread that commits them.

    `commit(jobs)` is called on that thread; it must settle every job's future or leave it to be settled later,
    and must not raise. `idle()` is called there when nothing came for `idle_s`, and at the end; it says whether it has
    more to do, and is called again soon then.
    """

    def __init__(
        self, commit: Callable[[Sequence[CommitJob]], None], idle: Callable[[], bool], idle_s: float, name: str
    ) -> None:
        self._commit = commit
        self._idle = idle
        self._idle_s = idle_s
        self._queue: deque[CommitJob] = deque()
        self._lock = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Callable[[WriteTxn], Any]) -> CommitJob:
        """Queue `work`. Never blocks; the callers' own bounds (leases, slots) bound the queue."""
        job = CommitJob(work)
        with self._lock:
            if self._stopping:
                job.future.cancel()
            else:
                self._queue.append(job)
                self._lock.notify()
        return job

    def wake(self) -> None:
        """Call `idle` soon."""
        with self._lock:
            self._lock.notify()

    def stop(self) -> None:
        """Commit what is queued and end. Blocks until that is done, for as long as the write lock is not to be had."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        more = False
        while True:
            with self._lock:
                if not self._queue and not self._stopping and not more:
                    self._lock.wait(self._idle_s)
                jobs = [self._queue.popleft() for _ in range(min(len(self._queue), JOBS_PER_COMMIT_MAX))]
                stopping = self._stopping
            if jobs:
                self._commit(jobs)
            else:
                more = self._idle()
                if stopping and not more:
                    return
