"""Named pins and guarantees through the public surface: what was promised stays, in every tier and over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvtier
from kvtier.identity.keys import scope_of
from kvtier.retention.pins import Pin
from kvtier.retention.terms import Depth, Terms
from kvtier.testing import (
    Fault,
    FaultyTier,
    MemoryTier,
    VirtualClock,
    chain_of,
    payloads_of,
)
from kvtier.testing.memory import MemoryStore
from kvtier.tiers.protocol import Tier
from tests.retention.support.requests import BLOCK, NS, opened, put, served

HOUR = Terms("hour", ttl=3600, guarantee=True)
SHALLOW = Terms("shallow", ttl=3600, guarantee=True, ceiling=Depth.G2)


@contextmanager
def on_disk(path: Path, blocks: int = 16, disk_blocks: int = 64, **more: object) -> Iterator[kvtier.Cache]:
    tiers = {"g2": {"capacity": blocks * BLOCK}, "g3": {"path": str(path), "capacity": disk_blocks * BLOCK}}
    with kvtier.open(kvtier.Config.parse({"tiers": tiers, **more}), NS) as cache:
        yield cache
        cache.check()


def flood(cache: kvtier.Cache, chains: int, blocks: int = 8, first: int = 100) -> None:
    for seed in range(first, first + chains):
        put(cache, list(chain_of(NS, blocks, seed=seed)))


def pin_notes(store: MemoryStore) -> set[str]:
    return {name for name in store.notes if name.startswith("pin/")}


KEYS = list(chain_of(NS, 6))


@pytest.mark.parametrize("policy", ["lru", "gapduel"])
def test_a_pinned_chain_stays_in_ram_until_its_pin_ends(policy: str) -> None:
    clock = VirtualClock()
    with opened(clock, [], policy=policy) as cache:
        put(cache, KEYS, retention="5m")
        info = cache.pins.create("docs/manual", KEYS, "2h")
        assert (info.blocks, info.bytes, info.tokens, info.resident) == (6, 6 * BLOCK, 6 * NS.block_tokens, 6)
        flood(cache, 10)
        clock.advance(3600)
        assert served(cache, KEYS) == 6, "evicted, or expired by the terms it was stored with"
        assert cache.pins.list() == [info]
        assert cache.pins.extend("docs/manual", 7200).until == clock.wall() + 7200
        clock.advance(7100)
        assert served(cache, KEYS) == 6
        clock.advance(200)
        assert cache.pins.list() == []
        flood(cache, 10)
        assert served(cache, KEYS) == 0


@pytest.mark.parametrize("stored_before", [False, True])
@pytest.mark.parametrize("set_by", [172_800, -172_800])
def test_a_pin_holds_for_what_is_stored_while_the_clock_is_in_doubt(set_by: float, stored_before: bool) -> None:
    """By one of the two times the pin is over, or the blocks are; they are not, once the clock is right again."""
    clock = VirtualClock()
    with opened(clock, []) as cache:
        if stored_before:
            put(cache, KEYS, retention="5m")
        cache.pins.create("docs/manual", KEYS, "2h")
        clock.jump_wall(set_by)
        put(cache, KEYS, retention="5m")
        clock.jump_wall(-set_by)
        clock.advance(3600)
        assert served(cache, KEYS) == 6 and cache.pins.list()


def test_without_a_pin_it_would_have_left() -> None:
    with opened(VirtualClock(), []) as cache:
        put(cache, KEYS)
        flood(cache, 10)
        assert served(cache, KEYS) < 6


def test_a_deleted_pin_lets_its_blocks_go() -> None:
    with opened(VirtualClock(), []) as cache:
        put(cache, KEYS)
        cache.pins.create("a", KEYS, "1h")
        cache.pins.create("b", KEYS[:2], "1h")
        assert cache.pins.delete("a") and not cache.pins.delete("a")
        flood(cache, 10)
        assert cache.match(KEYS) == 2
        assert cache.pins.delete("b", drop=True)
        assert cache.match(KEYS) == 0


def test_what_is_stored_under_a_pin_later_is_pinned_too() -> None:
    clock = VirtualClock()
    with opened(clock, []) as cache:
        cache.pins.create("a", KEYS, "1h")
        put(cache, KEYS, retention="5m")
        flood(cache, 10)
        clock.advance(1000)
        assert served(cache, KEYS) == 6


def test_more_than_may_be_reserved_is_refused() -> None:
    with opened(VirtualClock(), [], retention={"reserved": 0.25}) as cache:
        cache.pins.create("a", KEYS[:4], 60)
        with pytest.raises(kvtier.InvalidRequest, match="4 of 4 are pinned"):
            cache.pins.create("b", KEYS, 60)
        with pytest.raises(kvtier.InvalidRequest, match="guarantee for 6 more blocks is refused"):
            put(cache, KEYS, retention=HOUR)
        assert cache.match(KEYS) == 0, "something was stored"
        for wrong in (0, -1, float("nan"), True, "1 hour", 10**10):
            with pytest.raises(kvtier.InvalidRequest):
                cache.pins.create("c", KEYS, wrong)
        assert [pin.name for pin in cache.pins.list()] == ["a"]


@pytest.mark.parametrize("terms", [HOUR, SHALLOW])
def test_a_guarantee_holds_against_everything_that_has_none(terms: Terms) -> None:
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock, capacity_blocks=32)]) as cache:
        assert put(cache, KEYS, retention=terms) == 6
        flood(cache, 20)
        clock.advance(3000)
        assert served(cache, KEYS) == 6
        cache.flush()
        clock.advance(3000)
        flood(cache, 20, first=200)
        assert served(cache, KEYS) == 6, "use renews it"
        cache.flush()
        clock.advance(3700)
        assert served(cache, KEYS) == 0
        cache.flush()
        assert cache.stats()["requests"]["promises"]["guaranteed"] == 0


def guaranteed(cache: kvtier.Cache) -> int:
    return int(cache.stats()["requests"]["promises"]["guaranteed"])


def put_from(cache: kvtier.Cache, start: int, terms: Terms) -> int:
    return cache.put(KEYS, payloads_of(KEYS[start:], BLOCK), terms, start=start)


@pytest.mark.parametrize("below", [False, True])
def test_a_suffix_without_its_head_is_stored_and_not_guaranteed(below: bool) -> None:
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock, capacity_blocks=32)] if below else []) as cache:
        put(cache, KEYS[:2])
        assert put_from(cache, 4, HOUR) == 2
        promises = cache.stats()["requests"]["promises"]
        assert (promises["guaranteed"], promises["refused"]) == (0, 1)
        assert cache.put(KEYS, payloads_of(KEYS, BLOCK), HOUR) == 6
        assert guaranteed(cache) == 6, "whole, it is"


@pytest.mark.parametrize("where", ["g2", "g3"])
def test_a_suffix_is_guaranteed_with_the_head_that_some_tier_has(where: str) -> None:
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock, capacity_blocks=32)]) as cache:
        put(cache, KEYS[:4])
        cache.flush()
        if where == "g3":
            assert cache.evict("g2") == 4
        assert put_from(cache, 4, HOUR) == 2 and guaranteed(cache) == 6
        cache.flush()
        flood(cache, 20)
        assert served(cache, KEYS) == 6


@pytest.mark.parametrize("terms", [HOUR, SHALLOW])
@pytest.mark.parametrize("order", [["g2", "g3"], ["g3", "g2"]])
def test_guarantees_of_blocks_that_were_evicted_everywhere_end(order: list[str], terms: Terms) -> None:
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock, capacity_blocks=32)]) as cache:
        assert put(cache, KEYS, retention=terms) == 6
        cache.flush()
        cache.evict(order[0])
        assert guaranteed(cache) == (0 if (order[0], terms) == ("g2", SHALLOW) else 6), "some tier has them"
        cache.evict(order[1])
        assert guaranteed(cache) == 0
        assert put(cache, KEYS, retention=terms) == 6 and guaranteed(cache) == 6


def test_a_block_on_its_way_down_keeps_its_guarantee_when_g2_is_evicted() -> None:
    clock = VirtualClock()
    tier = FaultyTier(MemoryTier(NS, clock, capacity_blocks=32), [Fault("write", "hang")])
    with opened(clock, [tier], deadlines={"close": "300ms"}) as cache:
        assert cache.put(KEYS, payloads_of(KEYS, BLOCK), HOUR, wait=False) == 6
        cache.evict("g2")
        assert guaranteed(cache) == 6


def test_what_finds_no_slot_is_not_guaranteed() -> None:
    """As connectors store: a slice after the other, each as far as there is space."""
    with opened(blocks=4, retention={"reserved": 1.0}) as cache:
        chain = cache._chain(KEYS, distinct=True)
        slots, reached = cache.manager.reserve(chain, 0, 4, Terms("plain"))
        more, ended = cache.manager.reserve(chain, 4, 6, HOUR)
        assert (len(slots), reached, more, ended) == (4, 4, [], 4) and guaranteed(cache) == 0
        cache.manager.abort(slots, [slot.generation for slot in slots])


def test_a_guarantee_that_is_over_stays_over_though_a_pin_keeps_its_block() -> None:
    clock = VirtualClock()
    with opened(clock, [MemoryTier(NS, clock)]) as cache:
        keys = list(chain_of(NS, 2))
        put(cache, keys, retention=HOUR)
        cache.pins.create("longer", keys, "24h")
        clock.advance(2 * 3600)
        cache.flush()
        assert cache.stats()["requests"]["promises"]["guaranteed"] == 0
        assert served(cache, keys) == 2, "pinned"
        cache.flush()
        assert cache.stats()["requests"]["promises"]["guaranteed"] == 0, "a use revived it"


def test_a_promise_moves_down_and_ram_is_free_again() -> None:
    clock = VirtualClock()
    store = MemoryStore.empty()
    with opened(clock, [MemoryTier(NS, clock, store=store, capacity_blocks=64)], blocks=8) as cache:
        for seed in range(4):
            put(cache, list(chain_of(NS, 8, seed=seed)), retention=HOUR)
        cache.flush()
        assert len(store.retained) == 32 and not cache.manager.host.retained
        flood(cache, 20)
        assert all(cache.match(list(chain_of(NS, 8, seed=seed))) == 8 for seed in range(4))


def test_pins_and_guarantees_survive_a_restart(tmp_path: Path) -> None:
    other = list(chain_of(NS, 6, seed=1))
    with on_disk(tmp_path) as cache:
        put(cache, KEYS)
        put(cache, other, retention=HOUR)
        cache.pins.create("docs/manual", KEYS, "1h")
    with on_disk(tmp_path) as cache:
        assert [(pin.name, pin.blocks) for pin in cache.pins.list()] == [("docs/manual", 6)]
        flood(cache, 30)
        cache.flush()
        assert served(cache, KEYS) == 6 and served(cache, other) == 6
        cache.pins.delete("docs/manual")
    with on_disk(tmp_path) as cache:
        assert cache.pins.list() == []
        flood(cache, 30, first=200)
        cache.flush()
        assert served(cache, KEYS) == 0 and served(cache, other) == 6


def test_a_pin_ends_while_nobody_runs() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()

    def tier() -> list[Tier]:
        return [MemoryTier(NS, clock, store=store, capacity_blocks=32)]

    with opened(clock, tier()) as cache:
        put(cache, KEYS, retention="5m")
        cache.pins.create("a", KEYS, "1h")
    clock.advance(1800)
    with opened(clock, tier()) as cache:
        assert served(cache, KEYS) == 6, "the pin holds over its ttl"
    clock.advance(1900)
    with opened(clock, tier()) as cache:
        assert served(cache, KEYS) == 0 and cache.pins.list() == []
        cache.flush()
        assert not store.retained and not pin_notes(store)


def test_a_damaged_note_costs_its_pin_only() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    with opened(clock, [MemoryTier(NS, clock, store=store)]) as cache:
        put(cache, KEYS)
        cache.pins.create("a", KEYS, "1h")
        cache.pins.create("b", KEYS, "1h")
    store.notes["pin/a"] = store.notes["pin/a"][:-1]
    with opened(clock, [MemoryTier(NS, clock, store=store)]) as cache:
        assert [pin.name for pin in cache.pins.list()] == ["b"] and served(cache, KEYS) == 6


def test_a_purge_ends_pins_and_guarantees() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    scope = scope_of("tenant")
    keys, mine = list(chain_of(NS, 4, scope=scope)), list(chain_of(NS, 4))
    with opened(clock, [MemoryTier(NS, clock, store=store)]) as cache:
        for name, chain in (("theirs", keys), ("mine", mine)):
            put(cache, chain, retention=HOUR)
            cache.pins.create(name, chain, "1h")
        clock.advance(1)
        assert len(cache.manager.protection.guarantees) == 8
        cache.purge("tenant")
        assert [pin.name for pin in cache.pins.list()] == ["mine"]
        assert len(cache.manager.protection.guarantees) == 4, "what was guaranteed of the purged is reserved still"
        assert cache.match(keys) == 0 and served(cache, mine) == 4
        clock.advance(1)
        put(cache, keys)
        cache.pins.create("theirs", keys, "1h")  # the name is free again
        cache.flush()
        cache.manager._purger.apply_tombstones({scope: clock.wall() - 1.5})  # an old tombstone, learned again
        assert len(cache.pins.list()) == 2
    assert pin_notes(store) == {"pin/mine", "pin/theirs"}


def test_a_sick_disk_keeps_nobody_from_pinning() -> None:
    clock, store = VirtualClock(), MemoryStore.empty()
    tier = FaultyTier(MemoryTier(NS, clock, store=store))
    with opened(clock, [tier]) as cache:
        put(cache, KEYS)
        cache.flush()
        tier.faults.append(Fault("*", "error"))
        cache.pins.create("a", KEYS, "1h")
        flood(cache, 10)
        assert cache.match(KEYS) == 6, "G2 holds it meanwhile"
        tier.faults.clear()
        clock.advance(60)
        cache.flush()
        assert pin_notes(store) == {"pin/a"} and len(store.retained) == 6


async def test_the_async_face_pins_too() -> None:
    clock = VirtualClock()
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 16 * BLOCK}}})
    async with kvtier.aopen(config, NS, clock=clock, tiers=[]) as cache:
        await cache.put(KEYS, payloads_of(KEYS, BLOCK))
        await cache.pins.create("a", KEYS, "1h")
        assert (await cache.pins.extend("a", "2h")).until == clock.wall() + 7200
        assert [pin.name for pin in await cache.pins.list()] == ["a"]
        assert await cache.pins.delete("a")


async def test_a_list_of_many_pins_lets_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turns, most = VirtualClock(), 0, 0
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 4096 * 4096}}})
    async with kvtier.aopen(config, NS, clock=clock, tiers=[]) as cache:
        for number in range(40):
            await cache.pins.create(f"p{number:02}", list(chain_of(NS, 4 if number else 600, seed=number)), "1h")
        real, asked = cache.manager.protection.resident, 0

        def resident(pin: Pin) -> int:
            nonlocal asked
            asked += asyncio._get_running_loop() is not None  # else on a thread of its own
            return real(pin)

        monkeypatch.setattr(cache.manager.protection, "resident", resident)
        listing = asyncio.ensure_future(cache.pins.list())
        while not listing.done():
            before, turns = asked, turns + 1
            await asyncio.sleep(0)
            most = max(most, asked - before)
        assert [pin.name for pin in listing.result()] == [f"p{number:02}" for number in range(40)]
        assert most == 1 and asked == 39 and turns >= 40


def test_a_pin_that_another_process_has_extended_outlives_its_end_in_this_one(tmp_path: Path) -> None:
    """Each process reads the others' pins every half minute only."""
    clock = VirtualClock()
    tiers = {"g2": {"capacity": 16 * BLOCK}, "g3": {"path": str(tmp_path), "capacity": 64 * BLOCK}}
    config = kvtier.Config.parse({"tiers": tiers})

    def tend(cache: kvtier.Cache, *, read_pins: bool) -> None:
        cache._run(cache.manager.protection.tend(read_pins=read_pins))

    with kvtier.open(config, NS, clock=clock) as one, kvtier.open(config, NS, clock=clock) as two:
        put(one, KEYS)
        one.flush()
        one.pins.create("p", KEYS, 100)
        for _ in range(2):  # learns of it, and has it retained below
            tend(two, read_pins=True)
        clock.advance(90)
        one.pins.extend("p", 1000)
        clock.advance(20)
        tend(two, read_pins=False)
        retained = one._run(one.manager.protection.retainer.known_below())
        assert retained == dict.fromkeys(KEYS, clock.wall() + 980), "its end in two makes none evictable"
        for cache in (one, two):
            tend(cache, read_pins=True)
            assert [pin.name for pin in cache.pins.list()] == ["p"]
        clock.advance(2000)
        for cache in (two, one, two):
            tend(cache, read_pins=True)
            assert cache.pins.list() == []
        assert not one._run(one.manager.protection.retainer.known_below())
        notebook = one.manager.hierarchy.notebook()
        assert notebook is not None and not one._run(notebook.read_notes("pin/"))


def test_a_guarantee_of_another_process_shortens_none_of_this_one_s(tmp_path: Path) -> None:
    """What is retained below is one record for all processes: the last to ask replaces it."""
    classes = {"hour": {"ttl": "1h", "guarantee": True}, "brief": {"ttl": "100s", "guarantee": True}}
    clock = VirtualClock()
    tiers = {"g2": {"capacity": 16 * BLOCK}, "g3": {"path": str(tmp_path), "capacity": 64 * BLOCK}}
    config = kvtier.Config.parse({"tiers": tiers, "retention": {"classes": classes}})
    with kvtier.open(config, NS, clock=clock) as one, kvtier.open(config, NS, clock=clock) as two:
        for cache, retention in ((one, "hour"), (two, "brief")):
            cache.put(KEYS, payloads_of(KEYS, BLOCK), retention)
            cache.flush()
        for _ in range(2):
            one._run(one.manager.protection.tend(read_pins=True))
        retained = one._run(one.manager.protection.retainer.known_below())
        assert set(retained) == set(KEYS) and min(retained.values()) >= clock.wall() + 3600


async def test_what_is_guaranteed_while_a_pin_is_dropped_stays() -> None:
    """The end of a pin goes to its media first, which may take seconds."""
    clock = VirtualClock()
    tier, asked, answer = MemoryTier(NS, clock), asyncio.Event(), asyncio.Event()
    write = tier.write_note

    async def slow(name: str, value: bytes | None) -> None:
        asked.set()
        await answer.wait()
        await write(name, value)

    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 16 * BLOCK}}})
    async with kvtier.aopen(config, NS, clock=clock, tiers=[tier]) as cache:
        await cache.put(KEYS, payloads_of(KEYS, BLOCK))
        await cache.flush()
        await cache.pins.create("docs", KEYS, "1h")
        tier.write_note = slow  # type: ignore[method-assign]
        deleting = asyncio.ensure_future(cache.pins.delete("docs", drop=True))
        await asked.wait()
        assert await cache.put(KEYS[:4], payloads_of(KEYS[:4], BLOCK), HOUR) == 4
        answer.set()
        assert await deleting
        assert await cache.match(KEYS) == 4 == cache.stats()["requests"]["promises"]["guaranteed"]
        await cache.evict("g2")
        assert await cache.match(KEYS) == 4
        cache.check()


@pytest.mark.parametrize("name", [None, 7, b"docs", ["docs"], "", "\ud800", "a b", "x" * 129], ids=ascii)
def test_a_name_that_no_pin_can_have_is_refused_and_not_remembered(name: str) -> None:
    """It was to be taken off the media ever after: housekeeping failed at it, until every block was a miss."""
    clock, store = VirtualClock(), MemoryStore.empty()
    with opened(clock, [MemoryTier(NS, clock, store=store)]) as cache:
        for verb in (lambda: cache.pins.create(name, KEYS, "1h"), lambda: cache.pins.extend(name, "1h"),
                     lambda: cache.pins.delete(name), lambda: cache.pins.delete(name, drop=True)):  # fmt: skip
            with pytest.raises(kvtier.InvalidRequest, match="pin: a name has"):
                verb()
        cache.pins.create("docs", KEYS, "1h")
        assert pin_notes(store) == {"pin/docs"} and not cache.manager.protection._sync.unwritten
