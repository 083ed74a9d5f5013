"""Waiting in a test for what another thread or process does."""

from __future__ import annotations

import asyncio
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


async def until(true: Callable[[], object], what: str = "it does not come to that") -> None:
    """Wait half a minute at most for what another task, thread or process does."""
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.001)
