"""Threads that do block I/O: reads before syncs, syncs before writes, a bounded number of each.

A device finishes the requests it has before later ones, so a read waits for all writes in flight. While reads are
active, and for NEAR_S after the last, at most one write begins at a time, and writes go in smaller pieces: reads wait
for that one, and writes slow down. Without reads they go in larger pieces, and in the largest where none came for
QUIET_S: each costs two changes of thread, and a read that comes all the same waits for two of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.errors import TierError

Work = Callable[[], None]

NEAR_S = 0.005
"""For so long after a read another one is expected."""
QUIET_S = 1.0
"""For so long after a read others may come now and then."""
WRITE_BYTES_NEAR, WRITE_BYTES, WRITE_BYTES_QUIET = 1 << 20, 2 << 20, 4 << 20
"""Per system call: beside reads, between them, and where none comes."""


class IOBatch:
    """Jobs handed to `IOScheduler` together. A job handles its own errors. One that raises has ended, too: its results
    are to be failures from the start."""

    def __init__(self, jobs: Sequence[Work], cancel: Callable[[IOBatch], None]) -> None:
        self.jobs = deque(jobs)
        self._left = len(jobs)
        self._cancel = cancel
        self._loop: asyncio.AbstractEventLoop | None = None  # of who waits
        self._ended = asyncio.Event()

    def finished(self, count: int) -> None:
        """`count` jobs will not touch their memory any more. Called under the scheduler's lock."""
        self._left -= count
        if self._left == 0 and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._ended.set)
            except RuntimeError:  # the loop is closed
                pass

    def cancel(self) -> None:
        """No further job starts."""
        self._cancel(self)

    async def wait(self) -> None:
        """Until no job runs. After a cancellation no further job starts; it is raised when none runs any more."""
        self._loop = asyncio.get_running_loop()  # first: the last job sees it, or it is seen here that it has ended
        cancelled: asyncio.CancelledError | None = None
        while self._left:
            try:
                await self._ended.wait()
            except asyncio.CancelledError as error:
                self.cancel()
                cancelled = error
        if cancelled is not None:
            raise cancelled


class IOScheduler:
    """`threads` threads; a free one takes the oldest read, else the oldest write if fewer than `writers_max` run or,
    while reads are active, if none runs. Threads start as they are needed. `failed(error)` is called where a job
    raises; its thread goes on with the next."""

    def __init__(self, threads: int, writers_max: int, name: str, failed: Callable[[Exception], object]) -> None:
        self._failed = failed
        self._threads_max = threads
        self._writers_max = writers_max
        self._name = name
        self._lock = threading.Condition()
        self._reads: deque[IOBatch] = deque()
        self._writes: deque[IOBatch] = deque()
        self._running = 0
        self._reading = 0
        self._writing = 0
        self._near_until = -QUIET_S  # NEAR_S after the last read
        self._idle = 0
        self._idle_step: Callable[[], bool] | None = None
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def read(self, jobs: Sequence[Work]) -> IOBatch:
        """Run `jobs`; never blocks."""
        return self._submit(self._reads, jobs)

    def write(self, jobs: Sequence[Work]) -> IOBatch:
        """Like `read`, after all reads."""
        return self._submit(self._writes, jobs)

    def sync(self, work: Work) -> None:
        """Run `work` before all writes that wait: the writes that it makes durable are done, and behind those of other
        batches they would be published as late as those. Counts as a write; never blocks."""
        self._submit(self._writes, [work], first=True)

    def when_idle(self, step: Callable[[], bool]) -> None:
        """Call `step` repeatedly while nothing is to be read or written, until it returns False or raises. Replaces an
        earlier one."""
        with self._lock:
            self._idle_step = step
            self._start(1)
            self._wake(1)

    def _submit(self, queue: deque[IOBatch], jobs: Sequence[Work], *, first: bool = False) -> IOBatch:
        batch = IOBatch(jobs, self._cancel)
        with self._lock:
            most = self._threads_max if queue is self._reads else self._writes_at_once() - self._writing
            wanted = min(len(jobs), max(0, most))  # those that run now come to the others
            self._start(wanted)
            if first:
                queue.appendleft(batch)
            elif jobs:
                queue.append(batch)
            self._wake(wanted)
        return batch

    def _wake(self, count: int) -> None:
        """Have up to so many idle threads look for work. They are idle no more, though they may be slow to wake: work
        that comes meanwhile is for others."""
        count = min(count, self._idle)
        self._idle -= count
        self._lock.notify(count)

    def _start(self, wanted: int) -> None:
        """Raises TierError where no thread runs and none can be started."""
        for _ in range(min(wanted - self._idle, self._threads_max - len(self._threads))):
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if self._threads:
                    return  # they come to it
                raise TierError("g3", "io", str(error)) from None
            self._threads.append(thread)

    def _cancel(self, batch: IOBatch) -> None:
        """Drop the jobs of `batch` that have not started."""
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

    def write_bytes(self) -> int:
        """How many bytes a system call should write that begins now. From any thread, without the lock."""
        if self._near():
            return WRITE_BYTES_NEAR
        return WRITE_BYTES if time.monotonic() < self._near_until + QUIET_S else WRITE_BYTES_QUIET

    def _near(self) -> bool:
        return self._reading > 0 or time.monotonic() < self._near_until

    def _writes_at_once(self) -> int:
        return 1 if self._near() else self._writers_max

    def _run(self) -> None:
        with self._lock:
            while True:
                taken = self._take()
                if taken is None:
                    if self._stopping:
                        return
                    if self._idle_step is not None and not self._running:
                        self._run_idle_step(self._idle_step)
                        continue
                    self._idle += 1
                    self._lock.wait()
                    continue
                batch, work, is_write = taken
                self._running += 1
                self._writing += is_write
                self._reading += not is_write
                if self._writes and self._writing < self._writes_at_once():
                    self._wake(1)
                self._lock.release()
                try:
                    work()
                except Exception as error:
                    self._failed(error)
                finally:
                    self._lock.acquire()
                    self._running -= 1
                    self._writing -= is_write
                    self._reading -= not is_write
                    if not is_write:
                        self._near_until = time.monotonic() + NEAR_S
                    batch.finished(1)

    def _run_idle_step(self, step: Callable[[], bool]) -> None:
        """One step, without the lock. Counts as running: there is one at a time."""
        more = False
        self._running += 1
        self._lock.release()
        try:
            more = step()
        except Exception as error:
            self._failed(error)
        finally:
            self._lock.acquire()
            self._running -= 1
            if not more and self._idle_step is step:
                self._idle_step = None

    def stop(self) -> None:
        """Let the threads end once nothing is queued, and wait for that."""
        with self._lock:
            self._stopping = True
            self._wake(self._idle)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
