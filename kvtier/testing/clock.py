"""Time that moves only by `advance`, and clocks that disagree about it."""

from __future__ import annotations

import asyncio
from typing import cast

from kvtier.clock import Clock
from kvtier.times import Mono, Wall


class VirtualClock:
    """A `kvtier.clock.Clock` for tests: both readings start at a round number and move together with `advance`.

    `sleep` lets other tasks run once and then jumps: a simulation never waits for real time.
    """

    def __init__(self, wall: float = 1_800_000_000.0) -> None:
        self._wall = cast(Wall, wall)  # as given: whole seconds stay whole in what is stored
        self._monotonic = Mono(1_000.0)

    def monotonic(self) -> Mono:
        return self._monotonic

    def wall(self) -> Wall:
        return self._wall

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._wall += seconds
        self._monotonic += seconds

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP would; monotonic time does not change."""
        self._wall += seconds


class SkewedClock:
    """Another clock, `ahead_s` seconds ahead of it by the wall. Settable: the wall clock of one machine."""

    def __init__(self, clock: Clock, ahead_s: float = 0.0) -> None:
        self._clock = clock
        self.ahead_s = ahead_s

    def wall(self) -> Wall:
        return Wall(self._clock.wall() + self.ahead_s)

    def monotonic(self) -> Mono:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
