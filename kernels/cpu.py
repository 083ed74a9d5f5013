"""The fallback without a device: the same engine over CPU tensors and host memory.

Copies are made inside `CopyEngine.poll`, in the order a device would make them, so that everything above the
engine meets the same states, acknowledgements and races as with CUDA.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.kernels.copy import MIB, CopyEngine, Limits
from kvtier.kernels.layout import Paged, Shape
from kvtier.kernels.mover import Event, Flight, Gate, Lane, Moves, State
from kvtier.kernels.plan import Planner, Runs

LIMITS = Limits(chunk_bytes=4 * MIB, load_window_bytes=256 * MIB, store_window_bytes=64 * MIB)
"""Windows bound what one `poll` copies, since here the caller's thread does the copying."""


def open_engine(device: Paged, host: Paged, shape: Shape, limits: Limits = LIMITS) -> CopyEngine:
    """A copy engine between two pieces of host memory, of which the first plays the device."""
    return CopyEngine(CpuMover(device, host, shape), limits)


@dataclass(frozen=True, slots=True)
class _Gate:
    after: Event | None

    def close(self) -> None:
        """Nothing is held."""


class CpuMover:
    """Copies with memmove, one flight per `state` query and never before its gate and what it is behind."""

    def __init__(self, device: Paged, host: Paged, shape: Shape) -> None:
        self.block_bytes = shape.block_bytes
        self.blocks, self.slots = device.count, host.count
        self._planners = {True: Planner(device, host, shape), False: Planner(host, device, shape)}
        self._held: tuple[object, ...] = (device, host)
        self._lanes: dict[Lane, deque[_CpuFlight]] = {lane: deque() for lane in Lane}

    def gate(self, after: Event | None) -> Gate:
        return _Gate(after)

    def launch(self, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight]) -> Flight:
        assert isinstance(gate, _Gate)
        planner = self._planners[lane is Lane.STORE]
        ends = (moves.blocks, moves.slots) if lane is Lane.STORE else (moves.slots, moves.blocks)
        flight = _CpuFlight(self._lanes[lane], planner.runs(*ends), gate.after, tuple(behind))
        self._lanes[lane].append(flight)
        return flight

    def close(self) -> None:
        assert not any(self._lanes.values()), "closed with copies pending"
        self._held = ()
        self._planners = {}


class _CpuFlight:
    def __init__(self, lane: deque[_CpuFlight], runs: Runs, after: Event | None, behind: tuple[Flight, ...]) -> None:
        self._lane, self._runs, self._after, self._behind = lane, runs, after, behind
        self._state = State.PENDING

    def state(self) -> State:
        """Makes the copy if it is this flight's turn."""
        if self._state is State.PENDING and self._lane[0] is self and self._may_start():
            self._copy()
        return self._state

    def fence(self) -> None:
        """There is no stream to order: waits for the events and makes the copy now, with all before it."""
        while self._state is State.PENDING:
            head = self._lane[0]
            for flight in head._behind:
                flight.fence()
            if head._after is not None:
                head._after.synchronize()
            head._copy()

    def _may_start(self) -> bool:
        if any(flight.state() is State.PENDING for flight in self._behind):
            return False
        return self._after is None or self._after.query()

    def _copy(self) -> None:
        runs = self._runs
        for src, dst, nbytes in zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True):
            ctypes.memmove(dst, src, nbytes)
        self._state = State.DONE
        self._lane.popleft()
