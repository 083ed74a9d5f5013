"""Boundaries of prompts in an engine over the tiny model with states, at multiples of a grid."""

from __future__ import annotations

from typing import Any

PAGE, GRID = 16, 32  # the grid is the model's chunk
BLOCKS = {1: 60, 16: 4, 64: 2}
"""Of a state, by page: three layers of 3,456 bytes of a convolution and 16,384 of a state each, in blocks of 1,024
bytes per token."""

TRACKS: dict[str, Any] = {
    "page_size": PAGE, "mamba_track_interval": GRID, "max_mamba_cache_size": 64, "max_running_requests": 8,
}  # fmt: skip
"""Arguments of an engine with an extra buffer."""


def whole(tokens: int) -> int:
    return tokens // GRID * GRID


def moved(start: int, boundary: int, page: int = PAGE) -> int:
    """Blocks that are loaded for a boundary where the device has `start` tokens."""
    return (boundary - start) // page + BLOCKS[page] if boundary > start else 0
