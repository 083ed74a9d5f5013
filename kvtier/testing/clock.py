"""Time that moves only by `advance`."""

from __future__ import annotations

import asyncio
from typing import cast

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
