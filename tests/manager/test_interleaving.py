"""Between any two slices of a verb somebody purges, evicts, closes the cache or cancels the verb: right bytes or a
miss, nothing stays pinned, and a purged block does not come back.

Slices are of two blocks. The other verb comes one turn of the loop later each time, until the first was over before.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import kvtier
from kvtier.clock import SystemClock
from kvtier.identity.keys import scope_of
from kvtier.manager.purge import Purger
from kvtier.put import Put
from kvtier.retention.ranges import ChainTerms, RequestTerms
from kvtier.retention.terms import Depth, Terms
from kvtier.testing import MemoryTier, chain_of, payloads_of, sample_namespace
from kvtier.testing.short_slices import slices_of

BLOCK = 512
NS = sample_namespace(BLOCK)
SCOPE = scope_of("tenant")
CHAIN = list(chain_of(NS, 12, scope=SCOPE))
PAYLOADS = payloads_of(CHAIN, BLOCK)
OTHERS = [list(chain_of(NS, 12, seed=seed)) for seed in range(1, 4)]
CONFIG = kvtier.Config.parse(
    {
        "tiers": {"g2": {"capacity": 40 * 4096}},
        "retention": {"classes": {"sure": {"ttl": "1h", "guarantee": True}}, "reserved": 0.9},
        "deadlines": {"close": "5s"},
    }
)
TURNS = 120  # more than any of the verbs takes

Cache = kvtier.AsyncCache
Verb = Callable[[Cache], Coroutine[Any, Any, object]]


def opened(stack: str) -> Cache:
    clock = SystemClock()
    tiers = [MemoryTier(NS, clock)] if "g3" in stack else []
    if "g4" in stack:
        tiers.append(MemoryTier(NS, clock, name="g4", depth=Depth.G4, stride=2))
    return kvtier.aopen(CONFIG, NS, clock=clock, tiers=tiers)


async def get(cache: Cache) -> None:
    async with cache.get(CHAIN, 5.0) as hit:
        assert [bytes(block) for block in hit.blocks] == PAYLOADS[: len(hit)]
        await asyncio.sleep(0)
        assert [bytes(block) for block in hit.blocks] == PAYLOADS[: len(hit)]


async def put_sure(cache: Cache) -> None:
    assert await cache.put(CHAIN, PAYLOADS, "sure", wait=False) <= len(CHAIN)


VERBS: dict[str, Verb] = {
    "get": get,
    "prewarm": lambda cache: cache.prewarm(CHAIN, 5.0),
    "match": lambda cache: cache.match(CHAIN, 5.0),
    "put": put_sure,
    "pin": lambda cache: cache.pins.create("p", CHAIN, "1h"),
    "unpin": lambda cache: cache.pins.delete("q", drop=True),
    "extend": lambda cache: cache.pins.extend("q", "2h"),
    "tend": lambda cache: cache.manager.protection.tend(read_pins=True),
    "purge": lambda cache: cache.purge("tenant"),
    "flush": lambda cache: cache.flush(5.0),
}


async def crowd(cache: Cache) -> None:
    for chain in OTHERS:
        await cache.put(chain, payloads_of(chain, BLOCK), wait=False)


MEANWHILE: dict[str, Verb] = {
    "purge": lambda cache: cache.purge("tenant"),
    "evict g2": lambda cache: cache.evict("g2"),
    "evict below": lambda cache: cache.evict(next(iter(cache.manager.lower))),
    "crowd": crowd,
    "get": get,
    "close": lambda cache: cache.close(),
}


async def settled(cache: Cache) -> None:
    manager = cache.manager
    for _ in range(2000):
        await cache.flush(1.0)
        with manager.lock:
            quiet = not (manager.host.pins.slots or manager.host.filling() or manager.host.quarantined)
        if quiet and not manager.promoter.overdue:
            break
        await asyncio.sleep(0.01)
    assert quiet, "something stays pinned"
    cache.check()


async def prepared(cache: Cache) -> None:
    """The chain is below, its head in G2, too, with a guarantee, and it is pinned."""
    await cache.put(CHAIN, PAYLOADS, "sure")
    await cache.pins.create("q", CHAIN[:7], "1h")
    await cache.flush(5.0)
    await cache.evict("g2")
    await cache.prewarm(CHAIN[:3], 5.0)


async def turns_taken(stack: str, verb: Verb, meanwhile: Verb | None, turns: int) -> bool:
    """Run `verb`, and after so many turns of the loop the other one, or a cancellation. Whether it was over by then."""
    async with opened(stack) as cache:
        await prepared(cache)
        task = asyncio.ensure_future(verb(cache))
        for _ in range(turns):
            await asyncio.sleep(0)
        over = task.done()
        if meanwhile is None:
            task.cancel()
        else:
            await meanwhile(cache)
        with contextlib.suppress(asyncio.CancelledError, kvtier.KVTierError):
            await task
        if cache.manager.closed:
            return over
        await settled(cache)
        await get(cache)
        if meanwhile is MEANWHILE["purge"] and (turns or verb not in (put_sure, VERBS["pin"])):  # it began before
            assert await cache.match(CHAIN) == 0, "purged blocks came back"
            assert not len(cache.manager.protection.guarantees) and not len(cache.manager.protection.pins)
        await settled(cache)
    return over


@pytest.mark.timeout(120)
@pytest.mark.parametrize("meanwhile", [*MEANWHILE, "cancel"])
@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("stack", ["g3", *(pytest.param(deep, marks=pytest.mark.long) for deep in ("g4", "g3+g4"))])
async def test_between_any_two_slices(stack: str, name: str, meanwhile: str) -> None:
    step = 7 if stack == "g3" else 1
    with slices_of(2):
        for turns in range(0, TURNS, step):
            if await turns_taken(stack, VERBS[name], MEANWHILE.get(meanwhile), turns):
                break


@pytest.mark.parametrize("turns", range(1, 40, 3))
async def test_a_purge_between_two_slices_of_a_pin_leaves_no_pin(turns: int) -> None:
    with slices_of(2):
        async with opened("g3") as cache:
            await cache.put(CHAIN, PAYLOADS)
            pinning = asyncio.ensure_future(cache.pins.create("p", CHAIN, "1h"))
            for _ in range(turns):
                await asyncio.sleep(0)
            await cache.purge("tenant")
            await pinning
            assert await cache.pins.list() == [] and not len(cache.manager.protection.pins)
            await settled(cache)


@pytest.mark.parametrize("wait", [False, True])
async def test_a_put_that_began_before_a_purge_leaves_nothing(wait: bool) -> None:
    """However late its later slices come."""
    with slices_of(2):
        async with opened("g3") as cache:
            manager = cache.manager
            of = ChainTerms(RequestTerms(Terms("sure", ttl=600, guarantee=True)), NS.block_tokens)
            put = Put(manager, CHAIN, PAYLOADS, of, start=0, wait=wait, request_id="")
            reserve, purged = manager.reserve, asyncio.Event()

            def purge_first(*arguments: Any, **named: Any) -> Any:
                asyncio.run_coroutine_threadsafe(cache.purge("tenant"), loop).result()
                manager.reserve = reserve  # type: ignore[method-assign]
                purged.set()
                return reserve(*arguments, **named)

            loop = asyncio.get_running_loop()
            manager.reserve = purge_first  # type: ignore[method-assign]
            assert await asyncio.to_thread(put.step) is None, "it waits for nothing any more"
            assert purged.is_set() and await cache.match(CHAIN) == 0
            assert not len(manager.protection.guarantees)
            await settled(cache)
            assert await cache.put(CHAIN, PAYLOADS) == len(CHAIN) == await cache.match(CHAIN), "a later one is stored"


@pytest.mark.parametrize("again", [False, True])
async def test_what_is_taken_in_while_a_purge_takes_force_is_purged(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread, after the purge has read the clock, and before it has the lock: new blocks, and longer terms of
    those that are there."""
    with slices_of(2):
        async with opened("g3") as cache:
            manager = cache.manager
            if again:
                await cache.put(CHAIN, PAYLOADS, "1h")
            of = ChainTerms(RequestTerms(Terms("sure", ttl=7200, guarantee=True)), NS.block_tokens)
            put = Put(manager, CHAIN, PAYLOADS, of, start=0, wait=False, request_id="")
            apply = Purger.apply_tombstones

            def late(purger: Purger, *arguments: Any) -> Any:
                time.sleep(0.001)
                thread = threading.Thread(target=put.step)
                thread.start()
                thread.join()
                return apply(purger, *arguments)

            monkeypatch.setattr(Purger, "apply_tombstones", late)
            await cache.purge("tenant")
            monkeypatch.undo()
            assert await cache.match(CHAIN) == 0, "purged blocks are served"
            assert not len(manager.protection.guarantees), "guarantees of purged blocks"
            await settled(cache)
            assert await cache.put(CHAIN, PAYLOADS) == len(CHAIN) == await cache.match(CHAIN), "a later one is stored"
