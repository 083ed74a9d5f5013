"""The mover on an NVIDIA GPU: one stream per lane, pooled events, three ways of copying.

Order on the device, for every launch:

    lane stream:  wait(gate) · wait(each flight it is behind) · copies · record(flight's event)

Streams are in order, so a lane's flights complete in order, and scratch memory that only one lane uses needs no
further guard. Completion is read by polling the event; nothing here synchronizes with the device. When the driver
refuses a copy half-way, what it had accepted still runs: the flight's event is recorded behind it all the same, and
the flight turns FAILED only when that is reached. If not even that is possible, it is LOST.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvtier.errors import InvalidRequest, TierError
from kvtier.kernels.driver import DeviceError, Driver
from kvtier.kernels.grid import grid_of
from kvtier.kernels.layout import Addresses, Indices, Paged, Region, Shape
from kvtier.kernels.method import Method, Table
from kvtier.kernels.mover import Event, Flight, Gate, Lane, Moves, State
from kvtier.kernels.plan import Planner, Runs

log = logging.getLogger(__name__)

MAX_CTAS = 12
"""Blocks of threads for a kernel that crosses the bus: a smaller part of the GPU than that is slower, a larger one
takes SMs from the model and is hardly faster."""

STAGING_CTAS = 32  # for the short kernel between staging memory and the engine's layout, at HBM speed
THREADS = 1024
_PRIORITY = {Lane.STORE: 0, Lane.LOAD: -4, Lane.EXPEDITED: -5}  # out of range is clamped


class CudaMover:
    """Copies between a device pool and page-locked host slots.

    The host's regions are its registered chunks; with `pageable` it is not registered, so kernels cannot reach it
    and every copy goes through the driver. `method` overrides `table`; `on_close` runs first thing in `close`.
    Raises DeviceError when streams cannot be made.
    """

    def __init__(
        self,
        driver: Driver,
        device: Paged,
        host: Paged,
        shape: Shape,
        table: Table,
        *,
        method: Method | None = None,
        pageable: bool = False,
        on_close: Callable[[], None] = lambda: None,
        staging_bytes: int = 32 << 20,
    ) -> None:
        self.block_bytes = shape.block_bytes
        self.blocks, self.slots = device.count, host.count
        self._driver, self._table, self._on_close = driver, table, on_close
        self._method = Method.DMA if pageable else method
        self._pageable = pageable
        self._streams = {lane: driver.stream(_PRIORITY[lane]) for lane in Lane}
        self._events = _Events(driver)
        self._held: tuple[object, ...] = (device, host)
        self._planners = {True: Planner(device, host, shape), False: Planner(host, device, shape)}
        self._kernels = {
            True: _Kernel(driver, device, host, shape, host, MAX_CTAS),
            False: _Kernel(driver, host, device, shape, host, MAX_CTAS),
        }
        self._scratch = {lane: _Scratch(driver, self._events, shape.layers * shape.kv) for lane in Lane}
        # Allocated when first needed, never where fragments are long: device memory is scarce.
        self._make_staging = partial(_Staging.of, driver, device, host, shape, staging_bytes)
        self._staging: dict[Lane, _Staging | None] = {}

    def gate(self, after: Event | None) -> Gate:
        if after is None:
            event = self._events.take()
            try:
                self._driver.record(event, self._driver.current_stream())
            except DeviceError as error:
                self._events.give(event)
                raise TierError("g1", "record event", str(error)) from error
            return _Gate(event, self._events)
        handle = int(getattr(after, "cuda_event", 0))
        if handle == 0:
            raise InvalidRequest("after: expected a torch.cuda.Event that was recorded")
        return _Gate(handle, None, after)

    def launch(self, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight]) -> Flight:
        assert isinstance(gate, _Gate)
        stream = self._streams[lane]
        failed = False
        event = 0
        try:
            event = self._events.take()
            self._driver.wait(stream, gate.event)
            for flight in behind:
                assert isinstance(flight, _CudaFlight)
                flight.hold(stream)
            self._copy(lane, moves, stream)
        except DeviceError as error:
            log.warning("copy of %d blocks on lane %s refused: %s", len(moves), lane.name.lower(), error)
            failed = True
        try:
            if not event:
                raise DeviceError("no event to record", -1)
            self._driver.record(event, stream)
        except DeviceError as error:
            log.error("the end of a refused copy is unknown: %s", error)
            return _CudaFlight(self._driver, self._events, 0, State.LOST)
        return _CudaFlight(self._driver, self._events, event, State.PENDING, State.FAILED if failed else State.DONE)

    def close(self) -> None:
        self._on_close()
        self._driver.close(list(self._streams.values()), self._events.all())
        self._held, self._planners, self._kernels, self._scratch, self._staging = (), {}, {}, {}, {}

    def method_for(self, store: bool, items: int) -> Method:
        """The method for a launch of `items` blocks, before any fallback."""
        planner = self._planners[store]
        return self._method or self._table.choose(store, planner.fragment_bytes, items * planner.fragments)

    def _copy(self, lane: Lane, moves: Moves, stream: int) -> None:
        store = lane is Lane.STORE
        src, dst = (moves.blocks, moves.slots) if store else (moves.slots, moves.blocks)
        method = self.method_for(store, len(moves))
        try:
            if method is Method.DIRECT:
                self._kernels[store].copy(src, dst, self._scratch[lane], stream)
                return
            if method is Method.STAGED and (staging := self._staging_of(lane)) is not None:
                staging.copy(store, moves, self._scratch[lane], stream)
                return
        except _Busy:
            pass
        except DeviceError as error:
            log.warning("%s copies do not work here, using the copy engine from now on: %s", method.value, error)
            self._method = Method.DMA
        # Right even after a part of the above: on the same stream, over the same bytes.
        self._driver.copy(self._planners[store].runs(src, dst), stream, pageable=self._pageable)

    def _staging_of(self, lane: Lane) -> _Staging | None:
        if lane not in self._staging:
            self._staging[lane] = self._make_staging()
        return self._staging[lane]


class _Events:
    """Events for reuse. One is taken per flight, and one per gate of its own."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: list[int] = []
        self._all: list[int] = []

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        event = self._driver.event()
        self._all.append(event)
        return event

    def give(self, event: int) -> None:
        self._free.append(event)

    def all(self) -> list[int]:
        return self._all


@dataclass(slots=True, eq=False)
class _Gate:
    """An event of the engine's own (`pool` takes it back) or the caller's (`caller` keeps it alive)."""

    event: int
    pool: _Events | None
    caller: object = None

    def close(self) -> None:
        """Every wait for it has been enqueued, and a wait refers to the record at that time."""
        if self.pool is not None:
            self.pool.give(self.event)
            self.pool = None


class _CudaFlight:
    def __init__(self, driver: Driver, events: _Events, event: int, state: State, result: State = State.DONE) -> None:
        self._driver, self._events = driver, events
        self._event, self._state, self._result = event, state, result

    def state(self) -> State:
        if self._state is State.PENDING:
            try:
                if self._driver.reached(self._event):
                    self._state = self._result
                    self._events.give(self._event)
            except DeviceError as error:
                log.error("a copy was lost: %s", error)
                self._state = State.LOST
        return self._state

    def hold(self, stream: int) -> None:
        """Order work that is enqueued on `stream` from now on behind this flight."""
        if self.state() is State.PENDING:
            self._driver.wait(stream, self._event)
        elif self._state is State.LOST:
            raise DeviceError("behind a copy that was lost", -1)

    def fence(self) -> None:
        try:
            self.hold(self._driver.current_stream())
        except DeviceError as error:
            raise TierError("g1", "fence", str(error)) from error


class _Scratch:
    """The address tables of a lane's kernels: bases and items, written by the host, read by the device.

    A launch's table travels pinned → device on the lane's stream, right before its kernel, so one piece of device
    memory serves every launch. The pinned side is a ring of slices, each guarded by an event behind its last copy.
    """

    SLICES = 512
    ITEMS = 1024  # blocks per launch

    def __init__(self, driver: Driver, events: _Events, planes: int) -> None:
        self._driver, self._events = driver, events
        self._words = 2 * planes + 2 * self.ITEMS
        self._pinned = self._device = 0
        self._slices: Addresses = np.zeros((0, 0), np.uint64)
        self._copied: list[int] = []
        self._turn = 0

    def upload(self, tables: Sequence[Addresses | Indices], stream: int) -> list[int] | None:
        """Device addresses of the tables (uint64 each), valid for what is enqueued on `stream` next. None when the
        ring has gone round and its oldest copy has not run yet."""
        if not self._pinned:
            self._allocate()
        at = self._turn % self.SLICES
        if self._turn >= self.SLICES and not self._driver.reached(self._copied[at]):
            return None
        self._turn += 1
        addresses, used = [], 0
        for table in tables:
            self._slices[at, used : used + table.size] = table.ravel()
            addresses.append(self._device + 8 * used)
            used += table.size
        self._driver.copy(_one_run(self._pinned + 8 * self._words * at, self._device, 8 * used), stream)
        self._driver.record(self._copied[at], stream)
        return addresses

    def _allocate(self) -> None:
        nbytes = 8 * self._words
        self._device = self._driver.device_memory(nbytes)
        pinned = self._driver.pinned_memory(nbytes * self.SLICES)
        self._copied = [self._events.take() for _ in range(self.SLICES)]
        whole = np.ctypeslib.as_array((ctypes.c_uint64 * (self._words * self.SLICES)).from_address(pinned))
        self._slices = whole.reshape(self.SLICES, self._words)
        self._pinned = pinned


class _Busy(DeviceError):
    """As many launches are in flight as there are tables for them."""


class _Kernel:
    """The copy kernel between two paged memories, in one direction."""

    def __init__(self, driver: Driver, src: Paged, dst: Paged, shape: Shape, dense: Paged, ctas: int) -> None:
        self._driver, self._src, self._dst, self._ctas = driver, src, dst, ctas
        self._grid = grid_of(src, dst, shape, dense=dense)

    def copy(self, src: Indices, dst: Indices, scratch: _Scratch, stream: int) -> None:
        """Enqueue the copy of items `src[i]` to `dst[i]`."""
        grid = self._grid
        step = min(grid.max_items, scratch.ITEMS)
        for start in range(0, len(src), step):
            part = slice(start, start + step)
            items = len(src[part])
            tables = scratch.upload([self._src.bases, self._dst.bases, src[part], dst[part]], stream)
            if tables is None:
                raise _Busy(f"upload of {items} items", -1)
            wide = [*tables, self._src.stride, self._dst.stride]
            wide += [grid.outer.src, grid.outer.dst, grid.inner.src, grid.inner.dst]
            narrow = [items, grid.planes, grid.outer.count, grid.inner.count, grid.row_bytes]
            self._driver.launch(
                f"kvtier_copy_{grid.unit_bytes}",
                ctas=max(1, min(self._ctas, -(-grid.units(items) // THREADS))),
                threads=THREADS,
                args=[*(np.uint64(value) for value in wide), *(np.uint32(value) for value in narrow)],
                stream=stream,
            )


class _Staging:
    """Device memory shaped like a few host slots. Only one lane uses it, so the lane's stream orders its reuse."""

    def __init__(self, driver: Driver, stage: Paged, device: Paged, host: Paged, shape: Shape) -> None:
        self._driver, self._count = driver, stage.count
        self._kernels = {
            True: _Kernel(driver, device, stage, shape, stage, STAGING_CTAS),
            False: _Kernel(driver, stage, device, shape, stage, STAGING_CTAS),
        }
        whole = Shape.opaque(shape.block_bytes)
        slots = host.at(host.bases.min().reshape(1, 1), host.count, host.stride, host.regions)
        places = stage.at(stage.bases.min().reshape(1, 1), stage.count, stage.stride, stage.regions)
        self._planners = {True: Planner(places, slots, whole), False: Planner(slots, places, whole)}

    @classmethod
    def of(cls, driver: Driver, device: Paged, host: Paged, shape: Shape, nbytes: int) -> _Staging | None:
        """None where it cannot be: no memory, a block larger than it, or slots that are not one dense run each."""
        rows = np.sort(host.rows(shape).ravel())
        dense = bool((np.diff(rows) == shape.row_bytes).all()) and shape.block_bytes <= host.stride
        count = nbytes // host.stride if host.stride else 0
        if not dense or count < 1:
            return None
        try:
            address = driver.device_memory(count * host.stride)
        except DeviceError as error:
            log.warning("no staging memory, small fragments go to the copy engine: %s", error)
            return None
        bases = host.bases - host.bases.min() + np.uint64(address)
        stage = host.at(bases, count, host.stride, (Region(address, count * host.stride),))
        return cls(driver, stage, device, host, shape)

    def copy(self, store: bool, moves: Moves, scratch: _Scratch, stream: int) -> None:
        """Enqueue: kernel then DMA for a store, DMA then kernel for a load, as many slots at a time as fit."""
        order = np.argsort(moves.slots, kind="stable")
        for start in range(0, len(moves), self._count):
            # In order of slots, neighbouring slots lie side by side in staging memory too and travel as one run.
            part = order[start : start + self._count]
            blocks, slots = moves.blocks[part], moves.slots[part]
            places = np.arange(len(part), dtype=np.int64)
            if store:
                self._kernels[True].copy(blocks, places, scratch, stream)
                self._driver.copy(self._planners[True].runs(places, slots), stream)
            else:
                self._driver.copy(self._planners[False].runs(slots, places), stream)
                self._kernels[False].copy(places, blocks, scratch, stream)


def _one_run(src: int, dst: int, nbytes: int) -> Runs:
    return Runs(np.array([src], np.uint64), np.array([dst], np.uint64), np.array([nbytes], np.uint64))
