"""Time, injected: waits use `monotonic`, expiry uses `wall`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings of time, in seconds. Neither blocks.

    `monotonic` never goes back and is good for waits, rates and deadlines within one process.
    `wall` is seconds since the Unix epoch and is what leaves the process (expiry, creation stamps).
    """

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks.

    The monotonic reading counts the time the machine was suspended (CLOCK_BOOTTIME): a lease or a
    time-to-live must not stand still while a laptop sleeps.
    """

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()
