"""Work on a thread of its own: it runs to its end whatever becomes of the event loop that waits for it, however busy
that loop's threads are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvtier.errors import TierUnavailable

T = TypeVar("T")


def on_own_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Start `work`. Its result or exception is the future's, which nobody can cancel, and whose callbacks run on that
    thread. Where no thread can be started the future has failed with TierUnavailable."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        future.set_exception(TierUnavailable("g3", name, str(error)))
    return future


async def outcome(future: Future[T], timeout_s: float | None = None) -> T:
    """The result of such work. Raises TimeoutError after `timeout_s`; late or cancelled, it leaves the work alone."""
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(future)
