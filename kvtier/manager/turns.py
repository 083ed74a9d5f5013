"""The turns of an event loop, shared by tasks that have work at the same time."""

from __future__ import annotations

import asyncio
import time
from collections import deque

TURN_NS = 500_000
"""Thread CPU time of work on the loop, after which others have their turn."""
WOKEN_MAX = 32
"""Tasks at most that share a turn. Each that finds its time over waits again, ahead of all others."""


class Turns:
    """Who awaits `next` before each piece of work does it when all before have had theirs: so many tasks that are ready
    at once, loads that a tier answered together, do not make one long turn of the loop. Used on one loop."""

    def __init__(self) -> None:
        self._began_ns: int | None = None  # of the turn in which there was work, if there was
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._woken = False  # some were, and none of them has gone on yet
        self._back = 0  # so many of the woken wait again

    async def next(self) -> None:
        """At once, unless pieces of TURN_NS together were done in this turn, or others wait. Cancelled, it gives up its
        place."""
        loop = asyncio.get_running_loop()
        if self._began_ns is None:
            self._begin(loop)
            return
        if not self._waiting and self._has_time(self._began_ns):
            return
        place = len(self._waiting)
        while True:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiting.insert(place, waiter)
            await waiter
            if self._goes_on():
                return
            place, self._back = self._back, self._back + 1

    def _goes_on(self) -> bool:
        """Whether one that was woken may. The woken have their steps one after the other: so only their own time counts
        from the first one on, who always may."""
        if not self._woken and self._began_ns is not None:
            return self._has_time(self._began_ns)
        self._woken, self._began_ns = False, time.thread_time_ns()
        return True

    @staticmethod
    def _has_time(began_ns: int) -> bool:
        return time.thread_time_ns() - began_ns < TURN_NS

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._began_ns = time.thread_time_ns()
        loop.call_soon(self._end)

    def _end(self) -> None:
        """The turn is over: the next is the first waiters'."""
        self._began_ns, self._back, woken = None, 0, 0
        while self._waiting and woken < WOKEN_MAX:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                woken += 1
        if woken:
            self._woken = True
            self._begin(asyncio.get_running_loop())
