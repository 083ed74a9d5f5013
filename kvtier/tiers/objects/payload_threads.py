"""Threads for work on payloads: to verify, code or encrypt a unit takes milliseconds, and lookups share the loop.

Reads and writes have threads of their own: a read never waits behind the units that are being made for writing.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 256 << 10
"""Of less than this the work is done on the loop: it takes no longer than a thread's wake-up."""

THREADS_MAX = 4


class PayloadThreads:
    """Threads for one kind of work, started as they are needed. Lives on the tier's event loop."""

    def __init__(self, name: str) -> None:
        self._name = f"kvtier-g4-{name}"
        self._pool, self._pid = self._new_pool(), os.getpid()

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(THREADS_MAX, os.cpu_count() or 1), thread_name_prefix=self._name)

    async def run(self, steps: Iterator[T], size: int) -> list[T]:
        """All that `steps` yields, where it works on `size` bytes. Cancelled, this returns when the step at hand has
        ended, at once if none has begun: nothing uses the caller's memory any more."""
        if size < INLINE_BYTES:
            return list(steps)
        if self._pid != os.getpid():  # a fork copies the pool, but not its threads
            self._pool, self._pid = self._new_pool(), os.getpid()
        stopped = threading.Event()
        work = self._pool.submit(_until, stopped.is_set, steps)
        running = asyncio.wrap_future(work)
        interrupted: BaseException | None = None
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError as error:
                stopped.set()
                work.cancel()  # which does nothing once a step has begun
                interrupted = error
        if interrupted is not None:
            if not running.cancelled():
                running.exception()
            raise interrupted
        return running.result()

    def close(self) -> None:
        """Let the threads end. They start again with the next work."""
        pool, self._pool = self._pool, self._new_pool()
        pool.shutdown(wait=False)


def _until(stopped: Callable[[], bool], steps: Iterator[T]) -> list[T]:
    out = []
    for each in steps:
        out.append(each)
        if stopped():
            break
    return out
