"""Cost of moving blocks on a GPU, beside one large pinned copy of the same run. A part of `make gpu-check`.

Every figure is wall time from the command to the completed copy, submission included; medians. Fragments are laid
out as an engine's layer-first tensors against block-major slots, in random order, so that neighbours rarely merge.
With device "cpu" the same code runs tiny sizes, to show that it runs.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu.rows import Rows, Skip

from kvtier.kernels import cpu
from kvtier.kernels.calibration import measurement
from kvtier.kernels.copy import CopyEngine, CopyLimits, Moves, Outcome
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.driver import KERNELS, CudaDriver, DeviceError
from kvtier.kernels.layout import Paged, Region, Shape
from kvtier.kernels.method import Method, Table, calibrate
from kvtier.kernels.page_lock import page_lock, page_unlock
from kvtier.kernels.plan import Planner, Runs

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FRAGMENTS = (4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
COUNTS = (16, 256, 4096, 65536)
ROUNDS = 3
WAYS = {"store": ("store",), "load": ("load",), "both": ("store", "load")}
UNLIMITED = CopyLimits(
    chunk_bytes=64 * MIB,
    load_window_bytes=64 * GIB,
    store_window_bytes=64 * GIB,
    store_window_while_loading_bytes=64 * GIB,
)


class Bench:
    """Scratch memory on both sides; the host's is page-locked where there is a GPU."""

    def __init__(self, device: str, nbytes: int, *, cuda: bool) -> None:
        self.cuda = cuda
        self.nbytes = nbytes
        self.pool = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
        self.host = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)  # page-aligned
        self.host.copy_(self.pool)
        self.table = Table("cpu", {})
        self.figures: dict[str, Any] = {}
        self.graphs = cuda  # whether work can be captured
        self._release: Callable[[], None] = lambda: None
        if self.cuda:
            self.ordinal = torch.cuda.current_device()
            self._driver = CudaDriver(self.ordinal)
            started = time.perf_counter()
            chunks = page_lock(self._driver, [Region(self.host.data_ptr(), nbytes)], 2 * MIB)
            if not chunks:
                raise RuntimeError("this process may not page-lock memory: raise the memlock limit")
            self.figures["pin_gb_s"] = nbytes / (time.perf_counter() - started) / 1e9
            self._release = partial(page_unlock, self._driver, chunks)
            started = time.perf_counter()
            try:
                self._driver.prepare(KERNELS[0])
                self.figures["compile_s"] = time.perf_counter() - started
            except DeviceError as error:  # without kernels the copy engine can still be measured
                self.figures["no_kernels"] = str(error)
            started = time.perf_counter()
            measured = measurement(lambda: CudaDriver(self.ordinal))
            self.table = calibrate(self._driver.scope, measured, time.monotonic, first=16 * KIB)
            self.figures["calibration_s"] = time.perf_counter() - started
            self.figures["methods"] = [[s, f, n, m.value] for (s, f, n), m in sorted(self.table.best.items())]

    def start_up(self) -> dict[str, Any]:
        """Time to open, and the methods that calibration chose."""
        return self.figures

    def another(self) -> CudaDriver:
        """A driver of its own on the same device."""
        return CudaDriver(self.ordinal)

    def close(self) -> None:
        self._release()

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def ceiling(self) -> dict[str, float]:
        """GB/s of one big pinned copy: each way, and both at once (sum)."""
        half = self.nbytes // 2
        device, host = self.pool.split(half)[:2], self.host.split(half)[:2]
        streams = [torch.cuda.Stream().cuda_stream for _ in range(2)] if self.cuda else []

        def copy(way: str, part: int) -> None:
            source, target = (device[part], host[part]) if way == "store" else (host[part], device[part])
            if self.cuda:  # by the driver: torch takes memory that it did not pin itself for pageable, and waits
                self._driver.copy(_one_run(source, target), streams[part])
            else:
                target.copy_(source)

        def run(ways: tuple[str, ...]) -> float:
            self.sync()
            started = time.perf_counter()
            for part, way in enumerate(ways):
                copy(way, part)
            self.sync()
            return len(ways) * half / (time.perf_counter() - started) / 1e9

        figures: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(6):
            for name, ways in WAYS.items():
                figures[name].append(run(ways))
        return {name: statistics.median(values[1:]) for name, values in figures.items()}

    def geometry(self, fragment: int, count: int) -> tuple[Paged, Paged, Shape, int]:
        """Layer-first device memory and block-major slots for two disjoint sets of `count` fragments each."""
        layers = min(16, count)
        blocks = 2 * count // layers
        shape = Shape.opaque(fragment, layers)
        index = np.arange(layers, dtype=np.uint64)[:, None] * np.uint64(fragment)

        def paged(tensor: torch.Tensor, between: int, stride: int) -> Paged:
            bases = np.uint64(tensor.data_ptr()) + index * np.uint64(between)
            region = Region(tensor.data_ptr(), self.nbytes)
            return Paged(bases, blocks, stride, token=0, head=0, regions=(region,), owners=(tensor,)).validate(shape)

        return paged(self.pool, blocks, fragment), paged(self.host, 1, shape.block_bytes), shape, blocks

    def engine(self, fragment: int, count: int, method: Method | None) -> tuple[CopyEngine, int, Shape]:
        device, host, shape, blocks = self.geometry(fragment, count)
        if not self.cuda:
            return cpu.open_engine(device, host, shape, UNLIMITED), blocks, shape
        self.mover = CudaMover(CudaDriver(self.ordinal), device, host, shape, self.table, method=method)
        return CopyEngine(self.mover, UNLIMITED), blocks, shape

    def close_engine(self, engine: CopyEngine, method: Method | None) -> None:
        """Raises Skip if another method ran: the requested one cannot run here."""
        gave_way = self.cuda and method is not None and self.mover.method_for(True, 1) is not method
        assert engine.close(10.0)
        if gave_way:
            raise Skip("it gave way to the copy engine: no kernels here")

    def cell(self, fragment: int, count: int, method: Method | None) -> dict[str, Any]:
        """GB/s stored, loaded, both at once; µs of CPU per descriptor of a load. Every copy must report DONE."""
        engine, blocks, shape = self.engine(fragment, count, method)
        half, generation = blocks // 2, 0
        rng = np.random.default_rng(1)

        def run(ways: tuple[str, ...]) -> tuple[float, float]:
            self.sync()
            commands = [
                (engine.store, _moves(rng, 0, half, generation)) if way == "store"
                else (engine.load, _moves(rng, half, half, generation))
                for way in ways
            ]  # fmt: skip
            started = time.perf_counter()
            tickets = [command(moves) for command, moves in commands]
            submitted = time.perf_counter()
            assert engine.wait(tickets, 60.0, sleep=lambda _: None)
            ended = time.perf_counter()
            assert {ack.outcome for ack in engine.poll()} == {Outcome.DONE}, engine.stats()
            return len(ways) * half * shape.block_bytes / (ended - started) / 1e9, submitted - started

        figures: dict[str, list[float]] = {name: [] for name in (*WAYS, "submit_us")}
        for _ in range(ROUNDS + 1):
            for name, ways in WAYS.items():
                generation += 1
                speed, submit = run(ways)
                figures[name].append(speed)
                if name == "load":
                    figures["submit_us"].append(submit * 1e6 / count)
        self.close_engine(engine, method)
        named = {"fragment": fragment, "count": count, "method": method.value if method else "auto"}
        return named | {name: statistics.median(values[1:]) for name, values in figures.items()}

    def naive(self, fragment: int, count: int) -> dict[str, Any]:
        """GB/s of loads by a loop: torch's copy_ per fragment, and the driver's plain copy per fragment."""
        device, host, shape, blocks = self.geometry(fragment, count)
        half = blocks // 2
        order = np.random.default_rng(1).permutation(half)
        nbytes = half * shape.block_bytes
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.cuda).view(half, shape.layers, fragment)
        layers = self.pool[: blocks * shape.block_bytes].view(shape.layers, blocks, fragment)

        def by_torch() -> None:
            for slot, block in enumerate(order.tolist()):
                for layer in range(shape.layers):
                    layers[layer, block].copy_(pinned[slot, layer], non_blocking=True)

        subjects: dict[str, Callable[[], None]] = {"torch_per_fragment": by_torch}
        if self.cuda:
            stream = torch.cuda.Stream().cuda_stream
            runs = Planner(host, device, shape).runs(np.arange(half), order)
            subjects["memcpy_async_per_fragment"] = lambda: self._driver.copy(runs, stream, pageable=True)
        figures: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(ROUNDS):
            for name, subject in subjects.items():
                self.sync()
                started = time.perf_counter()
                subject()
                self.sync()
                figures[name].append(nbytes / (time.perf_counter() - started) / 1e9)
        return {name: statistics.median(values) for name, values in figures.items()}

    def interference(
        self, fragment: int, count: int, method: Method | None, size: int, products: int
    ) -> dict[str, Any]:
        """Slowdown of bf16 matrix products while stores and loads run all the time: 0.02 is 2 %.

        All products are enqueued at once, and the device's clock times them, so that only the device is shared.
        """
        left, right, result = (torch.randn(size, size, device=self.pool.device).bfloat16() for _ in range(3))
        return self.beside(fragment, count, method, lambda: torch.mm(left, right, out=result), products)

    def beside(
        self, fragment: int, count: int, method: Method | None, work: Callable[[], object], times: int
    ) -> dict[str, Any]:
        """Slowdown of `work`, enqueued so many times, as `interference` has it."""
        engine, blocks, shape = self.engine(fragment, count, method)
        half, generation, moved = blocks // 2, 0, 0
        every = np.arange(half)
        # Copies wait for an event long past, not for the products that they are to disturb.
        event = torch.cuda.Event() if self.cuda else None
        if event is not None:
            event.record()

        def run(copying: bool) -> float:
            nonlocal generation, moved
            clock = _Clock(self.cuda)
            for _ in range(times):
                work()
            clock.stop()
            stopped = False
            while not stopped:
                stopped = clock.stopped()
                acks = engine.poll()
                moved += sum(len(ack.moves) for ack in acks if ack.outcome is Outcome.DONE)
                if copying and engine.stats().in_flight == 0:
                    generation += 1
                    named = np.full(half, generation)
                    engine.store(Moves(every, every, named), after=event)
                    engine.load(Moves(half + every, half + every, named), after=event)
            seconds = clock.seconds()
            while engine.stats().in_flight:
                engine.poll()
            return seconds

        run(True)
        engine.poll()
        moved = 0
        figures: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for copying, seconds in figures.items():
                seconds.append(run(copying))
        self.close_engine(engine, method)
        alone, beside = (statistics.median(figures[copying]) for copying in (False, True))
        return {
            "slowdown": beside / alone - 1,
            "alone_s": alone,
            "copied_gb_s": moved * shape.block_bytes / sum(figures[True]) / 1e9,
        }


class _Clock:
    """Of the current stream; of the host on a CPU."""

    def __init__(self, cuda: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
        self._begun, self._ended = time.perf_counter(), 0.0
        if cuda:
            self._events[0].record()

    def stop(self) -> None:
        self._ended = time.perf_counter()
        if self._events:
            self._events[1].record()

    def stopped(self) -> bool:
        return not self._events or self._events[1].query()

    def seconds(self) -> float:
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._ended - self._begun


def measure(device: str, rows: Rows, *, tiny: bool) -> None:
    """Each figure a row of its own: what the targets ask for first, the rest of the sweep last."""
    bench = Bench(device, 4 * MIB if tiny else 4 * GIB, cuda=device == "cuda")
    sweep(bench, rows, tiny)
    bench.close()


def sweep(bench: Bench, rows: Rows, tiny: bool) -> None:
    rows.run("ceiling", bench.ceiling)
    rows.run("start-up", bench.start_up)
    cells = _cells(bench, tiny)
    for fragment, count, method in cells:
        if method is None:
            rows.run(_name(fragment, count, method), partial(bench.cell, fragment, count, method))
    size, products = (64, 4) if tiny else (8192, 200)
    mixes: list[tuple[int, int, Method | None]] = [(4 * KIB, 16, None)] if tiny else [(MIB, 1024, Method.DMA)]
    if not tiny:
        mixes += [(16 * KIB, 32768, method) for method in (None, Method.DIRECT, Method.STAGED)]
    for fragment, count, method in mixes:
        work = partial(bench.interference, fragment, count, method, size, products)
        rows.run(f"GEMM beside {_name(fragment, count, method)}", work)
    loops = [(4 * KIB, 16)] if tiny else [(16 * KIB, 4096), (256 * KIB, 1024), (2 * MIB, 256)]
    for fragment, count in loops:
        rows.run(f"loop, {fragment // KIB} KiB × {count}", partial(bench.naive, fragment, count))
    for fragment, count, method in cells:
        if method is not None:
            rows.run(_name(fragment, count, method), partial(bench.cell, fragment, count, method))


def _name(fragment: int, count: int, method: Method | None) -> str:
    return f"{fragment // KIB} KiB × {count}, {method.value if method else 'auto'}"


def _cells(bench: Bench, tiny: bool) -> list[tuple[int, int, Method | None]]:
    """The sweep: `auto` everywhere, and each method by itself where they compete."""
    fragments, counts = ((4 * KIB, 16 * KIB), (16, 256)) if tiny else (FRAGMENTS, COUNTS)
    cells: list[tuple[int, int, Method | None]] = [
        (fragment, count, None) for fragment in fragments for count in counts if 2 * fragment * count <= bench.nbytes
    ]
    if bench.cuda:
        cells += [(f, n, m) for f, n, _ in list(cells) if f <= 64 * KIB and n in (256, 4096) for m in Method]
    return cells


def _moves(rng: np.random.Generator, first: int, count: int, generation: int) -> Moves:
    return Moves(first + rng.permutation(count), first + rng.permutation(count), np.full(count, generation))


def _one_run(source: torch.Tensor, target: torch.Tensor) -> Runs:
    values = (source.data_ptr(), target.data_ptr(), source.nbytes)
    return Runs(*(np.array([value], np.uint64) for value in values))
