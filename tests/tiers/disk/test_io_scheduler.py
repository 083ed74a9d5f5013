"""Reads before writes, one write at a time beside them, and nobody left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvtier.tiers.disk import io_scheduler as lanes_module
from kvtier.tiers.disk.io_scheduler import IOScheduler

WRITERS = 3


@pytest.fixture
def lanes() -> Iterator[IOScheduler]:
    made = IOScheduler(8, WRITERS, "test-lane")
    yield made
    made.stop()


class Jobs:
    """Jobs that wait for `let_go`, and what ran beside what."""

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
            assert self._gate.wait(10)
            with self._lock:
                self.running.remove(kind)

        return job

    async def until(self, count: int) -> None:
        """So many have begun; and a moment later, still no more."""
        for _ in range(1000):
            if len(self.begun) >= count:
                break
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert len(self.begun) == count

    def let_go(self) -> None:
        self._gate.set()


async def test_a_bounded_number_of_writes_runs_and_reads_go_before_those_that_wait(lanes: IOScheduler) -> None:
    jobs = Jobs()
    writes = lanes.write([jobs.make("write") for _ in range(6)])
    await jobs.until(WRITERS)
    reads = lanes.read([jobs.make("read") for _ in range(8)])
    await jobs.until(8)  # the threads there are
    assert jobs.begun == ["write"] * WRITERS + ["read"] * (8 - WRITERS)
    jobs.let_go()
    await reads.wait(lanes.cancel)
    await writes.wait(lanes.cancel)
    assert jobs.most_writes == WRITERS


async def test_beside_reads_one_write_runs(lanes: IOScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "NEAR_S", 0.2)
    jobs = Jobs()
    reads = lanes.read([jobs.make("read")])
    await jobs.until(1)
    writes = lanes.write([jobs.make("write") for _ in range(6)])
    await jobs.until(2)
    assert jobs.begun == ["read", "write"]
    jobs.let_go()
    await reads.wait(lanes.cancel)
    await writes.wait(lanes.cancel)
    assert jobs.writes_beside_reads == 1


async def test_reads_without_end_do_not_keep_writes_out_and_after_them_all_writers_work(lanes: IOScheduler) -> None:
    stop = False

    async def read() -> None:
        while not stop:
            await lanes.read([lambda: time.sleep(0.001)]).wait(lanes.cancel)

    readers = [asyncio.ensure_future(read()) for _ in range(4)]
    slow = [lambda: time.sleep(0.002)] * 20
    await asyncio.wait_for(lanes.write(slow).wait(lanes.cancel), 10)
    stop = True
    await asyncio.gather(*readers)
    jobs = Jobs()
    writes = lanes.write([lambda: time.sleep(2 * lanes_module.NEAR_S), *(jobs.make("write") for _ in range(6))])
    await jobs.until(WRITERS)
    jobs.let_go()
    await writes.wait(lanes.cancel)


async def test_a_cancelled_batch_waits_for_what_runs_and_forgets_the_rest(lanes: IOScheduler) -> None:
    jobs = Jobs()
    batch = lanes.write([jobs.make("write") for _ in range(6)])
    await jobs.until(WRITERS)
    waiting = asyncio.ensure_future(batch.wait(lanes.cancel))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0.02)
    assert not waiting.done(), "its memory is still in use"
    jobs.let_go()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert jobs.begun == ["write"] * WRITERS


async def test_spare_work_waits_for_what_is_asked_for(lanes: IOScheduler) -> None:
    jobs, steps = Jobs(), list[int]()
    reads = lanes.read([jobs.make("read")])
    await jobs.until(1)
    lanes.spare(lambda: (steps.append(1), len(steps) < 3)[1])
    await asyncio.sleep(0.02)
    assert not steps
    jobs.let_go()
    await reads.wait(lanes.cancel)
    for _ in range(1000):
        if len(steps) == 3:
            break
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)
    assert len(steps) == 3
