"""A token bucket for bytes: the write-behind queues bound the write rate with it, G4's store its transfers."""

from __future__ import annotations

from math import inf

from kvtier.clock import Clock

WAIT_S_MAX = 1.0


class TokenBucket:
    """`rate` bytes per second on average, at most `burst` at once. rate 0: no bound.

    An amount larger than the burst passes when the bucket is full, and leaves it negative: the average holds, and
    nothing starves.
    """

    def __init__(self, clock: Clock, rate: float, burst: float) -> None:
        self._clock = clock
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = clock.monotonic()

    def change(self, rate: float, burst: float) -> None:
        """Another rate and burst from now on; who waits already notices within WAIT_S_MAX."""
        self._refill()
        self._rate, self._burst = rate, burst
        self._level = min(self._level, burst) if rate > 0 else burst

    def _refill(self) -> None:
        now = self._clock.monotonic()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now

    @property
    def at_once(self) -> float:
        """The largest amount that leaves the bucket no debt."""
        return self._burst if self._rate > 0 else inf

    def try_take(self, amount: float) -> bool:
        """Take `amount` if the bucket has it (or is full); else take nothing. Does not wait."""
        if self._rate <= 0:
            return True
        self._refill()
        if self._level < min(amount, self._burst):
            return False
        self._level -= amount
        return True

    async def take(self, amount: float) -> None:
        """Wait until `try_take` succeeds."""
        while not self.try_take(amount):
            rate, missing = self._rate, min(amount, self._burst) - self._level
            if rate > 0:  # 0: another thread has lifted the bound just now
                await self._clock.sleep(min(max(missing / rate, 0.001), WAIT_S_MAX))
