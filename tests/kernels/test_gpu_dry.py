"""The GPU tests without a GPU: their own code runs over the stand-in for libcuda, so that a GPU finds them in order.

What they prove about a device they prove on one alone.
"""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_gpu
import torch
from headless_driver import HeadlessDriver

from kvtier.kernels.method import Method

MIB = 1 << 20


@pytest.fixture(autouse=True)
def stand_in(libcuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    libcuda.fake_reset(1, 0, 0)

    def open_driver() -> HeadlessDriver:
        return HeadlessDriver(0, library=libcuda)

    def opened(opener: Any, *args: Any, **options: Any) -> Any:
        return opener(*args, driver=open_driver(), **options)

    monkeypatch.setattr(test_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(test_gpu, "SHORT_S", 100.0)  # this machine may be busy
    monkeypatch.setattr(test_gpu, "open_driver", open_driver)
    for name in ("open_engine", "open_pool_engine"):
        monkeypatch.setattr(test_gpu, name, partial(opened, getattr(test_gpu, name)))
    for name in ("_sleep", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


def pool_and_arena() -> tuple[torch.Tensor, memoryview]:
    return torch.arange(128, dtype=torch.uint8)[:, None].repeat(1, MIB), test_gpu.arena_of(128 * MIB)


@pytest.mark.parametrize(
    ("name", "method"),
    [*(("odd halves", method) for method in Method), ("fp8", Method.DIRECT), ("one byte", Method.STAGED)],
)
def test_layouts(name: str, method: Method, caplog: pytest.LogCaptureFixture) -> None:
    test_gpu.test_bytes_are_equal_in_every_layout(name, method, caplog)


def test_a_layout_that_is_not_turned_is_seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The control: slots are described in another order than the test expects."""
    of_slots = test_gpu.of_slots

    def wrong(arena: Any, slot_bytes: int, shape: Any, order: Any, packed: bool) -> Any:
        return of_slots(arena, slot_bytes, shape, test_gpu.Order.NHD, packed)

    monkeypatch.setattr(test_gpu, "of_slots", wrong)
    with pytest.raises(AssertionError):
        test_gpu.test_bytes_are_equal_in_every_layout("odd halves", Method.DIRECT, caplog)


@pytest.mark.parametrize("method", Method)
def test_the_walk(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_gpu, "ITERATIONS", 400)
    test_gpu.test_random_work_with_delays_never_gives_a_wrong_byte(method)


def test_cancelling() -> None:
    test_gpu.test_cancelling_in_flight_ends_clean(pool_and_arena())


def test_no_device_memory(libcuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pool_and_arena()

    def full(*_: Any, **__: Any) -> None:
        libcuda.fake_reset(1, 0, 1)
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "empty", full)
    test_gpu.test_without_device_memory_for_staging_bytes_are_still_right(memory)


def test_pageable_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    test_gpu.test_pageable_memory_gives_the_same_bytes(pool_and_arena(), monkeypatch, caplog)


def test_two_ranks() -> None:
    test_gpu.test_two_ranks_pieces_go_to_their_own_arena()


def test_calibration(libcuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Through `open_engine` as on a GPU, but for who opens the driver and which tensor is the device's."""
    from kvtier.kernels import calibration, engine

    for module in (calibration, engine):
        monkeypatch.setattr(module, "CudaDriver", lambda ordinal: HeadlessDriver(ordinal, library=libcuda))
    monkeypatch.setattr(engine, "_ordinal", lambda device: 0)
    monkeypatch.setattr(calibration, "_CELL_BYTES", 4 * MIB)  # a CPU's memory is not a GPU's
    monkeypatch.setattr(calibration, "calibrate", partial(calibration.calibrate, budget_s=100.0))
    monkeypatch.setattr(test_gpu, "open_pool_engine", engine.open_pool_engine)
    test_gpu.test_calibration_is_short_and_kept(pool_and_arena(), tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("copy-fake-gpu-driver-13000-link-unknown-kernels-")


def test_loads_by_layer() -> None:
    test_gpu.test_a_forward_reads_each_layer_behind_its_fence()
