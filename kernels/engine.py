"""Opening a copy engine: on the device that holds the pool, or on the CPU where there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.errors import TierError
from kvtier.kernels import cpu
from kvtier.kernels.calibration import measured_table
from kvtier.kernels.copy import CopyEngine, CopyLimits
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.driver import CudaDriver, DeviceError, Driver
from kvtier.kernels.layout import Paged, Shape, of_arenas, of_pool
from kvtier.kernels.memory import Progress, Reporter, node_cpus
from kvtier.kernels.method import Table, parse
from kvtier.kernels.page_lock import page_lock, page_unlock
from kvtier.kernels.plan import Planner

log = logging.getLogger(__name__)

_LOAD_PARTS = 8
"""Of a load by layer: the forward waits for an eighth of it, and a part costs an event and some launches."""

_WHOLE = 1 << 62
"""Bytes of a chunk that is a whole load, so that its layers come one after another."""


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
    by_layer: bool = False,
    driver: Driver | None = None,
    table: Table | None = None,
) -> CopyEngine:
    """An engine between a device pool and host slots (see `kvtier.kernels.layout` for describing both).

    On CUDA: page-locks the host memory (0.1 s per GB; pageable with a warning where that is refused), loads the
    kernels and, with method "auto", takes the device's table from the folder `calibration`, or measures for up to 5 s
    and writes it there: nothing of that is left for the first copy. `by_layer`: a load is one chunk, whose layers come
    in eight groups one after another, for `fence(ticket, layer)`; loads then come one after another, too. `driver` and
    `table` are for tests. Raises ConfigError for an unknown method, TierError without a working device.
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
                table = measured_table(cuda, calibration, fragment)
        mover = _pinned_mover(
            driver,
            device,
            host,
            shape,
            progress or Reporter(),
            table=table or Table("", {}),
            method=fixed,
            load_parts=_LOAD_PARTS if by_layer else 1,
        )
    except (DeviceError, OSError) as error:  # OSError: no libcuda
        raise TierError("g1", "open", str(error)) from error
    limits = limits or CopyLimits()
    return CopyEngine(mover, replace(limits, load_chunk_bytes=_WHOLE) if by_layer else limits)


def _pinned_mover(
    driver: Driver, device: Paged, host: Paged, shape: Shape, progress: Progress, **options: Any
) -> CudaMover:
    chunks = page_lock(driver, host.regions, host.stride, progress=progress)
    locked = replace(host, regions=chunks or host.regions)
    release = partial(page_unlock, driver, chunks)
    try:
        mover = CudaMover(driver, device, locked, shape, pageable=not chunks, on_close=release, **options)
        mover.prepare()
        return mover
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
