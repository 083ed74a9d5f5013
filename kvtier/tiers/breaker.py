"""Is a tier well enough to be asked? A circuit breaker on the injected clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtier.clock import Clock


class Health(Enum):
    WELL = "well"
    OUT = "out"  # answers are not waited for
    PROBING = "probing"  # one call is let through to find out


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """`errors_max` failures in a row open the breaker; after `rest_s` one call probes; the rest doubles up to
    `rest_s_max` while probes fail."""

    errors_max: int = 5
    rest_s: float = 1.0
    rest_s_max: float = 15.0


class Breaker:
    """Counts failures in a row. Not thread-safe: used from one event loop (reads of `allows` may race by one call)."""

    def __init__(self, clock: Clock, limits: BreakerLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or BreakerLimits()
        self.errors = 0
        self._rest_s = self._limits.rest_s
        self._retry_at = 0.0
        self.health = Health.WELL
        self.opened = 0

    def allows(self) -> bool:
        """May the tier be called now? Turns OUT into PROBING when its rest is over; the one caller that gets True
        then must report back."""
        if self.health is Health.WELL:
            return True
        if self._clock.monotonic() >= self._retry_at:
            self.health = Health.PROBING
            self._retry_at = self._clock.monotonic() + self._rest_s
            return True
        return False

    def succeeded(self) -> None:
        """A call was answered: the tier is well."""
        self.errors = 0
        self._rest_s = self._limits.rest_s
        self.health = Health.WELL

    def failed(self) -> None:
        """A call failed or timed out."""
        self.errors += 1
        if self.health is Health.PROBING or self.errors >= self._limits.errors_max:
            if self.health is Health.PROBING:
                self._rest_s = min(2 * self._rest_s, self._limits.rest_s_max)
            else:
                self.opened += 1
            self.health = Health.OUT
            self._retry_at = self._clock.monotonic() + self._rest_s
