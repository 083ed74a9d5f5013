"""From (blocks, slots) to the fewest runs of bytes: pure arithmetic, no memory touched.

The pattern of one block, its rows merged where both sides are contiguous, is computed once; a plan for many
blocks is that pattern added to every block's addresses, merged again where neighbours continue each other.
The driver does not merge adjacent copies, and submission costs CPU time per run, so fewer and longer runs make a copy
fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.kernels.layout import Addresses, Indices, Paged, Shape


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Copies to make, in no particular order: three uint64 arrays of one length. Bytes, addresses."""

    src: Addresses
    dst: Addresses
    nbytes: Addresses

    def __len__(self) -> int:
        return len(self.src)


class Planner:
    """Plans copies of whole blocks from `src` to `dst`, which hold blocks of one `shape`. Stateless after init.

    `pattern` are the runs from item 0 to item 0; `fragment_bytes` is the longest run that every block has on both sides
    (by which a copy method is chosen), `fragments` how many of them make a block.
    """

    def __init__(self, src: Paged, dst: Paged, shape: Shape) -> None:
        self._src, self._dst = src, dst
        self._src_seams, self._dst_seams = _seams(src), _seams(dst)
        rows = Runs(
            src=src.rows(shape).ravel(),
            dst=dst.rows(shape).ravel(),
            nbytes=np.full(shape.layers * shape.kv * shape.tokens * shape.heads, shape.row_bytes, dtype=np.uint64),
        )
        # In the order of the destination, contiguous rows of it follow one another whatever the source's order.
        order = np.argsort(rows.dst, kind="stable")
        self.pattern = self._merge(Runs(rows.src[order], rows.dst[order], rows.nbytes[order]))
        self.fragment_bytes = int(self.pattern.nbytes.min())
        self.fragments = len(self.pattern)

    def runs(self, src_items: Indices, dst_items: Indices) -> Runs:
        """Runs that copy item `src_items[i]` to `dst_items[i]` for all i: every byte once, none outside.

        Items must be within both counts and destinations distinct (the caller checks). Pure; cost is linear in
        items × fragments, in numpy.
        """
        order = np.argsort(dst_items, kind="stable")
        src_at = src_items[order].astype(np.uint64) * np.uint64(self._src.stride)
        dst_at = dst_items[order].astype(np.uint64) * np.uint64(self._dst.stride)
        pattern = self.pattern
        runs = Runs(
            src=(src_at[:, None] + pattern.src[None, :]).ravel(),
            dst=(dst_at[:, None] + pattern.dst[None, :]).ravel(),
            nbytes=np.tile(pattern.nbytes, len(order)),
        )
        return self._merge(runs)

    def _merge(self, runs: Runs) -> Runs:
        """Join each run with its predecessor where both sides continue and neither crosses a seam."""
        if len(runs) < 2:
            return runs
        follows = (runs.src[:-1] + runs.nbytes[:-1] == runs.src[1:]) & (
            runs.dst[:-1] + runs.nbytes[:-1] == runs.dst[1:]
        )
        if not follows.any():
            return runs
        for address, seams in ((runs.src, self._src_seams), (runs.dst, self._dst_seams)):
            if len(seams) > 1:
                home = np.searchsorted(seams, address, side="right")
                follows &= home[:-1] == home[1:]
        heads = np.flatnonzero(np.concatenate([[True], ~follows]))
        return Runs(runs.src[heads], runs.dst[heads], np.add.reduceat(runs.nbytes, heads))


def _seams(paged: Paged) -> Addresses:
    return np.array([region.start for region in paged.regions], dtype=np.uint64)
