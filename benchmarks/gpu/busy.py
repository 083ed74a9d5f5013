"""Copies beside other work, and what opening costs. A part of `make gpu-check`.

Submitting loads while a kernel holds their gate, calibration beside a kernel, shapes of the copy kernel, decode-like
kernels beside copies, page-locking by kind of page, one memfd registered by two processes, and two processes under MPS.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu import mps
from gpu.rows import Rows, Skip
from gpu.transfer import MIB, Bench

from kvtier.kernels import copy_kernel, cuda
from kvtier.kernels.calibration import measurement
from kvtier.kernels.copy import CopyEngine, Moves, Outcome
from kvtier.kernels.layout import Region
from kvtier.kernels.memory import populate
from kvtier.kernels.method import Method, calibrate
from kvtier.kernels.page_lock import page_lock, page_unlock
from kvtier.kernels.pump import LIMITS, Pump

KIB, GIB = 1 << 10, 1 << 30
SHAPES = [(4, 512), (4, 1024), (6, 512), (6, 1024), (8, 256), (8, 512), (12, 256), (12, 512)]
_MFD_HUGETLB = 4  # linux/memfd.h
_HELD_CYCLES = 400_000_000  # about 200 ms at 2 GHz


def measure(device: str, rows: Rows, *, tiny: bool) -> None:
    bench = Bench(device, 4 * MIB if tiny else 4 * GIB, cuda=device == "cuda")
    sweep(bench, rows, tiny)
    bench.close()


def sweep(bench: Bench, rows: Rows, tiny: bool) -> None:
    fragment, count = (4 * KIB, 64) if tiny else (64 * KIB, 32768)
    for way in ("pump", "pump beside a busy thread", "caller"):
        for method in Method:
            work = partial(submission, bench, fragment, count, method, way)
            rows.run(f"loads behind a long kernel, {method.value}, by the {way}", work)
    rows.run("calibration beside a kernel", partial(calibration, bench, tiny))
    small = (4 * KIB, 64) if tiny else (8 * KIB, 65536)
    for ctas, threads in SHAPES[:2] if tiny else SHAPES:
        rows.run(f"kernel of {ctas} × {threads}", partial(kernel_shape, bench, *small, ctas, threads))
    for method in Method:
        rows.run(f"decode beside 16 KiB, {method.value}", partial(decode, bench, tiny, method))
    nbytes = 4 * MIB if tiny else 4 * GIB
    for pages in ("4 KiB", "transparent huge", "hugetlb"):
        rows.run(f"page-locking, {pages} pages", partial(pinning, bench, pages, nbytes))
    rows.run("one memfd, two processes", partial(two_processes, bench, nbytes // 4))
    rows.run("two processes under MPS", partial(under_mps, bench, tiny))


def submission(bench: Bench, fragment: int, count: int, method: Method, way: str) -> Mapping[str, Any]:
    """Host milliseconds of the call that loads, while a kernel of about 200 ms runs on the caller's stream; and until
    all is loaded. By the pump the caller asks every millisecond; as a busy thread, it asks without a pause, and so
    holds the interpreter's lock for as long as it is left to it."""
    if not bench.cuda:
        raise Skip("on a CPU")
    engine, blocks, shape = bench.engine(fragment, count, method)
    half = blocks // 2
    every = np.arange(half)
    pump = Pump(lambda: CopyEngine(bench.mover, LIMITS)) if way != "caller" else None
    while pump is not None and not pump.ready:
        time.sleep(1e-3)
    give: Callable[[Moves], int] = pump.load if pump is not None else engine.load
    poll = pump.poll if pump is not None else engine.poll
    torch.cuda._sleep(_HELD_CYCLES)
    started = time.perf_counter()
    give(Moves(every, every, np.zeros(half, np.int64)))
    submitted = time.perf_counter()
    outcomes, last = set(), False
    while not last and time.perf_counter() < submitted + 60:
        if way == "pump":
            time.sleep(1e-3)
        acks = poll()
        outcomes |= {ack.outcome for ack in acks}
        last = any(ack.last for ack in acks)
    ended = time.perf_counter()
    assert outcomes == {Outcome.DONE} and last, f"{outcomes}"
    assert pump.close(10.0) if pump is not None else engine.close(10.0)
    return {
        "way": way, "submit_ms": 1e3 * (submitted - started), "all_ms": 1e3 * (ended - started),
        "gib": half * shape.block_bytes / GIB,
    }  # fmt: skip


def calibration(bench: Bench, tiny: bool) -> Mapping[str, Any]:
    if not bench.cuda:
        raise Skip("on a CPU")
    torch.cuda._sleep(4 * _HELD_CYCLES)
    started = time.perf_counter()
    table = calibrate("beside", measurement(lambda: bench.another()), time.perf_counter, first=8 * KIB, budget_s=1.0)
    took_s = time.perf_counter() - started
    assert table.best, "nothing was measured beside a kernel"
    return {"cells": len(table.best), "calibration_s": took_s}


def kernel_shape(bench: Bench, fragment: int, count: int, ctas: int, threads: int) -> Mapping[str, Any]:
    if not bench.cuda:
        raise Skip("on a CPU")
    before, cuda.BUS_CREW = cuda.BUS_CREW, copy_kernel.Crew(ctas, threads)
    try:
        return bench.cell(fragment, count, Method.DIRECT)
    finally:
        cuda.BUS_CREW = before


def decode(bench: Bench, tiny: bool, method: Method) -> Mapping[str, Any]:
    """Slowdown of memory-bound kernels, replayed from a CUDA graph, while stores and loads run all the time."""
    fragment, count, replays, values = (4 * KIB, 16, 2, 1 << 16) if tiny else (16 * KIB, 32768, 200, 1 << 28)
    left, right = (torch.ones(values, dtype=torch.bfloat16, device=bench.pool.device) for _ in range(2))

    def kernels() -> None:
        for _ in range(4):
            torch.add(left, right, out=left)

    replay: Callable[[], None] = kernels
    if bench.graphs:
        kernels()
        bench.sync()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels()
        replay = graph.replay
    return bench.beside(fragment, count, method if bench.cuda else None, replay, replays)


@contextmanager
def memory(pages: str, nbytes: int) -> Iterator[tuple[int, mmap.mmap]]:
    """A populated memfd of this kind of page, and its mapping. Raises Skip where the system has none."""
    fd = os.memfd_create("gpu-check", os.MFD_CLOEXEC | (_MFD_HUGETLB if pages == "hugetlb" else 0))
    try:
        os.ftruncate(fd, nbytes)
        mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        if pages == "transparent huge":
            mapping.madvise(mmap.MADV_HUGEPAGE)
        elif pages == "4 KiB":
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
        if populate(memoryview(mapping)) < nbytes:
            raise Skip("the system gave less memory than that")
        yield fd, mapping
    except OSError as error:
        raise Skip(f"the system has no such pages: {error}") from None
    finally:
        os.close(fd)


def pinning(bench: Bench, pages: str, nbytes: int) -> Mapping[str, Any]:
    """GB/s of populating and of page-locking."""
    started = time.perf_counter()
    with memory(pages, nbytes) as (_, mapping):
        populated = time.perf_counter()
        figures = {"populate_gb_s": nbytes / (populated - started) / 1e9}
        if bench.cuda:
            driver = bench.another()
            begun = time.perf_counter()
            chunks = page_lock(driver, [Region(_address(mapping), nbytes)], 2 * MIB)
            if not chunks:
                raise RuntimeError("the driver refused to page-lock these pages")
            figures["pin_gb_s"] = nbytes / (time.perf_counter() - begun) / 1e9
            page_unlock(driver, chunks)
            driver.close((), ())
        return figures


def under_mps(bench: Bench, tiny: bool) -> Mapping[str, Any]:
    if not bench.cuda:
        raise Skip("on a CPU")
    sizes = {"blocks": 4, "block_bytes": 4 * KIB, "rounds": 2} if tiny else {}
    return mps.two_clients(str(bench.pool.device), **sizes)


_OTHER = """
import mmap, sys
from gpu.busy import _address
from kvtier.kernels.driver import CudaDriver
mapping = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]), flags=mmap.MAP_SHARED)
driver = CudaDriver(0)
driver.register(_address(mapping), len(mapping))
print("registered", flush=True)
sys.stdin.read()
driver.unregister(_address(mapping))
"""


def two_processes(bench: Bench, nbytes: int) -> Mapping[str, Any]:
    """Both register one memfd at once, as two ranks or two engines do."""
    if not bench.cuda:
        raise Skip("on a CPU")
    with memory("4 KiB", nbytes) as (fd, mapping):
        driver = bench.another()
        driver.register(_address(mapping), nbytes)
        words = [sys.executable, "-c", _OTHER, str(fd), str(nbytes)]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, pass_fds=[fd]
        ) as other:
            assert other.stdout is not None
            said = other.stdout.readline().strip()
            rest, _ = other.communicate(timeout=60)
        driver.unregister(_address(mapping))
        driver.close((), ())
    assert said == "registered" and other.returncode == 0, f"the other process: {said} {rest[-500:]}"
    return {"passed": True}


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
