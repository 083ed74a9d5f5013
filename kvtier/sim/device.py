"""A virtual accelerator of one rank: the pages of its KV cache, a stream of forward passes, and copies to and from host
memory that take virtual time.

Forwards run one after the other. A copy begins behind its gate, the copies that it is ordered behind and those of its
lane, and takes a while: half of a block arrives as it begins, the rest as it ends, and meanwhile there is rubbish. So
whoever reads too early, or gives memory away that a copy still uses, is seen by the bytes.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.kernels.cpu import CpuMover
from kvtier.kernels.layout import Paged, Shape
from kvtier.kernels.mover import Event, Flight, Gate, Lane, Moves, State
from kvtier.sim.device_faults import DeviceFaults

LAYERS = 2
HANG_S = 40.0
"""A device that hangs goes on by then, and does not hang again soon: memory that its copies use may not be touched
before."""
_CALM_S = 60.0
_COPY_S = (0.0, 0.0002, 0.001, 0.004, 0.03)
_SLOW_S = (0.05, 0.3, 1.0)
_RUBBISH = 0xDD


class DevicePages:
    """A layer's part of all blocks, as far as the connector looks at an engine's tensor."""

    is_cuda = False
    dtype = "uint8"
    device = SimpleNamespace(type="cpu")

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.array = array
        self.shape = array.shape

    def element_size(self) -> int:
        return 1

    def stride(self, axis: int | None = None) -> Any:
        return self.array.strides if axis is None else self.array.strides[axis]

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> DevicePages:
        return self

    def nbytes(self) -> int:
        return int(self.array.nbytes)


class Device:
    """See the module. `run` begins a forward, `look` reads a block as it is now."""

    def __init__(
        self, blocks: int, block_bytes: int, rng: random.Random, faults: DeviceFaults, loop: asyncio.AbstractEventLoop
    ) -> None:
        piece = block_bytes // LAYERS
        self.layers = [np.full((blocks, piece), _RUBBISH, dtype=np.uint8) for _ in range(LAYERS)]
        self.rng, self.faults, self.loop = rng, faults, loop
        self.launched = self.over = 0
        """Forwards, of which so many are over."""
        self.movers: list[VirtualMover] = []
        self.owned: Callable[[bool, int, int], None] = lambda store, slot, generation: None
        """Told of each host slot that a copy uses, as it begins and as it ends: whether it is written, its number, and
        the generation that the copy is for."""
        self.hangs_until_s = self._calm_until_s = 0.0
        self._free_at_s = 0.0
        self._piece = piece

    def pages(self) -> list[DevicePages]:
        """A tensor per layer."""
        return [DevicePages(layer) for layer in self.layers]

    def look(self, block: int) -> bytes:
        return b"".join(layer[block].tobytes() for layer in self.layers)

    def write(self, block: int, begin: int, end: int, content: bytes) -> None:
        """Bytes begin … end-1 of a block's `content`, where a token has an equal part of each layer."""
        piece = self._piece
        for number, layer in enumerate(self.layers):
            part = np.frombuffer(content, np.uint8)[number * piece : (number + 1) * piece]
            layer[block, begin:end] = part[begin:end]

    def part(self, block: int, end: int) -> bytes:
        """The first `end` bytes of a block in each layer."""
        return b"".join(layer[block, :end].tobytes() for layer in self.layers)

    def run(self, seconds: float, begins: Callable[[], None], ends: Callable[[], None]) -> float:
        """Launch a forward behind those before it; returns when it will be over."""
        self.launched += 1
        begin_s = max(self.loop.time(), self._free_at_s)
        self._free_at_s = begin_s + seconds
        self.loop.call_at(begin_s, begins)
        self.loop.call_at(self._free_at_s, self._end, ends)
        return self._free_at_s

    def _end(self, ends: Callable[[], None]) -> None:
        ends()
        self.over += 1
        self.advance()

    def hang(self) -> float:
        """A copy is hit. Returns how long the device makes no more copies, 0 where it has hung lately."""
        now = self.loop.time()
        if now >= self._calm_until_s:
            self.hangs_until_s = now + HANG_S * self.rng.random()
            self._calm_until_s = self.hangs_until_s + _CALM_S
        return max(0.0, self.hangs_until_s - now)

    def advance(self) -> None:
        """Begin the copies that may begin."""
        for mover in self.movers:
            mover.advance()


class _Mark:
    """All forwards that were launched by now."""

    def __init__(self, device: Device) -> None:
        self._device, self._number = device, device.launched

    def query(self) -> bool:
        return self._device.over >= self._number


class _Gate:
    def __init__(self, after: Event) -> None:
        self.after = after

    def close(self) -> None:
        """Nothing is held."""


class VirtualMover(CpuMover):
    """Copies between a device and host slots, over virtual time. Those that are expedited are over at once: a forward
    waits for them."""

    def __init__(self, device: Device, pages: Paged, host: Paged, shape: Shape) -> None:
        super().__init__(pages, host, shape)
        self._device = device
        self._queues: dict[Lane, deque[_Flight]] = {lane: deque() for lane in Lane}
        device.movers.append(self)

    def mark(self) -> Event:
        return _Mark(self._device)

    def gate(self, after: Event | None) -> Gate:
        return _Gate(after or _Mark(self._device))

    def launch(
        self, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight], show: Callable[[Flight], None]
    ) -> Flight:
        assert isinstance(gate, _Gate)
        older = [flight for flight in behind if isinstance(flight, _Flight)]
        flight = _Flight(self._device, gate.after, older, self._ways[lane is Lane.STORE], moves, lane is Lane.STORE)
        self._queues[lane].append(flight)
        if lane is Lane.EXPEDITED:
            for other in (*older, *self._queues[lane]):
                other.hurry()
        self.advance()
        return flight

    def advance(self) -> None:
        for queue in self._queues.values():
            while queue and queue[0].seen is not State.PENDING:
                queue.popleft()
            if queue and queue[0].may_begin():
                queue[0].begin()  # one that ends at once has all advance again

    def hurry(self) -> None:
        """Make all copies under way."""
        for queue in self._queues.values():
            for flight in list(queue):
                flight.hurry()

    def close(self) -> None:
        self._device.movers.remove(self)
        super().close()


class _Flight:
    """A copy under way. It is seen as what it is now, whoever looks when."""

    def __init__(
        self, device: Device, after: Event, behind: Sequence[_Flight], way: Any, moves: Moves, store: bool
    ) -> None:
        self._device, self._after, self._behind = device, after, behind
        blocks, slots = moves.blocks.tolist(), moves.slots.tolist()
        self._src, self._dst = (blocks, slots) if store else (slots, blocks)
        self._used = [(store, slot, generation) for _, slot, generation in moves.triples()]
        self._runs, self._src_stride, self._dst_stride = way._runs, way._src_stride, way._dst_stride
        self._begun = False
        self._fails = False
        self.seen = State.PENDING

    def state(self) -> State:
        return self.seen

    def fence(self, layer: int | None = None) -> None:
        self.hurry()

    def covers(self, layer: int | None = None) -> bool:
        return True

    def may_begin(self) -> bool:
        ready = self._after.query() and all(flight.seen is not State.PENDING for flight in self._behind)
        return ready and not self._begun

    def begin(self) -> None:
        seconds = self._start()
        if seconds:
            self._device.loop.call_later(seconds, self._end)
        else:
            self._end()

    def hurry(self) -> None:
        """Make it now, whatever it waits for."""
        if not self._begun:
            self._start()
        self._end()

    def _start(self) -> float:
        """Half of it arrives. Returns how long the rest takes."""
        self._begun = True
        self._look()
        faults, rng = self._device.faults, self._device.rng
        hit = faults.kind if faults.kind and rng.random() < faults.rate else ""
        self._fails = hit == "fail"
        self._copy(self._runs[1:], rubbish=True)
        self._copy(self._runs[:1], rubbish=self._fails)
        if hit == "hang" and (seconds := self._device.hang()):
            return seconds
        return rng.choice(_SLOW_S if hit == "slow" else _COPY_S)

    def _end(self) -> None:
        if self.seen is State.PENDING:
            self._look()
            self._copy(self._runs[1:], rubbish=self._fails)
            self.seen = State.FAILED if self._fails else State.DONE
            self._device.advance()

    def _look(self) -> None:
        for store, slot, generation in self._used:
            self._device.owned(store, slot, generation)

    def _copy(self, runs: Sequence[tuple[int, int, int]], *, rubbish: bool) -> None:
        for source, target in zip(self._src, self._dst, strict=True):
            from_at, to_at = source * self._src_stride, target * self._dst_stride
            for dst, src, nbytes in runs:
                if rubbish:
                    ctypes.memset(dst + to_at, _RUBBISH, nbytes)
                else:
                    ctypes.memmove(dst + to_at, src + from_at, nbytes)
