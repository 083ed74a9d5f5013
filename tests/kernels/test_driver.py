"""How libcuda is called: the right functions with the right arguments, in the right context, and its refusals."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from delayed import Delayed
from headless_driver import HeadlessDriver

from kvtier.errors import TierError
from kvtier.kernels.calibration import measurement
from kvtier.kernels.copy import CopyEngine, Lane, Moves, Outcome
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.driver import OUT_OF_MEMORY, CudaDriver, DeviceError
from kvtier.kernels.layout import of_arenas, of_pool
from kvtier.kernels.method import COUNTS, Method, Table
from kvtier.kernels.plan import Runs


@pytest.fixture
def driver(libcuda: ctypes.CDLL) -> Callable[..., HeadlessDriver]:
    def make(batch: bool = True, pending: int = 0, no_memory: bool = False) -> HeadlessDriver:
        libcuda.fake_reset(batch, pending, no_memory)
        return HeadlessDriver(0, library=libcuda)

    return make


def engine_of(driver: CudaDriver, method: Method) -> tuple[CopyEngine, torch.Tensor, memoryview, CudaMover]:
    pool = torch.arange(8 * 64, dtype=torch.int64).remainder(251).to(torch.uint8).reshape(8, 64)
    device, shape = of_pool(pool)
    arena = memoryview(bytearray(8 * 64))
    mover = CudaMover(driver, device, of_arenas([arena], 64, shape), shape, Table("", {}), method=method)
    return CopyEngine(mover), pool, arena, mover


@pytest.mark.parametrize("batch", [True, False], ids=["batch", "one by one"])
def test_copies_through_the_driver(driver: Callable[..., HeadlessDriver], libcuda: ctypes.CDLL, batch: bool) -> None:
    cuda = driver(batch=batch, pending=3)
    assert cuda.has_batch is batch
    assert cuda.name == "Fake GPU, driver 13000" and cuda.pci_bus_id() == "0000:1b:00.0"
    engine, pool, arena, _ = engine_of(cuda, Method.DMA)
    engine.store(Moves.of([(0, 3, 0), (5, 6, 0)]))
    calls = libcuda.fake_calls().decode().split()
    copies = ["fake_batch"] if batch else ["cuMemcpyAsync"] * 2
    assert calls[-len(copies) - 2 :] == ["cuStreamWaitEvent", *copies, "cuEventRecord"]
    acks = [ack for _ in range(5) for ack in engine.poll()]
    assert [ack.outcome for ack in acks] == [Outcome.DONE]
    assert bytes(arena[192:256]) == pool[0].numpy().tobytes() and bytes(arena[384:448]) == pool[5].numpy().tobytes()
    assert engine.close(1.0)
    assert libcuda.fake_depth() == 0, "the caller's context is restored"
    calls = libcuda.fake_calls().decode().split()
    assert calls.count("cuStreamDestroy_v2") == 3
    assert calls.count("cuEventDestroy_v2") == calls.count("cuEventCreate")


def test_several_calls_ask_once_for_the_context(driver: Callable[..., HeadlessDriver], libcuda: ctypes.CDLL) -> None:
    cuda = driver()
    event = cuda.event()
    with pytest.raises(DeviceError), cuda.current:
        cuda.record(event, 77)
        assert libcuda.fake_depth() == 1
        with cuda.current:
            assert libcuda.fake_depth() == 1
        raise DeviceError("any", 1)
    assert libcuda.fake_depth() == 0
    cuda.record(event, 77)
    assert libcuda.fake_depth() == 0, "outside of it each call asks"


def test_pageable_memory_is_copied_one_by_one(driver: Callable[..., HeadlessDriver], libcuda: ctypes.CDLL) -> None:
    cuda = driver()
    data = np.arange(64, dtype=np.uint8)
    target = np.zeros(64, dtype=np.uint8)
    runs = Runs(*(np.array([value], np.uint64) for value in (data.ctypes.data, target.ctypes.data, 64)))
    cuda.copy(runs, 77, pageable=True)
    assert "fake_batch" not in libcuda.fake_calls().decode() and (target == data).all()
    with pytest.raises(DeviceError, match="cuMemcpyBatchAsync"):
        cuda.copy(runs, 0)
    assert libcuda.fake_depth() == 0


def test_an_error_of_the_device_is_not_mistaken_for_completion(driver: Callable[..., HeadlessDriver]) -> None:
    cuda = driver(pending=-1)
    engine, *_ = engine_of(cuda, Method.DMA)
    engine.load(Moves.of([(0, 3, 0)]))
    assert engine.poll() == [] and engine.stats().broken


def test_a_command_whose_event_cannot_be_made_is_refused(
    driver: Callable[..., HeadlessDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an error of kvtier's tree that callers know, and nothing begun."""
    cuda = driver()
    engine, pool, arena, _ = engine_of(cuda, Method.DMA)
    call, refused = cuda._call, ""

    def refuse(name: str, *args: Any) -> None:
        if name == refused:
            raise DeviceError(name, OUT_OF_MEMORY)
        call(name, *args)

    monkeypatch.setattr(cuda, "_call", refuse)
    for refused in ("cuEventCreate", "cuEventRecord"):
        with pytest.raises(TierError, match=refused):
            engine.store(Moves.of([(5, 3, 0)]))
    refused = ""
    engine.store(Moves.of([(5, 3, 0)]))
    assert [ack.outcome for ack in engine.poll()] == [Outcome.DONE]
    assert bytes(arena[192:256]) == pool[5].numpy().tobytes()


def test_what_the_device_does_not_release_is_no_error_of_the_one_who_closes(
    driver: Callable[..., HeadlessDriver], libcuda: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that failed leaves the device in error: every call fails from then on."""
    cuda = driver()
    engine, *_ = engine_of(cuda, Method.DMA)
    engine.load(Moves.of([(0, 3, 0)]))
    assert [ack.outcome for ack in engine.poll()] == [Outcome.DONE]
    tried, call = list[str](), cuda._call

    def refuse(name: str, *args: Any) -> None:
        tried.append(name)
        call(name, *args)
        raise DeviceError(name, 700)

    cuda._call = refuse  # type: ignore[method-assign]
    assert engine.close(1.0) and libcuda.fake_depth() == 0
    assert tried.count("cuStreamDestroy_v2") == 3 and tried[-1] == "cuDevicePrimaryCtxRelease_v2"
    assert "did not release" in caplog.text


def test_out_of_memory_is_named(driver: Callable[..., HeadlessDriver]) -> None:
    cuda = driver(no_memory=True)
    for allocate in (cuda.device_memory, cuda.pinned_memory):
        with pytest.raises(DeviceError) as caught:
            allocate(1 << 20)
        assert caught.value.code == OUT_OF_MEMORY


@pytest.mark.parametrize("method", [Method.DIRECT, Method.STAGED])
def test_kernels_are_launched_with_the_arguments_they_declare(
    driver: Callable[..., HeadlessDriver], libcuda: ctypes.CDLL, method: Method
) -> None:
    engine, pool, arena, mover = engine_of(driver(), method)
    before = pool.clone()
    engine.store(Moves.of([(0, 3, 0), (5, 6, 0), (6, 7, 0)]))
    assert [ack.outcome for ack in engine.poll()] == [Outcome.DONE]
    for block, slot in ((0, 3), (5, 6), (6, 7)):
        assert bytes(arena[64 * slot : 64 * slot + 64]) == before[block].numpy().tobytes()
    engine.load(Moves.of([(1, 3, 0), (2, 7, 0)]))
    assert [ack.outcome for ack in engine.poll()] == [Outcome.DONE]
    assert torch.equal(pool[1], before[0]) and torch.equal(pool[2], before[6])
    assert torch.equal(pool[3:], before[3:]) and mover.method_for(True, 1) is method
    assert libcuda.fake_calls().decode().split().count("cuLaunchKernel") == 2
    assert engine.close(1.0) and libcuda.fake_depth() == 0


def test_the_fault_mode_delays_with_a_kernel(driver: Callable[..., HeadlessDriver], libcuda: ctypes.CDLL) -> None:
    delayed = Delayed(driver(), Random(1), most_cycles=5000)
    engine, pool, arena, _ = engine_of(delayed, Method.DMA)
    for generation in range(10):
        engine.store(Moves.of([(0, 3, generation)]))
        engine.poll()
    assert libcuda.fake_calls().decode().split().count("cuLaunchKernel") > 3
    assert bytes(arena[192:256]) == pool[0].numpy().tobytes()
    assert engine.close(1.0)


@pytest.mark.parametrize("method", [Method.DIRECT, Method.STAGED])
def test_where_kernels_do_not_load_the_copy_engine_serves(
    driver: Callable[..., HeadlessDriver], libcuda: ctypes.CDLL, method: Method, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = driver()
    libcuda.fake_refuse_kernels(1)
    engine, pool, arena, mover = engine_of(cuda, method)
    engine.store(Moves.of([(0, 3, 0), (5, 6, 0)]))
    assert [ack.outcome for ack in engine.poll()] == [Outcome.DONE]
    assert "copy engine from now on" in caplog.text and mover.method_for(True, 1) is Method.DMA
    assert bytes(arena[192:256]) == pool[0].numpy().tobytes()
    assert engine.close(1.0)


class StubCupy:
    """CuPy as far as the driver uses it: a compiler whose kernels are at that address, or that fails at 0."""

    def __init__(self, address: int) -> None:
        self.address, self.compiled = address, list[str]()
        self.cuda = SimpleNamespace(Device=lambda ordinal: nullcontext())

    def RawModule(self, code: str, options: tuple[str, ...], backend: str) -> Any:
        self.compiled.append(code)
        if not self.address:
            raise RuntimeError("NVRTC_ERROR_INVALID_OPTION")
        return SimpleNamespace(get_function=lambda name: SimpleNamespace(kernel=SimpleNamespace(ptr=self.address)))


@pytest.mark.parametrize("address", [0x1234, 0])
def test_cupy_compiles_the_kernels_where_it_is_installed_and_can(
    driver: Callable[..., HeadlessDriver], libcuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, address: int
) -> None:
    cupy, cuda = StubCupy(address), driver()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name in ("kvtier_copy_16", "kvtier_copy_4"):
        cuda.prepare(name)
    assert all("kvtier_copy" in code for code in cupy.compiled)
    if address:
        assert len(cupy.compiled) == 1 and set(cuda._kernels.values()) == {address}
    assert ("cuModuleLoadData" in libcuda.fake_calls().decode().split()) == (not address)


def test_a_driver_without_a_needed_function_is_refused() -> None:
    with pytest.raises(DeviceError, match="not in this driver"):
        CudaDriver(0, library=ctypes.CDLL(None))


def test_memory_that_the_device_sees_elsewhere_is_not_registered(
    driver: Callable[..., HeadlessDriver], libcuda: ctypes.CDLL
) -> None:
    cuda = driver()
    cuda.register(4096, 8192)
    cuda.unregister(4096)
    libcuda.fake_map_elsewhere(1)
    try:
        with pytest.raises(DeviceError, match="another address"):
            cuda.register(4096, 8192)
    finally:
        libcuda.fake_map_elsewhere(0)
    assert libcuda.fake_calls().decode().split()[-1] == "cuMemHostUnregister"


def test_a_measurement_times_every_cell_it_can(driver: Callable[..., HeadlessDriver]) -> None:
    measure = measurement(driver)
    for method in Method:
        cells = measure(method, 512)
        assert set(cells) == {(store, count) for store in (True, False) for count in COUNTS}
        assert all(0 < seconds < 1 for seconds in cells.values())


def test_what_gives_way_to_the_copy_engine_is_not_measured_as_itself(
    driver: Callable[..., HeadlessDriver], libcuda: ctypes.CDLL
) -> None:
    def without_kernels() -> HeadlessDriver:
        cuda = driver()
        libcuda.fake_refuse_kernels(1)
        return cuda

    assert measurement(without_kernels)(Method.DIRECT, 512) == {}


def test_loads_and_stores_use_streams_of_their_own(driver: Callable[..., HeadlessDriver]) -> None:
    _, _, _, mover = engine_of(driver(), Method.DMA)
    assert len(set(mover._streams.values())) == len(Lane)
