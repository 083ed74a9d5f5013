"""Threads that do block I/O: reads before writes, a bounded number of each, and no call left behind.

What a device has been given it finishes before what comes later, so a read waits for all writes that are in flight
when it comes. While there are reads, and for as long after the last as the next one may take to come, one write at a
time is in flight: they wait for that one, and writes go on, slower.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

Work = Callable[[], None]

NEAR_S = 0.005
"""So long after a read another one is expected."""


class IOBatch:
    """Some jobs handed to `IOScheduler` together. A job handles its own errors: it must not raise."""

    def __init__(self, jobs: Sequence[Work], loop: asyncio.AbstractEventLoop) -> None:
        self.jobs = deque(jobs)
        self._left = len(jobs)
        self._loop = loop
        self._done = loop.create_future()
        if not jobs:
            self._done.set_result(None)

    def finished(self, count: int) -> None:
        """`count` jobs will not touch their memory any more. Called under the lanes' lock."""
        self._left -= count
        if self._left == 0 and count:
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed: nobody waits any more
                pass

    def _wake(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    async def wait(self, cancel: Callable[[IOBatch], None]) -> None:
        """Until no job runs. A cancellation calls `cancel` and is raised when none runs any more."""
        cancelled: asyncio.CancelledError | None = None
        while not self._done.done():
            try:
                await asyncio.shield(self._done)
            except asyncio.CancelledError as error:
                cancel(self)
                cancelled = error
        if cancelled is not None:
            raise cancelled


class IOScheduler:
    """`threads` threads; a free one takes the oldest read, else the oldest write if fewer than `writers_max` run, or,
    while reads are near, if none runs. Threads start as they are needed."""

    def __init__(self, threads: int, writers_max: int, name: str) -> None:
        self._threads_max = threads
        self._writers_max = writers_max
        self._name = name
        self._lock = threading.Condition()
        self._reads: deque[IOBatch] = deque()
        self._writes: deque[IOBatch] = deque()
        self._running = 0
        self._reading = 0
        self._writing = 0
        self._near_until = 0.0
        self._idle = 0
        self._spare: Callable[[], bool] | None = None
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def read(self, jobs: Sequence[Work]) -> IOBatch:
        """Run `jobs`; never blocks. Must be called on an event loop, which `IOBatch.wait` belongs to."""
        return self._submit(self._reads, jobs)

    def write(self, jobs: Sequence[Work]) -> IOBatch:
        """Like `read`, after all reads."""
        return self._submit(self._writes, jobs)

    def spare(self, step: Callable[[], bool]) -> None:
        """Call `step` again and again while nothing is to be read or written, until it says False. It must not raise.
        Replaces an earlier one."""
        with self._lock:
            self._spare = step
            self._start(1)
            self._lock.notify()

    def _submit(self, queue: deque[IOBatch], jobs: Sequence[Work]) -> IOBatch:
        batch = IOBatch(jobs, asyncio.get_running_loop())
        with self._lock:
            if jobs:
                queue.append(batch)
            self._start(len(jobs))
            self._lock.notify(len(jobs))
        return batch

    def _start(self, wanted: int) -> None:
        for _ in range(min(wanted - self._idle, self._threads_max - len(self._threads))):
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def cancel(self, batch: IOBatch) -> None:
        """Forget the jobs of `batch` that have not started."""
        with self._lock:
            count = len(batch.jobs)
            batch.jobs.clear()
            batch.finished(count)

    def _take(self) -> tuple[IOBatch, Work, bool] | None:
        for queue, is_write in ((self._reads, False), (self._writes, True)):
            if is_write and self._writing >= self._writes_at_once():
                return None
            while queue:
                batch = queue[0]
                if len(batch.jobs) <= 1:
                    queue.popleft()
                if batch.jobs:
                    return batch, batch.jobs.popleft(), is_write
        return None

    def _writes_at_once(self) -> int:
        near = self._reading or time.monotonic() < self._near_until
        return 1 if near else self._writers_max

    def _run(self) -> None:
        with self._lock:
            while True:
                taken = self._take()
                if taken is None:
                    if self._stopping:
                        return
                    if self._spare is not None and not self._running:
                        self._use_spare(self._spare)
                        continue
                    self._idle += 1
                    self._lock.wait()
                    self._idle -= 1
                    continue
                batch, work, is_write = taken
                self._running += 1
                self._writing += is_write
                self._reading += not is_write
                if self._writes and self._writing < self._writes_at_once():
                    self._lock.notify()
                self._lock.release()
                try:
                    work()
                finally:
                    self._lock.acquire()
                    self._running -= 1
                    self._writing -= is_write
                    self._reading -= not is_write
                    if not is_write:
                        self._near_until = time.monotonic() + NEAR_S
                    batch.finished(1)

    def _use_spare(self, step: Callable[[], bool]) -> None:
        """One step, without the lock. Counts as running: there is one at a time."""
        more = False
        self._running += 1
        self._lock.release()
        try:
            more = step()
        finally:
            self._lock.acquire()
            self._running -= 1
            if not more and self._spare is step:
                self._spare = None

    def stop(self) -> None:
        """Let the threads end once nothing is queued, and wait for that."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
