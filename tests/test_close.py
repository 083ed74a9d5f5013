"""flush and close hold their deadlines whatever a tier does, and a closing cache strands nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.clock import Clock, SystemClock
from kvtier.errors import ClosedError
from kvtier.identity.keys import BlockKey
from kvtier.manager import closing as closing_module
from kvtier.retention.terms import Depth, Terms
from kvtier.testing import Fault, FaultyTier, MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace
from kvtier.tiers.protocol import Tier
from kvtier.times import Mono
from tests.manager.support.stubborn import StubbornTier

BLOCK = 4096
NS = sample_namespace(BLOCK)
KEYS = list(chain_of(NS, 8))
SLACK_S = 5.0
"""For a loaded machine; what must not happen takes longer, or for ever."""


def config(close: str = "1s") -> kvtier.Config:
    return kvtier.Config.parse({"tiers": {"g2": {"capacity": 64 * BLOCK}}, "deadlines": {"close": close}})


def stubborn(clock: Clock | None = None) -> StubbornTier:
    return StubbornTier(NS, clock or SystemClock())


def arena(cache: Any) -> Any:
    return cache.manager.host.arena


VERBS = ["write", "lookup", "flush", "close", "retain", "write_note", "evict", "purge", "tombstones"]


@pytest.mark.parametrize("kind", ["hang", "stubborn", "crash"])
@pytest.mark.parametrize("verb", VERBS)
def test_flush_and_close_hold_their_deadlines_whatever_a_tier_does(
    verb: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cache._GRACE_S", 4 * SLACK_S)  # the loop's own bound is none of theirs
    tier = stubborn()
    faulty = FaultyTier(tier)
    deep = MemoryTier(NS, SystemClock(), name="g4", depth=Depth.G4)
    cache = kvtier.open(config(), NS, tiers=[faulty, deep])
    faulty.faults = [Fault(verb, kind)] if kind != "stubborn" else []
    tier.stuck = frozenset([verb] if kind == "stubborn" else [])
    cache.put(KEYS, payloads_of(KEYS, BLOCK))
    cache.put(list(chain_of(NS, 8, seed=1))[:4], payloads_of(list(chain_of(NS, 8, seed=1))[:4], BLOCK))
    cache.manager.protection.retainer.ask(map(BlockKey, KEYS))
    began = time.monotonic()
    flushed = cache.flush(timeout=0.2)
    assert time.monotonic() - began < 0.2 + SLACK_S
    if verb == "write" and kind != "crash":
        assert flushed.pending == 12 and flushed.durable["g3"] == 0
    began = time.monotonic()
    cache.close()
    assert time.monotonic() - began < 1.0 + SLACK_S
    assert not arena(cache)._maps
    tier.stuck = frozenset()


async def test_a_tier_that_hangs_takes_no_other_tiers_time_to_flush_and_close() -> None:
    clock = VirtualClock()
    deep = MemoryTier(NS, clock, name="g4", depth=Depth.G4)
    faulty = FaultyTier(MemoryTier(NS, clock), [Fault("flush", "hang"), Fault("close", "hang")])
    cache = kvtier.aopen(config("300ms"), NS, clock=clock, tiers=[faulty, deep])
    async with cache:
        pass
    assert not deep._opened and not arena(cache)._maps


Verb = Callable[[kvtier.Cache], object]

CALLS: dict[str, Verb] = {
    "match": lambda cache: cache.match(KEYS, timeout=30),
    "get": lambda cache: cache.get(KEYS, timeout=30).release(),
    "prewarm": lambda cache: cache.prewarm(KEYS, timeout=30),
    "put": lambda cache: cache.put(KEYS, payloads_of(KEYS, BLOCK), timeout=30),
    "flush": lambda cache: cache.flush(timeout=30),
    "evict": lambda cache: cache.evict("g3"),
    "purge": lambda cache: cache.purge("tenant"),
    "pins": lambda cache: cache.pins.delete(cache.pins.create(f"docs/{threading.get_ident()}", KEYS, "1h").name),
    "close": lambda cache: cache.close(),
}


@pytest.mark.parametrize("kind", ["hang", "stubborn", "well"])
def test_whoever_is_in_a_call_when_the_cache_closes_comes_back(kind: str) -> None:
    """Four threads per verb, over a tier that answers nothing: each returns, or gets ClosedError."""
    tier = stubborn()
    faulty = FaultyTier(tier)
    cache = kvtier.open(config("600ms"), NS, tiers=[faulty])
    faulty.faults = [Fault("*", "hang")] if kind == "hang" else []
    if kind == "stubborn":
        tier.stuck = frozenset({"lookup", "flush", "evict", "purge", "close", "retain", "write_note"})
    failures: list[BaseException] = []
    closing = threading.Event()

    def work(verb: str) -> None:
        while True:
            try:
                CALLS[verb](cache)
            except kvtier.ClosedError:
                return
            except BaseException as error:
                failures.append(error)
                return
            if closing.is_set() and cache.manager.closed:
                return

    names = [name for name in CALLS if name != "close"] * 4
    threads = [threading.Thread(target=work, args=(name,), name=name, daemon=True) for name in names]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    closing.set()
    began = time.monotonic()
    closers = [threading.Thread(target=cache.close, name="close", daemon=True) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in [*threads, *closers]:
        thread.join(max(0.1, began + 15 - time.monotonic()))
    stranded = [thread.name for thread in [*threads, *closers] if thread.is_alive()]
    assert (stranded, failures) == ([], [])
    with pytest.raises(kvtier.ClosedError):
        cache.submit(asyncio.sleep(0))
    for name, call in CALLS.items():
        if name != "close":
            with pytest.raises(kvtier.ClosedError):
                call(cache)
    assert cache.close() == kvtier.Flushed({}, 0, 0)
    tier.stuck = frozenset()


def test_a_loop_that_is_stuck_costs_the_answer_not_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that blocks the event loop itself."""
    monkeypatch.setattr("kvtier.cache._GRACE_S", 0.1)
    go = threading.Event()

    class Blocking(MemoryTier):
        async def lookup(self, *arguments: Any) -> Any:
            go.wait(20)
            return await super().lookup(*arguments)

    cache = kvtier.open(config("100ms"), NS, tiers=[Blocking(NS, SystemClock())])
    cache.put(KEYS[:4], payloads_of(KEYS[:4], BLOCK))
    began = time.monotonic()
    assert cache.match(KEYS, timeout=0.1) == 4
    with cache.get(KEYS, timeout=0.1) as hit:
        assert len(hit) == 4
    cache.flush(timeout=0.1)
    cache.close()
    assert time.monotonic() - began < 0.4 + 5 * 0.1 + 2 * SLACK_S
    go.set()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize("stuck", [(), ("flush", "close", "write"), ("close", "write_note")])
async def test_a_close_that_is_cancelled_closes_everything_all_the_same(
    steps: int, stuck: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing_module, "CANCELLED_S", 0.2)
    clock = SystemClock()
    tier, deep = stubborn(clock), MemoryTier(NS, clock, name="g4", depth=Depth.G4)
    cache = kvtier.aopen(config("20s"), NS, clock=clock, tiers=[FaultyTier(tier), deep])
    await cache.__aenter__()
    assert await cache.put(KEYS, payloads_of(KEYS, BLOCK)) == 8
    tier.stuck = frozenset(stuck)
    closing = asyncio.ensure_future(cache.close())
    for _ in range(steps):
        await asyncio.sleep(0 if steps < 8 else 0.002)
    closing.cancel()
    await asyncio.sleep(0)
    closing.cancel()
    began = time.monotonic()
    await asyncio.wait({closing})
    assert (closing.cancelled() or not stuck) and time.monotonic() - began < 0.2 + SLACK_S
    assert cache.manager.closed or steps == 0
    if steps:
        assert not arena(cache)._maps and not deep._opened
        assert await cache.close() == kvtier.Flushed({}, 0, 0)
    else:  # it had not begun
        tier.stuck = frozenset()
        await cache.close()
    tier.stuck = frozenset()


class Slow(MemoryTier):
    """Takes a while to close. `closing` is called when it begins."""

    closing: Callable[[], object] = staticmethod(lambda: None)

    async def close(self, deadline: Mono) -> None:
        self.closing()
        await asyncio.sleep(0.1)
        await super().close(deadline)


async def test_a_close_that_is_cancelled_while_a_tier_closes_leaves_it_its_time() -> None:
    clock, begun = SystemClock(), asyncio.Event()
    tier = Slow(NS, clock)
    cache = kvtier.aopen(config("20s"), NS, clock=clock, tiers=[tier])
    await cache.__aenter__()
    tier.closing = begun.set
    closing = asyncio.ensure_future(cache.close())
    await begun.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not tier._opened and not arena(cache)._maps


def test_a_close_that_is_interrupted_closes_everything_all_the_same() -> None:
    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    tier = Slow(NS, SystemClock())
    cache = kvtier.open(config("20s"), NS, tiers=[tier])
    tier.closing = interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            cache.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not tier._opened and not arena(cache)._maps and not cache._loop._thread.is_alive()


async def test_a_cache_that_is_open_is_not_opened_again() -> None:
    """It got a second arena beside the first: nothing could be stored or read any more."""
    cache = kvtier.aopen(config(), NS, tiers=[])
    opening = [asyncio.ensure_future(cache.__aenter__()) for _ in range(2)]
    assert [type(each) for each in await asyncio.gather(*opening, return_exceptions=True)] == [
        kvtier.AsyncCache, kvtier.InvalidRequest,
    ]  # fmt: skip
    with pytest.raises(kvtier.InvalidRequest):
        async with cache:
            pass
    assert await cache.put(KEYS, payloads_of(KEYS, BLOCK)) == 8
    async with cache.get(KEYS) as hit:
        assert [bytes(block) for block in hit.blocks] == payloads_of(KEYS, BLOCK)
    await cache.close()
    with pytest.raises(ClosedError):
        await cache.__aenter__()


async def test_an_open_that_is_cancelled_leaves_nothing_open() -> None:
    clock = VirtualClock()
    for verb in ("open", "tombstones", "read_notes", "retained"):
        inner = MemoryTier(NS, clock)
        cache = kvtier.aopen(config(), NS, clock=clock, tiers=[FaultyTier(inner, [Fault(verb, "hang")])])
        opening = asyncio.ensure_future(cache.__aenter__())
        await asyncio.sleep(0.1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not inner._opened and not arena(cache)._maps and cache.manager.closed, verb


async def test_calls_of_other_tasks_end_when_the_cache_is_closed() -> None:
    clock = VirtualClock()
    tiers: list[Tier] = [FaultyTier(MemoryTier(NS, clock))]
    cache = kvtier.aopen(config("400ms"), NS, clock=clock, tiers=tiers)
    await cache.__aenter__()
    tiers[0].faults = [Fault("*", "hang")]  # type: ignore[attr-defined]
    calls = [
        asyncio.ensure_future(call)
        for call in (
            cache.evict("g3"), cache.purge(), cache.flush(timeout=30), cache.match(KEYS, timeout=30), cache.close(),
            cache.put(KEYS, payloads_of(KEYS, BLOCK), timeout=30), cache.close(),
        )
    ]  # fmt: skip
    done, waiting = await asyncio.wait(calls, timeout=20)
    assert not waiting
    for call in done:
        assert call.exception() is None or isinstance(call.exception(), kvtier.ClosedError)


def test_close_does_nothing_in_a_forked_child() -> None:
    cache = kvtier.open(config(), NS, tiers=[MemoryTier(NS, SystemClock())])
    child = os.fork()
    if not child:
        os._exit(0 if cache.close() == kvtier.Flushed({}, 0, 0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.put(KEYS, payloads_of(KEYS, BLOCK)) == 8
    assert cache.close().durable == {"g3": 8}


async def test_a_lease_that_outlives_the_cache_ends_without_a_word() -> None:
    """Its block was passed over by eviction, which the policy of an open cache hears of at the end of the lease."""
    small = kvtier.Config.parse({"tiers": {"g2": {"capacity": 4 * BLOCK}}})
    cache = kvtier.aopen(small, NS, tiers=[])
    async with cache:
        await cache.put(KEYS[:4], payloads_of(KEYS[:4], BLOCK), Terms("urgent", priority=90))
        hit = await cache.get(KEYS[:4])
        other = list(chain_of(NS, 2, seed=1))
        assert await cache.put(other, payloads_of(other, BLOCK)) == 0
        assert any(slot.suspended for slot in hit.slots)
    assert [bytes(block) for block in hit.blocks] == payloads_of(KEYS[:4], BLOCK)
    hit.release()


async def test_a_closed_cache_is_not_opened_again() -> None:
    cache = kvtier.aopen(config(), NS, tiers=[])
    async with cache:
        await cache.put(KEYS, payloads_of(KEYS, BLOCK))
    with pytest.raises(ClosedError, match="another"):
        await cache.__aenter__()
    assert not arena(cache)._maps


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("verb", ["demote_pinned", "stored_again"])
def test_a_put_whose_cache_closes_before_it_queues_its_blocks_finds_it_closed(
    stride: int, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop has ended by then; the blocks are dropped."""
    cache = kvtier.open(config(), NS, tiers=[MemoryTier(NS, SystemClock(), stride=stride)])
    cache.put(KEYS, payloads_of(KEYS, BLOCK), "5m")
    demoter = cache.manager.demoter
    real = getattr(demoter, verb)

    def late(*arguments: Any) -> Any:
        cache.close()
        return real(*arguments)

    keys = KEYS if verb == "stored_again" else list(chain_of(NS, 8, seed=1))
    monkeypatch.setattr(demoter, verb, late)
    with pytest.raises(ClosedError):
        cache.put(keys, payloads_of(keys, BLOCK), "24h")
        cache.put(keys, payloads_of(keys, BLOCK))


AWAITED: dict[str, Callable[[kvtier.AsyncCache], Coroutine[Any, Any, object]]] = {
    "match": lambda cache: cache.match(KEYS),
    "get": lambda cache: _got(cache),
    "prewarm": lambda cache: cache.prewarm(KEYS),
    "put": lambda cache: cache.put(KEYS, payloads_of(KEYS, BLOCK)),
    "flush": lambda cache: cache.flush(),
    "evict": lambda cache: cache.evict("g2"),
    "purge": lambda cache: cache.purge(),
    "pins.create": lambda cache: cache.pins.create("other", KEYS, "1h"),
    "pins.extend": lambda cache: cache.pins.extend("mine", "1h"),
    "pins.delete": lambda cache: cache.pins.delete("mine"),
    "pins.list": lambda cache: cache.pins.list(),
    "close": lambda cache: cache.close(),
}


async def _got(cache: kvtier.AsyncCache) -> int:
    async with cache.get(KEYS) as hit:
        return len(hit)


def elsewhere(call: Callable[[], Coroutine[Any, Any, object]], seconds: float = SLACK_S) -> object:
    """The result of a call on an event loop of its own, or its error."""

    async def bounded() -> object:
        async with asyncio.timeout(seconds):
            return await call()

    try:
        return asyncio.run(bounded())
    except Exception as error:
        return error


@pytest.mark.parametrize("verb", AWAITED)
async def test_a_verb_on_another_event_loop_is_refused_at_once_and_changes_nothing(verb: str) -> None:
    cache = kvtier.aopen(config(), NS, tiers=[MemoryTier(NS, SystemClock())])
    async with cache:
        assert await cache.put(KEYS, payloads_of(KEYS, BLOCK)) == 8
        await cache.flush()
        await cache.pins.create("mine", KEYS[:2], "1h")
        refused = await asyncio.to_thread(elsewhere, lambda: AWAITED[verb](cache))
        assert isinstance(refused, ClosedError), refused
        assert repr(asyncio.get_running_loop()) in str(refused)
        assert [pin.name for pin in await cache.pins.list()] == ["mine"]
        assert await _got(cache) == 8
    assert not arena(cache)._maps
    assert await asyncio.to_thread(elsewhere, cache.close) == kvtier.Flushed({}, 0, 0), "it is closed, on any loop"


def test_a_cache_whose_event_loop_has_ended_says_so_and_can_still_be_closed() -> None:
    """Nothing is flushed: what was under way ended with the loop. Memory and tiers are given back."""
    tier = MemoryTier(NS, SystemClock())
    cache = kvtier.aopen(config(), NS, tiers=[tier])

    async def opened() -> None:
        await cache.__aenter__()
        assert await cache.put(KEYS, payloads_of(KEYS, BLOCK)) == 8

    asyncio.run(opened())
    for name, call in AWAITED.items():
        if name != "close":
            refused = elsewhere(lambda call=call: call(cache))  # type: ignore[misc]
            assert isinstance(refused, ClosedError) and "which has ended" in str(refused), refused
    assert arena(cache)._maps
    flushed = elsewhere(cache.close)
    assert isinstance(flushed, kvtier.Flushed) and flushed.durable["g3"] + flushed.pending <= 8
    assert not arena(cache)._maps and not tier._opened
    assert elsewhere(cache.close) == kvtier.Flushed({}, 0, 0), "a second time"


def test_a_cache_whose_event_loop_has_ended_closes_its_real_tiers(tmp_path: Path) -> None:
    tiers = {"g2": {"capacity": 64 * BLOCK}, "g3": {"path": str(tmp_path / "g3"), "capacity": "64 MiB"}}
    both = kvtier.Config.parse({"tiers": {**tiers, "g4": {"url": f"file://{tmp_path}/g4"}}})
    cache = kvtier.aopen(both, NS)

    async def used() -> None:
        await cache.__aenter__()
        assert await cache.put(KEYS, payloads_of(KEYS, BLOCK)) == 8
        await cache.flush()

    asyncio.run(used())
    assert isinstance(elsewhere(cache.close, 20.0), kvtier.Flushed), "it takes its whole deadline"
    assert not arena(cache)._maps
    with kvtier.open(both, NS) as again:
        assert again.match(KEYS) == 8, "its folder was given back"


@pytest.mark.parametrize("caller_leaves", [False, True])
async def test_dropping_blocks_is_cut_off_by_the_end_of_the_cache_not_of_its_caller(caller_leaves: bool) -> None:
    """The caller of `evict` looked cancelled: an application's task ended without a reason."""
    steps = iter(lambda: 1, 2)
    async with kvtier.aopen(config(), NS, tiers=[]) as cache:
        hierarchy = cache.manager.hierarchy
        evicting = asyncio.ensure_future(hierarchy.drop_slices(steps))
        await asyncio.sleep(0.01)
        if caller_leaves:
            evicting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await evicting
            assert next(steps) == 1, "it goes on"
    if not caller_leaves:
        with pytest.raises(ClosedError):
            await evicting
