"""How the hammer calls a cache: from tasks of its loop, or from threads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import kvtier
from kvtier.cache import AsyncCache, Cache


class TasksFace:
    """Calls of an AsyncCache, from tasks of this loop."""

    def __init__(self, cache: AsyncCache, number: int = 0) -> None:
        self.cache: Any = cache
        self.number = number

    async def call(self, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return await verb(*args, **named)

    async def on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @contextlib.asynccontextmanager
    async def get(self, *args: Any, **named: Any) -> AsyncIterator[kvtier.Hit]:
        async with self.cache.get(*args, **named) as hit:
            yield hit


class ThreadsFace:
    """Calls of a Cache, which never suspend: their coroutines run on any thread, see `at_once`."""

    def __init__(self, cache: Cache, number: int = 0) -> None:
        self.cache: Any = cache
        self.number = number

    async def call(self, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return verb(*args, **named)

    async def on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.cache.submit(work).result(20)

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextlib.asynccontextmanager
    async def get(self, *args: Any, **named: Any) -> AsyncIterator[kvtier.Hit]:
        with self.cache.get(*args, **named) as hit:
            yield hit


Face = TasksFace | ThreadsFace
CACHES = {TasksFace: AsyncCache, ThreadsFace: Cache}


def at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that does not suspend."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits on a thread without a loop")
