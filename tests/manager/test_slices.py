"""No hold of the lock and no turn of the loop grows with the length of a chain, with the number of pins or guarantees.

Counted in steps, at two sizes: a hold that went over a whole chain would have four times as many at the larger.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

import kvtier
from kvtier.errors import TierError
from kvtier.identity.keys import BlockKey, scope_of
from kvtier.manager.housekeeping import Housekeeping
from kvtier.manager.manager import Manager
from kvtier.manager.retain import Retainer
from kvtier.policies.policy import make_policy
from kvtier.put import Put
from kvtier.retention.pins import Pin, encode
from kvtier.retention.ranges import ChainTerms, RequestTerms
from kvtier.retention.terms import Depth, Terms
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace
from kvtier.testing.short_slices import slices_of
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.host.tier import HostTier
from tests.manager.support.steps import StepLock, TurnSteps, counted

BLOCK = 512
NS = sample_namespace(BLOCK)
SMALL, LARGE, SLICE = 48, 192, 8
IN_THE_TEST = ("steps_of", "MemoryTier", "test_")
SURE = Terms("sure", ttl=600, guarantee=True)
PLAIN = Terms("plain", ttl=86_400)


def encode_counted(pins: list[Pin]) -> bytes:
    return encode([replace(pin, chain=tuple(BlockKey(bytes(key)) for key in pin.chain)) for pin in pins])


class Subject:
    """A cache with room for a few chains of `blocks`, whose lock and loop count steps."""

    def __init__(self, blocks: int, lower: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks = blocks
        self.clock = VirtualClock()
        self.lock = StepLock()
        monkeypatch.setattr("kvtier.manager.build.Manager", partial(Manager, lock=self.lock))
        monkeypatch.setattr("kvtier.face.check_keys", lambda keys, distinct: None)  # they are counted keys
        monkeypatch.setattr("kvtier.manager.pin_sync.encode", encode_counted)
        tiers = {
            "g3": [MemoryTier(NS, self.clock)],
            "g4": [MemoryTier(NS, self.clock, name="g4", depth=Depth.G4, stride=16)],
            "both": [MemoryTier(NS, self.clock), MemoryTier(NS, self.clock, name="g4", depth=Depth.G4, stride=16)],
        }[lower]
        config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 4 * LARGE * 4096}}, "retention": {"reserved": 0.9}})
        self.cache = kvtier.aopen(config, NS, clock=self.clock, tiers=tiers)

    def chain(self, seed: int) -> list[BlockKey]:
        return counted(list(chain_of(NS, self.blocks, seed=seed, scope=scope_of(str(seed)))))

    async def put(self, chain: list[BlockKey], terms: Terms = PLAIN) -> None:
        manager, buffers = self.cache.manager, payloads_of(chain, BLOCK)
        of = ChainTerms(RequestTerms(terms), NS.block_tokens)
        put = await asyncio.to_thread(lambda: Put(manager, chain, buffers, of, start=0, wait=False, request_id=""))
        while await asyncio.to_thread(put.step) is not None:
            pass
        assert put.accepted == self.blocks

    async def measure(self, verb: Callable[[], Awaitable[Any]]) -> tuple[Counter[str], Counter[str]]:
        """Steps of the longest hold by function, and of the longest turn by task, of one verb."""
        self.lock.most.clear()
        with TurnSteps() as turns:
            await asyncio.ensure_future(verb())
            await asyncio.sleep(0)
        return self.lock.most.copy(), turns.most


async def nothing(housekeeping: Housekeeping) -> None:
    """It would come at any time; its parts are verbs here."""


async def broken(*_: object) -> None:
    raise TierError("g3", "retain", "no space left on device")


async def steps_of(
    blocks: int, lower: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Per verb, its longest holds and turns."""
    it = Subject(blocks, lower, monkeypatch)
    cache, out = it.cache, {}
    first, second = it.chain(1), it.chain(2)

    async def get(chain: list[BlockKey]) -> None:
        async with cache.get(chain, 60.0, request_id="r") as hit:
            assert len(hit) == blocks

    async with cache:
        manager = cache.manager

        async def verb(name: str, work: Callable[[], Awaitable[Any]]) -> None:
            out[name] = await it.measure(work)

        await verb("put", lambda: it.put(first))
        await verb("flush", lambda: cache.flush(60.0))
        await verb("get from G2", lambda: get(first))
        await cache.evict("g2")
        await verb("match below", lambda: cache.match(first, 60.0))
        await verb("get from below", lambda: get(first))
        await verb("uses", manager._housekeeping.flush_uses)
        await verb("prewarm", lambda: cache.prewarm(first, 60.0))
        await verb("pin", lambda: cache.pins.create("p", first, "1h"))
        await verb("pin twice", lambda: cache.pins.create("q", first, "1h"))
        await verb("extend", lambda: cache.pins.extend("p", "2h"))
        await verb("tend", lambda: manager.protection.tend(read_pins=True))
        await verb("end of a pin", lambda: cache.pins.delete("q"))
        await verb("drop of a pin", lambda: cache.pins.delete("p", drop=True))
        await verb("guarantee", lambda: it.put(second, SURE))
        with monkeypatch.context() as patch:
            patch.setattr(Retainer, "_ask_below", broken)
            await verb("not taken over below", manager.protection.tend)
        await verb("taken over below", manager.protection.tend)
        await verb("guarantees used", lambda: get(second))
        await manager._housekeeping.flush_uses()
        it.clock.advance(700)
        await verb("end of guarantees", manager.protection.tend)
        await it.put(second, SURE)
        await cache.pins.create("r", second, "1h")
        await verb("purge", lambda: cache.purge("2"))
        assert len(manager.protection.guarantees) == len(manager.protection.pins) == 0
        await it.put(first, SURE)
        await manager.protection.tend()
        if "g3" in manager.lower:
            await verb("evict below", lambda: cache.evict("g3"))
        await verb("evict", lambda: cache.evict("g2"))
        await verb("stats", lambda: asyncio.to_thread(cache.stats))
        cache.check()
    return out


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lower", ["g3", *(pytest.param(lower, marks=pytest.mark.long) for lower in ("g4", "both"))])
async def test_no_hold_and_no_turn_grows_with_a_chain(lower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.manager.housekeeping.Housekeeping.run", nothing)
    with slices_of(SLICE):
        # Each twice: the loop may take in one turn or in two what comes together where the machine is busy.
        small, again = await steps_of(SMALL, lower, monkeypatch), await steps_of(SMALL, lower, monkeypatch)
        large, once_more = await steps_of(LARGE, lower, monkeypatch), await steps_of(LARGE, lower, monkeypatch)
    grown = [
        f"{kind} of {where}: {few[where]} → {steps}"
        for kind, few, *many in zip(
            ("hold", "turn"), longest(small, again), longest(large), longest(once_more), strict=True
        )
        for where, steps in (many[0] & many[1]).items()  # the shorter of both
        if steps > 1.5 * few[where] + 80 and not where.startswith(IN_THE_TEST)
    ]
    assert not grown, "\n".join(grown)


def longest(*runs: dict[str, tuple[Counter[str], Counter[str]]]) -> tuple[Counter[str], Counter[str]]:
    """The longest holds and turns over all runs and verbs."""
    holds, turns = Counter[str](), Counter[str]()
    for hold, turn in (found for verbs in runs for found in verbs.values()):
        holds |= hold
        turns |= turn
    return holds, turns


async def test_a_closing_cache_gives_its_tables_up_without_the_lock() -> None:
    clock, at_release = VirtualClock(), list[bool]()

    class Lock:
        _lock = threading.Lock()

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()
            at_release.append(policy() is not None)

    manager = Manager(HostTier(Arena(BLOCK, 1, 4 * 4096), make_policy("lru", 4)), [], clock, lock=cast("Any", Lock()))
    policy = weakref.ref(manager.host.policy)
    await manager.start()
    await manager.close()
    assert all(at_release) and policy() is None
