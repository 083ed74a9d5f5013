"""An event loop on a thread of its own, for client libraries that must live on one loop and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvtier.errors import ClosedError
from kvtier.supervisor import abandon

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers on other loops. Belongs to the process that started it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._ended: Future[None] = Future()

    def start(self) -> None:
        """Start the thread; returns when its loop runs. Blocks for microseconds."""
        ready = threading.Event()
        self._loop = loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._ended = ended = Future[None]()
        ended.set_running_or_notify_cancel()  # nobody can cancel it

        def main() -> None:
            asyncio.set_event_loop(loop)
            loop.call_soon(ready.set)
            try:
                loop.run_forever()
                loop.close()
            finally:
                ended.set_result(None)

        threading.Thread(target=main, name=self._name, daemon=True).start()
        ready.wait()

    @property
    def usable(self) -> bool:
        """Whether the loop runs, in this very process: a fork copies the object but not the thread."""
        return self._loop is not None and self._pid == os.getpid()

    async def run(self, work: Coroutine[Any, Any, T], budget_s: float | None = None) -> T:
        """Await `work` on the thread's loop, for at most `budget_s`. When the caller is cancelled, so is `work`, and
        this returns only after `work` has ended: it uses no memory of the caller any more. Raises TimeoutError or
        ClosedError."""
        try:
            return await self._run(_bounded(work, budget_s), abandon=False)
        finally:
            work.close()  # in case it was cancelled before it began

    async def run_or_abandon(self, work: Coroutine[Any, Any, T]) -> T:
        """Like `run`, but a cancelled caller returns at once, and `work` ends when that loop comes to it: for work that
        uses no memory of the caller."""
        return await self._run(work, abandon=True)

    async def _run(self, work: Coroutine[Any, Any, T], *, abandon: bool) -> T:
        loop = self._loop
        if loop is None or not self.usable:
            work.close()
            raise ClosedError(f"{self._name} is closed, or was opened in another process")
        caller = asyncio.get_running_loop()
        result: asyncio.Future[T] = caller.create_future()
        tasks: list[asyncio.Task[T]] = []

        def launch() -> None:
            tasks.append(asyncio.get_running_loop().create_task(work))
            tasks[0].add_done_callback(report)

        def report(task: asyncio.Task[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop was closed meanwhile
                caller.call_soon_threadsafe(_copy, task, result)

        loop.call_soon_threadsafe(launch)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            while not abandon and not result.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([result])
            if result.done() and not result.cancelled():
                result.exception()
            raise

    def stop(self, grace_s: float) -> Future[None]:
        """Cancel all tasks, give them `grace_s` to end, and end the thread. Does not block; the future ends with the
        thread. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is None or self._pid != os.getpid():
            return self._ended

        async def drain() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
                abandon(task)
            if tasks:
                await asyncio.wait(tasks, timeout=grace_s)
            loop.stop()

        asyncio.run_coroutine_threadsafe(drain(), loop)
        return self._ended


async def _bounded(work: Coroutine[Any, Any, T], budget_s: float | None) -> T:
    async with asyncio.timeout(budget_s):
        return await work


def _copy(task: asyncio.Task[T], result: asyncio.Future[T]) -> None:
    if result.done():
        return
    if task.cancelled():
        result.cancel()
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())


class CallersLoop:
    """A `LoopThread` without a thread: the work is done on the loop of its caller. For a bucket whose client does not
    mind the loop it is called on."""

    usable = True

    def start(self) -> None:
        """There is nothing to start."""

    async def run(self, work: Coroutine[Any, Any, T], budget_s: float | None = None) -> T:
        """Await `work`, for at most `budget_s`. Raises TimeoutError."""
        return await _bounded(work, budget_s)

    async def run_or_abandon(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`."""
        return await work

    def stop(self, grace_s: float) -> Future[None]:
        """Ended already."""
        ended: Future[None] = Future()
        ended.set_result(None)
        return ended
