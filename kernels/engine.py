"""Opening a copy engine: on the device that holds the pool, or on the CPU where there is none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import TierError
from kvtier.kernels import cpu
from kvtier.kernels.copy import CopyEngine, CopyLimits
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.driver import KERNELS, CudaDriver, DeviceError, Driver
from kvtier.kernels.layout import Paged, Region, Shape, of_arenas, of_pool
from kvtier.kernels.memory import Progress, Reporter, node_cpus
from kvtier.kernels.method import COUNTS, Method, Table, calibrate, load_table, parse, table_path
from kvtier.kernels.mover import Lane, Moves, State
from kvtier.kernels.page_lock import page_lock, page_unlock
from kvtier.kernels.plan import Planner

log = logging.getLogger(__name__)

_CELL_BYTES = 64 << 20  # larger cells are not measured: every method is fast there, and calibration is short
_FRAGMENTS_PER_BLOCK = 16
_CELL_TIMEOUT_S = 0.5


def open_pool_engine(pool: Any, arenas: Sequence[memoryview], slot_bytes: int, **options: Any) -> CopyEngine:
    """An engine between a uint8 tensor `[blocks, block_bytes]` on any device and whole-block host slots.

    Slot i is the `slot_bytes` at i * slot_bytes of every arena, each of which holds an equal piece of the block (one
    per rank). Options as for `open_engine`. Keeps the tensor and the arenas' buffers until `close`.
    """
    device, shape = of_pool(pool, len(arenas))
    return open_engine(device, of_arenas(arenas, slot_bytes, shape), shape, **options)


def open_engine(
    device: Paged,
    host: Paged,
    shape: Shape,
    *,
    method: str = "auto",
    calibration: Path | None = None,
    limits: CopyLimits | None = None,
    progress: Progress | None = None,
    driver: Driver | None = None,
    table: Table | None = None,
) -> CopyEngine:
    """An engine between a device pool and host slots (see `kvtier.kernels.layout` for describing both).

    On CUDA: page-locks the host memory (0.1 s per GB; pageable with a warning where that is refused) and, with
    method "auto", takes the device's table from the folder `calibration`, or measures for up to 2 s (and compiles
    the kernels, where they have never been) and writes it there. `driver` and `table` are for tests. Raises ConfigError
    for an unknown method, TierError without a working device.
    """
    fixed = parse(method)
    ordinal = _ordinal(device)
    if driver is None and ordinal is None:
        return cpu.open_engine(device, host, shape, limits or cpu.LIMITS)
    try:
        if driver is None:
            assert ordinal is not None
            cuda = CudaDriver(ordinal)
            driver = cuda
            if table is None and fixed is None:
                fragment = Planner(device, host, shape).fragment_bytes
                table = _table(cuda, calibration, fragment)
        mover = _pinned_mover(driver, device, host, shape, table or Table("", {}), fixed, progress or Reporter())
    except (DeviceError, OSError) as error:  # OSError: no libcuda
        raise TierError("g1", "open", str(error)) from error
    return CopyEngine(mover, limits or CopyLimits())


def _pinned_mover(
    driver: Driver, device: Paged, host: Paged, shape: Shape, table: Table, method: Method | None, progress: Progress
) -> CudaMover:
    chunks = page_lock(driver, host.regions, host.stride, progress=progress)
    locked = replace(host, regions=chunks or host.regions)
    release = partial(page_unlock, driver, chunks)
    try:
        return CudaMover(driver, device, locked, shape, table, method=method, pageable=not chunks, on_close=release)
    except DeviceError:
        release()
        raise


def _ordinal(device: Paged) -> int | None:
    """The CUDA device that the memory lies on; None for host memory."""
    tensor: Any = device.owners[0] if device.owners else None
    return int(tensor.device.index) if getattr(tensor, "is_cuda", False) else None


def cpus_near(device: Any) -> frozenset[int]:
    """CPUs of the NUMA node of a torch device, for memory that it copies to and from; empty for "cpu" and where
    unknown."""
    if device.type != "cuda":
        return frozenset()
    try:
        driver = CudaDriver(int(device.index or 0))
        place = driver.pci_bus_id()
        driver.close((), ())
    except (DeviceError, OSError) as error:
        log.warning("host memory is not placed near %s: %s", device, error)
        return frozenset()
    return node_cpus(place)


def _table(driver: CudaDriver, folder: Path | None, fragment_bytes: int) -> Table:
    path = folder and table_path(folder, driver.name)
    if path is not None and (saved := load_table(path, driver.name)) is not None:
        return saved
    try:
        driver.kernel(KERNELS[0])  # compiled once per machine, for seconds: not measured
    except DeviceError as error:
        log.warning("kernels are not measured: %s", error)
    started = time.monotonic()
    measure = measurement(lambda: CudaDriver(driver.ordinal))
    table = calibrate(driver.name, measure, time.monotonic, first=fragment_bytes)
    log.info("measured %d cells on %s in %.1f s", len(table.best), driver.name, time.monotonic() - started)
    if path is not None:
        try:
            table.save(path)
        except OSError as error:
            log.warning("calibration not saved, it is measured again next time: %s", error)
    return table


def measurement(
    open_driver: Callable[[], Driver], now: Callable[[], float] = time.perf_counter
) -> Callable[[Method, int], Mapping[tuple[bool, int], float]]:
    """A `kvtier.kernels.method.Measure` on scratch memory of the real device: layer-first fragments, block-major
    slots, wall time from command to completion, the better of two after a warm-up."""

    def measure(method: Method, fragment_bytes: int) -> Mapping[tuple[bool, int], float]:
        counts = [count for count in COUNTS if count * fragment_bytes <= _CELL_BYTES]
        seconds: dict[tuple[bool, int], float] = {}
        driver = open_driver()
        try:
            mover = _scratch_mover(driver, method, fragment_bytes, max(counts) // _FRAGMENTS_PER_BLOCK)
        except DeviceError as error:
            log.warning("%s was not measured: %s", method.value, error)
            driver.close((), ())
            return seconds
        for store in (True, False):
            for count in counts:
                times = [_once(mover, store, count // _FRAGMENTS_PER_BLOCK, now) for _ in range(3)]
                if mover.method_for(store, 1) is not method:
                    break  # it fell back to the copy engine
                if None in times:
                    return seconds  # something hangs; its memory is left to the process
                seconds[store, count] = min(each for each in times[1:] if each is not None)
        mover.close()
        return seconds

    return measure


def _scratch_mover(driver: Driver, method: Method, fragment_bytes: int, blocks: int) -> CudaMover:
    shape = Shape.opaque(fragment_bytes, _FRAGMENTS_PER_BLOCK)
    nbytes = blocks * shape.block_bytes
    device, host = driver.device_memory(nbytes), driver.pinned_memory(nbytes)
    layers = np.arange(_FRAGMENTS_PER_BLOCK, dtype=np.uint64)[:, None] * np.uint64(fragment_bytes)

    def paged(start: int, between: int, stride: int) -> Paged:
        bases = np.uint64(start) + layers * np.uint64(between)
        return Paged(bases, blocks, stride, token=0, head=0, regions=(Region(start, nbytes),)).validate(shape)

    on_device, on_host = paged(device, blocks, fragment_bytes), paged(host, 1, shape.block_bytes)
    return CudaMover(driver, on_device, on_host, shape, Table("", {}), method=method)


def _once(mover: CudaMover, store: bool, blocks: int, now: Callable[[], float]) -> float | None:
    """Seconds for one launch; None when it failed or was late."""
    every = np.arange(blocks, dtype=np.int64)
    started = now()
    gate = mover.gate(None)
    flight = mover.launch(Lane.STORE if store else Lane.LOAD, Moves(every, every, every), gate, ())
    gate.close()
    launched = now()  # the first launch loads the kernel, for as long as it takes
    while (state := flight.state()) is State.PENDING:
        if now() - launched > _CELL_TIMEOUT_S:
            return None
    return now() - started if state is State.DONE else None
