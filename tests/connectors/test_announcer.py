"""A warm G3 is announced after a restart: what is there, parents first, no more at once than a step takes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvtier
from kvtier.config import Config
from kvtier.connectors import announcer as module
from kvtier.connectors.announcer import Announcer
from kvtier.connectors.block_events import BlockEvents
from kvtier.connectors.contents import Passage, described
from kvtier.errors import TierError
from kvtier.events import Change, Events
from kvtier.identity.keys import SHARED, BlockKey, Scope, scope_of
from kvtier.testing import chain_of, payloads_of, sample_namespace
from kvtier.tiers.meter import Metered

BLOCK, SIZE = 4096, 16
NAMESPACE = sample_namespace(BLOCK)


class Told(BlockEvents):
    """An engine's side of events that names blocks by their keys, and has no events."""

    def request(self, chain: list[BlockKey], lasting: int | None = None) -> None:
        """A request with these blocks, of which `lasting` may lie in G3; None: all."""

        def passage(keys: list[BlockKey], start: int) -> Passage:
            tokens = list(range(start * SIZE, (start + len(keys)) * SIZE))
            return Passage(keys, chain[start - 1][-32:] if start else None, tokens, [None] * len(keys))

        self._remember(chain, 0, passage, None, len(chain) if lasting is None else lasting)

    def _names(self, keys: Any) -> list[Any]:
        return list(keys)

    def _announced(self, keys: Any) -> Any:
        return keys

    def _made_of(self, run: Any, first: int, stop: int, tier: str) -> Any: ...
    def _removed(self, keys: Any, tier: str) -> Any: ...
    def _all_cleared(self) -> Any: ...


class Here:
    """A cache, its announcer, and what a router would hear."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.events, self.told = cache, Events(), deque[Passage]()
        cache.manager.subscribe(self.events)
        self.announcer = Announcer(cache.manager.hierarchy, self.told.append, lambda: bool(self.told))

    async def store(self, chain: list[BlockKey], start: int = 0, salt: str | None = None) -> None:
        await self.cache.put(chain, payloads_of(chain[start:], BLOCK), start=start)
        await self.cache.flush(20)
        tokens = list(range(start * SIZE, len(chain) * SIZE))
        parent = chain[start - 1][-32:] if start else None
        self.announcer.note(Passage(chain[start:], parent, tokens, [None] * (len(chain) - start), salt))

    def heard(self) -> list[BlockKey]:
        """Blocks of G3, in the order of the events. Those that were told of have their tokens."""
        out, known = list[BlockKey](), {key for passage in self.told for key in passage.keys}
        self.told.clear()
        for change in self.events.take():
            assert isinstance(change, Change)
            if change.tier == "g3" and change.stored:
                assert known.issuperset(change.keys)
                out += change.keys
        return out


@pytest.fixture
def restarted(tmp_path: Path) -> Callable[[], Any]:
    tiers = {"g2": {"capacity": 64 * BLOCK}, "g3": {"path": str(tmp_path), "capacity": 1 << 20}}
    config = Config.parse({"tiers": tiers})

    @asynccontextmanager
    async def begin() -> AsyncIterator[Here]:
        async with kvtier.aopen(config, NAMESPACE) as cache:
            here = Here(cache)
            await here.announcer.write()
            yield here
            await here.announcer.write()

    return begin


def chain(blocks: int, seed: int = 0, scope: Scope = SHARED) -> list[BlockKey]:
    return chain_of(NAMESPACE, blocks, seed, scope)


async def test_what_g3_has_is_announced_parents_first(restarted: Callable[[], Any]) -> None:
    long, other, tenants = chain(9), chain(4, 1), chain(3, 2, scope_of("tenant"))
    async with restarted() as here:
        await here.store(long[:5])
        await here.store(other)
        await here.announcer.write()
        await here.store(long, start=5)
        await here.store(tenants, salt="tenant")
        here.events.take()
    async with restarted() as here:
        assert here.heard() == []
        await here.announcer.announce()
        assert {passage.salt for passage in here.told} == {None, "tenant"}
        assert here.heard() == [*tenants, *long, *other], "the newest first, but not before its parent"
        assert here.announcer.announced == 16
        assert await here.cache.evict("g3") == 16
        await here.announcer.announce()
        assert here.heard() == [], "nothing that is not there"


async def test_what_was_evicted_or_purged_is_not_announced_nor_what_goes_on_from_it(
    restarted: Callable[[], Any],
) -> None:
    one, other = chain(6), chain(4, 1, scope_of("tenant"))
    async with restarted() as here:
        await here.store(one[:4])
        await here.announcer.write()
        await here.store(one, start=4)
        await here.store(other, salt="tenant")
    async with restarted() as here:
        await here.cache.manager.lower["g3"].evict(one[2:3])
        await here.cache.purge("tenant")
        here.events.take()
        await here.announcer.announce()
        assert here.heard() == one[:2]
        assert {passage.salt for passage in here.told} <= {None}


async def test_nothing_that_was_noted_before_a_purge_is_written_after_it(restarted: Callable[[], Any]) -> None:
    tenants, others = chain(3, scope=scope_of("tenant")), chain(2, 1)

    async def kept() -> list[list[BlockKey]]:
        found = here.cache.manager.hierarchy.describing()
        return [described(part).keys for part in (await found[1].read_contents(0))[1]]

    async with restarted() as here:
        await here.store(others)
        await here.store(tenants, salt="tenant")
        await here.cache.purge("tenant")
        await here.announcer.write()
        assert await kept() == [others]
        await here.store(tenants, salt="tenant")  # of a request after the purge
        await here.announcer.write()
        assert await kept() == [others, tenants]
        await here.store(others[:1])
        await here.cache.purge("tenant")
        assert await kept() == [others]
        await here.announcer.write()
        assert await kept() == [others, others[:1]], "the page as it was written is not written again"


async def test_a_step_takes_one_batch(restarted: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BLOCKS", 6)
    monkeypatch.setattr(module, "BATCH_S", 0.001)
    async with restarted() as here:
        for seed in range(5):
            await here.store(chain(4, seed))
    async with restarted() as here:
        announcing, batches = asyncio.create_task(here.announcer.announce()), list[int]()
        while not announcing.done():
            await asyncio.sleep(0.05)
            batches.append(len(here.heard()))
        assert [count for count in batches if count] == [8, 8, 4]


async def test_a_requests_blocks_one_by_one_are_one_passage(restarted: Callable[[], Any]) -> None:
    whole = chain(12)
    async with restarted() as here:
        for stop in range(1, 13):
            await here.store(whole[:stop], start=stop - 1)
    async with restarted() as here:
        await here.announcer.announce()
        (passage,) = here.told
        assert passage.keys == whole and passage.tokens == list(range(12 * SIZE))
        assert here.heard() == whole


async def test_what_is_not_there_costs_one_look_each_and_reaches_no_engine(
    restarted: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation whose head is gone, turn by turn: each turn was tried again for every later one."""
    turns, looks = chain(40), list[int]()
    async with restarted() as here:
        await here.store(turns[:1])
        for stop in range(2, 41):
            await here.announcer.write()
            await here.store(turns[:stop], start=stop - 1)
        await here.announcer.write()
        await here.cache.manager.lower["g3"].evict(turns[:1])
        here.events.take()
    lookup = Metered.announce

    async def counted(self: Metered, keys: list[BlockKey], *arguments: Any) -> int:
        looks.append(len(keys))
        return await lookup(self, keys, *arguments)

    monkeypatch.setattr(Metered, "announce", counted)
    async with restarted() as here:
        await here.announcer.announce()
        assert here.heard() == [] and not here.told and looks == [1]


async def test_a_tier_that_is_used_later_or_fails_for_a_while_is_announced_then(
    restarted: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE_MAX_S", 0.001)
    monkeypatch.setattr(module, "_AGAIN_S", 0.001, raising=False)
    async with restarted() as here:
        await here.store(chain(5))
    for absent in (True, False):
        async with restarted() as here:
            hierarchy, fails = here.cache.manager.hierarchy, [True]
            found = hierarchy.describing()

            async def read(below: int, verbs: Any = found[1], fails: list[bool] = fails) -> tuple[int, list[bytes]]:
                if fails:
                    raise TierError("g3", "read", "a fault")
                return await verbs.read_contents(below)

            failing = (found[0], SimpleNamespace(read_contents=read))
            monkeypatch.setattr(hierarchy, "describing", lambda f=fails, s=failing, n=absent: None if n and f else s)
            announcing = asyncio.create_task(here.announcer.announce())
            await asyncio.sleep(0.02)
            assert not announcing.done() and here.heard() == []
            fails.clear()
            await announcing
            assert here.heard() == chain(5)


async def test_it_waits_for_a_tier_that_is_out_of_service(
    restarted: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE_MAX_S", 0.001)
    monkeypatch.setattr(module, "_AGAIN_S", 0.001, raising=False)
    async with restarted() as here:
        await here.store(chain(5))
    async with restarted() as here:
        breaker = here.cache.manager.lower["g3"].breaker
        breaker.trip("a fault")
        announcing = asyncio.create_task(here.announcer.announce())
        await asyncio.sleep(0.02)
        assert here.heard() == []
        breaker.succeeded()
        await announcing
        assert here.heard() == chain(5)


async def test_a_passage_of_which_some_is_noted_again_is_written_whole(restarted: Callable[[], Any]) -> None:
    whole = chain(6)
    async with restarted() as here:
        await here.store(whole[:4])
        await here.store(whole[:4], start=2)
        await here.store(whole, start=4)
    async with restarted() as here:
        await here.announcer.announce()
        assert here.heard() == whole


async def test_a_prefix_of_every_prompt_is_described_again_before_its_page_is_overwritten(
    restarted: Callable[[], Any],
) -> None:
    head = chain(4)
    async with restarted() as here:
        events = Told(SIZE, 1 << 17, ("g3",))
        announcer = events.announcer(here.cache.manager.hierarchy)
        await announcer.write()
        await here.cache.put(head, payloads_of(head, BLOCK))
        await here.cache.flush(20)
        for seed in range(1, 120):
            events.request([*head, *chain(12, seed)])
            await announcer.write()
        here.announcer._noted.clear()
    async with restarted() as here:
        await here.announcer.announce()
        assert here.heard() == head


async def test_what_a_later_request_keeps_in_g3_is_described_though_an_earlier_one_did_not(
    restarted: Callable[[], Any],
) -> None:
    """And so is what was described before a purge, and comes again."""
    whole = chain(4, scope=scope_of("tenant"))

    async def kept() -> list[list[BlockKey]]:
        found = here.cache.manager.hierarchy.describing()
        return [described(part).keys for part in (await found[1].read_contents(0))[1]]

    async with restarted() as here:
        events = Told(SIZE, 1 << 17, ("g3",))
        announcer = events.announcer(here.cache.manager.hierarchy)
        await announcer.write()
        events.request(whole, lasting=1)
        events.request(whole)
        await announcer.write()
        assert await kept() == [whole]
        await here.cache.purge("tenant")
        await announcer.write()
        events.request(chain(1, 1))
        await announcer.write()
        events.request(whole)
        await announcer.write()
        assert [whole] == [keys for keys in await kept() if keys[0] == whole[0]]


def test_what_is_announced_while_events_are_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passage came too late to be known, and its blocks are not announced again."""

    class Telling(Told):
        def _made_of(self, run: Any, first: int, stop: int, tier: str) -> Any:
            return run.passage.keys[first:stop]

    keys, told = list(chain_of(NAMESPACE, 4)), Telling(SIZE, 1 << 12, ("g2", "g3"))
    report, take = told.events.of("g3"), told.events.take

    def meanwhile() -> Any:
        if not told._kept.numbers:
            told._told.append(Passage(keys, None, list(range(4 * SIZE)), [None] * 4))
            report(keys, True)
        return take()

    monkeypatch.setattr(told.events, "take", meanwhile)
    heard = [event for _ in range(3) for event in told.take()]
    assert heard and heard[0] == keys
