"""Ends a cache: flush, then close every part, within one bound, whatever a tier does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.clock import Clock
from kvtier.times import Mono

CANCELLED_S = 1.0
"""Time that a cancelled close still takes to close every tier."""

Step = tuple[float, Callable[[Mono], Awaitable[object]]]
"""A share of the time by which a step is to be over, and the step, which is given that deadline."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """The state at the end of a flush. `durable[tier]`: blocks that this handle wrote to that tier's medium; `dropped`:
    accepted blocks that no lower tier took; `pending`: still under way at the deadline."""

    durable: Mapping[str, int]
    dropped: int
    pending: int


async def within(work: Awaitable[object], deadline: Mono, clock: Clock) -> None:
    """Await `work`, at most until the deadline."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, deadline - clock.monotonic())):
            await work


Flush = Callable[[Mono], Coroutine[Any, Any, Flushed]]


class Closing:
    """One close under way: `flush`, then the steps in order, whatever becomes of those before."""

    def __init__(self, flush: tuple[float, Flush], steps: list[Step], seconds: float, clock: Clock) -> None:
        """Starts on the running loop. The whole takes at most `seconds`."""
        self._clock = clock
        self._from, self._seconds = clock.monotonic(), seconds
        self._limit: asyncio.Timeout | None = None  # of the step under way, which is to be over by this share
        self._share = 0.0
        self._task = asyncio.get_running_loop().create_task(self._run(flush, steps))

    async def _run(self, flush: tuple[float, Flush], steps: list[Step]) -> Flushed:
        async with contextlib.AsyncExitStack() as ending:  # last in, first done
            for share, step in reversed(steps):
                ending.push_async_callback(self._step, share, step)
            share, work = flush
            return await work(self._by(share))

    async def _step(self, share: float, step: Callable[[Mono], Awaitable[object]]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as self._limit:
                self._share = share
                await step(self._by(share))  # asked for now: a cancellation has changed it

    def _by(self, share: float) -> Mono:
        return self._from + share * self._seconds

    async def ended(self) -> None:
        """Wait until it is over."""
        if not self._task.done():  # else any event loop may ask
            await asyncio.wait({self._task})

    async def result(self) -> Flushed:
        """The result of the flush. A cancellation skips the flush and leaves CANCELLED_S for the steps, which are done
        all the same before it is raised."""
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            self._from, self._seconds = self._clock.monotonic(), min(CANCELLED_S, self._seconds)
            if self._limit is None:
                self._task.cancel()
            elif not self._task.done():  # a step that has begun has its share of this time, too
                self._limit.reschedule(asyncio.get_running_loop().time() + self._share * self._seconds)
            while not self._task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.ended()
            raise
