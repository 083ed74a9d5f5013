"""The copy engine's protocol for making copies: a mover launches flights, behind gates and other flights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import TierError
from kvtier.kernels.layout import Indices

log = logging.getLogger(__name__)


class Lane(IntEnum):
    """One queue each; copies of one lane complete in the order in which they were launched."""

    STORE = 0
    LOAD = 1
    EXPEDITED = 2  # loads that overtake other loads


class State(Enum):
    """Of one flight."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"  # failed, and over: its memory is free to use
    LOST = "lost"  # failed, and perhaps not over: its memory stays in quarantine


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Pairs of block and slot, with the slot's generation: three int64 arrays of one length."""

    blocks: Indices
    slots: Indices
    generations: Indices

    @classmethod
    def of(cls, triples: Iterable[tuple[int, int, int]]) -> Moves:
        """From (block, slot, generation) triples."""
        return cls(*np.array(list(triples), dtype=np.int64).reshape(-1, 3).T.copy())

    def triples(self) -> list[tuple[int, int, int]]:
        return list(zip(self.blocks.tolist(), self.slots.tolist(), self.generations.tolist(), strict=True))

    def take(self, which: npt.NDArray[np.bool_] | slice) -> Moves:
        return Moves(self.blocks[which], self.slots[which], self.generations[which])

    def __len__(self) -> int:
        return len(self.blocks)


class Event(Protocol):
    """A point in the device's work that a copy waits for. `torch.cuda.Event` is one."""

    def query(self) -> bool: ...


class Gate(Protocol):
    """A condition for the start of a copy; taken when the command arrives."""

    def close(self) -> None:
        """No further copy will wait for it."""


class Flight(Protocol):
    """A launched copy."""

    def state(self) -> State:
        """Never blocks. Once it is not PENDING it does not change."""

    def fence(self, layer: int | None = None) -> None:
        """Order the caller's current stream behind this copy, without waiting on the host where the device can; behind
        `layer` and those before it, where the mover copies layers one after another. Any thread's."""

    def covers(self, layer: int | None = None) -> bool:
        """Whether that is launched, so that it can be fenced; False only while `Mover.launch` goes on. Any thread's."""


class Shown(Protocol):
    """Takes a flight of a command when it can be fenced, or more of it can; `last`: no other flight comes after it. On
    the thread that launches it, and brief."""

    def __call__(self, flight: Flight, last: bool) -> None: ...


class Mover(Protocol):
    """Makes copies between one device pool and one set of host slots. Used from one thread, but for `gate` and `mark`,
    which belong to the thread whose stream they ask about."""

    block_bytes: int
    blocks: int
    slots: int

    def gate(self, after: Event | None) -> Gate:
        """A gate that opens with `after`; None: with all work enqueued so far on the caller's current stream."""

    def mark(self) -> Event | None:
        """A point behind all work enqueued so far on the caller's current stream; None where there is no such work."""

    def launch(
        self, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight], show: Callable[[Flight], None]
    ) -> Flight:
        """Start copying, behind the gate and the given flights. Never waits for the device and never raises for it:
        a refusal becomes a flight that is FAILED once copies under way are over, or LOST. `show` gets the flight before
        it is returned, as often as more layers of it can be fenced."""

    def close(self) -> None:
        """Release streams, events and memory. Only when no flight is pending."""


def launched(
    mover: Mover, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight], show: Callable[[Flight], None]
) -> Flight:
    """As `mover.launch`, of a mover that may have bugs: an error does not tell how much of the copy was begun."""
    try:
        return mover.launch(lane, moves, gate, behind, show)
    except Exception:
        log.exception("the end of a copy of %d blocks is unknown", len(moves))
        return _Lost()


def state_of(flight: Flight) -> State:
    """As `flight.state`, of a mover that may have bugs."""
    try:
        return flight.state()
    except Exception:
        log.exception("the end of a copy is unknown")
        return State.LOST


class _Lost:
    def state(self) -> State:
        return State.LOST

    def fence(self, layer: int | None = None) -> None:
        raise TierError("g1", "fence", "behind a copy that was lost")

    def covers(self, layer: int | None = None) -> bool:
        return True
