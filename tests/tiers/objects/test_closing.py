"""G4 is given back whatever becomes of the call that closes it, and can be opened again."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.testing import chain_of
from kvtier.tiers.protocol import Stored
from tests.tiers.objects.support.replicas import NS, Site


async def no_loop_left() -> None:
    deadline = time.monotonic() + 5
    while any(thread.name == "kvtier-g4" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread of its loop is left"
        await asyncio.sleep(0.01)


async def test_its_loop_ends_while_all_threads_of_the_callers_loop_are_busy(site: Site) -> None:
    """And though its close is given up, as a guard does, and cancelled again, as an ending loop does."""
    over = threading.Event()
    tier = await site.replica()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.ensure_future(asyncio.to_thread(over.wait, 20))
    try:
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(tier.close(site.deadline))
        while not closing.done():
            await asyncio.sleep(0)
            closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await no_loop_left()
    finally:
        over.set()
        await busy


async def test_a_tier_that_was_closed_is_opened_again(site: Site) -> None:
    tier, chain = await site.replica(), chain_of(NS, 8)
    for opened in range(2):
        stored = await site.store(tier, chain)
        assert set(stored) == {Stored.PRESENT if opened else Stored.STORED}, tier.problem
        await tier.close(site.deadline)
        await no_loop_left()
        await tier.open()
