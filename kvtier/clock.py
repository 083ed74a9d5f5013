"""Time, injected: waits use `monotonic` and `sleep`, expiry uses `wall`."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from kvtier.times import Mono, Wall


class Clock(Protocol):
    """Two readings of time (`kvtier.times`), and a wait. The readings do not block."""

    def monotonic(self) -> Mono: ...

    def wall(self) -> Wall: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clocks.

    The monotonic reading counts the time that the machine was suspended (CLOCK_BOOTTIME): a lease or a
    time-to-live must not stand still while a laptop sleeps.
    """

    def monotonic(self) -> Mono:
        return Mono(time.clock_gettime(time.CLOCK_BOOTTIME))

    def wall(self) -> Wall:
        return Wall(time.time())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
