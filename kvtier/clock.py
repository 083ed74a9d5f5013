"""Time, injected: waits use `monotonic` and `sleep`, expiry uses `wall`."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Two readings of time in seconds, and a wait. The readings do not block.

    `monotonic` never goes back and is good for waits, rates and deadlines within one process.
    `wall` is seconds since the Unix epoch and is what leaves the process (expiry, creation stamps).
    """

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clocks.

    The monotonic reading counts the time the machine was suspended (CLOCK_BOOTTIME): a lease or a
    time-to-live must not stand still while a laptop sleeps.
    """

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
