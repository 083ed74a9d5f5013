"""An arena that two processes have mapped: spans name its pieces in either."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtier.tiers.protocol import Pieces


class MappableArena(Protocol):
    """G2's memory, one memfd per rank, as far as another process may map it."""

    def fds(self, *, page_locked: bool = True) -> tuple[int, ...]:
        """Descriptors that a child may inherit. `page_locked`: whether the caller's mapping may be."""

    def views(self, *, page_locked: bool = True) -> tuple[memoryview, ...]:
        """All memory of each rank, as this process has it mapped."""


class ArenaSpan(NamedTuple):
    """`length` bytes from `start` on in the memory of one rank."""

    rank: int
    start: int
    length: int


class SharedArena:
    """The memory of all ranks, as this process has it mapped. Its pieces are valid as long as it is."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._starts = [_address(view) for view in views]

    @classmethod
    def map(cls, fds: Sequence[int]) -> SharedArena:
        """Map the memory behind these descriptors (`Arena.fds` of another process); they can be closed afterwards.
        Raises OSError."""
        maps = [mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED) for fd in fds]
        for each in maps:
            with contextlib.suppress(OSError):  # as the arena does
                each.madvise(mmap.MADV_HUGEPAGE)
        return cls([memoryview(each) for each in maps])

    def spans(self, pieces: Pieces) -> list[ArenaSpan]:
        """The spans of pieces of this memory. Raises ValueError for other memory."""
        return [self._span(piece) for piece in pieces]

    def _span(self, piece: memoryview) -> ArenaSpan:
        address = _address(piece)
        for rank, (start, view) in enumerate(zip(self._starts, self._views, strict=True)):
            if start <= address and address + len(piece) <= start + len(view):
                return ArenaSpan(rank, address - start, len(piece))
        raise ValueError("a piece is not the arena's memory")

    def pieces(self, spans: Sequence[ArenaSpan]) -> Pieces:
        """The pieces of these spans, writable. Raises ValueError for a span that is not in this memory."""
        for rank, start, length in spans:
            if not (0 <= rank < len(self._views) and 0 <= start <= start + length <= len(self._views[rank])):
                raise ValueError(f"rank {rank} has no {length} bytes from {start} on")
        return tuple(self._views[rank][start : start + length] for rank, start, length in spans)


def _address(view: memoryview) -> int:
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    import numpy as np  # a tenth as fast, but the only way for read-only memory

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
