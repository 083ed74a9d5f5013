"""What workers are told of the arena, and whether all ranks reach it."""

from __future__ import annotations

from kvtier.clock import Clock
from kvtier.connectors.vllm.messages import ArenaHandle

_TELL_AGAIN_S = 10.0
"""How often workers are told again of an arena that one of them cannot reach."""


class ArenaNotices:
    """`unreached`: number of an arena that a rank cannot reach, as the workers said last; 0: none."""

    def __init__(self, clock: Clock) -> None:
        self.unreached = 0
        self._clock = clock
        self._told = 0  # number
        self._tell_again_s = 0.0  # monotonic

    @property
    def reached(self) -> bool:
        """Whether every rank reaches the arena that they were told of, as far as is known."""
        return not self.unreached or self.unreached != self._told

    def due(self, handle: ArenaHandle) -> bool:
        """Whether workers are to be told of this arena now, which counts as done then: it is new, or a rank did not
        reach it some time ago."""
        now = self._clock.monotonic()
        again = self.unreached == handle.number and now >= self._tell_again_s
        if handle.number == self._told and not again:
            return False
        self._told, self._tell_again_s = handle.number, now + _TELL_AGAIN_S
        return True
