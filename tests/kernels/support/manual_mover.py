"""A mover whose flights end when the test says so, and an event that is reached when it says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.kernels.mover import Event, Flight, Gate, Lane, Moves, State


class ManualEvent:
    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


class ManualGate:
    def __init__(self, after: Event | None) -> None:
        self.after, self.closed = after, 0

    def close(self) -> None:
        self.closed += 1


class ManualFlight:
    def __init__(self, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight]) -> None:
        self.lane, self.moves, self.gate, self.behind = lane, moves, gate, tuple(behind)
        self.now = State.PENDING
        self.fences = 0

    def state(self) -> State:
        return self.now

    def fence(self, layer: int | None = None) -> None:
        self.fences += 1

    def covers(self, layer: int | None = None) -> bool:
        return True


class ManualMover:
    """Records launches in order."""

    def __init__(self, blocks: int = 64, slots: int = 64, block_bytes: int = 100) -> None:
        self.blocks, self.slots, self.block_bytes = blocks, slots, block_bytes
        self.flights: list[ManualFlight] = []
        self.gates: list[ManualGate] = []
        self.closed = False

    def gate(self, after: Event | None) -> ManualGate:
        self.gates.append(ManualGate(after))
        return self.gates[-1]

    def mark(self) -> ManualEvent:
        return ManualEvent()

    def launch(
        self, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight], show: Callable[[Flight], None]
    ) -> ManualFlight:
        assert isinstance(gate, ManualGate) and not gate.closed, "launched behind a closed gate"
        self.flights.append(ManualFlight(lane, moves, gate, behind))
        return self.flights[-1]

    def end(self, *numbers: int, state: State = State.DONE) -> None:
        for number in numbers:
            self.flights[number].now = state

    def close(self) -> None:
        self.closed = True
