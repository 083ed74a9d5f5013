"""The mover on an NVIDIA GPU: one stream per lane, pooled events, three ways of copying.

Order on the device, for every launch:

    lane stream:  wait(gate) · wait(each flight it is behind) · copies · record(flight's event)

A load may go layers by layers, with an event after each part but the last, so that a forward can begin while the later
layers are on their way.

Streams are in order, so a lane's flights complete in order, staging memory that only one lane uses needs no further
guard, and a command's later flights need not wait for its gate again. Completion is read by polling the event;
nothing here synchronizes with the device. When the driver refuses a copy half-way, what it had accepted still runs:
the flight's event is recorded behind it all the same, and the flight turns FAILED only when that is reached. If not
even that is possible, it is LOST.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvtier.errors import InvalidRequest, TierError
from kvtier.kernels.copy_kernel import BUS_CREW, CopyKernel
from kvtier.kernels.driver import DeviceError, Driver
from kvtier.kernels.layout import Indices, Paged, Shape
from kvtier.kernels.method import Method, Table
from kvtier.kernels.mover import Event, Flight, Gate, Lane, Moves, State
from kvtier.kernels.plan import Planner
from kvtier.kernels.staging import Staging, Unjoined

log = logging.getLogger(__name__)

_PRIORITY = {Lane.STORE: 0, Lane.LOAD: -4, Lane.EXPEDITED: -5}  # out of range is clamped


class CudaMover:
    """Copies between a device pool and page-locked host slots.

    The host's regions are its registered chunks; with `pageable` it is not registered, so kernels cannot reach it
    and every copy goes through the driver. `method` overrides `table`; `on_close` runs first thing in `close`.
    A load goes in `load_parts` groups of layers, one after another. Raises DeviceError when streams cannot be made.
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
        load_parts: int = 1,
    ) -> None:
        self.block_bytes = shape.block_bytes
        self.blocks, self.slots = device.count, host.count
        self._driver, self._table, self._on_close = driver, table, on_close
        self._method = Method.DMA if pageable else method
        self._pageable = pageable
        self._streams = {lane: driver.stream(_PRIORITY[lane]) for lane in Lane}
        self._events = _Events(driver)
        self._held: tuple[object, ...] = (device, host)
        whole = slice(0, shape.layers)
        size = -(-shape.layers // load_parts)
        groups = [slice(start, min(start + size, shape.layers)) for start in range(0, shape.layers, size)]
        self._stores = [_Way(driver, device, host, shape, whole, store=True)]
        self._loads = [_Way(driver, device, host, shape, layers, store=False) for layers in groups]
        # Allocated when first needed, never where fragments are long: device memory is scarce.
        self._make_staging = partial(Staging.of, driver, device, host, shape, staging_bytes)
        self._staging: dict[Lane, Staging | None] = {}

    def prepare(self) -> None:
        """Load and allocate now what the first copies would: kernels, and memory for staging."""
        for lane in Lane:
            store = lane is Lane.STORE
            method = self.method_for(store, 64)
            try:
                if method is Method.DIRECT:
                    for way in self._ways(store):
                        way.kernel()
                elif method is Method.STAGED:
                    self._staging_of(lane)
            except DeviceError as error:
                self._give_way(method, error)

    def gate(self, after: Event | None) -> Gate:
        if after is None:
            return _Gate(self._record(), self._events)
        handle = int(getattr(after, "cuda_event", 0))
        if handle == 0:
            raise InvalidRequest("after: expected a torch.cuda.Event that was recorded")
        return _Gate(handle, None, after)

    def mark(self) -> Event:
        return _Mark(self._record(), self._driver, self._events)

    def _record(self) -> int:
        event = 0
        try:
            event = self._events.take()
            self._driver.record(event, self._driver.current_stream())
        except DeviceError as error:
            if event:
                self._events.give(event)
            raise TierError("g1", "record event", str(error)) from error
        return event

    def open_gate(self) -> Gate:
        """A gate that waits for nothing: for memory that nothing else uses."""
        return _Gate(0, None)

    def launch(
        self, lane: Lane, moves: Moves, gate: Gate, behind: Sequence[Flight], show: Callable[[Flight], None]
    ) -> Flight:
        launching = _CudaFlight(self._driver, self._events)
        try:
            with self._driver.current:
                return self._launch(launching, lane, moves, gate, behind, show)
        except DeviceError as error:
            log.error("a copy of %d blocks cannot be launched: %s", len(moves), error)
            return launching.launched(0, State.LOST)

    def _launch(
        self,
        launching: _CudaFlight,
        lane: Lane,
        moves: Moves,
        gate: Gate,
        behind: Sequence[Flight],
        show: Callable[[Flight], None],
    ) -> Flight:
        assert isinstance(gate, _Gate)
        stream = self._streams[lane]
        failed = False
        event = 0
        try:
            event = self._events.take()
            if gate.event and stream not in gate.waited:
                self._driver.wait(stream, gate.event)
                gate.waited.add(stream)
            for flight in behind:
                assert isinstance(flight, _CudaFlight)
                flight.hold(stream)
            self._copy(lane, moves, stream, launching, show)
        except Unjoined as error:
            log.error("the end of a staged copy is unknown: %s", error)
            return launching.launched(0, State.LOST)
        except DeviceError as error:
            log.warning("copy of %d blocks on lane %s refused: %s", len(moves), lane.name.lower(), error)
            failed = True
        except Exception:  # planning or staging went wrong; what was enqueued before it still runs
            log.exception("copy of %d blocks on lane %s failed", len(moves), lane.name.lower())
            failed = True
        try:
            if not event:
                raise DeviceError("no event to record", -1)
            self._driver.record(event, stream)
        except DeviceError as error:
            log.error("the end of a refused copy is unknown: %s", error)
            return launching.launched(0, State.LOST)
        return launching.launched(event, State.FAILED if failed else State.DONE)

    def close(self) -> None:
        self._on_close()
        staged = [staging for staging in self._staging.values() if staging is not None]
        streams = [*self._streams.values(), *(staging.side for staging in staged)]
        self._driver.close(streams, [*self._events.all(), *(event for each in staged for event in each.events)])
        self._held, self._stores, self._loads, self._staging = (), [], [], {}

    def method_for(self, store: bool, items: int) -> Method:
        """The method for a launch of `items` blocks, before any fallback."""
        ways = self._ways(store)
        planner = ways[0].planner
        chosen = self._method or self._table.choose(store, planner.fragment_bytes, items * planner.fragments)
        # Staging holds whole slots: they cannot come layers by layers.
        return Method.DIRECT if chosen is Method.STAGED and len(ways) > 1 else chosen

    def _ways(self, store: bool) -> list[_Way]:
        return self._stores if store else self._loads

    def _copy(self, lane: Lane, moves: Moves, stream: int, flight: _CudaFlight, show: Callable[[Flight], None]) -> None:
        """Enqueue the copies, with an event of the flight's behind every group of layers but the last."""
        store = lane is Lane.STORE
        src, dst = (moves.blocks, moves.slots) if store else (moves.slots, moves.blocks)
        ways = self._ways(store)
        for way in ways:
            self._copy_way(way, lane, moves, src, dst, stream)
            if way is not ways[-1]:
                event = self._events.take()
                try:
                    self._driver.record(event, stream)
                except DeviceError:
                    self._events.give(event)
                    raise
                flight.add(_Part(way.layers.stop, event))
                show(flight)

    def _copy_way(self, way: _Way, lane: Lane, moves: Moves, src: Indices, dst: Indices, stream: int) -> None:
        store = lane is Lane.STORE
        method = self.method_for(store, len(moves))
        try:
            if method is Method.DIRECT:
                way.kernel().copy(src, dst, stream)
                return
            if method is Method.STAGED and (staging := self._staging_of(lane)) is not None:
                staging.copy(store, moves, stream)
                return
        except Unjoined:
            raise
        except DeviceError as error:
            self._give_way(method, error)
        # Right even after a part of the above: on the same stream, over the same bytes.
        self._driver.copy(way.planner.runs(src, dst), stream, pageable=self._pageable)

    def _give_way(self, method: Method, error: DeviceError) -> None:
        log.warning("%s copies do not work here, using the copy engine from now on: %s", method.value, error)
        self._method = Method.DMA

    def _staging_of(self, lane: Lane) -> Staging | None:
        if lane not in self._staging:
            self._staging[lane] = self._make_staging(_PRIORITY[lane])
        return self._staging[lane]


class _Way:
    """Copies of some layers, a range of the shape's, one way between the device and the host."""

    def __init__(self, driver: Driver, device: Paged, host: Paged, shape: Shape, layers: slice, *, store: bool) -> None:
        self.layers = layers
        device, host = device.of_layers(layers), host.of_layers(layers)
        shape = replace(shape, layers=layers.stop - layers.start)
        src, dst = (device, host) if store else (host, device)
        self.planner = Planner(src, dst, shape)
        self._make = partial(CopyKernel, driver, src, dst, shape, host, BUS_CREW)
        self._kernel: CopyKernel | None = None

    def kernel(self) -> CopyKernel:
        """Raises DeviceError where it cannot be loaded."""
        if self._kernel is None:
            self._kernel = self._make()
        return self._kernel


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers below `stop` are there once `event` is reached."""

    stop: int
    event: int


class _Events:
    """Events for reuse. One is taken per flight, and one per gate of its own."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: list[int] = []
        self._all: list[int] = []

    def take(self) -> int:
        try:
            return self._free.pop()  # commands and copies may come from two threads
        except IndexError:
            event = self._driver.event()
        self._all.append(event)
        return event

    def give(self, event: int) -> None:
        self._free.append(event)

    def all(self) -> list[int]:
        return self._all


@dataclass(slots=True, eq=False)
class _Gate:
    """An event of the engine's own (`pool` takes it back) or the caller's (`caller` keeps it alive); 0: none."""

    event: int
    pool: _Events | None
    caller: object = None
    waited: set[int] = field(default_factory=set)  # streams that are behind it

    def close(self) -> None:
        """Every wait for it has been enqueued, and a wait refers to the record at that time."""
        if self.pool is not None:
            self.pool.give(self.event)
            self.pool = None


class _Mark:
    """A recorded event, for any number of commands; it is used again once nothing refers to it."""

    def __init__(self, event: int, driver: Driver, events: _Events) -> None:
        self.cuda_event, self._driver, self._events = event, driver, events

    def __del__(self) -> None:
        self._events.give(self.cuda_event)

    def query(self) -> bool:
        return self._driver.reached(self.cuda_event)


class _CudaFlight:
    """Launched by one thread, which asks for its `state`; fenced by any, from its first part on."""

    def __init__(self, driver: Driver, events: _Events) -> None:
        self._driver, self._events = driver, events
        self._parts: list[_Part] = []
        self._event = 0
        self._state, self._result = State.PENDING, State.DONE
        self._launching = True
        # Of a fence: its events are not used again meanwhile. Never held while copies are launched, which a fence that
        # waits for space in its stream's queue may need.
        self._lock = threading.Lock()

    def add(self, part: _Part) -> None:
        """These layers' copies, which come next, are enqueued."""
        self._parts.append(part)

    def launched(self, event: int, result: State) -> _CudaFlight:
        """All that will be is enqueued, up to `event`, and ends with that result; LOST: nothing says when."""
        with self._lock:
            self._event, self._result, self._launching = event, result, False
            if result is State.LOST:
                self._state = State.LOST
        return self

    def state(self) -> State:
        with self._lock:
            return self._look()

    def _look(self) -> State:
        if self._state is State.PENDING and not self._launching:
            try:
                if self._driver.reached(self._event):
                    self._state = self._result
                    for event in (self._event, *(part.event for part in self._parts)):
                        self._events.give(event)
            except DeviceError as error:
                log.error("a copy was lost: %s", error)
                self._state = State.LOST
        return self._state

    def covers(self, layer: int | None = None) -> bool:
        return not self._launching or self._part_of(layer) is not None

    def _part_of(self, layer: int | None) -> _Part | None:
        return next((part for part in self._parts if layer is not None and layer < part.stop), None)

    def hold(self, stream: int, layer: int | None = None) -> None:
        """Order work that is enqueued on `stream` from now on behind this flight, or its layers up to `layer`."""
        with self._lock:
            state = self._look()
            if state is State.LOST:
                raise DeviceError("behind a copy that was lost", -1)
            if state is not State.PENDING:
                return
            part = self._part_of(layer)
            if part is None and self._launching:
                raise DeviceError("behind a copy that is being launched", -1)
            self._driver.wait(stream, part.event if part is not None else self._event)

    def fence(self, layer: int | None = None) -> None:
        try:
            self.hold(self._driver.current_stream(), layer)
        except DeviceError as error:
            raise TierError("g1", "fence", str(error)) from error
