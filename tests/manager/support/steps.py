"""Counts the steps that are made in one hold of a lock, and in one turn of an event loop: a measure of time that does
not depend on the machine.

A step is a line that Python runs, or a `CountedKey` that is hashed: the one counts loops of Python, the other those
that C makes over keys (sets, dictionaries, counters). Those of tiers are not counted.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from types import FrameType, TracebackType
from typing import Any

from kvtier.identity.keys import BlockKey

_ELSEWHERE = (
    "/testing/",
    "/logging/",
    "/asyncio/",
    "/tests/",
    "/lifetime.py",
    "/concurrent/",
    "/threading.py",
)


class _Count:
    """The steps of one thread so far."""

    def __init__(self) -> None:
        self.steps = 0
        self.tracing = False


_of_thread = threading.local()


def _count() -> _Count:
    if not hasattr(_of_thread, "count"):
        _of_thread.count = _Count()
    found: _Count = _of_thread.count
    return found


def _elsewhere(frame: FrameType | None) -> bool:
    name = frame.f_code.co_filename if frame is not None else ""
    return any(part in name for part in _ELSEWHERE)


class CountedKey(bytes):
    """A block key whose hashing is a step."""

    def __hash__(self) -> int:
        if not _elsewhere(sys._getframe(1)):
            _count().steps += 1
        return bytes.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return bytes.__eq__(self, other)  # type: ignore[arg-type]


def counted(chain: list[BlockKey]) -> list[BlockKey]:
    """The same keys, counted."""
    return [BlockKey(CountedKey(key)) for key in chain]


def _trace(frame: FrameType, event: str, _: Any) -> Any:
    if _elsewhere(frame):
        return None
    _count().steps += event == "line"
    return _trace


def trace_this_thread() -> None:
    """Count the lines of this thread, in frames that begin from now on."""
    _count().tracing = True
    sys.settrace(_trace)


def _where(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}"


class StepLock:
    """A lock that knows the most steps of one hold, by the function that took it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = 0
        self._before: Any = None
        self.most: Counter[str] = Counter()

    def __enter__(self) -> None:
        self._lock.acquire()
        frame = sys._getframe(1)
        if not _count().tracing:
            self._before = sys.gettrace()
            sys.settrace(_trace)
            frame.f_trace = _trace
        self._since = _count().steps

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        steps, frame = _count().steps - self._since, sys._getframe(1)
        if not _count().tracing:
            sys.settrace(self._before)
            frame.f_trace = None
        where = _where(frame)
        self.most[where] = max(self.most[where], steps)
        self._lock.release()


class TurnSteps:
    """The most steps of one callback of the running event loop, by the task whose turn it was."""

    def __init__(self) -> None:
        self.most: Counter[str] = Counter()

    def __enter__(self) -> TurnSteps:
        self._before = sys.gettrace()  # coverage's, where it is measured
        trace_this_thread()
        self._run = run = asyncio.Handle._run

        def counting(handle: asyncio.Handle) -> None:
            task = getattr(handle._callback, "__self__", None)
            coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
            name = getattr(coroutine, "__qualname__", "") or repr(handle._callback).split(" at ")[0]
            before = _count().steps
            run(handle)
            self.most[name] = max(self.most[name], _count().steps - before)

        asyncio.Handle._run = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        asyncio.Handle._run = self._run  # type: ignore[method-assign]
        sys.settrace(self._before)
        _count().tracing = False
