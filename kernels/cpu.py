"""The fallback without a device: the same engine over CPU tensors and host memory.

Copies are made inside `CopyEngine.poll`, in the order of a device, so that callers see the same states,
acknowledgements and races as with CUDA.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.kernels.copy import MIB, CopyEngine, CopyLimits
from kvtier.kernels.layout import Paged, Shape
from kvtier.kernels.mover import Event, Flight, Gate, Lane, Moves, State
from kvtier.kernels.plan import Planner

_LOOK_S = 0.0001
"""Between two looks at an event that a fence waits for."""

LIMITS = CopyLimits(chunk_bytes=4 * MIB, load_window_bytes=256 * MIB, store_window_bytes=64 * MIB)
"""Windows bound what one `poll` copies, since here the caller's thread does the copying."""


def open_engine(device: Paged, host: Paged, shape: Shape, limits: CopyLimits = LIMITS) -> CopyEngine:
    """A copy engine between two pieces of host memory, of which the first plays the device."""
    return CopyEngine(CpuMover(device, host, shape), limits)


@dataclass(frozen=True, slots=True)
class _Gate:
    after: Event | None

    def close(self) -> None:
        """Nothing is held."""


class CpuMover:
    """Copies with memmove, one flight per `state` query and never before its gate and the flights before it."""

    def __init__(self, device: Paged, host: Paged, shape: Shape) -> None:
        self.block_bytes = shape.block_bytes
        self.blocks, self.slots = device.count, host.count
        self._ways = {True: _Way(device, host, shape), False: _Way(host, device, shape)}
        self._held: tuple[object, ...] = (device, host)
        self._lanes: dict[Lane, deque[_CpuFlight]] = {lane: deque() for lane in Lane}
        self._turn = threading.RLock()  # a fence may be another thread's

    def gate(self, after: Event | None) -> Gate:
        return _Gate(after)

    def mark(self) -> Event | None:
        return None

    def launch(
        self, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight], show: Callable[[Flight], None]
    ) -> Flight:
        assert isinstance(gate, _Gate)
        store = lane is Lane.STORE
        src, dst = (moves.blocks, moves.slots) if store else (moves.slots, moves.blocks)
        copy = partial(self._ways[store].copy, src.tolist(), dst.tolist())
        with self._turn:
            flight = _CpuFlight(self._lanes[lane], copy, gate.after, tuple(behind), self._turn)
            self._lanes[lane].append(flight)
        return flight

    def close(self) -> None:
        assert not any(self._lanes.values()), "closed with copies pending"
        self._held = ()
        self._ways = {}


class _Way:
    """From `src` to `dst` item by item: where a copy is a call anyway, joining neighbours' runs costs more than it
    saves."""

    def __init__(self, src: Paged, dst: Paged, shape: Shape) -> None:
        pattern = Planner(src, dst, shape).pattern
        self._runs = list(zip(pattern.dst.tolist(), pattern.src.tolist(), pattern.nbytes.tolist(), strict=True))
        self._src_stride, self._dst_stride = src.stride, dst.stride

    def copy(self, src_items: list[int], dst_items: list[int]) -> None:
        for src_item, dst_item in zip(src_items, dst_items, strict=True):
            src_at, dst_at = src_item * self._src_stride, dst_item * self._dst_stride
            for dst, src, nbytes in self._runs:
                ctypes.memmove(dst + dst_at, src + src_at, nbytes)


class _CpuFlight:
    def __init__(
        self,
        lane: deque[_CpuFlight],
        make: Callable[[], None],
        after: Event | None,
        behind: tuple[Flight, ...],
        turn: threading.RLock,
    ) -> None:
        self._lane, self._make, self._after, self._behind, self._turn = lane, make, after, behind, turn
        self._state = State.PENDING

    def state(self) -> State:
        """Makes the copy if it is this flight's turn."""
        with self._turn:
            if self._state is State.PENDING and self._lane[0] is self and self._may_start():
                self._copy()
            return self._state

    def fence(self, layer: int | None = None) -> None:
        """There is no stream to order: waits for the events and makes the copy now, with all before it."""
        with self._turn:
            while self._state is State.PENDING:
                head = self._lane[0]
                for flight in head._behind:
                    flight.fence()
                while head._after is not None and not head._after.query():
                    time.sleep(_LOOK_S)
                head._copy()

    def covers(self, layer: int | None = None) -> bool:
        return True

    def _may_start(self) -> bool:
        if any(flight.state() is State.PENDING for flight in self._behind):
            return False
        return self._after is None or self._after.query()

    def _copy(self) -> None:
        self._make()
        self._state = State.DONE
        self._lane.popleft()
