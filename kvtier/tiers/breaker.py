"""A circuit breaker on the injected clock: stops calls to a tier that keeps failing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtier.clock import Clock


class Health(Enum):
    WELL = "well"
    FULL = "full"  # closed, but the tier cannot grow: its volume takes no more bytes
    OUT = "out"  # open: no calls
    PROBING = "probing"  # half open: one call is let through


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """`errors_max` failures in a row open the breaker; after `open_s` one call probes; that time doubles up to
    `open_s_max` while probes fail."""

    errors_max: int = 5
    open_s: float = 1.0
    open_s_max: float = 15.0


class Breaker:
    """Counts failures in a row. Not thread-safe: used from one event loop (reads of `allows` may race by one call)."""

    def __init__(self, clock: Clock, limits: BreakerLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or BreakerLimits()
        self.errors = 0
        self._open_s = self._limits.open_s
        self._retry_at = 0.0
        self.health = Health.WELL
        self.reason = ""
        """Why it opened; empty while the tier is well."""
        self.opened = 0

    @property
    def resting(self) -> bool:
        """Whether a call now would come before the next probe."""
        return self.health is not Health.WELL and self._clock.monotonic() < self._retry_at

    def why_out(self) -> str:
        """Why it is open, and when the next call is let through."""
        left_s = self._retry_at - self._clock.monotonic()
        return f"{self.reason}; next try in {left_s:.0f} s" if left_s > 0 else f"{self.reason}; next try now"

    def allows(self) -> bool:
        """Whether the tier may be called now. Turns OUT into PROBING when its time is over; the one caller that then
        gets True must report the result."""
        if self.health is Health.WELL:
            return True
        if self._clock.monotonic() >= self._retry_at:
            self.health = Health.PROBING
            self._retry_at = self._clock.monotonic() + self._open_s
            return True
        return False

    def succeeded(self) -> None:
        """Report a call that was answered."""
        self.errors = 0
        self._open_s = self._limits.open_s
        self.health = Health.WELL
        self.reason = ""

    def failed(self) -> None:
        """Report a call that failed or timed out."""
        self.errors += 1
        if self.health is Health.PROBING or self.errors >= self._limits.errors_max:
            self.trip(f"{self.errors} errors in a row")

    def trip(self, reason: str) -> None:
        """Open at once."""
        if self.health is Health.WELL:
            self.opened += 1
            self.reason = reason
        elif self.health is Health.PROBING:
            self._open_s = min(2 * self._open_s, self._limits.open_s_max)
        self.health = Health.OUT
        self._retry_at = self._clock.monotonic() + self._open_s
