"""Room in G2 or in a queue below it: told by whoever gives some back, waited for by who found none."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvtier.clock import Clock


class SpaceSignal:
    """Read `version`, look for room, and if there is none `wait` with it: what comes free meanwhile ends that."""

    def __init__(self, clock: Clock, coming: Callable[[], bool]) -> None:
        """`coming` says whether anybody has something to give back."""
        self.version = 0
        """Times that room may have appeared."""
        self._clock = clock
        self._coming = coming
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Those who wait do so on this loop."""
        self._loop = loop

    def notify(self) -> None:
        """Room may have appeared. Thread-safe, does not block."""
        self.version += 1
        if self._waiters and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    async def wait(self, deadline: float, seen: int) -> bool:
        """Wait until there may be room that there was not when `version` was `seen`. False at the deadline, and at once
        when none is on its way."""
        if self.version != seen:
            return True
        if not self._coming():
            return False
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                await future
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_result(None)
