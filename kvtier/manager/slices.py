"""Long chains cut into slices, so that neither the lock nor the event loop is taken for more than a millisecond.

Between two slices anybody may evict, purge, store or cancel. So a verb that works in slices says what holds there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

SLICE_BLOCKS = 256
"""Blocks that are looked up, pinned or unpinned in one hold of the lock: half a millisecond of work."""

MOVED_BLOCKS = 32
"""Blocks that are reserved, published or retained in one hold, each with a change of the policy's order: half a
millisecond of work, of a guaranteed block a whole one."""

LOADED_BLOCKS = 64
"""Blocks that one task brings up."""


def slices(items: Sequence[T], size: int = 0) -> Iterator[Sequence[T]]:
    """`items` in parts of `size`; 0: SLICE_BLOCKS."""
    size = size or SLICE_BLOCKS
    return (items[first : first + size] for first in range(0, len(items), size))


def in_strides(depths: Sequence[int], stride: int) -> Iterator[Sequence[int]]:
    """Ascending depths in parts of at most LOADED_BLOCKS; strides are whole, where they are not longer than that."""
    width = max(1, LOADED_BLOCKS // stride) * stride if stride <= LOADED_BLOCKS else LOADED_BLOCKS
    part: list[int] = []
    for depth in depths:
        if part and depth // width != part[0] // width:
            yield part
            part = []
        part.append(depth)
    if part:
        yield part


async def aside(blocks: int, work: Callable[[], T]) -> T:
    """The result of `work` over so many blocks: at once if they are a slice, else from a thread, so that others have a
    turn on the loop. Cancelled, it leaves the thread to end by itself."""
    return work() if blocks <= SLICE_BLOCKS else await asyncio.to_thread(work)
