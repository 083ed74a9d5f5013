"""A loop on a thread of its own strands nobody who waits for it, however it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvtier.errors import ClosedError, TierError
from kvtier.tiers.objects.loop_thread import LoopThread


async def deaf(began: threading.Event) -> None:
    """Work that heeds no cancellation."""
    began.set()
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass


async def waits(began: threading.Event) -> None:
    began.set()
    await asyncio.Event().wait()


async def nothing() -> None: ...


async def seen(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)


async def test_whoever_waits_for_work_that_never_ends_is_told_that_the_loop_has() -> None:
    loop, began = LoopThread("test"), threading.Event()
    loop.start()
    callers = [asyncio.ensure_future(loop.run(deaf(began))), asyncio.ensure_future(loop.run_or_abandon(deaf(began)))]
    await seen(began)
    async with asyncio.timeout(60):
        await asyncio.wrap_future(loop.stop(nothing(), 0.05))
        for caller in callers:
            with pytest.raises(ClosedError):
                await caller


@pytest.mark.parametrize("verb", [LoopThread.run, LoopThread.run_or_abandon])
async def test_a_caller_that_is_cancelled_as_the_loop_ends_is_cancelled(
    verb: Callable[..., asyncio.Future[None]],
) -> None:
    loop, began = LoopThread("test"), threading.Event()
    loop.start()
    caller = asyncio.ensure_future(verb(loop, waits(began)))
    await seen(began)
    loop.stop(nothing(), 0.05).result(60)  # on this loop's thread: the caller does not hear of it before
    caller.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await caller


async def test_work_that_others_begin_as_they_are_ended_is_ended_too() -> None:
    loop, began, ended = LoopThread("test"), threading.Event(), threading.Event()
    loop.start()

    async def last() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def first() -> None:
        try:
            began.set()
            await asyncio.sleep(3600)
        finally:
            late.append(asyncio.ensure_future(last()))
            await asyncio.sleep(0)

    late: list[asyncio.Future[None]] = []
    caller = asyncio.ensure_future(loop.run(first()))
    await seen(began)
    async with asyncio.timeout(60):
        await asyncio.wrap_future(loop.stop(nothing(), 1.0))
        with pytest.raises(ClosedError):
            await caller
    assert ended.is_set() and late[0].cancelled()


async def test_a_loop_that_has_ended_takes_no_work() -> None:
    loop, work = LoopThread("test"), waits(threading.Event())
    loop.start()
    inner = loop._loop
    await asyncio.wrap_future(loop.stop(nothing(), 0.05))
    loop._loop = inner  # as a caller on another thread has read it, a moment before
    with pytest.raises(ClosedError):
        await loop.run(work)
    assert work.cr_frame is None, "it is closed"


async def test_work_that_was_cancelled_by_itself_is_a_failure_and_no_end() -> None:
    async def stray() -> None:
        raise asyncio.CancelledError

    thread = LoopThread("t")
    thread.start()
    for run in (thread.run, thread.run_or_abandon):
        with pytest.raises(TierError, match="cancelled by"):
            await run(stray())
    assert await asyncio.wrap_future(thread.stop(nothing(), 1)) is None
