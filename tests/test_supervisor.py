"""Background tasks die and come back; what hangs is left behind; an ended loop strands nobody."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvtier.errors import ClosedError
from kvtier.supervisor import FAILURES_MAX, LoopOnThread, Supervisor
from kvtier.testing import VirtualClock
from kvtier.tiers.breaker import Breaker, Health


class Recorded:
    """A supervisor on a virtual clock that records its pauses."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.pauses: list[float] = []
        self.service = Breaker(self.clock)
        self.supervisor = Supervisor(self.clock, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        if seconds:
            self.pauses.append(round(seconds, 3))
        await self.clock.sleep(seconds)

    async def until(self, true: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if true():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came")


def failing(times: int, error: BaseException) -> Callable[[], Coroutine[Any, Any, None]]:
    """Work that fails so often, and then runs for ever."""
    left = [times]

    async def work() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        await asyncio.Event().wait()

    return work


@pytest.mark.parametrize("error", [ValueError("injected"), asyncio.CancelledError(), BaseException()])
async def test_a_task_that_fails_is_restarted_counted_and_logged_once_with_its_stack(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    at = Recorded()
    with caplog.at_level(logging.WARNING):
        at.supervisor.start("feeding", failing(2, error), at.service)
        await at.until(lambda: len(at.pauses) == 2)
    assert at.pauses == [0.1, 0.2] and at.supervisor.restarts["feeding"] == 2 and at.service.health is Health.WELL
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    await at.supervisor.close(at.clock.monotonic() + 1)
    assert at.supervisor.abandoned == 0


async def test_the_pause_doubles_up_to_its_bound_and_begins_anew_after_a_quiet_minute() -> None:
    at = Recorded()
    at.supervisor.start("feeding", failing(9, ValueError()), at.service)
    await at.until(lambda: len(at.pauses) == 9)
    assert at.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    at.clock.advance(61)
    at.supervisor.start("feeding", failing(1, ValueError()), at.service)
    await at.until(lambda: len(at.pauses) == 10)
    assert at.pauses[-1] == 0.1
    await at.supervisor.close(at.clock.monotonic())


async def test_three_failures_within_a_minute_put_the_service_out_with_a_reason_until_a_probe() -> None:
    at = Recorded()
    at.supervisor.start("feeding", failing(FAILURES_MAX, KeyError("slot")), at.service)
    await at.until(lambda: at.service.health is Health.OUT)
    assert "feeding failed 3 times" in at.service.reason and "slot" in at.service.reason
    assert not at.service.allows()
    at.clock.advance(1)
    assert at.service.allows()
    at.service.succeeded()
    assert (at.service.health, at.service.reason) == (Health.WELL, "")
    await at.supervisor.close(at.clock.monotonic())


async def test_a_periodic_task_brings_its_service_back_itself() -> None:
    at, passes = Recorded(), [0]

    async def work() -> None:
        passes[0] += 1
        if passes[0] <= FAILURES_MAX:
            raise ValueError

    at.supervisor.start("keeping", work, at.service, every_s=2.0)
    await at.until(lambda: at.service.health is Health.OUT)
    await at.until(lambda: passes[0] == 5)
    assert at.service.health is Health.WELL
    assert at.pauses[:6] == [2.0, 0.1, 0.2, 0.4, 2.0, 2.0]
    await at.supervisor.close(at.clock.monotonic())


async def test_what_a_run_held_is_undone_before_the_next_begins() -> None:
    at, held = Recorded(), [0]

    async def work() -> None:
        assert held[0] == 0
        held[0] += 1
        try:
            await asyncio.sleep(0)
            raise ValueError
        finally:
            await asyncio.sleep(0)
            held[0] -= 1

    at.supervisor.start("feeding", work, at.service)
    await at.until(lambda: at.supervisor.restarts["feeding"] == 5)
    await at.supervisor.close(at.clock.monotonic())
    assert held == [0]


async def test_close_leaves_behind_what_hangs_and_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    at, go = Recorded(), asyncio.Event()

    async def stubborn() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                pass

    at.supervisor.start("stuck", stubborn, at.service)
    at.supervisor.start("well", failing(0, ValueError()), at.service)
    for _ in range(4):
        await asyncio.sleep(0)
    began = time.monotonic()
    await at.supervisor.close(at.clock.monotonic())
    assert time.monotonic() - began < 10 and at.supervisor.abandoned == 1 and "stuck" in caplog.text
    go.set()


class TestLoopOnThread:
    def test_whoever_waits_when_it_ends_gets_an_error(self) -> None:
        loop, caught = LoopOnThread("test"), list[BaseException]()

        def wait() -> None:
            try:
                loop.run(asyncio.Event().wait())
            except BaseException as error:
                caught.append(error)

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(loop._waiting) < 4:
            time.sleep(0.001)
        loop.end(1.0)
        for thread in threads:
            thread.join(30)
        assert [type(error) for error in caught] == [ClosedError] * 4
        with pytest.raises(ClosedError):
            loop.submit(asyncio.sleep(0))
        loop.end(1.0)

    def test_one_that_is_stuck_ends_for_its_callers_all_the_same(self) -> None:
        loop, go = LoopOnThread("test"), threading.Event()

        async def stuck() -> None:
            go.wait()

        future = loop.submit(stuck())
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            loop.run(asyncio.sleep(0), 0.05)
        loop.end(0.05)
        assert time.monotonic() - began < 20
        with pytest.raises(ClosedError):
            future.result(0)
        go.set()

    def test_work_that_takes_longer_than_its_caller_waits_is_cancelled(self) -> None:
        loop, ended = LoopOnThread("test"), threading.Event()

        async def slow() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        with pytest.raises(TimeoutError):
            loop.run(slow(), 0.02)
        assert ended.wait(30)
        loop.end(1.0)


def test_an_exit_that_a_library_raises_ends_no_loop() -> None:
    """Every call waited for its time, and nothing was closed."""
    loop = LoopOnThread("test")

    async def exits() -> None:
        raise SystemExit(3)

    async def works() -> int:
        return 7

    with pytest.raises(SystemExit):
        loop.run(exits(), 5)
    assert loop.run(works(), 5) == 7
    loop.end(5)
    assert not loop._thread.is_alive()
