"""An event loop over virtual time on which several processes live, whose turns a seed orders. Nothing waits.

Each process has a queue of its own, in asyncio's order, and so has each of its threads, if it has some
(`kvtier.sim.threads`); the seed draws whose turn is next, and how long work on a thread takes. So every history is one
that real processes could have, and the same seed gives the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
import sys
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from kvtier.times import Mono, Wall

T = TypeVar("T")

OUTSIDE = 0
"""The process of whoever runs the simulation."""

_process: contextvars.ContextVar[int] = contextvars.ContextVar("kvtier-sim-process", default=OUTSIDE)
_lane: contextvars.ContextVar[int] = contextvars.ContextVar("kvtier-sim-lane", default=0)
"""The queue of a thread, below 0, for the handle that gives it its turn; 0: that of the process."""
_THREAD_S = (0.0, 0.0, 0.0002, 0.001, 0.02)
"""How long work on a thread takes."""

TURNS_MAX = 400_000
"""Of one simulation: beyond, something runs in circles."""


def process_now() -> int:
    """The process to which the running line belongs."""
    return _process.get()


class Stuck(AssertionError):
    """Nothing is left to happen, or too much happens, and the simulation has not ended."""


class LoopClock:
    """The time that all clocks are skewed from."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def wall(self) -> Wall:
        return Wall(1_800_000_000.0 + self._loop.time())

    def monotonic(self) -> Mono:
        return Mono(self._loop.time())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Numbered:
    """Tasks and futures are kept in sets, whose order is that of these numbers and not of addresses."""

    def __init__(self, *args: Any, loop: VirtualLoop, **named: Any) -> None:
        self.process, self._number = _process.get(), loop.number()
        super().__init__(*args, loop=loop, **named)  # type: ignore[call-arg]

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Task(_Numbered, asyncio.Task[Any]):
    pass


class _Future(_Numbered, asyncio.Future[Any]):
    pass


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module. `time` is virtual seconds; `turns` counts batches of callbacks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._now = 1000.0
        self._numbers = 0
        self._queues: dict[int, deque[asyncio.Handle]] = {}  # process or thread → what is ready, if anything is
        self._order = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.dead: set[int] = set()
        """Processes that were killed."""
        self.turns = 0
        self.errors: list[str] = []
        """What asyncio had to report: exceptions of tasks that nobody awaited."""
        self.thread: Callable[[Callable[[], None]], None] = lambda work: work()
        """Runs work on a thread. As given it runs to its end at once, and must not wait."""
        self.set_task_factory(_make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._report)

    def number(self) -> int:
        """Another one each time."""
        self._numbers += 1
        return self._numbers

    def time(self) -> float:
        return self._now

    def leap(self, seconds: float) -> None:
        """Let time pass in which no process had a turn: all machines were suspended."""
        self._now += seconds

    # -- processes --------------------------------------------------------------------------------------------------

    def spawn(self, process: int, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of that process, as is all that it begins."""
        context = contextvars.copy_context()
        context.run(_process.set, process)
        return self.create_task(work, context=context)

    def kill(self, process: int) -> None:
        """No line of it runs any more, but for `finally` blocks, which find its devices gone: Python runs them when the
        coroutines go. They go now, so that this does not depend on the garbage collector."""
        self.dead.add(process)
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, _Task) and task.process == process]
        context = contextvars.copy_context()
        context.run(_process.set, process)
        with _unheard():
            self._queues.pop(process, None)
            for task in sorted(tasks, key=hash, reverse=True):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):
                    context.run(task.get_coro().close)

    # -- what asyncio asks of a loop --------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def _call_soon(
        self, callback: Callable[..., object], args: Any, context: contextvars.Context | None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._queue(handle)
        return handle

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self._call_soon(callback, args, context)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """On a thread, of which some have begun before they can be cancelled."""
        future: asyncio.Future[T] = self.create_future()
        begun = self._rng.random() < 0.5

        def work() -> None:
            if future.cancelled() and not begun:
                return
            try:
                result = func(*args)
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_at(self._now + self._rng.choice(_THREAD_S), self.thread, work)
        return future

    # -- threads ----------------------------------------------------------------------------------------------------

    def turn_of(self, lane: int, work: Callable[[], None], when: float | None = None) -> asyncio.Handle:
        """A turn of a thread of the present process, `lane` (below 0): soon, in an order that the seed draws, or at a
        time."""
        context = contextvars.copy_context()
        context.run(_lane.set, lane)
        if when is None:
            return self._call_soon(work, (), context)
        return self.call_at(when, work, context=context)

    def run_one(self, lanes: Sequence[int]) -> bool:
        """Give one of these threads its turn now, within a turn of their process. False where none is ready."""
        ready = [lane for lane in lanes if lane in self._queues]
        if not ready:
            return False
        for handle in self._queues.pop(ready[int(self._rng.random() * len(ready))]):
            if not handle._cancelled:
                handle._run()
        return True

    def _queue(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(_process, OUTSIDE)  # type: ignore[attr-defined]
        if process in self.dead:
            return
        lane = handle._context.get(_lane, 0) or process  # type: ignore[attr-defined]
        if (queue := self._queues.get(lane)) is None:
            queue = self._queues[lane] = deque()
        queue.append(handle)

    def _run_once(self) -> None:
        """One turn of one process: what is ready there, as one iteration of its own loop. Or one of a thread."""
        timers = self._timers
        while not self._queues or (timers and timers[0][0] <= self._now):
            if not timers:
                raise Stuck("nothing is left to happen")
            when, _, timer = heapq.heappop(timers)
            if not timer._cancelled:
                self._now = max(self._now, when)
                self._queue(timer)
        self.turns += 1
        if self.turns > TURNS_MAX:
            raise Stuck(f"{TURNS_MAX} turns, and no end")
        ready = list(self._queues)
        process = ready[0] if len(ready) == 1 else ready[int(self._rng.random() * len(ready))]
        for handle in self._queues.pop(process):
            if process in self.dead:
                return
            if not handle._cancelled:
                handle._run()

    def _write_to_self(self) -> None: ...

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        """Once a process was killed, nothing tells whose a generator was that is being dropped: none is closed."""
        if not self.dead:
            super()._asyncgen_finalizer_hook(agen)  # type: ignore[misc]

    def _report(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        culprit = context.get("task") or context.get("future")
        if getattr(culprit, "process", OUTSIDE) in self.dead:
            return
        error = context.get("exception")
        detail = f": {type(error).__name__}: {error}" if error is not None else ""
        self.errors.append(f"{context.get('message', '')}{detail}")


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """What Python says of coroutines that are dropped before they began, or wait in a `finally`, is not printed."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook


def _make_task(loop: VirtualLoop, work: Coroutine[Any, Any, T], context: contextvars.Context | None = None) -> _Task:
    if _process.get() in loop.dead:
        work.close()  # a `finally` of a killed process began it: it never runs
    # The task notes its process when it is made: in the context that it will run in.
    return context.run(_Task, work, loop=loop, context=context) if context is not None else _Task(work, loop=loop)
