"""On a GPU: the same promises as over the simulated device, kept by the real one. Run by `make gpu-check`.

The tests themselves are tried without one, over a stand-in for libcuda (test_gpu_dry.py).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from delayed import Delayed
from random_copies import Walk

from kvtier.kernels.copy import Ack, CopyEngine, CopyLimits, Moves, Outcome
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.driver import CudaDriver
from kvtier.kernels.engine import open_engine, open_pool_engine
from kvtier.kernels.layout import Order, Paged, Shape, of_arenas, of_pool, of_slots, of_tensors
from kvtier.kernels.method import Method, Table, load_table, table_path
from kvtier.kernels.page_lock import page_lock, page_unlock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(400),
]

MIB = 1 << 20
NO_TABLE = Table("", {})
DEVICE = "cuda"
SHORT_S = 8.0
DELAY_CYCLES = 2_000_000
"""About a millisecond: the host takes tens of microseconds for a step, so that work is still enqueued at the next."""
ITERATIONS = int(os.environ.get("KVTIER_GPU_ITERATIONS", "10000"))


def slot_bytes_for(payload_bytes: int) -> int:
    return -(-payload_bytes // 4096) * 4096


def open_driver() -> CudaDriver:
    return CudaDriver(torch.cuda.current_device())


def arena_of(nbytes: int) -> memoryview:
    """Page-aligned host memory, poisoned."""
    arena = memoryview(mmap.mmap(-1, -(-nbytes // 4096) * 4096))
    np.frombuffer(arena, np.uint8)[:] = 0xA5
    return arena


def cuda_engine(
    device: Paged, host: Paged, shape: Shape, method: Method, limits: CopyLimits | None = None, delay: int | None = None
) -> CopyEngine:
    """An engine over registered memory; with `delay`, every copy is delayed by up to so many cycles."""
    driver = open_driver()
    chunks = page_lock(driver, host.regions, host.stride)
    assert chunks, "this process may not page-lock memory"
    seen = driver if delay is None else Delayed(driver, Random(delay), delay)
    mover = CudaMover(
        seen,
        device,
        replace(host, regions=chunks),
        shape,
        NO_TABLE,
        method=method,
        on_close=partial(page_unlock, driver, chunks),
    )
    return CopyEngine(mover, limits or CopyLimits())


def finish(engine: CopyEngine, *tickets: int) -> list[Ack]:
    assert engine.wait(tickets, timeout_s=60.0), engine.stats()
    engine.check()
    return engine.poll()


SHAPES = {
    "llama-like": Shape(layers=4, kv=2, tokens=16, heads=8, channels=128, element_bytes=2),
    "latent": Shape(layers=5, kv=1, tokens=64, heads=1, channels=576, element_bytes=2),
    "fp8": Shape(layers=3, kv=2, tokens=16, heads=4, channels=128, element_bytes=1),
    "float": Shape(layers=2, kv=2, tokens=8, heads=2, channels=64, element_bytes=4),
    "odd bytes": Shape(layers=3, kv=2, tokens=7, heads=3, channels=37, element_bytes=1),
    "odd halves": Shape(layers=2, kv=2, tokens=5, heads=3, channels=33, element_bytes=2),
    "one byte": Shape(layers=1, kv=1, tokens=1, heads=1, channels=1, element_bytes=1),
}


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("name", SHAPES)
def test_bytes_are_equal_in_every_layout(name: str, method: Method, caplog: pytest.LogCaptureFixture) -> None:
    """Random payloads through every pair of layouts, poison around them untouched."""
    shape = SHAPES[name]
    dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[shape.element_bytes]
    sizes = {"B": 23, "K": shape.kv, "N": shape.tokens, "H": shape.heads, "C": shape.channels * shape.element_bytes}
    generator = torch.Generator(device=DEVICE).manual_seed(11)
    for dims in ("KBNHC", "BKNHC", "BKHNC", "BNHKC", "BHNKC", "KHBNC"):
        for order in Order:
            for packed in (False, True):
                layers = [
                    torch.randint(
                        0, 256, [sizes[a] for a in dims], dtype=torch.uint8, device=DEVICE, generator=generator
                    )
                    for _ in range(shape.layers)
                ]
                slot_bytes = slot_bytes_for(shape.block_bytes)
                arena = arena_of(29 * slot_bytes)
                device = of_tensors([layer.view(dtype) for layer in layers], dims, shape)
                host = of_slots(arena, slot_bytes, shape, order, packed)
                engine = cuda_engine(device, host, shape, method, CopyLimits(chunk_bytes=5 * shape.block_bytes))
                before = [layer.cpu().clone() for layer in layers]
                rng = np.random.default_rng(5)
                blocks, slots = rng.permutation(23)[:17], rng.permutation(29)[:17]
                acks = finish(engine, engine.store(Moves(blocks, slots, np.zeros(17, np.int64))))
                assert {ack.outcome for ack in acks} == {Outcome.DONE}
                check_slots(arena, slot_bytes, shape, before, dims, order, packed, blocks, slots)
                targets = rng.permutation(23)[:17]
                finish(engine, engine.load(Moves(targets, slots, np.zeros(17, np.int64))))
                at = dims.index("B")
                for layer, old in zip(layers, before, strict=True):
                    want = old.clone()
                    want.index_copy_(at, torch.from_numpy(targets), old.index_select(at, torch.from_numpy(blocks)))
                    assert torch.equal(layer.cpu(), want), (dims, order, packed)
                assert engine.close(10.0)
    assert "from now on" not in caplog.text, "the method asked for gave way to another"


def check_slots(
    arena: memoryview,
    slot_bytes: int,
    shape: Shape,
    layers: list[torch.Tensor],
    dims: str,
    order: Order,
    packed: bool,
    blocks: np.ndarray,
    slots: np.ndarray,
) -> None:
    held = np.frombuffer(arena, np.uint8)[: 29 * slot_bytes].reshape(29, slot_bytes)
    inner = ("NHKC" if order is Order.NHD else "HNKC") if packed else ("KNHC" if order is Order.NHD else "KHNC")
    axes = dims.replace("B", "")
    for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
        parts = [layer.select(dims.index("B"), block).permute(*(axes.index(a) for a in inner)) for layer in layers]
        want = b"".join(part.contiguous().numpy().tobytes() for part in parts)
        assert held[slot, : shape.block_bytes].tobytes() == want, (dims, order, packed)
        assert (held[slot, shape.block_bytes :] == 0xA5).all()
    untouched = sorted(set(range(29)) - set(slots.tolist()))
    assert (held[untouched] == 0xA5).all()


class GpuWalk(Walk):
    """The walk of the simulated device, on a real one, whose streams are kept busy at random."""

    def __init__(self, seed: int, method: Method) -> None:
        shape = Shape(layers=2, kv=2, tokens=16, heads=2, channels=256, element_bytes=1)
        self.nbytes = shape.block_bytes
        self.slot_bytes = slot_bytes_for(shape.block_bytes)
        self.layers = [torch.zeros(2, self.BLOCKS, 16, 2, 256, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        self.arena = arena_of(self.SLOTS * self.slot_bytes)
        self.held = np.frombuffer(self.arena, np.uint8)
        self.wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        device = of_tensors(self.layers, "KBNHC", shape)
        host = of_slots(self.arena, self.slot_bytes, shape, Order.HND)
        limits = CopyLimits(
            chunk_bytes=self.nbytes,
            load_window_bytes=2 * self.nbytes,
            store_window_bytes=2 * self.nbytes,
            store_window_while_loading_bytes=self.nbytes,
        )
        super().__init__(Random(seed), cuda_engine(device, host, shape, method, limits, delay=DELAY_CYCLES))

    def fill(self, block: int, value: int) -> None:
        if self.random.random() < 0.3:
            torch.cuda._sleep(self.random.randrange(2 * DELAY_CYCLES))
        for layer in self.layers:
            layer[:, block] = value

    def expect_block(self, block: int, value: int, where: str) -> None:
        self.checked += 1
        for layer in self.layers:
            self.wrong += (layer[:, block] != value).sum()

    def expect_slot(self, slot: int, value: int) -> None:
        start = slot * self.slot_bytes
        self.note(bool((self.held[start : start + self.nbytes] == value).all()), "slot")

    def breathe(self) -> None:
        if self.random.random() < 0.05:
            time.sleep(self.random.random() * 1e-3)


@pytest.mark.parametrize("method", Method)
def test_random_work_with_delays_never_gives_a_wrong_byte(method: Method) -> None:
    walk = GpuWalk(7, method)
    for _ in range(ITERATIONS // len(Method) + 1):
        walk.act()
    walk.engine.wait(list(walk.tickets), timeout_s=60.0)
    walk.settle()
    assert walk.wrong.item() == 0 and not walk.mismatches
    stats = walk.engine.stats()
    assert stats.stored_bytes and stats.loaded_bytes and stats.aborted and not stats.failed and not stats.broken
    assert walk.checked > ITERATIONS // 20
    assert walk.engine.close(10.0)


def test_the_walk_sees_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the same walk, with a driver that forgets to wait."""
    monkeypatch.setattr(CudaDriver, "wait", lambda self, stream, event: None)
    walk = GpuWalk(8, Method.DMA)
    for _ in range(2000):
        walk.act()
        if walk.mismatches or walk.wrong.item():
            break
    walk.engine.wait(list(walk.tickets), timeout_s=60.0)
    torch.cuda.synchronize()
    assert walk.mismatches or walk.wrong.item()
    walk.engine.close(10.0)


@pytest.fixture
def pool_and_arena() -> Iterator[tuple[torch.Tensor, memoryview]]:
    yield torch.randint(0, 256, (128, MIB), dtype=torch.uint8, device=DEVICE), arena_of(128 * MIB)
    torch.cuda.empty_cache()


def test_cancelling_in_flight_ends_clean(pool_and_arena: tuple[torch.Tensor, memoryview]) -> None:
    pool, arena = pool_and_arena
    device, shape = of_pool(pool)
    limits = CopyLimits(chunk_bytes=4 * MIB, load_window_bytes=32 * MIB)
    engine = cuda_engine(device, of_arenas([arena], MIB, shape), shape, Method.DMA, limits, delay=3_000_000)
    before = pool.cpu().clone()
    ticket = engine.load(Moves.of((i, i, 0) for i in range(100)))
    engine.cancel(ticket)
    assert engine.stats().quarantined == 32, "one window was launched, and nothing has been asked of it since"
    acks = finish(engine, ticket)
    assert {ack.outcome for ack in acks} == {Outcome.ABORTED}
    assert sum(len(ack.moves) for ack in acks) == 100 and engine.stats().quarantined == 0
    assert torch.equal(pool.cpu()[32:], before[32:]), "what never flew, or was never named, is untouched"
    ticket = engine.store(Moves.of((i, i, 1) for i in range(128)))
    assert {ack.outcome for ack in finish(engine, ticket)} == {Outcome.DONE}
    assert np.array_equal(np.frombuffer(arena, np.uint8).reshape(128, MIB), pool.cpu().numpy())
    assert engine.close(10.0)


def test_memory_under_a_copy_is_nobody_elses_after_close() -> None:
    """Closed and dropped in the middle of a store: it ends with its pool's bytes, and the memory is not given out."""
    pool, arena = torch.randint(0, 256, (128, MIB), dtype=torch.uint8, device=DEVICE), arena_of(128 * MIB)
    device, shape = of_pool(pool)
    limits = CopyLimits(chunk_bytes=4 * MIB)
    engine = cuda_engine(device, of_arenas([arena], MIB, shape), shape, Method.DMA, limits, delay=30_000_000)
    before, address = pool.cpu().numpy(), pool.data_ptr()
    engine.store(Moves.of((i, i, 0) for i in range(128)))
    assert not engine.close(0.0) and engine.stats().in_flight
    del pool, device, engine
    torch.cuda.empty_cache()
    other = torch.zeros((128, MIB), dtype=torch.uint8, device=DEVICE)
    assert not address <= other.data_ptr() < address + 128 * MIB
    torch.cuda.synchronize()
    assert np.array_equal(np.frombuffer(arena, np.uint8).reshape(128, MIB), before)


def test_without_device_memory_for_staging_bytes_are_still_right(
    pool_and_arena: tuple[torch.Tensor, memoryview],
) -> None:
    pool, arena = pool_and_arena
    device, shape = of_pool(pool)
    # Opened before memory is gone: staging memory is taken when it is first needed.
    engine = cuda_engine(device, of_arenas([arena], MIB, shape), shape, Method.STAGED)
    hoard = []
    size = 1 << 34
    while size >= 16 * MIB:  # staging wants 32; the driver needs a little for itself
        try:
            hoard.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            size //= 2
    acks = finish(engine, engine.store(Moves.of((i, 127 - i, 0) for i in range(128))))
    assert {ack.outcome for ack in acks} == {Outcome.DONE}
    del hoard
    torch.cuda.empty_cache()
    assert np.array_equal(np.frombuffer(arena, np.uint8).reshape(128, MIB)[::-1], pool.cpu().numpy())
    assert engine.close(10.0)


def test_pageable_memory_gives_the_same_bytes(
    pool_and_arena: tuple[torch.Tensor, memoryview], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvtier.kernels.driver import OUT_OF_MEMORY, DeviceError

    def refused(self: CudaDriver, address: int, nbytes: int) -> None:
        raise DeviceError("cuMemHostRegister_v2", OUT_OF_MEMORY)

    monkeypatch.setattr(CudaDriver, "register", refused)
    pool, arena = pool_and_arena
    engine = open_pool_engine(pool, [arena], MIB, method="direct")
    assert "pageable" in caplog.text
    finish(engine, engine.store(Moves.of((i, 127 - i, 0) for i in range(128))))
    assert np.array_equal(np.frombuffer(arena, np.uint8).reshape(128, MIB)[::-1], pool.cpu().numpy())
    pool.zero_()
    finish(engine, engine.load(Moves.of((i, i, 0) for i in range(128))))
    assert np.array_equal(np.frombuffer(arena, np.uint8).reshape(128, MIB), pool.cpu().numpy())
    assert engine.close(10.0)


def test_calibration_is_short_and_kept(pool_and_arena: tuple[torch.Tensor, memoryview], tmp_path: Path) -> None:
    pool, arena = pool_and_arena
    name = open_driver().scope
    engine = open_pool_engine(pool, [arena], MIB, calibration=tmp_path)  # the driver compiles the kernels here, too
    assert engine.close(10.0)
    path = table_path(tmp_path, name)
    table = load_table(path, name)
    assert table is not None and (True, 256 * 1024, 16) in table.best, (
        "the size nearest to the pool's is measured first"
    )
    path.unlink()
    started = time.monotonic()
    engine = open_pool_engine(pool, [arena], MIB, calibration=tmp_path)
    took = time.monotonic() - started
    assert engine.close(10.0) and took < SHORT_S, "5 s of measuring, and page-locking the arena"
    started = time.monotonic()
    engine = open_pool_engine(pool, [arena], MIB, calibration=tmp_path)
    assert engine.close(10.0) and time.monotonic() - started < SHORT_S / 4


def test_two_ranks_pieces_go_to_their_own_arena() -> None:
    pool = torch.randint(0, 256, (16, 2 * 12288), dtype=torch.uint8, device=DEVICE)
    arenas = [arena_of(16 * 12288), arena_of(16 * 12288)]
    device, shape = of_pool(pool, 2)
    host = of_arenas(arenas, 12288, shape)
    for method in Method:
        engine = open_engine(device, host, shape, method=method.value)
        for arena in arenas:
            np.frombuffer(arena, np.uint8)[:] = 0xA5
        finish(engine, engine.store(Moves.of((i, 15 - i, 0) for i in range(16))))
        halves = [np.frombuffer(arena, np.uint8)[: 16 * 12288].reshape(16, 12288)[::-1] for arena in arenas]
        assert np.array_equal(np.concatenate(halves, axis=1), pool.cpu().numpy())
        assert engine.close(10.0)


def test_a_forward_reads_each_layer_behind_its_fence() -> None:
    """64 MiB by layer, read back on the stream of the forward at once: a missing order shows as an old byte."""
    shape = Shape(layers=16, kv=2, tokens=16, heads=8, channels=128, element_bytes=2)
    layers = [torch.zeros(2, 64, 16, 8, 128, dtype=torch.int16, device=DEVICE) for _ in range(shape.layers)]
    arena = arena_of(64 * shape.block_bytes)
    np.frombuffer(arena, np.int16)[:] = np.arange(64 * shape.block_bytes // 2, dtype=np.int64).astype(np.int16)
    slots = np.frombuffer(arena, np.int16).reshape(64, shape.layers, 2, 16, 8, 128)
    device, host = of_tensors(layers, "KBNHC", shape), of_slots(arena, shape.block_bytes, shape)
    for method in Method:
        for layer in layers:
            layer.zero_()
        engine = open_engine(device, host, shape, method=method.value, by_layer=True)
        ticket = engine.load(Moves.of((i, 63 - i, 0) for i in range(64)))
        read = []
        for number, layer in enumerate(layers):
            engine.fence(ticket, number)
            read.append(layer.clone())
        finish(engine, ticket)
        for number, seen in enumerate(read):
            assert np.array_equal(seen.cpu().numpy(), slots[::-1, number].transpose(1, 0, 2, 3, 4)), (method, number)
        assert engine.close(10.0)
