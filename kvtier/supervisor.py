"""The background of a cache: tasks that are kept running and counted, on an event loop that strands no caller.

supervisor.start("housekeeping", work, service)   restarted after an exception, with a pause that doubles
supervisor.spawn(coroutine)                       runs once; its result is the caller's
supervisor.close(deadline)                        cancels all of them; one that hangs is abandoned
failures.record("g3 writer", error, service)      the same rule for a thread, which restarts itself
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from kvtier.clock import Clock
from kvtier.errors import ClosedError
from kvtier.times import Mono

log = logging.getLogger(__name__)
T = TypeVar("T")

WINDOW_S = 60.0
FAILURES_MAX = 3
"""A task that failed so often within WINDOW_S takes its service down."""

PAUSE_FIRST_S, PAUSE_LAST_S = 0.1, 5.0
"""Between a failure and the restart: the first, and the longest that doubling leads to."""

ENDING = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Raised by whoever ends the program, or gives up a coroutine: nobody's failure."""

_UNWIND_S = 0.05
"""Least time that cancelled tasks have to undo their work, even where the deadline is over."""


class Service(Protocol):
    """A tier, or the whole cache, that cannot be relied on while a task of its keeps failing."""

    def trip(self, reason: str) -> None:
        """Take it out of service."""

    def succeeded(self) -> None:
        """It works again."""


class Unwatched:
    """The service of work whose failures are counted and logged, and take nothing out."""

    def trip(self, reason: str) -> None: ...

    def succeeded(self) -> None: ...


class Together:
    """Several services of one task."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services

    def trip(self, reason: str) -> None:
        for service in list(self._services):
            service.trip(reason)

    def succeeded(self) -> None:
        for service in list(self._services):
            service.succeeded()


class Failures:
    """What failed in the background, by the name of its task or thread: counted, logged, and told to its service.
    Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times: dict[str, deque[float]] = {}  # task → monotonic times within WINDOW_S
        self.restarts: Counter[str] = Counter()
        """By task."""

    def record(self, name: str, error: BaseException, service: Service) -> float:
        """Count and log a failure: the first of a minute with its stack. The last that is bearable within a minute, and
        each after it, trips the service. Returns the pause before the restart, in seconds."""
        with self._lock:
            now = self._clock.monotonic()
            times = self._times.setdefault(name, deque())
            while times and times[0] < now - WINDOW_S:
                times.popleft()
            times.append(now)
            count = len(times)
            self.restarts[name] += 1
        detail = f"{type(error).__name__}: {error}"
        if count == 1:
            log.error("%s failed and is restarted", name, exc_info=error)
        else:
            log.warning("%s failed, time %d within a minute: %s", name, count, detail)
        if count >= FAILURES_MAX:
            service.trip(f"{name} failed {count} times within a minute, at last with {detail}")
        return min(PAUSE_LAST_S, PAUSE_FIRST_S * 2.0 ** min(count - 1, 10))

    def too_many(self, name: str) -> bool:
        """Whether this task's failures have tripped its service."""
        with self._lock:
            return len(self._times.get(name, ())) >= FAILURES_MAX


class Supervisor:
    """Owns the background tasks of one event loop. Every verb is called on it; the counters are read anywhere."""

    def __init__(self, clock: Clock, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """`sleep` waits between runs and before restarts."""
        self._clock = clock
        self._sleep = sleep
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failures = Failures(clock)
        self.abandoned = 0
        """Tasks that did not end when `close` cancelled them."""

    def start(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], service: Service, every_s: float | None = None
    ) -> None:
        """Run `work` until `close`: once and for ever, or anew `every_s` seconds after each end.

        An exception ends one run only. By then `work` has undone in its `finally` whatever it held. Tasks of one name
        are counted together. A periodic task brings its service back with its first run that succeeds; for any other
        task the service finds out by itself.
        """
        self.spawn(self._keep_running(name, work, service, every_s))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` once, as a task that `close` ends. Its result and exception are the caller's."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def restarts(self) -> Counter[str]:
        """By task."""
        return self.failures.restarts

    async def close(self, deadline: Mono) -> None:
        """Cancel every task, and wait until all have ended or the deadline is over."""
        hung = await end_tasks(set(self._tasks), deadline - self._clock.monotonic())
        self.abandoned += len(hung)
        if hung:
            names = ", ".join(task.get_name() for task in hung)
            log.warning("abandoned at close, since they do not end: %s", names)

    async def _keep_running(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], service: Service, every_s: float | None
    ) -> None:
        task, pause_s, tripped = asyncio.current_task(), 0.0, False
        assert task is not None
        task.set_name(name)
        while True:
            await self._sleep(pause_s or every_s or 0.0)
            try:
                await work()
            except ENDING:
                raise
            except BaseException as error:  # a stray cancellation is a failure, too, and so is a panic of Rust's
                if task.cancelling():
                    raise
                pause_s = self.failures.record(name, error, service)
                tripped = tripped or self.failures.too_many(name)
                continue
            if every_s is None:
                return
            if tripped:
                service.succeeded()
            pause_s, tripped = 0.0, False


async def end_tasks(tasks: Collection[asyncio.Task[Any]], left_s: float) -> list[asyncio.Task[Any]]:
    """Cancel these tasks, and wait until all have ended, for so long and _UNWIND_S at least. Returns those that have
    not: they are abandoned."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=max(_UNWIND_S, left_s))
    for task in tasks:
        abandon(task)
    return [task for task in tasks if not task.done()]


def abandon(call: asyncio.Future[Any]) -> None:
    """Never wait for a call that may not heed its cancellation: its result is dropped, and its loop may end first."""
    call.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as retrieved
    call._log_destroy_pending = False  # type: ignore[attr-defined]  # else asyncio reports it as forgotten


def soon(loop: asyncio.AbstractEventLoop | None, work: Callable[..., object], *arguments: object) -> None:
    """Call `work` on that loop, unless there is none, or it has ended. Thread-safe."""
    if loop is not None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(work, *arguments)


class LoopOnThread:
    """An event loop on a daemon thread, for callers on other threads. Whoever waits for it when it ends gets
    ClosedError. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Starts the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_on, name=name, daemon=True)
        self._lock = threading.Lock()
        self._ended = False
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._thread.start()

    def _run_on(self) -> None:
        """Until `end`. An exit in a task is its own: signals, by which somebody ends the program, come elsewhere."""
        while True:
            try:
                return self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                log.error("%s: a task has raised %s: %s", self._thread.name, type(error).__name__, error)

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop; cancelling the future cancels it. Raises ClosedError when the loop has ended."""
        with self._lock:
            if self._ended:
                work.close()
                raise ClosedError("the cache is closed")
            future = asyncio.run_coroutine_threadsafe(self._until_end(work), self._loop)
            self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def run(self, work: Coroutine[Any, Any, T], within_s: float | None = None) -> T:
        """The result of a coroutine. Raises TimeoutError, with the coroutine cancelled, if that takes longer than
        `within_s`, and ClosedError when the loop ends."""
        future = self.submit(work)
        try:
            return future.result(within_s)
        except BaseException:
            future.cancel()
            raise

    def end(self, grace_s: float) -> None:
        """Cancel what runs and end the thread. Blocks until that is done, at most `grace_s`: a stuck loop is left
        to its daemon thread. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._drain()))
        self._thread.join(grace_s)
        for future in list(self._waiting):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(ClosedError("the cache is closed"))
        if not self._thread.is_alive():
            self._loop.close()

    async def _until_end(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._ended:
                raise ClosedError("the cache is closed") from None
            raise

    async def _drain(self) -> None:
        """Cancel all tasks. All submitted work has begun by now: the loop takes tasks in the order of their making."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
            abandon(task)
        if tasks:
            await asyncio.wait(tasks, timeout=_UNWIND_S)
        self._loop.stop()
