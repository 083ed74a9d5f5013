"""What moving blocks costs on a GPU, beside one big pinned copy of the same run. A part of `make gpu-check`.

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

from kvtier.kernels import cpu
from kvtier.kernels.copy import CopyEngine, Limits, Moves, Outcome
from kvtier.kernels.cuda import CudaMover
from kvtier.kernels.driver import CudaDriver
from kvtier.kernels.engine import measurement
from kvtier.kernels.layout import Paged, Region, Shape
from kvtier.kernels.method import Method, Table, calibrate
from kvtier.kernels.pin import pin, unpin
from kvtier.kernels.plan import Planner, Runs

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FRAGMENTS = (4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
COUNTS = (16, 256, 4096, 65536)
ROUNDS = 3
WAYS = {"store": ("store",), "load": ("load",), "both": ("store", "load")}
UNLIMITED = Limits(
    chunk_bytes=64 * MIB,
    load_window_bytes=64 * GIB,
    store_window_bytes=64 * GIB,
    store_window_while_loading_bytes=64 * GIB,
)


class Bench:
    """Scratch memory on both sides; the host's is page-locked where there is a GPU."""

    def __init__(self, device: str, nbytes: int) -> None:
        self.cuda = device == "cuda"
        self.nbytes = nbytes
        self.pool = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
        self.host = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)  # page-aligned
        self.host.copy_(self.pool)
        self.pin_seconds = 0.0
        self.table = Table("cpu", {})
        self._release: Callable[[], None] = lambda: None
        if self.cuda:
            self.ordinal = torch.cuda.current_device()
            self._driver = CudaDriver(self.ordinal)
            started = time.perf_counter()
            chunks = pin(self._driver, [Region(self.host.data_ptr(), nbytes)], 2 * MIB)
            self.pin_seconds = time.perf_counter() - started
            if not chunks:
                raise SystemExit("this process may not page-lock memory: raise the memlock limit")
            self._release = partial(unpin, self._driver, chunks)
            measured = measurement(lambda: CudaDriver(self.ordinal))
            measured(Method.DIRECT, 512)  # compiles the kernels
            started = time.perf_counter()
            self.table = calibrate(self._driver.name, measured, time.monotonic, first=16 * KIB)
            self.calibration_seconds = time.perf_counter() - started

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
            return Paged(bases, blocks, stride, token=0, head=0, regions=(region,), keep=(tensor,)).validate(shape)

        return paged(self.pool, blocks, fragment), paged(self.host, 1, shape.block_bytes), shape, blocks

    def engine(self, fragment: int, count: int, method: Method | None) -> tuple[CopyEngine, int, Shape]:
        device, host, shape, blocks = self.geometry(fragment, count)
        if not self.cuda:
            return cpu.open_engine(device, host, shape, UNLIMITED), blocks, shape
        mover = CudaMover(CudaDriver(self.ordinal), device, host, shape, self.table, method=method)
        return CopyEngine(mover, UNLIMITED), blocks, shape

    def cell(self, fragment: int, count: int, method: Method | None) -> dict[str, float]:
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
        assert engine.close(10.0)
        return {name: statistics.median(values[1:]) for name, values in figures.items()}

    def naive(self, fragment: int, count: int) -> dict[str, float]:
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

    def interference(self, fragment: int, count: int, method: Method | None, size: int, seconds: float) -> float:
        """How much slower bf16 matrix products run while stores and loads fly all the time: 0.02 is 2 %."""
        left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=self.pool.device) for _ in range(2))
        engine, blocks, _ = self.engine(fragment, count, method)
        half, generation = blocks // 2, 0
        every = np.arange(half)
        # Copies wait for an event long past, not for the products that they are to disturb.
        event = torch.cuda.Event() if self.cuda else None
        if event is not None:
            event.record()

        def products(copying: bool) -> float:
            nonlocal generation
            done, started = 0, time.perf_counter()
            while time.perf_counter() - started < seconds:
                engine.poll()
                if copying and engine.stats().in_flight == 0:
                    generation += 1
                    named = np.full(half, generation)
                    engine.store(Moves(every, every, named), after=event)
                    engine.load(Moves(half + every, half + every, named), after=event)
                for _ in range(4):
                    torch.mm(left, right)
                done += 4
                if self.cuda:
                    torch.cuda.current_stream().synchronize()
            rate = done / (time.perf_counter() - started)
            while engine.stats().in_flight:
                engine.poll()
            return rate

        products(False)
        figures: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for copying, rates in figures.items():
                rates.append(products(copying))
        assert engine.close(10.0)
        return statistics.median(figures[False]) / statistics.median(figures[True]) - 1


def measure(device: str, budget_s: float, *, tiny: bool = False) -> dict[str, Any]:
    """The whole sweep, ended early (and saying so) when the budget is used up."""
    deadline = time.monotonic() + budget_s
    bench = Bench(device, 4 * MIB if tiny else 4 * GIB)
    results: dict[str, Any] = {"ceiling_gb_s": bench.ceiling(), "complete": True}
    if bench.cuda:
        results["pin_gb_s"] = bench.nbytes / bench.pin_seconds / 1e9
        results["calibration_s"] = bench.calibration_seconds
        results["method_table"] = [[store, f, n, m.value] for (store, f, n), m in sorted(bench.table.best.items())]
    results["naive"] = [
        {"fragment": fragment, "count": count} | bench.naive(fragment, count)
        for fragment, count in ([(4 * KIB, 16)] if tiny else [(16 * KIB, 4096), (256 * KIB, 1024), (2 * MIB, 256)])
    ]
    size, seconds = (64, 0.01) if tiny else (8192, 0.4)
    mixes: list[tuple[int, int, Method | None]] = [(4 * KIB, 16, None)] if tiny else [(MIB, 256, Method.DMA)]
    if not tiny:
        mixes += [(16 * KIB, 4096, method) for method in (None, Method.DIRECT, Method.STAGED)]
    results["gemm_slowdown"] = {
        f"{fragment // KIB} KiB × {count}, {method.value if method else 'auto'}": bench.interference(
            fragment, count, method, size, seconds
        )
        for fragment, count, method in mixes
    }
    results["cells"] = []
    for fragment, count, method in _cells(bench, tiny):
        if time.monotonic() > deadline:
            results["complete"] = False
            break
        named = {"fragment": fragment, "count": count, "method": method.value if method else "auto"}
        results["cells"].append(named | bench.cell(fragment, count, method))
    bench.close()
    return results


def _cells(bench: Bench, tiny: bool) -> list[tuple[int, int, Method | None]]:
    """What is swept, `auto` everywhere before each method by itself where they compete."""
    fragments, counts = ((4 * KIB, 16 * KIB), (16, 64)) if tiny else (FRAGMENTS, COUNTS)
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
