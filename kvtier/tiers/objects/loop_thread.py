"""An event loop on a thread of its own, for client libraries that must live on one loop and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from kvtier.errors import ClosedError, KVTierError, TierError
from kvtier.supervisor import abandon, soon

log = logging.getLogger(__name__)
T = TypeVar("T")

_UNWIND_S = 0.05
"""Time that tasks have to undo their work which began while the others were ended."""


class PerLoop(Generic[T]):
    """A lock, event or semaphore of the loop that runs: asyncio's belong for ever to the loop on which somebody first
    waited, and a tier that is opened again has another one."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[asyncio.AbstractEventLoop, T] | None = None

    def __call__(self) -> T:
        loop = asyncio.get_running_loop()
        if self._made is None or self._made[0] is not loop:
            self._made = (loop, self._make())
        return self._made[1]


class LoopThread:
    """Runs coroutines for callers on other loops. Belongs to the process that started it. Whoever waits for it when it
    ends gets ClosedError."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._ended: Future[None] = Future()
        self._waiting: set[Callable[[], None]] = set()  # each tells a caller that the loop has ended

    def start(self) -> None:
        """Start the thread; returns when its loop runs. Blocks for microseconds."""
        ready = threading.Event()
        self._loop = loop = asyncio.new_event_loop()
        self._waiting = waiting = set[Callable[[], None]]()
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
                for tell in list(waiting):  # it takes no more work: theirs did not end, or did not begin
                    tell()
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
        loop, waiting = self._loop, self._waiting
        if loop is None or not self.usable:
            work.close()
            raise self._closed()
        caller = asyncio.get_running_loop()
        result: asyncio.Future[T] = caller.create_future()
        tasks: list[asyncio.Task[T]] = []

        def launch() -> None:
            tasks.append(asyncio.get_running_loop().create_task(work))
            tasks[0].add_done_callback(report)

        def report(task: asyncio.Task[T]) -> None:
            waiting.discard(tell)
            why = TierError(self._name, "request", "cancelled by the client library itself")
            soon(caller, _copy, task, result, why if self._loop is loop else self._closed())

        def tell() -> None:
            if not tasks:
                work.close()
            soon(caller, _fail, result, self._closed())

        waiting.add(tell)
        try:
            loop.call_soon_threadsafe(launch)
        except RuntimeError:  # it has ended meanwhile
            waiting.discard(tell)
            work.close()
            raise self._closed() from None
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            result.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks for it
            soon(loop, lambda: tasks[0].cancel())
            while not abandon and not result.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([result])
            raise

    def _closed(self) -> ClosedError:
        return ClosedError(f"{self._name} is closed, or was opened in another process")

    async def end_tasks(self, grace_s: float) -> None:
        """Cancel every task on the thread's loop but the one that calls this, there, and give them `grace_s` to end."""
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        ends = loop.time() + grace_s
        while tasks := asyncio.all_tasks() - {me}:  # some begin others as they end
            for task in tasks:
                task.cancel()
                abandon(task)
            await asyncio.wait(tasks, timeout=max(0.0, ends - loop.time()))
            if loop.time() >= ends:
                return

    def stop(self, ending: Coroutine[Any, Any, None], grace_s: float) -> Future[None]:
        """Await `ending` on the loop, for at most `grace_s`, cancel all tasks, and end the thread, whatever becomes of
        the caller. Does not block; the future ends with the thread. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is None or self._pid != os.getpid():
            ending.close()
            return self._ended

        async def drain() -> None:
            try:
                await _bounded(ending, grace_s)
            except Exception as error:
                log.debug("%s: at its end: %s: %s", self._name, type(error).__name__, error)
            finally:
                await self.end_tasks(_UNWIND_S)
                loop.stop()

        asyncio.run_coroutine_threadsafe(drain(), loop)
        return self._ended


async def _bounded(work: Coroutine[Any, Any, T], budget_s: float | None) -> T:
    async with asyncio.timeout(budget_s):
        return await work


def _copy(task: asyncio.Task[T], result: asyncio.Future[T], cancelled: KVTierError) -> None:
    """What a task came to; `cancelled`, where it was, but not for its caller, who does not ask any more."""
    if result.done():
        return
    if task.cancelled():
        result.set_exception(cancelled)
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())


def _fail(result: asyncio.Future[Any], error: ClosedError) -> None:
    if not result.done():
        result.set_exception(error)


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

    async def end_tasks(self, grace_s: float) -> None:
        """Those of its caller's loop are its caller's."""

    def stop(self, ending: Coroutine[Any, Any, None], grace_s: float) -> Future[None]:
        """Await `ending`, for at most `grace_s`. The future ends with that."""
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()  # nobody can cancel it
        task = asyncio.ensure_future(_bounded(ending, grace_s))
        task.add_done_callback(lambda _: ended.set_result(None))
        abandon(task)
        return ended
