"""Slices of a few blocks, so that short chains are cut as long ones are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_SIZES = {
    "SLICE_BLOCKS",
    "MOVED_BLOCKS",
    "LOADED_BLOCKS",
    "NAMED_AT_ONCE",
    "FADED_AT_ONCE",
    "TURN_NS",
    "_ASKED_BLOCKS",
    "_LOOKUP_BLOCKS_MAX",
}


@contextlib.contextmanager
def slices_of(blocks: int) -> Iterator[None]:
    """Let every part of the manager work in slices of so many blocks."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("kvtier.")]
    before = [(m, size, vars(m)[size]) for m in modules for size in _SIZES & vars(m).keys()]
    for module, size, _ in before:
        setattr(module, size, blocks)
    try:
        yield
    finally:
        for module, size, value in before:
            setattr(module, size, value)
