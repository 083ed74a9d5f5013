"""CPU time in a test."""

from __future__ import annotations

import gc
import time
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


ADD_S = 25e-9
"""A step of `slowness`'s loop on the machine for which the tests' bounds of CPU time were chosen (CPython 3.11)."""


def slowness() -> float:
    """How many times as long as that machine this one takes now; at least 1. Bounds of CPU time are multiplied by it:
    with a core's other half busy, or on an older processor, the same work takes three times as long."""
    began, total, steps = time.thread_time(), 0, 100_000
    for number in range(steps):
        total += number
    return max(1.0, (time.thread_time() - began) / steps / ADD_S)
