"""Waiting in a test for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 30.0


def eventually(true: Callable[[], object]) -> bool:
    """Whether it is so within half a minute, looked at every few milliseconds."""
    end = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True
