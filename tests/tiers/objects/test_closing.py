"""G4 is given back whatever becomes of the call that closes it, and can be opened again."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.testing import chain_of
from kvtier.tiers.objects.bucket.local import LocalFiles
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.protocol import Loaded, Stored
from tests.tiers.objects.support.replicas import NS, Site


async def no_thread_left() -> None:
    """Neither that of its loop, nor those that its bucket works on."""
    deadline = time.monotonic() + 30
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier-g4")]:
        assert time.monotonic() < deadline, f"left: {left}"
        await asyncio.sleep(0.01)


async def test_its_loop_ends_while_all_threads_of_the_callers_loop_are_busy(site: Site) -> None:
    """And though its close is given up, as a guard does, and cancelled again, as an ending loop does."""
    over = threading.Event()
    tier = await site.replica()
    await site.store(tier, chain_of(NS, 8))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.ensure_future(asyncio.to_thread(over.wait, 100))
    try:
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(tier.close(site.deadline))
        while not closing.done():
            await asyncio.sleep(0)
            closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await no_thread_left()
    finally:
        over.set()
        await busy


async def test_a_tier_that_was_closed_is_opened_again(site: Site) -> None:
    tier, chain = await site.replica(), chain_of(NS, 8)
    for opened in range(2):
        stored = await site.store(tier, chain)
        assert set(stored) == {Stored.PRESENT if opened else Stored.STORED}, tier.problem
        await tier.close(site.deadline)
        await no_thread_left()
        await tier.open()


async def test_a_tier_that_is_opened_again_has_all_that_waits_on_a_loop_on_the_new_one(site: Site) -> None:
    """Its background, and more requests at once than there may be."""
    tier = await site.replica()
    for seed in range(2):
        chain = chain_of(NS, 200, seed=seed)
        assert set(await site.store(tier, chain)) == {Stored.STORED}, tier.problem
        assert all(isinstance(result, Loaded) for result in await site.read(tier, chain))
        site.clock.advance(60)
        assert await tier.lookup(chain, range(len(chain)), site.deadline) == [None] * len(chain)
        await tier._loop.run(tier._background.wait(), 30)
        assert not any(tier.restarts().values())
        await tier.close(site.deadline)
        await tier.open()


async def test_no_thread_begins_once_the_bucket_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call under way then, which nobody waits for any more: a delete of many goes on to the next file at once."""
    tier = await site.replica()
    await site.store(tier, chain_of(NS, 64))
    began, over, delete = threading.Event(), threading.Event(), LocalFiles.delete

    def slow(files: LocalFiles, name: str, etag: str | None) -> bool:
        began.set()
        over.wait(60)
        return delete(files, name, etag)

    async def closed(store: ObjectStore) -> None:
        await close(store)
        over.set()
        await asyncio.sleep(0.05)  # as where it has connections to end

    close = ObjectStore.close
    monkeypatch.setattr(LocalFiles, "delete", slow)
    monkeypatch.setattr(ObjectStore, "close", closed)
    evicting = asyncio.ensure_future(tier.evict(None))
    assert await asyncio.to_thread(began.wait, 60)
    await tier.close(site.deadline)
    await asyncio.gather(evicting, return_exceptions=True)
    await no_thread_left()
