"""Loads whose layers arrive one after another: a forward behind `fence(ticket, layer)`, bytes, order and failures."""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from random import Random

import pytest
import torch
from simulated_driver import SimulatedDriver

from kvtier.kernels.copy import CopyEngine, CopyLimits, Moves, Outcome
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.driver import DeviceError
from kvtier.kernels.layout import Shape, of_slots, of_tensors
from kvtier.kernels.method import Method, Table
from kvtier.kernels.mover import Flight
from kvtier.kernels.pump import Pump

LAYERS, BLOCKS, SLOTS, PARTS = 5, 6, 6, 3
SHAPE = Shape(layers=LAYERS, kv=2, tokens=2, heads=1, channels=8, element_bytes=1)
WANTED = 200
"""The value of every byte of the slots; blocks begin with 0."""


class Forwarding:
    """A device whose pool is loaded by layer, and a forward that reads it layer by layer."""

    def __init__(self, kernels: ctypes.CDLL, seed: int, method: Method | None = None, parts: int = PARTS) -> None:
        self.driver = SimulatedDriver(kernels, Random(seed), steps_per_query=0)
        self.layers = [torch.zeros(2, BLOCKS, 2, 1, 8, dtype=torch.uint8) for _ in range(LAYERS)]
        arena = memoryview(bytearray([WANTED]) * (SLOTS * SHAPE.block_bytes))
        self.mover = CudaMover(
            self.driver,
            of_tensors(self.layers, "KBNHC", SHAPE),
            of_slots(arena, SHAPE.block_bytes, SHAPE),
            SHAPE,
            Table("simulated", {}),
            method=method,
            staging_bytes=4 * SHAPE.block_bytes,
            load_parts=parts,
        )
        self.engine = CopyEngine(self.mover, CopyLimits(chunk_bytes=SHAPE.block_bytes, load_chunk_bytes=1 << 20))
        self.read: list[tuple[int, bool]] = []  # layer, and whether it held what it should

    def load(self, generation: int = 0) -> int:
        return self.engine.load(Moves.of((block, SLOTS - 1 - block, generation) for block in range(BLOCKS)))

    def forward(self, ticket: int, behind: list[int]) -> None:
        """Enqueue a forward whose layer l reads behind a fence on layer behind[l]."""
        for layer, fence in enumerate(behind):
            self.engine.fence(ticket, fence)
            self.driver.compute(lambda layer=layer: self._look(layer))  # type: ignore[misc]

    def _look(self, layer: int) -> None:
        self.read.append((layer, bool((self.layers[layer] == WANTED).all())))

    def settle(self) -> list[Outcome]:
        self.driver.drain()
        acks = self.engine.poll()
        self.engine.check()
        return [ack.outcome for ack in acks]


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("parts", [1, 2, PARTS, LAYERS, 8])
def test_a_forward_reads_every_layer_behind_its_fence(kernel_library: ctypes.CDLL, method: Method, parts: int) -> None:
    for seed in range(20):
        device = Forwarding(kernel_library, seed, method, parts)
        device.forward(device.load(), list(range(LAYERS)))
        assert device.settle() == [Outcome.DONE]
        assert device.read == [(layer, True) for layer in range(LAYERS)]
        assert device.engine.close(1.0)


def test_a_forward_behind_an_earlier_layer_alone_reads_too_soon(kernel_library: ctypes.CDLL) -> None:
    """The control of the test above: the simulation shows a fence that is missing."""
    wrong = 0
    for seed in range(20):
        device = Forwarding(kernel_library, seed)
        device.forward(device.load(), [0] * LAYERS)
        device.settle()
        wrong += not all(right for _, right in device.read)
    assert wrong


def test_a_forward_begins_before_the_last_layer_is_there(kernel_library: ctypes.CDLL) -> None:
    """By the order on the device alone: with one part it cannot."""

    def early(parts: int) -> int:
        count = 0
        for seed in range(20):
            device = Forwarding(kernel_library, seed, parts=parts)
            ticket = device.load()
            device.engine.fence(ticket, 0)
            device.driver.compute(lambda device=device: device._look(LAYERS - 1))  # type: ignore[misc]
            device.settle()
            count += not device.read[0][1]
        return count

    assert early(PARTS) > 0 and early(1) == 0


def test_a_fence_of_no_layer_is_one_of_all(kernel_library: ctypes.CDLL) -> None:
    for seed in range(20):
        device = Forwarding(kernel_library, seed)
        device.engine.fence(device.load())
        for layer in range(LAYERS):
            device.driver.compute(lambda layer=layer, device=device: device._look(layer))  # type: ignore[misc]
        device.settle()
        assert all(right for _, right in device.read)


@pytest.mark.parametrize(("call", "calls_before"), [("copy", 1), ("copy", 2), ("record", 0), ("record", 1)])
def test_a_load_refused_half_way_is_failed_and_its_events_are_used_again(
    kernel_library: ctypes.CDLL, call: str, calls_before: int
) -> None:
    device = Forwarding(kernel_library, 1, Method.DMA)
    real = getattr(device.driver, call)
    seen = 0

    def refusing(*arguments: object, **named: object) -> None:
        nonlocal seen
        seen += 1
        if seen == calls_before + 1 + (call == "record"):  # the first record is the gate's, the last the load's
            raise DeviceError(call, 1)
        real(*arguments, **named)

    setattr(device.driver, call, refusing)
    for generation in range(20):
        ticket = device.load(generation)
        device.forward(ticket, list(range(LAYERS)))
        assert device.settle() == [Outcome.FAILED if generation == 0 else Outcome.DONE]
    assert all(right for _, right in device.read[LAYERS:])
    assert len(device.driver._events) <= PARTS + 1, "an event per part and launch, and the gate's"
    assert device.engine.close(1.0)


def test_a_load_by_layer_is_launched_whole(kernel_library: ctypes.CDLL) -> None:
    """Its first layers must not wait behind the last layers of an earlier chunk."""
    device = Forwarding(kernel_library, 0, Method.DMA)
    device.load()
    assert device.driver.names().count("copy") == PARTS
    assert device.settle() == [Outcome.DONE]


def test_staging_holds_whole_slots_and_serves_stores_only(kernel_library: ctypes.CDLL) -> None:
    device = Forwarding(kernel_library, 0, Method.STAGED)
    assert device.mover.method_for(False, 4) is Method.DIRECT
    assert device.mover.method_for(True, 4) is Method.STAGED
    whole = Forwarding(kernel_library, 0, Method.STAGED, parts=1)
    assert whole.mover.method_for(False, 4) is Method.STAGED


class Meanwhile(Forwarding):
    """Its model's thread fences a layer as soon as the pump has launched it, while later ones are not launched yet; the
    device may run what it has by then."""

    def __init__(self, kernels: ctypes.CDLL, seed: int, parts: int) -> None:
        super().__init__(kernels, seed, Method.DMA, parts)
        self.due = list(range(LAYERS))
        self.due_at_copies: list[int] = []
        self._copy, self.driver.copy = self.driver.copy, self._copies  # type: ignore[method-assign]
        self.pump = Pump(lambda: self.engine, threaded=False)
        self.pump.open()
        self._shown, self.pump._launched = self.pump._launched, self._launched  # type: ignore[method-assign]
        self.ticket = self.pump.load(Moves.of((block, SLOTS - 1 - block, 0) for block in range(BLOCKS)))

    def _copies(self, *given: object, **named: object) -> None:
        self.due_at_copies.append(len(self.due))
        self._copy(*given, **named)  # type: ignore[arg-type]

    def _launched(self, ticket: int, flight: Flight, last: bool) -> None:
        self._shown(ticket, flight, last)
        while self.due and self.pump._under_way[ticket].covers(self.due[0]):
            layer = self.due.pop(0)
            self.pump.fence(ticket, layer)
            self.driver.compute(partial(self._look, layer))
        self.driver.step(3)


@pytest.mark.parametrize("parts", [1, PARTS, LAYERS])
def test_a_forward_that_another_thread_launches_meanwhile_reads_every_layer_behind_its_fence(
    kernel_library: ctypes.CDLL, parts: int
) -> None:
    for seed in range(20):
        device = Meanwhile(kernel_library, seed, parts)
        device.pump.tick()
        assert not device.due
        assert parts == 1 or device.due_at_copies[-1] < LAYERS, "it begins before the last part is launched"
        device.driver.drain()
        device.pump.tick()
        assert [ack.outcome for ack in device.pump.poll()] == [Outcome.DONE]
        assert device.read == [(layer, True) for layer in range(LAYERS)]


def test_two_threads_that_see_a_copys_end_give_its_events_back_once(kernel_library: ctypes.CDLL) -> None:
    """An event that two copies use orders neither."""
    device = Forwarding(kernel_library, 1)
    ticket = device.load()
    flight = device.engine._jobs[ticket].chunks[0].flight
    assert flight is not None
    reached, inner = device.driver.reached, []

    def slow(event: int) -> bool:
        """While one thread asks the driver, another fences."""
        if not inner:
            other = threading.Thread(target=flight.fence)
            inner.append(other)
            other.start()
            other.join(0.05)
        return reached(event)

    device.driver.drain()
    device.driver.reached = slow  # type: ignore[method-assign]
    flight.state()
    inner[0].join(20.0)
    free = device.mover._events._free
    assert len(free) == len(set(free))
