"""CPU time in a test."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: going over all that other tests have left would take longer than what is
    measured, on the thread whose turn it happens to be."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
