"""A pin holds all of its chain, whatever its blocks share with others, and however its making is cut off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

import kvtier
from kvtier.clock import SystemClock
from kvtier.identity.keys import BlockKey
from kvtier.manager import pin_sync, protection, retain
from kvtier.testing import MemoryTier, VirtualClock, chain_of, payloads_of
from kvtier.testing.memory import MemoryStore
from tests.retention.support.requests import BLOCK, NS, opened, put, served

CONFIG = kvtier.Config.parse({"tiers": {"g2": {"capacity": 512 * BLOCK}}})
LONG = list(chain_of(NS, 128))


def test_a_pin_over_blocks_that_another_pin_retains_retains_the_rest() -> None:
    keys = list(chain_of(NS, 8))
    with opened(VirtualClock(), [], blocks=16) as cache:  # half of them may be reserved
        put(cache, keys)
        cache.pins.create("a", keys[:6], "1h")
        cache.pins.create("b", keys, "1h")
        assert cache.stats()["requests"]["promises"]["unheld"] == 0
        for seed in range(100, 110):
            put(cache, list(chain_of(NS, 8, seed=seed)))
        assert served(cache, keys) == 8


@pytest.mark.parametrize("verb", ["create", "extend"])
async def test_a_pin_whose_making_was_cancelled_is_made_by_the_next_pass(verb: str) -> None:
    clock = VirtualClock()
    async with kvtier.aopen(CONFIG, NS, clock=clock, tiers=[]) as cache:
        await cache.put(LONG, payloads_of(LONG, BLOCK), retention="5m")
        if verb == "extend":
            await cache.pins.create("a", LONG, "10m")
        promises = cache.manager.protection
        arrived, making = promises.arrived, None

        def once(slots: Any) -> None:
            arrived(slots)
            assert making is not None
            making.cancel()

        promises.arrived = once  # type: ignore[method-assign]
        asked = cache.pins.create("a", LONG, "2h") if verb == "create" else cache.pins.extend("a", "2h")
        making = asyncio.ensure_future(asked)
        with pytest.raises(asyncio.CancelledError):
            await making
        promises.arrived = arrived  # type: ignore[method-assign]
        assert [pin.name for pin in await cache.pins.list()] == ["a"]
        await promises.tend()
        clock.advance(3600)
        assert await cache.match(LONG) == len(cache.manager.host.retained) == len(LONG)
        cache.check()


async def test_a_pin_of_elsewhere_covers_all_of_its_chain_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time for a tier's answer was over while the pins that it told of were entered: their rest was never."""
    clock, store, others = SystemClock(), MemoryStore.empty(), MemoryStore.empty()
    keys = list(chain_of(NS, 256 * 3))
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 2048 * BLOCK}}})
    async with kvtier.aopen(config, NS, tiers=[MemoryTier(NS, clock, store=others)]) as other:
        await other.pins.create("a", keys, "1h")
        async with kvtier.aopen(config, NS, tiers=[MemoryTier(NS, clock, store=store)]) as cache:
            store.notes.update({name: note for name, note in others.notes.items() if name.startswith("pin/")})
            promises = cache.manager.protection
            cover = promises.pins.cover

            def slow(name: str, part: Sequence[BlockKey]) -> None:
                time.sleep(0.03)
                cover(name, part)

            monkeypatch.setattr(promises.pins, "cover", slow)
            for module in (pin_sync, protection, retain):
                monkeypatch.setattr(module, "CALL_S", 0.02, raising=False)
            await promises.tend(read_pins=True)
            assert len(promises.pins) == len(keys)
            cache.check()


@pytest.mark.parametrize("tokens", [2**64, -1, 1.5, "16", True, float("nan")])
def test_a_pin_of_no_number_of_tokens_is_refused(tokens: Any) -> None:
    """It could not be written down: every later pass failed at it, then flush and close, and all was a miss."""
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock)]) as cache:
        with pytest.raises(kvtier.InvalidRequest, match="tokens"):
            cache.pins.create("a", LONG[:4], "1h", tokens=tokens)
        assert not cache.pins.list() and cache.pins.create("b", LONG[:4], "1h", tokens=20).tokens == 20
        cache.flush()
