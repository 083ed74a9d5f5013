"""A device in RAM with streams and events, which runs what is ready in any order it likes.

Everything enqueued waits in its stream until the simulation steps; which stream goes next is drawn. So an order
that the mover did not ask for happens sooner or later, and shows as a wrong byte.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.kernels.copy_kernel import ITEMS
from kvtier.kernels.driver import OUT_OF_MEMORY, DeviceError
from kvtier.kernels.plan import Runs

COMPUTE = 0
"""The stream on which the engine computes: the caller's current stream."""


@dataclass(eq=False)
class _Operation:
    run: Callable[[], None]
    blocked: Callable[[], bool] = lambda: False


@dataclass
class _Event:
    recorded: int = 0
    passed: int = 0


@dataclass
class Call:
    """One call that enqueued something: its name, stream, and what else tells calls apart."""

    name: str
    stream: int
    detail: Any = None


@dataclass
class Trouble:
    """What goes wrong: call names that raise, each as often as counted; whether waits are forgotten."""

    refuse: Counter[str] = field(default_factory=Counter)
    forget_waits: bool = False
    dead: bool = False  # every query of an event fails from now on


class SimulatedDriver:
    def __init__(self, kernels: ctypes.CDLL, random: Random, steps_per_query: int = 2) -> None:
        self._kernels, self._random, self._steps_per_query = kernels, random, steps_per_query
        self._streams: dict[int, deque[_Operation]] = {COMPUTE: deque()}
        self._events: dict[int, _Event] = {}
        self._memory: list[np.ndarray] = []
        self._handles = 100
        self.current = nullcontext()
        self.trouble = Trouble()
        self.calls: list[Call] = []
        self.registered: dict[int, int] = {}
        self.room_to_register = 1000
        self.closed = False

    # The protocol

    def stream(self, priority: int) -> int:
        handle = self._handle()
        self._streams[handle] = deque()
        return handle

    def current_stream(self) -> int:
        return COMPUTE

    def event(self) -> int:
        handle = self._handle()
        self._events[handle] = _Event()
        return handle

    def record(self, event: int, stream: int) -> None:
        self._refuse("record")
        self.calls.append(Call("record", stream, event))
        state = self._events[event]
        state.recorded += 1
        version = state.recorded

        def passing() -> None:
            state.passed = max(state.passed, version)

        self._streams[stream].append(_Operation(passing))

    def wait(self, stream: int, event: int) -> None:
        self._refuse("wait")
        self.calls.append(Call("wait", stream, event))
        state = self._events[event]
        version = state.recorded
        if not self.trouble.forget_waits:
            self._streams[stream].append(_Operation(lambda: None, lambda: state.passed < version))

    def reached(self, event: int) -> bool:
        if self.trouble.dead:
            raise DeviceError("cuEventQuery", 700)
        self.step(self._steps_per_query)
        state = self._events[event]
        return state.passed >= state.recorded

    def copy(self, runs: Runs, stream: int, *, pageable: bool = False) -> None:
        copies = list(zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True))
        if self.trouble.refuse["copy"] > 0:
            copies = copies[: len(copies) // 2]  # what was accepted before the refusal still runs
        self.calls.append(Call("copy", stream, len(runs)))
        self._random.shuffle(copies)  # runs of a batch come in no particular order
        for src, dst, nbytes in copies:
            self._streams[stream].append(_Operation(lambda s=src, d=dst, n=nbytes: ctypes.memmove(d, s, n)))  # type: ignore[misc]
        self._refuse("copy")

    def launch(self, kernel: str, ctas: int, threads: int, parameters: npt.NDArray[np.void], stream: int) -> None:
        self._refuse("launch")
        self.calls.append(Call("launch", stream, (kernel, ctas, threads)))
        if kernel == "kvtier_delay":
            self._streams[stream].append(_Operation(lambda: None))
            return
        values = [np.array(parameters[name]) for name in parameters.dtype.names or ()]
        assert [value.itemsize for value in values] == [8] * 8 + [4] * 5 + [8 * ITEMS], (
            "kernel parameters of other sizes than it has"
        )
        wide, narrow, numbers = np.array(values[:8], np.uint64), np.array(values[8:13], np.uint32), values[13]
        unit = int(kernel.rpartition("_")[2])

        def run() -> None:
            tables = (wide.ctypes.data, narrow.ctypes.data, numbers.ctypes.data)
            assert self._kernels.run_copy(unit, min(ctas, 2), 64, *tables) == 0

        self._streams[stream].append(_Operation(run))

    def prepare(self, kernel: str) -> None:
        self._refuse("prepare", 200)

    def device_memory(self, nbytes: int) -> int:
        self._refuse("device_memory", OUT_OF_MEMORY)
        return self._allocate(nbytes)

    def pinned_memory(self, nbytes: int) -> int:
        self._refuse("pinned_memory", OUT_OF_MEMORY)
        return self._allocate(nbytes)

    def register(self, address: int, nbytes: int) -> None:
        if len(self.registered) >= self.room_to_register:
            raise DeviceError("register", OUT_OF_MEMORY)
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def close(self, streams: Sequence[int], events: Sequence[int]) -> None:
        assert not any(self._streams[stream] for stream in streams), "closed with work enqueued"
        assert len(set(events)) == len(events), "an event is destroyed twice"
        self.closed = True

    # The device's side

    def compute(self, work: Callable[[], None]) -> None:
        """Enqueue work of the engine's own."""
        self._streams[COMPUTE].append(_Operation(work))

    def step(self, count: int = 1) -> bool:
        """Run up to `count` operations from streams drawn at random; False when nothing could run."""
        for _ in range(count):
            ready = [queue for queue in self._streams.values() if queue and not queue[0].blocked()]
            if not ready:
                return False
            self._random.choice(ready).popleft().run()
        return True

    def drain(self) -> None:
        """Run everything. Fails when what is left waits for something that never comes."""
        while self.step():
            pass
        assert not any(self._streams.values()), "streams wait for each other"

    def names(self, stream: int | None = None) -> list[str]:
        return [call.name for call in self.calls if stream is None or call.stream == stream]

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    def _allocate(self, nbytes: int) -> int:
        memory = np.full(nbytes + 4096, 0xCD, dtype=np.uint8)
        self._memory.append(memory)
        return (memory.ctypes.data + 4095) // 4096 * 4096

    def _refuse(self, name: str, code: int = 1) -> None:
        if self.trouble.refuse[name] > 0:
            self.trouble.refuse[name] -= 1
            raise DeviceError(name, code)
