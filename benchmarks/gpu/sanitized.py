"""The copy kernels over memory of exactly the needed size, for compute-sanitizer. A part of `make gpu-check`.

Without torch: its allocator hands out parts of large allocations, inside which a byte too far goes unseen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gpu.rows import Rows, Skip

from kvtier.kernels.copy import CopyEngine, CopyLimits, Moves, Outcome
from kvtier.kernels.copy_kernel import PARAMETERS
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.driver import CudaDriver
from kvtier.kernels.layout import Order, Paged, Region, Shape, of_slots
from kvtier.kernels.method import Method, Table
from kvtier.kernels.plan import Runs

BLOCKS, SLOTS = 5, 7
SHAPES = {
    "halves": Shape(layers=3, kv=2, tokens=16, heads=4, channels=64, element_bytes=2),
    "latent": Shape(layers=2, kv=1, tokens=16, heads=1, channels=576, element_bytes=1),
    "odd halves": Shape(layers=2, kv=2, tokens=5, heads=3, channels=33, element_bytes=2),
    "odd bytes": Shape(layers=3, kv=2, tokens=7, heads=3, channels=37, element_bytes=1),
}


class Streaming(CudaDriver):
    """A driver whose caller computes on a stream of its own."""

    _mine = 0

    def current_stream(self) -> int:
        self._mine = self._mine or self.stream(0)
        return self._mine


class OneByOne(Streaming):
    """Copies by a call per run: the writes of cuMemcpyBatchAsync are unknown to compute-sanitizer's initcheck, which
    then takes all that it copied for memory that was never written (2025.3)."""

    def _find_batch(self) -> None:
        return None


def measure(device: str, rows: Rows, *, tiny: bool, opened: Callable[[], CudaDriver] = lambda: Streaming(0)) -> None:
    kept = opened() if device != "cpu" else None  # its context, and the kernels in it, outlive every row
    for name, shape in SHAPES.items():
        for method in (Method.DIRECT, Method.STAGED):
            rows.run(f"{name}, {method.value}", lambda s=shape, m=method: _copies(device, s, m, opened))  # type: ignore[misc]
    del kept


def one_by_one(device: str, rows: Rows, *, tiny: bool) -> None:
    """The same for initcheck."""
    measure(device, rows, tiny=tiny, opened=lambda: OneByOne(0))


def overrun(device: str, rows: Rows, *, tiny: bool, opened: Callable[[], CudaDriver] = lambda: Streaming(0)) -> None:
    """The control: a kernel reads beyond its allocation, which the sanitizer must report."""
    rows.run("one byte too far", lambda: _too_far(device, opened))


def _copies(device: str, shape: Shape, method: Method, opened: Callable[[], CudaDriver]) -> Mapping[str, Any]:
    """Blocks to slots and back into other blocks, and every byte of both memories compared."""
    if device == "cpu":
        raise Skip("on a CPU")
    driver = opened()
    tensors, places = _layer_first(driver, shape)
    slot_bytes = shape.block_bytes + (-shape.block_bytes) % 16
    arena = _bytes(driver.pinned_memory(SLOTS * slot_bytes), SLOTS * slot_bytes)
    arena[:] = 0xA5
    host = of_slots(memoryview(arena), slot_bytes, shape, Order.HND, packed=shape.kv == 2)
    mover = CudaMover(driver, tensors, host, shape, Table("", {}), method=method)
    engine = CopyEngine(mover, CopyLimits(chunk_bytes=2 * shape.block_bytes))
    before = _fetch(driver, tensors)
    stored = [(0, 3, 0), (4, 0, 0), (2, 6, 0)]
    _finish(engine, engine.store(Moves.of(stored)))
    loaded = [(1, 3, 0), (4, 6, 0), (3, 0, 0)]
    _finish(engine, engine.load(Moves.of(loaded)))
    after = _fetch(driver, tensors)
    source = {slot: block for block, slot, _ in stored}
    expected = before.copy()
    for block, slot, _ in loaded:
        expected[places(block)] = before[places(source[slot])]
    assert (after == expected).all(), "a byte of a block is wrong"
    for block, slot, _ in stored:
        at = host.rows(shape).ravel() - np.uint64(arena.ctypes.data) + np.uint64(slot * slot_bytes)
        held = arena[(at[:, None] + np.arange(shape.row_bytes, dtype=np.uint64)).ravel()]
        assert (held == before[places(block)]).all(), "a byte of a slot is wrong"
    assert (arena.reshape(SLOTS, slot_bytes)[[1, 2, 4, 5]] == 0xA5).all(), "a slot was touched that was not named"
    assert mover.method_for(True, 1) is method, "the method gave way to another"
    assert engine.close(10.0)
    return {"passed": True}


def _too_far(device: str, opened: Callable[[], CudaDriver]) -> Mapping[str, Any]:
    if device == "cpu":
        raise Skip("on a CPU")
    driver = opened()
    stream = driver.current_stream()
    small, target = driver.device_memory(4096), driver.pinned_memory(8192)
    tables = driver.pinned_memory(16)
    _bytes(tables, 16).view(np.uint64)[:] = [small, target]
    parameters = np.zeros((), PARAMETERS)
    parameters["src_bases"], parameters["dst_bases"] = tables, tables + 8
    for name in ("items", "planes", "outer", "inner"):
        parameters[name] = 1
    parameters["row_bytes"] = 4096 + 1
    event = driver.event()
    driver.launch("kvtier_copy_1", 1, 1024, parameters, stream)
    driver.record(event, stream)
    while not driver.reached(event):
        pass
    return {"passed": True}


def _layer_first(driver: CudaDriver, shape: Shape) -> tuple[Paged, Callable[[int], Any]]:
    """Random device memory [layer][kv, block, token, head, channel], an allocation each; and where a block's rows lie
    in what `_fetch` returns, in the order of `Paged.rows`."""
    plane = shape.tokens * shape.heads * shape.row_bytes
    nbytes = shape.kv * BLOCKS * plane
    starts = [driver.device_memory(nbytes) for _ in range(shape.layers)]
    data = np.random.default_rng(5).integers(0, 256, shape.layers * nbytes, dtype=np.uint8)
    held = _bytes(driver.pinned_memory(data.nbytes), data.nbytes)
    held[:] = data
    for layer, start in enumerate(starts):
        _copy(driver, held.ctypes.data + layer * nbytes, start, nbytes)
    kv = np.arange(shape.kv, dtype=np.uint64)[None, :] * np.uint64(BLOCKS * plane)
    paged = Paged(
        bases=np.array(starts, np.uint64)[:, None] + kv,
        count=BLOCKS, stride=plane, token=shape.heads * shape.row_bytes, head=shape.row_bytes,
        regions=tuple(sorted((Region(start, nbytes) for start in starts), key=lambda region: region.start)),
    ).validate(shape)  # fmt: skip

    def places(block: int) -> Any:
        layer = np.arange(shape.layers)[:, None, None] * nbytes + np.arange(shape.kv)[None, :, None] * BLOCKS * plane
        return (layer + block * plane + np.arange(plane)[None, None, :]).ravel()

    return paged, places


def _fetch(driver: CudaDriver, tensors: Paged) -> Any:
    """All of the device memory, layer after layer."""
    nbytes = tensors.regions[0].nbytes
    held = _bytes(driver.pinned_memory(nbytes * len(tensors.bases)), nbytes * len(tensors.bases))
    for layer, start in enumerate(tensors.bases[:, 0].tolist()):
        _copy(driver, start, held.ctypes.data + layer * nbytes, nbytes)
    return held.copy()


def _copy(driver: CudaDriver, source: int, target: int, nbytes: int) -> None:
    stream, event = driver.current_stream(), driver.event()
    driver.copy(Runs(*(np.array([value], np.uint64) for value in (source, target, nbytes))), stream)
    driver.record(event, stream)
    while not driver.reached(event):
        pass


def _bytes(address: int, nbytes: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _finish(engine: CopyEngine, ticket: int) -> None:
    assert engine.wait([ticket], 60.0), engine.stats()
    assert {ack.outcome for ack in engine.poll()} == {Outcome.DONE}, engine.stats()
