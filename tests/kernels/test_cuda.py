"""The CUDA mover over a simulated device: bytes in every layout and method, order of events, failures."""

from __future__ import annotations

import ctypes
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from delayed import Delayed
from random_copies import Walk
from simulated_driver import COMPUTE, SimulatedDriver

from kvtier.errors import ConfigError, InvalidRequest, TierError
from kvtier.kernels.copy import CopyEngine, CopyLimits, Lane, Moves, Outcome
from kvtier.kernels.copy_kernel import BUS_CREW, ITEMS
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.driver import DeviceError
from kvtier.kernels.engine import open_engine
from kvtier.kernels.layout import Order, Region, Shape, of_arenas, of_pool, of_slots, of_tensors
from kvtier.kernels.method import Method, Table
from kvtier.kernels.page_lock import page_lock, page_unlock

SMALL = CopyLimits(chunk_bytes=128)
NO_TABLE = Table("simulated", {})
LAYOUTS = ["KBNHC", "BKHNC", "BHNKC"]


def arena_of(nbytes: int) -> memoryview:
    return memoryview(bytearray([0xA5]) * nbytes)


def settle(engine: CopyEngine, driver: SimulatedDriver) -> list[tuple[int, Outcome]]:
    """Let the device finish and collect what is acknowledged."""
    acks = engine.poll()
    while driver.step() or engine.stats().queued:
        acks += engine.poll()
    acks += engine.poll()
    engine.check()
    return [(ack.ticket, ack.outcome) for ack in acks]


def pool_engine(
    driver: SimulatedDriver, method: Method | None = None, limits: CopyLimits = SMALL, pageable: bool = False
) -> tuple[CopyEngine, torch.Tensor, memoryview, CudaMover]:
    pool = torch.arange(8 * 64, dtype=torch.int64).remainder(251).to(torch.uint8).reshape(8, 64)
    device, shape = of_pool(pool)
    arena = arena_of(8 * 64)
    mover = CudaMover(
        driver,
        device,
        of_arenas([arena], 64, shape),
        shape,
        NO_TABLE,
        method=method,
        pageable=pageable,
        staging_bytes=128,
    )
    return CopyEngine(mover, limits), pool, arena, mover


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize(("dims", "order", "packed"), list(product(LAYOUTS, Order, [False, True])))
def test_bytes_are_equal_in_every_layout_by_every_method(
    kernel_library: ctypes.CDLL, dims: str, order: Order, packed: bool, method: Method, element_bytes: int
) -> None:
    shape = Shape(layers=3, kv=2, tokens=4, heads=3, channels=5, element_bytes=element_bytes)
    dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[element_bytes]
    generator = torch.Generator().manual_seed(3)
    size = [{"B": 7, "K": 2, "N": 4, "H": 3, "C": 5 * element_bytes}[axis] for axis in dims]
    layers = [torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype) for _ in range(3)]
    slot_bytes = shape.block_bytes + 40
    arena = arena_of(9 * slot_bytes)
    device, host = of_tensors(layers, dims, shape), of_slots(arena, slot_bytes, shape, order, packed)
    driver = SimulatedDriver(kernel_library, Random(4))
    mover = CudaMover(driver, device, host, shape, NO_TABLE, method=method, staging_bytes=2 * slot_bytes)
    engine = CopyEngine(mover, CopyLimits(chunk_bytes=3 * shape.block_bytes))
    at = dims.index("B")
    before = [layer.clone() for layer in layers]
    engine.store(Moves.of([(6, 0, 0), (1, 8, 0), (2, 3, 0), (3, 4, 0), (0, 5, 0)]))
    assert {outcome for _, outcome in settle(engine, driver)} == {Outcome.DONE}
    slots = np.frombuffer(arena, dtype=np.uint8).reshape(9, slot_bytes)
    assert (slots[:, shape.block_bytes :] == 0xA5).all() and (slots[[1, 2, 6, 7]] == 0xA5).all()
    inner = ("NHKC" if order is Order.NHD else "HNKC") if packed else ("KNHC" if order is Order.NHD else "KHNC")
    for block, slot in ((6, 0), (1, 8), (2, 3), (3, 4), (0, 5)):
        parts = [layer.view(torch.uint8).select(at, block) for layer in before]
        axes = dims.replace("B", "")
        want = b"".join(part.permute(*(axes.index(a) for a in inner)).contiguous().numpy().tobytes() for part in parts)
        assert slots[slot, : shape.block_bytes].tobytes() == want
    engine.load(Moves.of([(4, 0, 0), (5, 8, 0), (1, 3, 0)]))
    assert {outcome for _, outcome in settle(engine, driver)} == {Outcome.DONE}
    for layer, old in zip(layers, before, strict=True):
        want_layer = old.clone()
        for to, source in ((4, 6), (5, 1), (1, 2)):
            want_layer.select(at, to).copy_(old.select(at, source))
        assert torch.equal(layer.view(torch.uint8), want_layer.view(torch.uint8))
    launched = driver.names().count("launch")
    assert (launched > 0) == (method is not Method.DMA)
    assert engine.close(1.0) and driver.closed


def test_a_launch_waits_then_copies_then_records(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    engine, *_ = pool_engine(driver)
    engine.store(Moves.of([(0, 0, 0), (3, 5, 0), (4, 6, 0), (5, 7, 0)]))
    first = driver.calls[0]
    assert (first.name, first.stream) == ("record", COMPUTE), "the gate is recorded when the command comes"
    stream = driver.calls[1].stream
    assert stream != COMPUTE
    assert driver.names(stream) == ["wait", "copy", "record", "copy", "record"], "a stream waits once"
    assert [call.detail for call in driver.calls if call.name == "wait"] == [first.detail]
    assert [call.detail for call in driver.calls if call.name == "copy"] == [2, 1], "neighbours travel as one run"
    settle(engine, driver)
    assert engine.close(1.0)


def test_a_load_waits_for_the_store_of_its_block_on_the_device(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    engine, *_ = pool_engine(driver)
    engine.store(Moves.of([(3, 1, 0)]))
    stored = driver.calls[-1]
    engine.load(Moves.of([(3, 2, 0)]))
    load_stream = driver.calls[-1].stream
    waits = [call.detail for call in driver.calls if call.name == "wait" and call.stream == load_stream]
    assert stored.name == "record" and waits[-1] == stored.detail
    settle(engine, driver)


def test_lanes_have_streams_of_their_own_and_loads_the_better_priority(kernel_library: ctypes.CDLL) -> None:
    made: list[int] = []

    class Watching(SimulatedDriver):
        def stream(self, priority: int) -> int:
            made.append(priority)
            return super().stream(priority)

    driver = Watching(kernel_library, Random(0))
    engine, *_ = pool_engine(driver)
    assert len(made) == 3 and made[Lane.EXPEDITED] < made[Lane.LOAD] < made[Lane.STORE]
    engine.store(Moves.of([(0, 0, 0)]))
    engine.load(Moves.of([(1, 1, 0)]))
    engine.load(Moves.of([(2, 2, 0)]), expedited=True)
    assert len({call.stream for call in driver.calls if call.name == "copy"}) == 3
    settle(engine, driver)


def test_events_are_pooled(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    engine, *_ = pool_engine(driver)
    for round_ in range(50):
        engine.store(Moves.of([(0, 0, round_)]))
        settle(engine, driver)
    assert len(driver._events) <= 3


def test_a_callers_event_is_waited_for_and_an_unrecorded_one_refused(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    engine, pool, arena, _ = pool_engine(driver)

    class TorchEvent:
        cuda_event = 0

        def query(self) -> bool:
            raise AssertionError("the device waits, not the host")

    event = TorchEvent()
    with pytest.raises(InvalidRequest, match="recorded"):
        engine.store(Moves.of([(0, 0, 0)]), after=event)  # type: ignore[arg-type]
    event.cuda_event = driver.event()
    driver.compute(lambda: pool[0].fill_(77))
    driver.record(event.cuda_event, COMPUTE)
    engine.store(Moves.of([(0, 0, 0)]), after=event)  # type: ignore[arg-type]
    assert settle(engine, driver)[-1][1] is Outcome.DONE
    assert bytes(arena[:64]) == bytes([77]) * 64


def test_kernels_take_few_ctas(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    pool = torch.zeros(64, 65536, dtype=torch.uint8)
    device, shape = of_pool(pool)
    host = of_arenas([arena_of(64 * 65536)], 65536, shape)
    engine = CopyEngine(CudaMover(driver, device, host, shape, NO_TABLE, method=Method.DIRECT))
    engine.store(Moves.of([(i, i, 0) for i in range(64)]))
    assert [call.detail[1] for call in driver.calls if call.name == "launch"] == [BUS_CREW.ctas]
    settle(engine, driver)


def test_a_refused_copy_fails_once_its_part_is_over(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    engine, *_ = pool_engine(driver)
    driver.trouble.refuse["copy"] = 1
    ticket = engine.store(Moves.of([(0, 3, 0), (5, 6, 0)]))
    assert engine.stats().in_flight == 2, "not free while what was accepted still runs"
    assert settle(engine, driver) == [(ticket, Outcome.FAILED)]
    again = engine.store(Moves.of([(0, 3, 1), (5, 6, 1)]))
    assert settle(engine, driver) == [(again, Outcome.DONE)]


@pytest.mark.parametrize("method", Method)
def test_a_launch_with_a_bug_fails_once_its_part_is_over(
    kernel_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    engine, *_ = pool_engine(driver, method)
    name = "launch" if method is Method.DIRECT else "copy"
    real = getattr(driver, name)

    def buggy(*args: object, **options: object) -> None:
        real(*args, **options)
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(driver, name, buggy)
        ticket = engine.store(Moves.of([(0, 3, 0), (5, 6, 0)]))
    assert engine.stats().in_flight == 2, "not free while what was accepted still runs"
    assert settle(engine, driver) == [(ticket, Outcome.FAILED)]
    again = engine.store(Moves.of([(0, 3, 1), (5, 6, 1)]))
    assert settle(engine, driver) == [(again, Outcome.DONE)]


def test_nothing_is_copied_when_its_gate_cannot_be_waited_for(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    engine, *_ = pool_engine(driver)
    driver.trouble.refuse["wait"] = 1
    ticket = engine.load(Moves.of([(0, 3, 0)]))
    assert "copy" not in driver.names()
    assert settle(engine, driver) == [(ticket, Outcome.FAILED)]


def test_without_an_event_behind_it_a_copy_is_lost_and_its_memory_kept(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    engine, *_ = pool_engine(driver)
    engine.load(Moves.of([(0, 3, 0)]))
    settle(engine, driver)
    driver.trouble.refuse["record"] = 2  # one for the gate is not refused: see below
    with pytest.raises(Exception, match="record"):
        engine.load(Moves.of([(1, 3, 0)]))
    engine.check()
    driver.trouble.refuse["record"] = 0
    engine.load(Moves.of([(1, 3, 0)]))
    driver.trouble.dead = True
    assert engine.poll() == [] and engine.stats().broken and engine.stats().quarantined == 1
    assert not engine.close(0.0) and not driver.closed


@pytest.mark.parametrize("what", ["launch", "prepare", "device_memory", "pinned_memory"])
def test_a_kernel_that_cannot_run_gives_way_to_the_copy_engine(kernel_library: ctypes.CDLL, what: str) -> None:
    for method in (Method.DIRECT, Method.STAGED):
        driver = SimulatedDriver(kernel_library, Random(0))
        engine, pool, arena, _ = pool_engine(driver, method)
        driver.trouble.refuse[what] = 1
        engine.store(Moves.of([(0, 3, 0), (5, 6, 0)]))
        assert {outcome for _, outcome in settle(engine, driver)} == {Outcome.DONE}
        assert bytes(arena[3 * 64 : 4 * 64]) == pool[0].numpy().tobytes()
        assert bytes(arena[6 * 64 : 7 * 64]) == pool[5].numpy().tobytes()


def test_a_kernels_items_travel_with_its_launch(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0), steps_per_query=0)
    pool = torch.arange((ITEMS + 5) * 16, dtype=torch.int64).remainder(251).to(torch.uint8).reshape(-1, 16)
    device, shape = of_pool(pool)
    arena = arena_of(len(pool) * 16)
    mover = CudaMover(driver, device, of_arenas([arena], 16, shape), shape, NO_TABLE, method=Method.DIRECT)
    engine = CopyEngine(mover, CopyLimits(chunk_bytes=1 << 20))
    engine.store(Moves.of([(i, len(pool) - 1 - i, 0) for i in range(len(pool))]))
    names = driver.names()
    assert names.count("launch") == 2 and names.count("copy") == 1, "the bases alone are copied, once"
    settle(engine, driver)
    assert bytes(arena) == pool.flip(0).numpy().tobytes()
    engine.load(Moves.of([(0, 1, 0)]))
    settle(engine, driver)
    engine.store(Moves.of([(1, 1, 1)]))
    settle(engine, driver)
    assert driver.names().count("copy") == 2, "once per direction and stream"


def test_pageable_memory_never_sees_a_kernel(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    engine, pool, arena, _ = pool_engine(driver, Method.DIRECT, pageable=True)
    engine.store(Moves.of([(0, 3, 0)]))
    settle(engine, driver)
    assert "launch" not in driver.names() and bytes(arena[192:256]) == pool[0].numpy().tobytes()


class SimulatedWalk(Walk):
    def __init__(self, seed: int, kernels: ctypes.CDLL, method: Method, delayed: bool, forget: bool = False) -> None:
        self.driver = SimulatedDriver(kernels, Random(seed + 1000))
        self.driver.trouble.forget_waits = forget
        self.layers = [torch.zeros(2, self.BLOCKS, 2, 1, 6, dtype=torch.uint8) for _ in range(2)]
        self.arena = arena_of(self.SLOTS * self.SLOT_BYTES)
        shape = Shape(layers=2, kv=2, tokens=2, heads=1, channels=6, element_bytes=1)
        device = of_tensors(self.layers, "KBNHC", shape)
        host = of_slots(self.arena, self.SLOT_BYTES, shape, Order.HND)
        driver = Delayed(self.driver, Random(seed)) if delayed else self.driver
        mover = CudaMover(driver, device, host, shape, NO_TABLE, method=method, staging_bytes=2 * self.SLOT_BYTES)
        limits = CopyLimits(48, load_window_bytes=96, store_window_bytes=96, store_window_while_loading_bytes=48)
        super().__init__(Random(seed), CopyEngine(mover, limits))

    def fill(self, block: int, value: int) -> None:
        def work() -> None:
            for layer in self.layers:
                layer[:, block] = value

        self.driver.compute(work)

    def expect_block(self, block: int, value: int, where: str) -> None:
        def work() -> None:
            self.note(all(bool((layer[:, block] == value).all()) for layer in self.layers), where)

        self.driver.compute(work)

    def expect_slot(self, slot: int, value: int) -> None:
        start = slot * self.SLOT_BYTES
        self.note(bytes(self.arena[start : start + 48]) == bytes([value]) * 48, "slot")

    def breathe(self) -> None:
        self.driver.step(self.random.randrange(12))

    def finish(self) -> None:
        for _ in range(300):
            self.settle()
        self.driver.drain()
        self.settle()
        self.driver.drain()


@pytest.mark.parametrize("delayed", [False, True], ids=["", "delayed"])
@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_order_the_device_chooses_no_byte_is_wrong(
    kernel_library: ctypes.CDLL, seed: int, method: Method, delayed: bool
) -> None:
    walk = SimulatedWalk(seed, kernel_library, method, delayed)
    for _ in range(300):
        walk.act()
    walk.finish()
    assert not walk.mismatches and walk.checked > 100
    stats = walk.engine.stats()
    assert stats.stored_bytes and stats.loaded_bytes and stats.aborted and not stats.refused and not stats.failed
    assert stats.queued == stats.in_flight == stats.quarantined == 0
    assert walk.engine.close(1.0)


def test_the_walk_sees_a_mover_that_does_not_wait(kernel_library: ctypes.CDLL) -> None:
    """The negative control: the same walk over a device that ignores every wait."""
    wrong = 0
    for seed in range(4):
        walk = SimulatedWalk(seed, kernel_library, Method.DMA, delayed=True, forget=True)
        for _ in range(300):
            walk.act()
        wrong += len(walk.mismatches)
    assert wrong > 10


def test_pinning_goes_in_chunks_of_whole_slots_and_is_all_or_nothing(kernel_library: ctypes.CDLL) -> None:
    driver = SimulatedDriver(kernel_library, Random(0))
    regions = [Region(4096, 960), Region(8192, 96)]
    seen: list[tuple[str, int, int]] = []
    chunks = page_lock(driver, regions, 96, chunk_bytes=300, progress=lambda *step: seen.append(step))
    assert [(chunk.start, chunk.nbytes) for chunk in chunks] == [
        (4096, 288), (4384, 288), (4672, 288), (4960, 96), (8192, 96),
    ]  # fmt: skip
    assert seen[-1] == ("register", 1056, 1056) and len(driver.registered) == 5
    page_unlock(driver, chunks)
    assert not driver.registered
    driver.room_to_register = 2
    assert page_lock(driver, regions, 96, chunk_bytes=300) == () and not driver.registered
    with pytest.raises(InvalidRequest):
        page_lock(driver, regions, 301, chunk_bytes=300)


def test_an_engine_opens_pinned_and_falls_back_to_pageable_with_a_warning(
    kernel_library: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    for room, pinned in ((100, True), (0, False)):
        driver = SimulatedDriver(kernel_library, Random(0))
        driver.room_to_register = room
        pool = torch.full((8, 4096), 5, dtype=torch.uint8)
        device, shape = of_pool(pool)
        arena = arena_of(8 * 4096)
        caplog.clear()
        engine = open_engine(device, of_arenas([arena], 4096, shape), shape, driver=driver, table=NO_TABLE)
        assert bool(driver.registered) is pinned and ("pageable" in caplog.text) is not pinned
        engine.store(Moves.of([(0, 3, 0)]))
        assert [outcome for _, outcome in settle(engine, driver)] == [Outcome.DONE]
        assert bytes(arena[3 * 4096 : 4 * 4096]) == bytes([5]) * 4096
        assert engine.close(1.0) and not driver.registered


def test_an_engine_that_cannot_open_leaves_nothing_locked(kernel_library: ctypes.CDLL) -> None:
    class Streamless(SimulatedDriver):
        def stream(self, priority: int) -> int:
            raise DeviceError("cuStreamCreateWithPriority", 2)

    driver = Streamless(kernel_library, Random(0))
    pool = torch.zeros((8, 4096), dtype=torch.uint8)
    device, shape = of_pool(pool)
    with pytest.raises(TierError, match="cuStreamCreate"):
        open_engine(device, of_arenas([arena_of(8 * 4096)], 4096, shape), shape, driver=driver, table=NO_TABLE)
    assert not driver.registered
    with pytest.raises(ConfigError, match="warp"):
        open_engine(device, of_arenas([arena_of(8 * 4096)], 4096, shape), shape, method="warp")
