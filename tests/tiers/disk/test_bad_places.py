"""Places of a disk that fail: set aside one by one and tried seldom; a device that fails is not taken for them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.bench.tiers.class_store import NOW, ClassStore
from kvtier.clock import SystemClock
from kvtier.errors import TierError
from kvtier.testing import VirtualClock, chain_of, sample_namespace, seal
from kvtier.tiers.breaker import Health
from kvtier.tiers.disk import quarantine, store, trial_queue, trials
from kvtier.tiers.disk.bad_places import DAY_S, BadPlace, bad_places
from kvtier.tiers.disk.idle_work import IdleWork
from kvtier.tiers.disk.index import Index, Use
from kvtier.tiers.disk.maintenance import looking_after
from kvtier.tiers.disk.records import SLOT_ALIGN
from kvtier.tiers.disk.slab import SystemCalls
from kvtier.tiers.disk.slot_health import TRIES, DeviceFault, SlotHealth
from kvtier.tiers.disk.store import Store
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.disk.trials import Dropped, Trial, drop_unreadable, end_trial
from kvtier.tiers.disk.write import SLOTS_PER_BLOCK_MAX
from kvtier.tiers.disk.write_txn import WriteTxn
from kvtier.tiers.guard import Guarded
from kvtier.tiers.protocol import Miss, Stored, Target
from kvtier.times import Wall
from tests.support.waiting import until
from tests.tiers.disk.support.bad_medium import BadMedium
from tests.tiers.disk.support.store import BLOCK, FAR_S, get, opened, put

NAMESPACE = sample_namespace(BLOCK)
FILE = "00000000.slab"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe and rest a hundred times as often."""
    monkeypatch.setattr(quarantine, "PROBE_FIRST_S", 0.005)
    monkeypatch.setattr(store, "IDLE_S", 0.005)
    monkeypatch.setattr(store, "HOLD_S", 0.0)
    monkeypatch.setattr(trial_queue, "TRY_FIRST_S", 0.0)
    monkeypatch.setattr(trial_queue, "TRY_EVERY_S", 0.005)


def set_aside(tier: DiskTier) -> list[BadPlace]:
    with tier._store.index.reading() as txn:
        return bad_places(txn)


async def settled(tier: DiskTier) -> None:
    """No trial is under way."""
    await until(lambda: not tier._store.index.has_reservations(), "a reservation was leaked")


async def test_an_unwritable_page_costs_its_slot_and_nothing_else(tmp_path: Path) -> None:
    medium, chain = BadMedium(), chain_of(NAMESPACE, 200)
    medium.unwritable = {(FILE, 3)}
    async with opened(tmp_path / "g3", 200, calls=medium) as tier:
        guard = Guarded(tier, tier._clock)
        deadline = tier._clock.monotonic() + FAR_S
        for start in range(0, 190, 10):
            sealed = seal(chain, range(start, start + 10), BLOCK, tier._clock.wall())
            assert await guard.write(sealed, deadline) == [Stored.STORED] * 10
        assert await get(tier, chain[:190]) == [True] * 190
        assert guard.breaker.health is Health.WELL and guard.breaker.errors == 0
        assert [place[:3] for place in set_aside(tier)] == [(0, 3, 1)]
        assert tier.counters()["set_aside_slots"] == 1
        await tier.evict(None)
        assert set(await put(tier, chain[:199])) == {Stored.STORED}, "all other slots are of use"
        assert max(medium.tries.values()) <= 3
    async with opened(tmp_path / "g3", 200, calls=medium) as tier:
        assert [place[:3] for place in set_aside(tier)] == [(0, 3, 1)], "it is remembered"
        await tier.evict(None)
        assert set(await put(tier, chain_of(NAMESPACE, 199, seed=2))) == {Stored.STORED}
        assert max(medium.tries.values()) <= 3


async def test_a_block_that_fails_in_every_slot_leaves_the_others_of_its_put_alone(tmp_path: Path) -> None:
    medium, chain = BadMedium(), chain_of(NAMESPACE, 10)
    async with opened(tmp_path / "g3", 2000, calls=medium) as tier:
        await put(tier, chain_of(NAMESPACE, 100, seed=1))
        await tier.evict(None)
        medium.unwritable = {(FILE, page) for page in range(9, 9 + SLOTS_PER_BLOCK_MAX)}
        assert await put(tier, chain) == [Stored.STORED] * 9 + [Stored.FAILED]
        assert await get(tier, chain) == [True] * 9 + [Miss.ABSENT]
        assert tier.counters()["set_aside_slots"] == SLOTS_PER_BLOCK_MAX


async def test_the_last_slot_that_fails_makes_room_elsewhere(tmp_path: Path) -> None:
    """Nothing else is free: another block leaves for the one whose slot failed."""
    medium, chain = BadMedium(), chain_of(NAMESPACE, 100)
    async with opened(tmp_path / "g3", 100, calls=medium) as tier:
        await put(tier, chain)
        medium.unwritable = {(FILE, page) for page in range(1)}
        fresh = chain_of(NAMESPACE, 100, seed=1)
        for start in range(0, 99, 9):
            assert await put(tier, fresh, range(start, min(99, start + 9))) == [Stored.STORED] * 9
        assert await get(tier, fresh[:99]) == [True] * 99


@pytest.mark.parametrize("heals", [False, True])
async def test_an_unreadable_block_is_a_miss_and_can_be_stored_again(tmp_path: Path, heals: bool) -> None:
    medium, chain = BadMedium(), chain_of(NAMESPACE, 100)
    async with opened(tmp_path / "g3", 200, calls=medium) as tier:
        guard = Guarded(tier, tier._clock)
        await put(tier, chain)
        medium.unreadable = {(FILE, 7)}

        medium.remaps = heals
        assert await get(tier, chain) == [True] * 7 + [Miss.CORRUPT] + [True] * 92, "neighbours are served"
        assert (await tier.lookup(chain, [7], tier._clock.monotonic() + FAR_S)) == [Miss.ABSENT]
        assert await put(tier, chain, [7]) == [Stored.STORED], "it can be stored again"
        assert await get(tier, chain) == [True] * 100
        await settled(tier)
        await until(lambda: bool(set_aside(tier)) is not heals, "the trial decides")
        assert tier.counters()["unreadable_blocks"] == 1
        assert medium.tries["read", (FILE, 7)] <= 3
        assert guard.breaker.health is Health.WELL
        tier.check()


async def test_a_block_that_two_reads_find_unreadable_is_set_aside_once(tmp_path: Path) -> None:
    """Also where the first read's trial is over before the second read's transaction."""
    chain = chain_of(NAMESPACE, 10)
    async with opened(tmp_path / "g3", 200) as tier:
        await put(tier, chain)
        name, wall_s = tier._prefix + chain[3], tier._clock.wall()
        ((raw, _),) = tier._store.index.find([name])
        assert raw is not None

        def drop(txn: WriteTxn) -> Trial | Dropped:
            return drop_unreadable(txn, name, raw, TRIES, wall_s)

        trial = await tier._store.submit(drop).result()
        assert isinstance(trial, Trial)
        assert await tier._store.submit(drop).result() is Dropped.RACED
        assert [place.tries for place in set_aside(tier)] == [TRIES + 1]
        await tier._store.submit(lambda txn: end_trial(txn, trial, sound=False)).result()
        assert await tier._store.submit(drop).result() is Dropped.RACED
        assert [place[:4] for place in set_aside(tier)] == [(0, 3, 1, TRIES + 1)]
        tier.check()


async def test_a_trial_whose_end_cannot_be_written_leaks_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium, chain, pinned = BadMedium(), chain_of(NAMESPACE, 10), threading.Event()
    refused: set[Use] = set()

    def pinned_by(_index: Index, use: Use) -> int | None:
        if not pinned.is_set():
            return None
        refused.add(use)
        return 1

    monkeypatch.setattr(Index, "pinned_by", pinned_by)

    def try_place(*_: object) -> bool:
        pinned.set()
        return True

    monkeypatch.setattr(SlotHealth, "try_place", try_place)
    async with opened(tmp_path / "g3", 200, calls=medium) as tier:
        await put(tier, chain)
        medium.unreadable = {(FILE, 3)}
        assert (await get(tier, chain)).count(Miss.CORRUPT) == 1
        await until(lambda: Use.DROP in refused, "no trial has come to its end")
        assert tier._store.index.has_reservations() and not tier.counters().get("restored_slots")
        pinned.clear()
        await settled(tier)
        assert [place[:3] for place in set_aside(tier)] == [(0, 3, 1)]


async def test_a_trial_that_is_not_made_before_the_store_is_closed_leaks_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as this process lives no other one would take the slot back, or try the place."""
    medium, chain = BadMedium(), chain_of(NAMESPACE, 10)
    monkeypatch.setattr(IdleWork, "wake", lambda self: None)  # the disk is never idle
    async with opened(tmp_path / "g3", 200, calls=medium) as tier:
        await put(tier, chain)
        medium.unreadable = {(FILE, 3)}
        assert (await get(tier, chain)).count(Miss.CORRUPT) == 1
        assert tier._store.index.has_reservations()
    again = Store.visit([tmp_path / "g3"])
    try:
        assert not again.index.has_reservations() and again.index.bad_places() == 1
    finally:
        again.release(10)


@pytest.mark.parametrize("verb", ["write", "read"])
async def test_a_run_that_raises_anything_when_tried_alone_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    medium, chain = BadMedium(), chain_of(NAMESPACE, 10)

    def raising(*_: object) -> None:
        raise RuntimeError("injected")

    async with opened(tmp_path / "g3", 200, calls=medium) as tier:
        if verb == "read":
            await put(tier, chain)
        (medium.unwritable if verb == "write" else medium.unreadable).add((FILE, 3))
        with monkeypatch.context() as patch:
            patch.setattr(SlotHealth, "alone", raising)
            if verb == "write":
                assert await put(tier, chain) == [Stored.FAILED] * 10
                assert await get(tier, chain) == [Miss.ABSENT] * 10, "they were published unwritten"
            else:
                assert await get(tier, chain) == [Miss.ERROR] * 10
        assert tier.restarts() == {"g3 io": 1}
        medium.unreadable.clear()
        await put(tier, chain)
        assert await get(tier, chain) == [True] * 10


async def test_a_place_is_tried_at_most_three_times_a_day_until_it_is_sound(tmp_path: Path) -> None:
    medium, chain, clock = BadMedium(), chain_of(NAMESPACE, 100), VirtualClock()
    medium.unwritable = {(FILE, 3)}
    async with opened(tmp_path / "g3", 100, calls=medium, clock=clock) as tier:
        await put(tier, chain, range(50))
        for _try in range(35):
            clock.advance(7200.0)
            await tier.evict(None)
            await put(tier, chain, range(50))
            await asyncio.sleep(0.03)
            await settled(tier)
        tries = medium.tries["write", (FILE, 3)]
        assert 5 <= tries <= 9, "two when it was found, then one each eight hours"
        medium.unwritable.clear()
        clock.advance(DAY_S)
        await until(lambda: tier.counters()["restored_slots"] == 1, "it is never tried again")
        assert not set_aside(tier)
        await settled(tier)
        await tier.evict(None)
        assert set(await put(tier, chain)) == {Stored.STORED}, "all of it is of use again"


async def test_restarts_within_a_day_try_no_place_more_than_three_times(tmp_path: Path) -> None:
    """What counts the tries is in the index: the next process, or another one beside it, goes on from there."""
    medium, chain, clock = BadMedium(), chain_of(NAMESPACE, 40), VirtualClock()
    medium.unwritable, medium.unreadable = {(FILE, 3)}, {(FILE, 7)}
    for hours in range(0, 24, 3):
        async with opened(tmp_path / "g3", 250, calls=medium, clock=clock) as tier:
            await put(tier, chain)
            await get(tier, chain)
            await asyncio.sleep(0.03)
            await settled(tier)
            await tier.evict(None)
        assert all(2 <= tries <= 3 for tries in medium.tries.values()), hours
        clock.advance(3 * 3600.0)
    assert set(medium.tries) == {("write", (FILE, 3)), ("read", (FILE, 7))}
    medium.unwritable.clear()
    medium.unreadable.clear()
    async with opened(tmp_path / "g3", 250, calls=medium, clock=clock) as tier:
        assert set(await put(tier, chain)) == {Stored.STORED}
        await until(lambda: not set_aside(tier), "they are tried again the next day")
        await settled(tier)


async def test_scrub_removes_an_unreadable_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medium, chain = BadMedium(), chain_of(NAMESPACE, 10)
    async with opened(tmp_path / "g3", 200) as tier:
        await put(tier, chain)
    medium.unreadable = {(FILE, 7)}
    monkeypatch.setattr(store, "SystemCalls", lambda: medium)

    def scrub() -> tuple[int, int, int]:
        with looking_after([tmp_path / "g3"], VirtualClock()) as care:
            found = care.scrub()
            assert care.inspect()["bad_places"] <= 1
        return found.blocks, found.unreadable, found.removed

    assert await asyncio.to_thread(scrub) == (10, 1, 1)
    assert await asyncio.to_thread(scrub) == (9, 0, 0)
    async with opened(tmp_path / "g3", 200, calls=medium) as tier:
        assert await put(tier, chain, [7]) == [Stored.STORED]
        assert await get(tier, chain) == [True] * 10


async def test_a_failed_sync_condemns_no_slot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    medium, chain = BadMedium(), chain_of(NAMESPACE, 100)
    async with opened(tmp_path / "g3", 200, calls=medium, clock=SystemClock()) as tier:
        medium.sync_fails = 1
        assert set(await put(tier, chain)) == {Stored.FAILED}
        await until(lambda: "in use again" in caplog.text, "it does not come back")
        assert set_aside(tier) == []
        assert await put(tier, chain) == [Stored.STORED] * 100


@pytest.mark.parametrize("reading", [False, True])
async def test_a_dead_device_opens_the_breaker_and_nothing_is_recorded(tmp_path: Path, reading: bool) -> None:
    medium, chain, clock = BadMedium(), chain_of(NAMESPACE, 100), SystemClock()
    async with opened(tmp_path / "g3", 200, calls=medium, clock=clock) as tier:
        guard = Guarded(tier, clock)
        await put(tier, chain)
        medium.dead = True
        other = chain_of(NAMESPACE, 100, seed=1)
        for start in range(0, 60, 10):
            deadline = clock.monotonic() + FAR_S
            if reading:
                targets = [Target(start + n, (memoryview(bytearray(BLOCK)),)) for n in range(10)]
                assert set(await guard.read(chain, targets, deadline)) <= {Miss.ERROR, Miss.BREAKER}
            else:
                sealed = seal(other, range(start, start + 10), BLOCK, clock.wall())
                assert set(await guard.write(sealed, deadline)) == {Stored.FAILED}
        assert guard.breaker.health is Health.OUT
        medium.dead = False
        await until(lambda: tier._store._state.index is not None, "it does not come back")
        assert set_aside(tier) == []
        assert await get(tier, chain) == [True] * 100, "nothing was lost"
        assert set(await put(tier, other, range(100))) == {Stored.STORED}


async def test_too_many_places_within_a_minute_are_the_device(tmp_path: Path) -> None:
    medium, clock = BadMedium(), VirtualClock()
    medium.unwritable = {(FILE, page) for page in range(0, 10_000, 2)}
    chain = chain_of(NAMESPACE, 400)
    tier = DiskTier([tmp_path / "g3"], 20_000 * BLOCK, NAMESPACE, clock=clock, calls=medium)
    await tier.open()
    assert set(await put(tier, chain)) == {Stored.FAILED}
    await until(lambda: tier._store._state.index is None)
    await asyncio.sleep(0.1)
    with pytest.raises(TierError, match="200 places failed within a minute"):  # left alone: no probe yet
        await put(tier, chain)
    await tier.close(clock.monotonic() + FAR_S)
    async with opened(tmp_path / "g3", 20_000, clock=clock) as tier:
        assert set_aside(tier) == []


def test_a_store_that_is_out_of_use_rests_as_long_as_the_longest_reason_asks(tmp_path: Path) -> None:
    held: Any = SimpleNamespace(close=lambda: None)
    state = quarantine.Quarantine(held, tmp_path)
    state.begin("a sync failed")
    state.begin("many places failed", rest_s=60.0)
    state.begin("a sync failed")
    time.sleep(2 * quarantine.PROBE_FIRST_S)
    assert not state.probe_due()


def test_places_that_are_few_beside_what_is_well_are_not_the_device(tmp_path: Path) -> None:
    health, now = SlotHealth([tmp_path], SystemCalls()), VirtualClock().monotonic

    def fail() -> None:
        raise OSError(errno.EIO, "a bad place")

    for _ in range(200):
        health.moved(1000)
        assert health.alone(0, [fail], now) != [None]
    with pytest.raises(DeviceFault, match="within a minute"):
        for _ in range(2000):
            health.alone(0, [fail], now)


async def test_more_than_a_hundredth_are_the_device(tmp_path: Path) -> None:
    medium = BadMedium()
    medium.unwritable = {(FILE, page) for page in range(0, 20, 2)}
    tier = DiskTier([tmp_path / "g3"], 500 * BLOCK, NAMESPACE, clock=VirtualClock(), calls=medium)
    await tier.open()
    with pytest.raises(TierError, match="too many bad places"):
        await put(tier, chain_of(NAMESPACE, 20))
    await tier.close(tier._clock.monotonic() + FAR_S)
    async with opened(tmp_path / "g3", 500) as tier:
        assert set_aside(tier) == [], "nothing of it is recorded"


async def test_a_class_of_another_size_leaves_the_place_out(tmp_path: Path) -> None:
    """A page that failed under small blocks costs one large slot, and one small one again later."""
    medium, small, large = BadMedium(), sample_namespace(BLOCK), sample_namespace(16 * BLOCK)
    medium.unwritable = {(FILE, 37)}
    path = tmp_path / "g3"
    async with opened(path, 1600, calls=medium) as tier:
        await put(tier, chain_of(small, 100))
        await tier.evict(None)
        async with opened(path, 100, block_bytes=16 * BLOCK, namespace=large, calls=medium) as other:
            chain = chain_of(large, 99)
            assert await put(other, chain) == [Stored.STORED] * 99
            assert await get(other, chain) == [True] * 99
            assert await put(other, chain_of(large, 1, seed=3)) == [Stored.STORED]
            await other.evict(None)
        chain = chain_of(small, 1599)
        assert set(await put(tier, chain)) == {Stored.STORED}
        assert await get(tier, chain) == [True] * 1599
        assert max(medium.tries.values()) <= 3


@pytest.mark.parametrize(
    ("slots", "segments"), [(4096, 1), pytest.param(65_536, 4, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
async def test_one_page_in_a_thousand_costs_one_page_in_a_thousand(tmp_path: Path, slots: int, segments: int) -> None:
    """Fixed places fail, a fifth of what may be set aside, all within a minute: the rest is filled and served."""
    medium, clock = BadMedium(), VirtualClock()
    medium.spoil(0.001, segments, slots // segments, seed=5)
    bad = len(medium.unwritable) + len(medium.unreadable)
    chain = chain_of(NAMESPACE, slots + 1000)
    async with opened(tmp_path / "g3", slots, calls=medium, clock=clock) as tier:
        guard = Guarded(tier, clock)
        deadline = clock.monotonic() + 10 * FAR_S
        for start in range(0, len(chain), 256):
            places = range(start, min(len(chain), start + 256))
            written = await guard.write(seal(chain, places, BLOCK, clock.wall()), deadline)
            assert set(written) == {Stored.STORED}, start
        found = await get(tier, chain)
        assert set(found) <= {True, Miss.ABSENT, Miss.CORRUPT}
        lost = [n for n, one in enumerate(found) if one is Miss.CORRUPT]
        assert set(await put(tier, chain, lost)) <= {Stored.STORED}
        await settled(tier)
        assert sum(one is True for one in await get(tier, chain)) >= 0.99 * (slots - bad)
        assert guard.breaker.health is Health.WELL and guard.breaker.opened == 0
        assert max(medium.tries.values()) <= 3
        assert len(set_aside(tier)) <= bad
        tier.check()


def test_tries_are_spread_over_the_day_and_survive_a_clock_set_back() -> None:
    place = BadPlace(0, 0, 1, 2, 1000.0)  # type: ignore[arg-type]
    assert not place.is_due(1000.0) and not place.is_due(1000.0 + DAY_S / 2)  # type: ignore[arg-type]
    assert place.is_due(1000.0 + 2 * DAY_S / 3) and place.is_due(999.0)  # type: ignore[arg-type]
    third = place.after_tries(1, 1000.0 + 2 * DAY_S / 3)  # type: ignore[arg-type]
    assert third.tries == 3 and not third.is_due(999.0 + DAY_S) and third.is_due(1000.0 + DAY_S)  # type: ignore[arg-type]
    assert third.after_tries(1, 1001.0 + DAY_S).tries == 1  # type: ignore[arg-type]


def test_two_processes_try_a_place_one_after_the_other(tmp_path: Path) -> None:
    """While one has a trial under way the other begins none; the second takes it up once the first has died."""
    place_store = ClassStore(tmp_path / "index", 2, 8 * SLOT_ALIGN)
    for number in range(16):
        assert place_store.put((1, number)) is Stored.STORED
    index, alive = place_store.index, place_store.index.owner
    [failed] = place_store.transact(lambda txn: txn.reserve_slots(1, 1))
    assert place_store.transact(lambda txn: trials.set_aside(txn, [failed], TRIES, NOW))
    day = [Wall(NOW + number * DAY_S) for number in range(4)]

    def begun(wall_s: Wall) -> list[tuple[int, int]]:
        found = place_store.transact(lambda txn: trials.begin_trials(txn, wall_s))
        return [(one.place.tries, one.reservations[0].slot) for one in found]

    index.owner = replace(alive, pid=os.getppid(), started=0)  # no process that lives
    assert begun(day[1]) == [(1, failed.slot)]
    index.owner = alive
    assert begun(day[2]) == []
    assert place_store.transact(WriteTxn.reclaim) == 1
    assert begun(day[3]) == [(1, failed.slot)]
    index.check()
    index.close()
