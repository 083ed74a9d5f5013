"""Measuring how a device copies best: once per device, driver, link and version of the kernels, kept in a file.

Meant for a thread of its own, ahead of serving: takes up to two seconds, beside whatever the device computes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.driver import CudaDriver, DeviceError, Driver
from kvtier.kernels.layout import Paged, Region, Shape
from kvtier.kernels.method import COUNTS, Method, Table, calibrate, load_table, table_path
from kvtier.kernels.mover import Lane, Moves, State

log = logging.getLogger(__name__)

_CELL_BYTES = 64 << 20  # larger cells are not measured: every method is fast there, and calibration is short
_FRAGMENTS_PER_BLOCK = 16
_CELL_TIMEOUT_S = 0.5
_TURN_S = 30.0


def measured_table(driver: CudaDriver, folder: Path | None, fragment_bytes: int) -> Table:
    """The device's table from the folder, or measured now and written there. Processes measure one at a time, so that
    they do not measure each other. Never raises: what is not known is chosen by the rule of thumb."""
    device = driver.scope
    if folder is None:
        return _measure(driver, device, fragment_bytes)
    path = table_path(folder, device)
    if (saved := load_table(path, device)) is not None:
        return saved
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _turn(folder):
            if (saved := load_table(path, device)) is not None:
                return saved
            table = _measure(driver, device, fragment_bytes)
            if table.whole:
                table.save(path)
            else:
                log.warning("not every way of copying could be measured: measured again at the next start")
            return table
    except OSError as error:
        log.warning("how this device copies is not measured: %s", error)
        return Table(device, {})


def _measure(driver: CudaDriver, device: str, fragment_bytes: int) -> Table:
    started = time.monotonic()
    table = calibrate(
        device,
        measurement(lambda: CudaDriver(driver.ordinal)),
        time.monotonic,
        first=fragment_bytes,
        wanted=lambda fragment, count: fragment * count <= _CELL_BYTES,
    )
    log.info("measured %d cells on %s in %.1f s", len(table.best), device, time.monotonic() - started)
    return table


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """This process alone measures. Raises OSError where the turn does not come."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _TURN_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def measurement(
    open_driver: Callable[[], Driver], now: Callable[[], float] = time.perf_counter
) -> Callable[[Method, int], Mapping[tuple[bool, int], float]]:
    """A `kvtier.kernels.method.Measure` on scratch memory of the real device: layer-first fragments, block-major
    slots, wall time from command to completion, the better of two after a warm-up. Waits for no stream but its own."""

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
    gate = mover.open_gate()
    lane = Lane.STORE if store else Lane.LOAD
    flight = mover.launch(lane, Moves(every, every, every), gate, (), lambda flight: None)
    gate.close()
    launched = now()  # the first launch loads the kernel, for as long as it takes
    while (state := flight.state()) is State.PENDING:
        if now() - launched > _CELL_TIMEOUT_S:
            return None
    return now() - started if state is State.DONE else None
