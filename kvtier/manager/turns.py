"""The turns of an event loop, shared by tasks that have work at the same time."""

from __future__ import annotations

import asyncio
import time
from collections import deque

TURN_NS = 500_000
"""Thread CPU time of work on the loop, after which others have their turn."""


class Turns:
    """Who awaits `next` before each piece of work does it when all before have had theirs: so many tasks that are ready
    at once, loads that a tier answered together, do not make one long turn of the loop. Used on one loop."""

    def __init__(self) -> None:
        self._began_ns: int | None = None  # of the turn in which there was work, if there was
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """At once, unless pieces of TURN_NS together were done in this turn, or others wait. Cancelled, it gives up its
        place."""
        loop, now_ns = asyncio.get_running_loop(), time.thread_time_ns()
        if self._began_ns is None:
            self._begin(loop)
        elif self._waiting or now_ns - self._began_ns >= TURN_NS:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiting.append(waiter)
            await waiter

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._began_ns = time.thread_time_ns()
        loop.call_soon(self._end)

    def _end(self) -> None:
        """The turn is over: the next is the first waiter's."""
        self._began_ns = None
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._begin(waiter.get_loop())
                return
