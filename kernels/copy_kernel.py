"""The kernel of copy.cu as one direction of copies uses it: what is uploaded once, and what each launch brings."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from kvtier.kernels.driver import Driver
from kvtier.kernels.grid import grid_of
from kvtier.kernels.layout import Addresses, Indices, Paged, Shape
from kvtier.kernels.plan import Runs


class Crew(NamedTuple):
    """The most thread blocks (CTAs) of a launch, and the threads of each."""

    ctas: int
    threads: int


BUS_CREW = Crew(12, 256)
"""Of a kernel that crosses the bus. Hiding 2 µs at 55 GB/s takes 110 KB in flight; these keep 196 KB. On an H200 eight
of 512 threads are as fast, and took more from a product of matrices beside them: 28 % at 47 GB/s, not 15 % at 39
(benchmarks/results/gpu-check.json and gpu-check-before.json)."""

DEVICE_CREW = Crew(64, 256)
"""Of the short kernel between staging memory and the engine's layout, at HBM speed."""

ITEMS = 480
"""Blocks per launch: KVTIER_ITEMS of copy.cu, whose numbers travel as a parameter of 4 KiB at most."""

_WIDE = ("src_bases", "dst_bases", "src_stride", "dst_stride", "src_outer", "dst_outer", "src_inner", "dst_inner")
_NARROW = ("items", "planes", "outer", "inner", "row_bytes")
_NUMBERS = np.dtype([("src", "<u4", ITEMS), ("dst", "<u4", ITEMS)])

PARAMETERS = np.dtype(
    {
        "names": [*_WIDE, *_NARROW, "numbers"],
        "formats": ["<u8"] * len(_WIDE) + ["<u4"] * len(_NARROW) + [_NUMBERS],
        "offsets": [8 * index for index in range(len(_WIDE) + len(_NARROW) + 1)],
    }
)
"""The parameters of kvtier_copy_* (copy.cu), each at a multiple of eight bytes."""


class CopyKernel:
    """Copies items of one shape from one paged memory to another. Keeps a small table in device memory.

    `dense` is the memory whose rows are walked in order of address. Raises DeviceError where the kernel or its table
    cannot be loaded.
    """

    def __init__(self, driver: Driver, src: Paged, dst: Paged, shape: Shape, dense: Paged, crew: Crew) -> None:
        self._driver, self._crew = driver, crew
        self._grid = grid = grid_of(src, dst, shape, dense=dense)
        self.name = f"kvtier_copy_{grid.unit_bytes}"
        driver.prepare(self.name)
        bases: Addresses = np.concatenate([src.bases.ravel(), dst.bases.ravel()])
        self._tables = driver.device_memory(bases.nbytes)
        self._pinned = driver.pinned_memory(bases.nbytes)
        self._nbytes = bases.nbytes
        ctypes.memmove(self._pinned, bases.ctypes.data, bases.nbytes)
        self._parameters = np.zeros((), PARAMETERS)
        values = [self._tables, self._tables + src.bases.nbytes, src.stride, dst.stride]
        values += [grid.outer.src, grid.outer.dst, grid.inner.src, grid.inner.dst]
        values += [0, grid.planes, grid.outer.count, grid.inner.count, grid.row_bytes]
        for name, value in zip((*_WIDE, *_NARROW), values, strict=True):
            self._parameters[name] = value
        self._uploaded: set[int] = set()

    def upload(self, stream: int) -> None:
        """Enqueue the bases ahead of the first launch on this stream. Each stream has its own turn, since nothing else
        orders them; the bytes are the same."""
        if stream not in self._uploaded:
            runs = (np.array([value], np.uint64) for value in (self._pinned, self._tables, self._nbytes))
            self._driver.copy(Runs(*runs), stream)
            self._uploaded.add(stream)

    def copy(self, src: Indices, dst: Indices, stream: int) -> None:
        """Enqueue the copy of items `src[i]` to `dst[i]`."""
        self.upload(stream)
        grid, crew, given = self._grid, self._crew, self._parameters
        step = min(grid.max_items, ITEMS)
        for start in range(0, len(src), step):
            part = slice(start, start + step)
            items = len(src[part])
            given["items"] = items
            given["numbers"]["src"][:items], given["numbers"]["dst"][:items] = src[part], dst[part]
            self._driver.launch(
                self.name,
                ctas=max(1, min(crew.ctas, -(-grid.units(items) // crew.threads))),
                threads=crew.threads,
                parameters=given,
                stream=stream,
            )
