"""Copies through device memory: whole slots cross the bus by the copy engine, a kernel at HBM speed turns them.

    lane stream   DMA half 0 · DMA half 1 · DMA half 0 · …        of a load; a store's kernel comes before its DMA
    side stream              kernel half 0 · kernel half 1 · …

The halves change places by events, so that the bus and the kernel work at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from kvtier.kernels.copy_kernel import DEVICE_CREW, CopyKernel
from kvtier.kernels.driver import DeviceError, Driver
from kvtier.kernels.layout import Indices, Paged, Region, Shape
from kvtier.kernels.mover import Moves
from kvtier.kernels.plan import Planner

log = logging.getLogger(__name__)

_HALVES = 2


class Unjoined(DeviceError):
    """The end of what was enqueued cannot be told by the lane's stream: it is lost."""


class Staging:
    """Device memory shaped like a few host slots, in two halves, for one lane. Make it by `of`."""

    def __init__(self, driver: Driver, stage: Paged, ends: tuple[Paged, Paged], shape: Shape, priority: int) -> None:
        device, host = ends
        self._driver, self._count = driver, stage.count // _HALVES
        self._kernels = {
            True: CopyKernel(driver, device, stage, shape, stage, DEVICE_CREW),
            False: CopyKernel(driver, stage, device, shape, stage, DEVICE_CREW),
        }
        whole = Shape.opaque(shape.block_bytes)
        slots = host.at(host.bases.min().reshape(1, 1), host.count, host.stride, host.regions)
        places = stage.at(stage.bases.min().reshape(1, 1), stage.count, stage.stride, stage.regions)
        self._planners = {True: Planner(places, slots, whole), False: Planner(slots, places, whole)}
        self.side = driver.stream(priority)
        self.events = [driver.event() for _ in range(2 * _HALVES + 1)]
        self._full, self._free, self._edge = self.events[:_HALVES], self.events[_HALVES:-1], self.events[-1]

    @classmethod
    def of(cls, driver: Driver, device: Paged, host: Paged, shape: Shape, nbytes: int, priority: int) -> Staging | None:
        """None where it cannot be: no memory, two blocks larger than it, or slots that are not one dense run each."""
        rows = np.sort(host.rows(shape).ravel())
        dense = bool((np.diff(rows) == shape.row_bytes).all()) and shape.block_bytes <= host.stride
        count = nbytes // _HALVES // host.stride * _HALVES if host.stride else 0
        if not dense or count < _HALVES:
            return None
        try:
            address = driver.device_memory(count * host.stride)
        except DeviceError as error:
            log.warning("no staging memory, small fragments go to the copy engine: %s", error)
            return None
        bases = host.bases - host.bases.min() + np.uint64(address)
        stage = host.at(bases, count, host.stride, (Region(address, count * host.stride),))
        return cls(driver, stage, (device, host), shape, priority)

    def copy(self, store: bool, moves: Moves, stream: int) -> None:
        """Enqueue the copies behind what `stream` has; they are over where `stream` has come past them. Raises
        DeviceError, and Unjoined where even a part that was enqueued cannot be waited for."""
        driver = self._driver
        order = np.argsort(moves.slots, kind="stable")
        self._kernels[store].upload(self.side)
        driver.record(self._edge, stream)
        driver.wait(self.side, self._edge)
        try:
            for number, start in enumerate(range(0, len(moves), self._count)):
                # In order of slots, neighbouring slots lie side by side in staging memory too and travel as one run.
                part = order[start : start + self._count]
                self._part(store, number % _HALVES, moves.blocks[part], moves.slots[part], stream)
        finally:
            try:
                driver.record(self._edge, self.side)
                driver.wait(stream, self._edge)
            except DeviceError as error:
                raise Unjoined(error.call, error.code) from error

    def _part(self, store: bool, half: int, blocks: Indices, slots: Indices, stream: int) -> None:
        driver = self._driver
        places = half * self._count + np.arange(len(slots), dtype=np.int64)

        def turn(stream: int) -> None:
            if store:
                self._kernels[True].copy(blocks, places, stream)
            else:
                self._kernels[False].copy(places, blocks, stream)

        def cross(stream: int) -> None:
            src, dst = (places, slots) if store else (slots, places)
            driver.copy(self._planners[store].runs(src, dst), stream)

        steps: list[tuple[int, Callable[[int], None]]] = [(stream, cross), (self.side, turn)]
        (first, fill), (second, empty) = steps[::-1] if store else steps
        driver.wait(first, self._free[half])  # what was in this half has been taken out
        fill(first)
        driver.record(self._full[half], first)
        driver.wait(second, self._full[half])
        empty(second)
        driver.record(self._free[half], second)
