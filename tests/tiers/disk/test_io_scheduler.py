"""Reads before writes, one write at a time beside them, and nobody left behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.tiers.disk import io_scheduler
from kvtier.tiers.disk.io_scheduler import (
    NEAR_S,
    QUIET_S,
    WRITE_BYTES,
    WRITE_BYTES_NEAR,
    WRITE_BYTES_QUIET,
    IOScheduler,
)
from kvtier.tiers.disk.slab import Slab, SystemCalls
from tests.support.waiting import until

WRITERS = 3


@pytest.fixture
def scheduler() -> Iterator[IOScheduler]:
    made = IOScheduler(8, WRITERS, "test-io", lambda error: 0.0)
    yield made
    made.stop()


class Jobs:
    """Jobs that wait for `finish`, and what ran beside what."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self.running: list[str] = []
        self.begun: list[str] = []
        self.most_writes = self.writes_beside_reads = 0

    def make(self, kind: str) -> Callable[[], None]:
        def job() -> None:
            with self._lock:
                self.running.append(kind)
                self.begun.append(kind)
                writes = self.running.count("write")
                self.most_writes = max(self.most_writes, writes)
                if kind == "write" and "read" in self.running:
                    self.writes_beside_reads = max(self.writes_beside_reads, writes)
            assert self._gate.wait(60)
            with self._lock:
                self.running.remove(kind)

        return job

    async def until(self, count: int) -> None:
        """So many have begun; and a moment later, still no more."""
        for _ in range(6000):
            if len(self.begun) >= count:
                break
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert len(self.begun) == count

    def finish(self) -> None:
        self._gate.set()


async def test_a_bounded_number_of_writes_runs_and_reads_go_before_those_that_wait(scheduler: IOScheduler) -> None:
    jobs = Jobs()
    writes = scheduler.write([jobs.make("write") for _ in range(6)])
    await jobs.until(WRITERS)
    reads = scheduler.read([jobs.make("read") for _ in range(8)])
    await jobs.until(8)  # the threads there are
    assert jobs.begun == ["write"] * WRITERS + ["read"] * (8 - WRITERS)
    jobs.finish()
    await reads.wait()
    await writes.wait()
    assert jobs.most_writes == WRITERS


async def test_a_sync_goes_before_writes_that_wait(scheduler: IOScheduler) -> None:
    begun: list[str] = []
    gates = [threading.Event() for _ in range(WRITERS)]
    running = scheduler.write([lambda gate=gate: _pass(gate) for gate in gates])
    waiting = scheduler.write([lambda: begun.append("write") for _ in range(4)])
    scheduler.sync(lambda: begun.append("sync"))
    gates[0].set()  # one writer goes on: it takes all that waits
    await waiting.wait()
    assert begun == ["sync"] + ["write"] * 4
    for gate in gates:
        gate.set()
    await running.wait()


def _pass(gate: threading.Event) -> None:
    assert gate.wait(60)


async def test_beside_reads_one_write_runs(scheduler: IOScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_scheduler, "NEAR_S", 0.2)
    jobs = Jobs()
    reads = scheduler.read([jobs.make("read")])
    await jobs.until(1)
    writes = scheduler.write([jobs.make("write") for _ in range(6)])
    await jobs.until(2)
    assert jobs.begun == ["read", "write"]
    jobs.finish()
    await reads.wait()
    await writes.wait()
    assert jobs.writes_beside_reads == 1


async def test_reads_without_end_do_not_keep_writes_out_and_after_them_all_writers_work(scheduler: IOScheduler) -> None:
    stop = False

    async def read() -> None:
        while not stop:
            await scheduler.read([lambda: time.sleep(0.001)]).wait()

    readers = [asyncio.ensure_future(read()) for _ in range(4)]
    slow = [lambda: time.sleep(0.002)] * 20
    await asyncio.wait_for(scheduler.write(slow).wait(), 60)
    stop = True
    await asyncio.gather(*readers)
    jobs = Jobs()
    writes = scheduler.write([lambda: time.sleep(2 * io_scheduler.NEAR_S), *(jobs.make("write") for _ in range(6))])
    await jobs.until(WRITERS)
    jobs.finish()
    await writes.wait()


async def test_a_cancelled_batch_waits_for_what_runs_and_forgets_the_rest(scheduler: IOScheduler) -> None:
    jobs = Jobs()
    batch = scheduler.write([jobs.make("write") for _ in range(6)])
    await jobs.until(WRITERS)
    waiting = asyncio.ensure_future(batch.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0.02)
    assert not waiting.done(), "its memory is still in use"
    jobs.finish()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert jobs.begun == ["write"] * WRITERS


async def test_idle_work_waits_for_reads(scheduler: IOScheduler) -> None:
    jobs, steps = Jobs(), list[int]()
    reads = scheduler.read([jobs.make("read")])
    await jobs.until(1)
    scheduler.when_idle(lambda: (steps.append(1), len(steps) < 3)[1])
    await asyncio.sleep(0.02)
    assert not steps
    jobs.finish()
    await reads.wait()
    await until(lambda: len(steps) == 3)
    await asyncio.sleep(0.02)
    assert len(steps) == 3


async def test_work_that_comes_before_a_woken_thread_wakes_has_another_one(scheduler: IOScheduler) -> None:
    """It waited for the first: for ever, where that one was stuck in the device."""
    await scheduler.read([lambda: None]).wait()
    await until(lambda: scheduler._idle == 1, "no thread is idle")
    gate = threading.Event()
    with scheduler._lock:  # the idle thread cannot wake
        stuck = scheduler.read([lambda: _pass(gate)])
        other = scheduler.read([lambda: None])
    try:
        await asyncio.wait_for(other.wait(), 10)
    finally:
        gate.set()
    await stuck.wait()


async def test_a_read_behind_more_writes_than_run_beside_reads_has_a_thread(scheduler: IOScheduler) -> None:
    """Each write or sync that came while too many writes ran counted as threads that are idle, and reads after it were
    left to those: they waited for a write to end."""
    jobs = Jobs()
    writes = scheduler.write([jobs.make("write")] * WRITERS)
    await jobs.until(WRITERS)
    first = scheduler.read([jobs.make("read")])
    await jobs.until(WRITERS + 1)
    scheduler.sync(lambda: None)  # beside a read one write would begin at a time
    second = scheduler.read([lambda: None])
    try:
        await asyncio.wait_for(second.wait(), 10)
    finally:
        jobs.finish()
    await first.wait()
    await writes.wait()


async def test_writes_go_in_smaller_pieces_beside_reads_and_in_larger_ones_where_none_came_for_long(
    scheduler: IOScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(io_scheduler, "time", SimpleNamespace(monotonic=lambda: now))
    assert scheduler.write_bytes() == WRITE_BYTES_QUIET
    jobs = Jobs()
    reads = scheduler.read([jobs.make("read")])
    await jobs.until(1)
    assert scheduler.write_bytes() == WRITE_BYTES_NEAR
    jobs.finish()
    await reads.wait()
    assert scheduler.write_bytes() == WRITE_BYTES_NEAR, "another one is expected"
    now += 1.01 * NEAR_S
    assert scheduler.write_bytes() == WRITE_BYTES
    now += QUIET_S
    assert scheduler.write_bytes() == WRITE_BYTES_QUIET


def test_a_write_under_way_heeds_a_read_that_comes(tmp_path: Path) -> None:
    """It asks before each system call how many bytes that may write."""
    (tmp_path / "slab").mkdir()
    sizes, written = iter([8192, 8192, 4096, 4096, 4096, 4096]), list[int]()

    class Counted(SystemCalls):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            written.append(sum(map(len, buffers)))
            return super().pwritev(fd, buffers, offset)

    payload, back = os.urandom(8 * 4096), bytearray(8 * 4096)
    slab = Slab([tmp_path], lambda segment: 8 * 4096, Counted(), lambda: next(sizes))
    slab.write(0, 0, [memoryview(payload)])
    slab.read(0, 0, [memoryview(back)])
    slab.close()
    assert written == [8192, 8192, 4096, 4096, 4096, 4096] and back == payload
