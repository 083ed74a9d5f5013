"""Fault mode: a driver that delays what it is asked for, on the device, so that races become likely."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt

from kvtier.kernels.driver import Driver
from kvtier.kernels.plan import Runs

_DELAY = np.dtype([("cycles", "<u8")])


class Delayed:
    """A `Driver` whose copies and kernels come behind a random busy wait on their stream, and are followed by one.

    `most_cycles` bounds each wait, in clock cycles of the GPU (1.5 million are about a millisecond). For tests and
    `make gpu-check`.
    """

    def __init__(self, inner: Driver, random: Random, most_cycles: int = 300_000) -> None:
        self._inner, self._random, self._most_cycles = inner, random, most_cycles
        self.stream, self.current_stream, self.event = inner.stream, inner.current_stream, inner.event
        self.current = inner.current
        self.record, self.wait, self.reached = inner.record, inner.wait, inner.reached
        self.device_memory, self.pinned_memory = inner.device_memory, inner.pinned_memory
        self.prepare = inner.prepare
        self.register, self.unregister, self.close = inner.register, inner.unregister, inner.close

    def copy(self, runs: Runs, stream: int, *, pageable: bool = False) -> None:
        self._delay(stream)
        self._inner.copy(runs, stream, pageable=pageable)
        self._delay(stream)

    def launch(self, kernel: str, ctas: int, threads: int, parameters: npt.NDArray[np.void], stream: int) -> None:
        self._delay(stream)
        self._inner.launch(kernel, ctas, threads, parameters, stream)
        self._delay(stream)

    def _delay(self, stream: int) -> None:
        if cycles := self._random.choice((0, 0, self._random.randrange(self._most_cycles))):
            self._inner.launch("kvtier_delay", 1, 1, np.array((cycles,), _DELAY), stream)
