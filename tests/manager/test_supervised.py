"""Every background task of a cache over a G3 process and G4 is known here, and to a test that kills it anywhere."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.supervisor import FAILURES_MAX, Service, Supervisor
from kvtier.testing import FaultyTier, MemoryTier, VirtualClock, chain_of, payloads_of, sample_namespace
from kvtier.testing.memory import MemoryStore
from kvtier.tiers.breaker import Health
from tests.manager.support.stubborn import Injected, Killed, has_ended
from tests.manager.test_housekeeping import TASKS, opened, put, until
from tests.manager.test_joining import CLOSED
from tests.support.waiting import eventually
from tests.tiers.objects.test_background import TASKS as OBJECT_TASKS

BLOCK = 4096
NS = sample_namespace(BLOCK)
PROCESS = "g3 process"
KEYS = chain_of(NS, 8)


def config_at(path: Path) -> kvtier.Config:
    g3 = {"path": str(path / "g3"), "capacity": 64 * BLOCK}
    g4 = {"url": f"file://{path}/g4", "stride": 4}
    tiers = {"g2": {"capacity": 64 * BLOCK}, "g3": g3, "g4": g4}
    return kvtier.Config.parse({"tiers": tiers, "deadlines": {"close": "5s"}})


def right(cache: kvtier.Cache, tier: str) -> bool:
    """Whether all blocks come back from that tier; asserts their bytes."""
    cache.evict("g2")
    with cache.get(KEYS, timeout=5) as hit:
        assert [bytes(block) for block in hit.blocks] == payloads_of(list(KEYS), BLOCK)[: len(hit)]
        return len(hit) == len(KEYS) and set(hit.tiers) == {tier}


def test_every_background_task_is_named_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: set[str] = set()
    start = Supervisor.start

    def noting(self: Supervisor, name: str, *arguments: Any) -> None:
        started.add(name)
        start(self, name, *arguments)

    monkeypatch.setattr(Supervisor, "start", noting)
    with kvtier.open(config_at(tmp_path), NS, computes=True) as cache:
        cache.put(KEYS, payloads_of(list(KEYS), BLOCK))
        cache.flush()
    assert started == {*TASKS, *OBJECT_TASKS, PROCESS}


def test_a_process_that_keeps_ending_takes_g3_out_until_a_probe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kvtier.open(config_at(tmp_path), NS, computes=True) as cache, caplog.at_level(logging.WARNING):
        cache.put(KEYS, payloads_of(list(KEYS), BLOCK))
        assert cache.flush().durable["g3"] == len(KEYS)
        tier, lower = cache.manager.lower["g3"].inner.inner, cache.manager.lower["g3"]
        for count in range(1, FAILURES_MAX + 1):
            assert eventually(lambda: tier._worker is not None)
            os.kill(tier._worker.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
            assert eventually(lambda count=count: cache.stats()["tasks"]["restarts"].get(PROCESS) == count)
        assert sum(record.exc_info is not None for record in caplog.records) == 1
        assert eventually(lambda: lower.health is Health.OUT)
        assert f"{PROCESS} failed 3 times" in cache.stats()["tasks"]["out"]["g3"]
        assert eventually(lambda: tier._worker is not None)
        assert eventually(lambda: right(cache, "g3"))
        assert lower.health is Health.WELL and cache.stats()["tasks"]["out"] == {}
        cache.check()


@pytest.mark.long
async def test_the_task_that_keeps_the_process_is_killed_at_any_await(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it starts another one: a process that is not in use then is ended."""
    for at in range(40):
        (tmp_path / str(at)).mkdir()
        killed, start = Killed(at), Supervisor.start

        def killing(
            self: Supervisor,
            name: str,
            work: Callable[[], Coroutine[Any, Any, None]],
            service: Service,
            every_s: float | None = None,
            killed: Killed = killed,
            start: Callable[..., None] = start,
        ) -> None:
            start(self, name, (lambda: killed.run(work())) if name == PROCESS else work, service, every_s)

        with monkeypatch.context() as patch:
            patch.setattr(Supervisor, "start", killing)
            cache = kvtier.open(config_at(tmp_path / str(at)), NS, computes=True)
        with cache:
            cache.put(KEYS, payloads_of(list(KEYS), BLOCK))
            cache.flush()
            tier = cache.manager.lower["g3"].inner.inner
            if at:
                os.kill(tier._worker.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
                assert eventually(lambda: cache.stats()["tasks"]["restarts"].get(PROCESS, 0) >= 1)  # noqa: B023
            assert eventually(lambda: tier._worker is not None and right(cache, "g3"))  # noqa: B023
            if killed.struck:
                assert cache.stats()["tasks"]["restarts"] == {PROCESS: 2 if at else 1}
            cache.check()
        if not killed.struck:
            assert at > 2
            return
    raise AssertionError("more than forty awaits?")


async def test_the_task_that_opens_a_tier_again_is_killed_at_any_await() -> None:
    for at in range(100):
        clock, store = VirtualClock(), MemoryStore.empty()
        faulty = FaultyTier(MemoryTier(NS, clock, store=store), list(CLOSED))
        killed = Killed(at)
        async with opened(clock, [faulty], ("g3 open", killed)) as cache:
            await put(cache)
            faulty.faults.clear()
            clock.advance(60)
            await until(lambda: "g3" in cache.manager.lower or killed.struck)  # noqa: B023
            clock.advance(120)
            await until(lambda: "g3" in cache.manager.lower)
            await has_ended("g3 open")
            struck, killed.struck = killed.struck, True
            restarts = dict(cache.manager.hierarchy.supervisor.restarts)
            assert restarts == ({"g3 open": 1} if struck else {})
            fresh = chain_of(NS, 8, 1)
            await put(cache, fresh)
            assert (await cache.flush()).pending == 0
            await cache.evict("g2")
            async with cache.get(fresh) as hit:
                assert [bytes(block) for block in hit.blocks] == payloads_of(list(fresh), BLOCK)
            cache.check()
        if not struck:
            assert at > 3
            return
    raise AssertionError("more than a hundred awaits?")


async def test_a_load_that_fails_for_a_reason_of_ours_is_a_miss_and_counted() -> None:
    """A subscriber of events that raises, in the middle of a load: no exception in the engine, no pin left."""
    clock = VirtualClock()
    async with opened(clock, [MemoryTier(NS, clock)]) as cache:
        await put(cache)
        await cache.flush()
        await cache.evict("g2")

        def broken(*_: object) -> None:
            raise Injected

        cache.manager.lower["g3"].subscribe(broken)
        async with cache.get(KEYS) as hit:
            assert len(hit) == 0 and hit.miss == "error"
        assert cache.stats()["tasks"]["restarts"] == {"g3 load": 1}
        cache.manager.lower["g3"].subscribe(None)
        async with cache.get(KEYS) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(list(KEYS), BLOCK)
        await until(lambda: not any(slot.pins for slot in cache.manager.host.index.values()))
        cache.check()
