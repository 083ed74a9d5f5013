"""Arguments of the copy kernels in copy.cu: which axes a grid walks, and how wide its loads are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.kernels.layout import Paged, Shape

UNIT_BYTES = (16, 8, 4, 2, 1)
"""Widths that a kernel was compiled for, widest first."""

MAX_UNITS = 2**31 - 1
"""Per launch: the kernels count units with 32 bits, and a grid's step is added to them."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An extent and its byte strides on both sides."""

    count: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The walk over blocks of one shape from one paged memory to another."""

    planes: int
    outer: Axis
    inner: Axis
    row_bytes: int
    unit_bytes: int

    def units(self, items: int) -> int:
        """Loads that copying `items` blocks takes."""
        return items * self.planes * self.outer.count * self.inner.count * (self.row_bytes // self.unit_bytes)

    @property
    def max_items(self) -> int:
        """Blocks that one launch may copy."""
        return max(1, MAX_UNITS // 2 // self.units(1))


def grid_of(src: Paged, dst: Paged, shape: Shape, *, dense: Paged) -> Grid:
    """The grid for copies of `shape` from `src` to `dst`. `dense` is the one of them whose rows shall be walked in
    order of address: the host's, since a bus wants contiguous bytes more than HBM does.

    Axes that continue the row on both sides become part of it. The unit is the widest that divides every
    address, stride and length. Works for any element size: bytes are moved, not numbers.
    """
    assert dense is src or dense is dst
    axes = [Axis(shape.tokens, src.token, dst.token), Axis(shape.heads, src.head, dst.head)]
    row = shape.row_bytes
    while longer := next((axis for axis in axes if axis.count == 1 or axis.src == axis.dst == row), None):
        row *= longer.count
        axes.remove(longer)
    axes.sort(key=lambda axis: axis.src if dense is src else axis.dst, reverse=True)
    outer, inner = [Axis(1, 0, 0)] * (2 - len(axes)) + axes
    numbers = [row, src.stride, dst.stride, outer.src, outer.dst, inner.src, inner.dst]
    common = int(np.gcd.reduce(np.concatenate([np.array(numbers, np.uint64), src.bases.ravel(), dst.bases.ravel()])))
    unit = next(width for width in UNIT_BYTES if common % width == 0)
    return Grid(shape.layers * shape.kv, outer, inner, row, unit)
