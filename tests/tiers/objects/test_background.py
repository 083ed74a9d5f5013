"""G4's background tasks, killed wherever they wait, come back; what keeps dying takes the tier out until a probe."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path

import pytest

import kvtier
from kvtier.identity.keys import scope_of
from kvtier.supervisor import FAILURES_MAX, Unwatched
from kvtier.testing import chain_of, payloads_of
from kvtier.tiers.breaker import Health
from kvtier.tiers.objects import background, deltas
from kvtier.tiers.objects.tier import ObjectTier
from kvtier.tiers.protocol import Loaded
from kvtier.times import Mono
from tests.manager.support.stubborn import Killed, kill
from tests.support.waiting import until
from tests.tiers.objects.support.replicas import NS, S, Site
from tests.tiers.objects.support.virtual_bucket import Replica, VirtualServer

TASKS = ["g4 writing", "g4 sweeping", "g4 learning"]
ALL_DUE_S = max(background.RECORD_S, deltas.PUBLISH_S, deltas.POLL_S, 61.0)


async def turn(site: Site, tier: ObjectTier, seed: int) -> None:
    """Store and use a chain; then everything is due, and is done: published, recorded, swept, learnt."""
    chain = chain_of(NS, 2 * S, seed)
    assert all(result.durable for result in await site.store(tier, chain))
    tier.touch(chain, site.clock.wall() + 4000)
    site.clock.advance(ALL_DUE_S)
    await tier.tombstones()
    for done in (tier._background.writing, tier._background.sweeping, tier._background.polling):
        if done is not None:
            await tier._loop.run(asyncio.wait_for(asyncio.shield(done), 10))


@pytest.mark.parametrize("task", TASKS)
async def test_a_task_that_is_killed_at_any_await_is_restarted_and_the_tier_lives(task: str, tmp_path: Path) -> None:
    counted = 0
    for at in range(200):
        site = Site(tmp_path / str(at))
        other = await site.replica()
        await turn(site, other, 9)  # what there is to learn
        tier = ObjectTier(f"file://{site.root}", NS, clock=site.clock, stride=S, seed=1)
        killed = Killed(at)
        kill(tier._background.supervisor, task, killed)
        await tier.open()
        try:
            await turn(site, tier, 1)
            await tier.tombstones()
            for _ in range(200):
                if not killed.struck or tier.restarts():
                    break
                await asyncio.sleep(0.001)
            struck, killed.struck = killed.struck, True
            assert set(tier.restarts()) <= {task}, "another task was touched"
            counted += tier.restarts().get(task, 0)
            await asyncio.sleep(0.15 if struck else 0)
            await turn(site, tier, 2)
            for seed in (1, 2, 9):
                chain = chain_of(NS, 2 * S, seed)
                assert all(isinstance(result, Loaded) for result in await site.read(tier, chain))
            tier.check()
        finally:
            await tier.close(site.deadline)
            await other.close(site.deadline)
        if not struck:
            assert counted > at // 2, "most awaits are the task's own, and their errors its own"
            return
    raise AssertionError("more than two hundred awaits?")


@pytest.mark.parametrize("task", TASKS)
async def test_three_deaths_take_the_tier_out_until_a_probe(task: str, tmp_path: Path) -> None:
    site = Site(tmp_path)
    tier = ObjectTier(f"file://{tmp_path}", NS, clock=site.clock, stride=S, seed=1)
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": 64 * 4096}}, "deadlines": {"close": "2s"}})
    keys = chain_of(NS, 2 * S)
    background = tier._background
    chore = {"g4 writing": background._write, "g4 sweeping": background._sweep}.get(task, background._learn)

    async def broken() -> None:
        raise ZeroDivisionError("a bug")

    async def ask() -> None:
        chore.ask()

    well, chore._work = chore._work, broken
    async with kvtier.aopen(config, NS, clock=site.clock, tiers=[tier]) as cache:
        await cache.put(keys, payloads_of(list(keys), 4096))
        await cache.flush()
        await cache.evict("g2")
        end = time.monotonic() + 20
        while cache.manager.lower["g4"].health is Health.WELL and time.monotonic() < end:
            await tier._loop.run(ask())
            await asyncio.sleep(0.02)
        stats = cache.stats()
        assert stats["g4"]["health"] == "out" and stats["tasks"]["restarts"][task] >= FAILURES_MAX
        assert "a bug" in stats["tasks"]["out"]["g4"] and task in stats["tasks"]["out"]["g4"]
        assert await cache.match(keys) == 0
        chore._work = well
        site.clock.advance(60)
        assert await cache.match(keys) == len(keys)
        assert cache.stats()["tasks"]["out"] == {}


async def test_records_that_never_end_in_time_keep_nothing_from_being_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a use is a unit that is written anew, a busy replica always has more to record than the time allows."""
    monkeypatch.setattr(background, "TASK_S", 0.05)
    server = VirtualServer()
    replica = Replica(server)
    for number in range(40):
        await replica.write(chain_of(NS, S, seed=number), ttl=1e5 if number < 20 else 60)
    asked = replica.bucket._asked

    async def slow(verb: str, name: str) -> None:
        await asked(verb, name)
        await asyncio.sleep(10 if verb == "copy" else 0)

    monkeypatch.setattr(replica.bucket, "_asked", slow)
    server.clock.advance(6e4)
    replica.store.index.touch([chain_of(NS, S, seed=number)[-1] for number in range(20)], server.clock.wall())
    replica.background.start(Unwatched())
    for _ in range(20):
        server.clock.advance(ALL_DUE_S)
        replica.background.start_due()
        await until(lambda: replica.background.writing is not None and replica.background.writing.done())
    assert replica.store.renewer.renewed == 0, "the case: none is recorded in time"
    assert replica.sweeper.swept.objects == 20
    await replica.background.close(Mono(server.clock.monotonic() + 10))


async def test_a_verb_that_is_cancelled_before_the_loop_thread_comes_to_it_leaves_nothing_behind(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    site = Site(tmp_path)
    tier = await site.replica()
    loop, go = tier._loop._loop, threading.Event()
    assert loop is not None
    loop.call_soon_threadsafe(go.wait, 10)
    purging = asyncio.ensure_future(tier.purge(scope_of("a"), site.clock.wall()))
    await asyncio.sleep(0.01)
    purging.cancel()
    await asyncio.sleep(0.01)
    go.set()
    await asyncio.wait({purging})
    assert purging.cancelled()
    del purging
    gc.collect()
    await tier.close(site.deadline)
    assert not [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)]
