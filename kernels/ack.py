"""How moves of a copy engine's command have ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtier.kernels.mover import Lane, Moves


class Outcome(Enum):
    """Outcome of acknowledged moves. In every case nothing touches their memory any more."""

    DONE = "done"  # the bytes are there
    ABORTED = "aborted"  # cancelled; a destination that was in flight holds undefined bytes
    FAILED = "failed"  # the device refused the copy; the destination holds undefined bytes
    REFUSED = "refused"  # stale generation, or slot or block taken; nothing was touched


@dataclass(frozen=True, slots=True, eq=False)
class Ack:
    """`moves` of `ticket` are over. A ticket gets one or more, the last of them with `last` set."""

    ticket: int
    lane: Lane
    moves: Moves
    outcome: Outcome
    last: bool
