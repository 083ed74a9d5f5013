"""Free space in G2 or in a queue below it, as a condition variable of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable

from kvtier.clock import Clock
from kvtier.supervisor import soon
from kvtier.times import Mono


class SpaceSignal:
    """Read `version`, look for space, and if there is none `wait` with it: space freed meanwhile ends the wait."""

    def __init__(self, clock: Clock, may_free: Callable[[], bool]) -> None:
        """`may_free` says whether anything is held that may be freed."""
        self._versions = itertools.count(1)
        self.version = 0
        """Another number each time that space may have been freed."""
        self._clock = clock
        self._may_free = may_free
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Waits are on this loop."""
        self._loop = loop

    def notify(self) -> None:
        """Space may have been freed. Thread-safe, does not wait."""
        self.version = next(self._versions)  # one step: `+= 1` on two threads may leave the number that a waiter has
        if self._waiters:
            soon(self._loop, self._wake)

    async def wait(self, deadline: Mono, version: int) -> bool:
        """Wait until space may have been freed after `version` was read. False at the deadline, and at once when
        nothing is held that may be freed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)  # before the version is compared: whoever changes it from now on sees a waiter
        try:
            if self.version != version:
                return True
            if not self._may_free():
                return False
            async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                await future
        except TimeoutError:
            return False
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(future)
        return True

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, deque()
        for future in waiters:
            if not future.done():
                future.set_result(None)
