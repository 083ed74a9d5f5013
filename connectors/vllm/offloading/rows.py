"""Rows of vLLM's host cache, as its jobs name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvtier.tiers.host.slot import copy_out
from kvtier.tiers.protocol import Pieces


class Rows:
    """vLLM's host cache: row i holds one chunk, all layers and ranks. The memory is vLLM's; a row may be used until the
    job that names it is reported."""

    def __init__(self, view: memoryview) -> None:
        """`view` is [rows, bytes], contiguous."""
        assert view.strides is not None
        self.row_bytes = view.strides[0]
        self._flat = view.cast("B")

    @contextmanager
    def read(self, rows: Sequence[int]) -> Iterator[list[memoryview]]:
        """Views of these rows, valid inside the `with`."""
        views = [self._flat[row * self.row_bytes : (row + 1) * self.row_bytes] for row in rows]
        try:
            yield views
        finally:
            for view in views:
                view.release()

    def write(self, row: int, pieces: Pieces) -> None:
        """Copy a block into a row. Other threads run meanwhile."""
        with self.read([row]) as (view,):
            copy_out(pieces, view)

    def release(self) -> None:
        """Allow vLLM to unmap its memory. Idempotent."""
        self._flat.release()


class Placed(NamedTuple):
    """One chunk of a job: vLLM's key, its depth in the request's chain, and its row of vLLM's host cache."""

    key: bytes
    depth: int
    row: int
