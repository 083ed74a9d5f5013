"""A running cache takes over what may change, and keeps every block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import kvtier
from kvtier import face
from kvtier.config import Config
from kvtier.config.changes import RELOADABLE, reloadable_changes
from kvtier.config.explain import known_keys
from kvtier.connectors.settings import Settings
from kvtier.errors import ClosedError, ConfigError, InvalidRequest
from kvtier.manager import build
from kvtier.manager.hierarchy import ManagerLimits
from kvtier.testing import VirtualClock, chain_of, payloads_of, sample_namespace
from kvtier.tiers.host.arena import Arena
from kvtier.tiers.rate_limiter import WAIT_S_MAX, TokenBucket
from tests.support.waiting import eventually

NS = sample_namespace(4096)
FILE = """\
tiers:
  g2: {{capacity: 1MiB}}
  g3: {{path: {folder}/g3, capacity: 2MiB, write_rate: {rate}}}
retention: {{default: {default}, classes: {{{classes}}}}}
deadlines: {{get: {get}}}
"""


def text(folder: Path, rate: str = "1GiB/s", default: str = "24h", classes: str = "", get: str = "10s") -> str:
    return FILE.format(folder=folder, rate=rate, default=default, classes=classes, get=get)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.yaml"
    path.write_text(text(tmp_path))
    return path


@pytest.fixture
def cache(file: Path) -> Iterator[kvtier.Cache]:
    with kvtier.open(file, NS) as cache:
        yield cache


def test_classes_deadlines_and_rates_change_and_every_block_stays(cache: kvtier.Cache, file: Path) -> None:
    keys = chain_of(NS, 8)
    cache.put(keys, payloads_of(keys, 4096))
    cache.flush()
    with pytest.raises(InvalidRequest):
        cache.put(keys, payloads_of(keys, 4096), retention="night")
    file.write_text(text(file.parent, "3MiB/s", "night", "night: {ttl: 8h}", "2s"))
    assert cache.reload(file) == ["deadlines.get", "retention.classes", "retention.default", "tiers.g3.write_rate"]
    more = chain_of(NS, 4, seed=2)
    assert cache.put(more, payloads_of(more, 4096)) == 4
    assert cache.config.deadlines.get == 2 and cache.stats()["requests"]["written_tokens"]["night"] == 4 * 16
    assert cache.manager.demoter.queues["g3"].rate._rate == 3 << 20
    for chain in (keys, more):
        with cache.get(chain) as hit:
            assert [bytes(block) for block in hit.blocks] == payloads_of(chain, 4096)
    assert cache.reload(file) == []
    file.write_text(text(file.parent))
    cache.reload(file)
    with pytest.raises(InvalidRequest):
        cache.put(more, payloads_of(more, 4096), retention="night")


def test_admission_changes(cache: kvtier.Cache) -> None:
    config = cache.config.model_copy(update={"offload": Config.parse({"offload": {"store_threshold": 2}}).offload})
    assert cache.reload(config) == ["offload.store_threshold"]
    keys = chain_of(NS, 4)
    cache.put(keys, payloads_of(keys, 4096))
    cache.flush()
    assert cache.stats()["g3"]["blocks"] == 0, "wanted once"
    with cache.get(keys):
        pass
    cache.put(keys, payloads_of(keys, 4096))
    cache.flush()
    assert cache.stats()["g3"]["blocks"] == 4


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("tiers.g2.capacity", {"tiers": {"g2": {"capacity": "2MiB"}}}),
        ("tiers.g4", {"tiers": {"g2": {"capacity": "1MiB"}, "g4": {"url": "memory://"}}}),
        ("security.scope_secret", {"security": {"scope_secret": "0123456789abcdef"}}),
        ("policy", {"policy": "lru"}),
    ],
)
def test_what_needs_a_restart_is_refused_and_nothing_changes(key: str, change: dict[str, object]) -> None:
    base = {"tiers": {"g2": {"capacity": "1MiB"}}}
    with kvtier.open(Config.parse(base), NS) as cache:
        before = cache.config
        with pytest.raises(ConfigError, match=f"^{key}: changes at a start only"):
            cache.reload(Config.parse({**base, **change, "deadlines": {"get": "1s"}}))
        assert cache.config is before


def test_a_changed_secret_is_a_change_though_dumps_hide_it() -> None:
    def secret(text: str) -> Config:
        return Config.parse({"tiers": {"g4": {"url": "memory://", "options": {"token": text}}}})

    with pytest.raises(ConfigError, match=r"^tiers\.g4\.options: "):
        reloadable_changes(secret("a"), secret("b"))
    assert reloadable_changes(secret("a"), secret("a")) == []


def test_the_list_names_keys_that_exist() -> None:
    known = known_keys(Config)
    assert all(any(f"{key}.".startswith(f"{each}.") for key in known) for each in RELOADABLE)
    page = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
    section = page.partition("### Changing a running cache")[2].partition("##")[0]
    assert all(f"`{each}`" in section for each in RELOADABLE)


def test_two_reloads_come_one_after_the_other(cache: kvtier.Cache, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, apply = threading.Semaphore(1), cache.manager.apply
    overlaps = []

    def slowly(limits: ManagerLimits) -> None:
        overlaps.append(not inside.acquire(blocking=False))
        time.sleep(0.05)
        apply(limits)
        inside.release()

    monkeypatch.setattr(cache.manager, "apply", slowly)
    configs = [Config.load(file), Config.parse({**yaml.safe_load(file.read_text()), "deadlines": {"lookup": "7s"}})]
    threads = [threading.Thread(target=cache.reload, args=(config,)) for config in configs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert overlaps == [False, False]
    assert cache.manager.hierarchy.limits.lookup_s == cache.config.deadlines.lookup


def test_a_reload_whose_file_does_not_come_holds_no_later_one_up(
    cache: kvtier.Cache, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file on a server that does not answer; a pipe that nobody writes to stands in."""
    monkeypatch.setattr(face, "RELOAD_S", 0.05)
    os.mkfifo(pipe := tmp_path / "pipe.yaml")
    with ThreadPoolExecutor(2) as pool:
        stuck = pool.submit(cache.reload, pipe)
        assert eventually(cache._reloading.locked)
        later = pool.submit(cache.reload, file)
        try:
            with pytest.raises(ConfigError, match="another reload has not read its file"):
                later.result(10)
        finally:
            pipe.write_text("[]")
        with pytest.raises(ConfigError):
            stuck.result(30)
    assert cache.reload(file) == []


def test_a_reload_that_fails_at_its_last_step_has_changed_nothing(
    cache: kvtier.Cache, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry is not installed here."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    before, limits, level = cache.config, cache.manager.hierarchy.limits, logging.getLogger("kvtier").level
    changed = text(file.parent, "3MiB/s", "night", "night: {ttl: 8h}", "2s")
    file.write_text(f"{changed}trace: {{spans: true}}\nlog: {{level: error}}\n")
    with pytest.raises(ConfigError, match=r"trace\.spans"):
        cache.reload(file)
    assert cache.config is before and cache.manager.hierarchy.limits is limits
    assert logging.getLogger("kvtier").level == level
    keys = chain_of(NS, 2)
    with pytest.raises(InvalidRequest):
        cache.put(keys, payloads_of(keys, 4096), retention="night")


def test_its_file_is_found_wherever_the_process_goes_later(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was started in the file's folder, and goes to / as daemons do."""
    monkeypatch.chdir(file.parent)
    before = signal.getsignal(signal.SIGHUP)
    assert Settings.parse({"kvtier_config": file.name}).source == file
    with kvtier.open(file.name, NS) as cache:
        kvtier.reload_on_sighup(cache, file.name)
        try:
            monkeypatch.chdir("/")
            file.write_text(text(file.parent, get="3s"))
            assert cache._answer(b'{"ask": "reload"}') == {
                "kvtier_answer": 1, "file": str(file), "changed": ["deadlines.get"]
            }  # fmt: skip
            file.write_text(text(file.parent, get="4s"))
            os.kill(os.getpid(), signal.SIGHUP)
            assert eventually(lambda: cache.config.deadlines.get == 4)
        finally:
            signal.signal(signal.SIGHUP, before)


def test_reloads_at_once_of_a_file_that_changes_take_over_one_state_of_it(cache: kvtier.Cache, file: Path) -> None:
    """Replaced, removed, a directory, half a file: each reload has all of one state, or has changed nothing."""
    done, halves = threading.Event(), list[Config]()
    states = [text(file.parent, f"{n}MiB/s", "mine", f"mine: {{ttl: {n}h}}", f"{n}s") for n in (2, 3)]
    torn = states[0][: len(states[0]) // 2]

    def reload() -> None:
        while not done.is_set():
            with contextlib.suppress(ConfigError):
                cache.reload(file)
            config = cache.config
            n = config.deadlines.get
            mine = next((terms for terms in config.terms() if terms.name == "mine"), None)
            assert config.tiers.g3 is not None
            if mine is not None and (mine.ttl, config.tiers.g3.write_rate) != (n * 3600, n * (1 << 20)):
                halves.append(config)

    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(reload) for _ in range(3)]
        for turn in range(60):
            if file.is_dir():
                file.rmdir()
            if turn % 5 == 4:
                file.unlink(missing_ok=True)
                file.mkdir()
            elif turn % 5 == 3:
                file.write_text(torn)
            else:
                (new := file.with_suffix(".new")).write_text(states[turn % 2])
                new.replace(file)
            time.sleep(0.01)
        done.set()
        for each in working:
            each.result(30)
    assert not halves and cache.config.retention.default == "mine"


def test_a_closed_cache_is_not_reloaded(file: Path) -> None:
    with kvtier.open(file, NS) as cache:
        before = cache.config
    file.write_text(text(file.parent, get="3s"))
    with pytest.raises(ClosedError):
        cache.reload(file)
    assert cache.config is before


def test_a_handler_is_set_on_the_main_thread_only(cache: kvtier.Cache, file: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(InvalidRequest, match="main thread"):
        pool.submit(kvtier.reload_on_sighup, cache, file).result(30)


async def test_a_bound_that_is_lifted_while_somebody_is_refused_lets_him_pass() -> None:
    class Lifted(TokenBucket):
        def try_take(self, amount: float) -> bool:
            taken = super().try_take(amount)
            self.change(0.0, 1.0)  # another thread, right after the refusal
            return taken

    bucket = Lifted(VirtualClock(), 1.0, 10.0)
    assert TokenBucket.try_take(bucket, 10), "it is empty now"
    await asyncio.wait_for(bucket.take(10), 10)


async def test_who_waits_at_a_slow_rate_notices_the_new_one() -> None:
    clock = VirtualClock()
    bucket = TokenBucket(clock, 1.0, 10.0)
    assert bucket.try_take(10)
    waiting = asyncio.create_task(bucket.take(10))
    await asyncio.sleep(0)
    bucket.change(1000.0, 1000.0)
    begin = clock.monotonic()
    while not waiting.done():
        clock.advance(WAIT_S_MAX / 4)
        await asyncio.sleep(0)
        assert clock.monotonic() - begin <= 2 * WAIT_S_MAX, "ten seconds at the old rate"
    bucket.change(0.0, 1.0)
    assert bucket.try_take(1e9), "no bound"


def test_sighup_reloads_and_a_mistake_changes_nothing(
    cache: kvtier.Cache, file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_start(thread: threading.Thread) -> None:
        raise RuntimeError("no more threads")

    before = signal.getsignal(signal.SIGHUP)
    kvtier.reload_on_sighup(cache, file)
    try:
        file.write_text(text(file.parent, get="3s"))
        with cache.manager.lock:  # the main thread may hold it when the signal comes
            os.kill(os.getpid(), signal.SIGHUP)
        assert eventually(lambda: cache.config.deadlines.get == 3)
        file.write_text("tiers: {g2: {capacity: 10MiB}}\n")
        with caplog.at_level(logging.ERROR, "kvtier.cache"):
            os.kill(os.getpid(), signal.SIGHUP)
            assert eventually(lambda: "not reloaded: tiers.g2.capacity" in caplog.text)
            file.unlink()
            os.kill(os.getpid(), signal.SIGHUP)
            assert eventually(lambda: "No such file" in caplog.text)
            monkeypatch.setattr(threading.Thread, "start", cannot_start)
            os.kill(os.getpid(), signal.SIGHUP)
            assert eventually(lambda: "no more threads" in caplog.text)
        assert cache.config.deadlines.get == 3
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows in the background does so at once."""
    limits_of = build.limits_of
    for module in (build, face):
        monkeypatch.setattr(module, "limits_of", lambda *of: replace(limits_of(*of), housekeeping_s=0.02))


CAPACITIES = """\
tiers:
  g2: {{capacity: {g2}}}
  g3: {{path: {folder}/g3, capacity: {g3}}}
"""


@pytest.mark.parametrize("computes", [False, True], ids=["threads", "process"])
def test_capacities_change_and_what_fits_stays(tmp_path: Path, quick: None, computes: bool) -> None:
    file = tmp_path / "kvtier.yaml"
    file.write_text(CAPACITIES.format(folder=tmp_path, g2="1MiB", g3="1MiB"))
    with kvtier.open(file, NS, computes=computes) as cache:
        cold, warm = chain_of(NS, 100, seed=1), chain_of(NS, 50, seed=2)
        for keys in (cold, warm):
            assert cache.put(keys, payloads_of(keys, 4096)) == len(keys)
        cache.flush()
        arena = cache.manager.host.arena
        held = memory_of(arena)
        assert held == 1 << 20

        file.write_text(CAPACITIES.format(folder=tmp_path, g2="256KiB", g3="32MiB"))
        assert cache.reload(file) == ["tiers.g2.capacity", "tiers.g3.capacity"]
        assert eventually(lambda: cache.stats()["g2"]["blocks"] <= 64 and memory_of(arena) == 256 << 10)
        assert eventually(lambda: cache.stats()["g3"]["capacity_bytes"] == 32 << 20)
        cache.check()
        assert cache.manager.prefix(warm) == 50, "the coldest left"
        assert cache.stats()["g2"]["capacity_bytes"] == 256 << 10 and cache.stats()["g2"]["blocks"] == 64
        for keys in (cold, warm):
            with cache.get(keys[:60]) as hit:
                assert [bytes(block) for block in hit.blocks] == payloads_of(keys[: len(hit.blocks)], 4096)
                assert len(hit.blocks) >= 50
        more = [chain_of(NS, 100, seed=seed) for seed in (3, 4, 5)]
        for keys in more:
            for part in range(0, 100, 20):
                cache.put(keys[: part + 20], payloads_of(keys[part : part + 20], 4096), start=part)
        cache.flush()
        assert cache.stats()["g3"]["bytes"] > 1 << 20, "more than it could hold before"
        assert cache.stats()["g2"]["blocks"] <= 64

        file.write_text(CAPACITIES.format(folder=tmp_path, g2="1MiB", g3="32MiB"))
        assert cache.reload(file) == ["tiers.g2.capacity"]
        assert eventually(lambda: memory_of(arena) == 1 << 20)
        keys = chain_of(NS, 120, seed=20)
        assert cache.put(keys, payloads_of(keys, 4096)) == 120
        assert cache.manager.prefix(keys) == 120
        cache.check()
    with kvtier.open(file, NS) as cache:
        assert cache.stats()["g3"]["capacity_bytes"] == 32 << 20
        for keys in (warm, *more):
            with cache.get(keys) as hit:
                assert [bytes(block) for block in hit.blocks] == payloads_of(keys, 4096)
        cache.check()


def test_what_is_read_outlives_a_smaller_g2(tmp_path: Path, quick: None) -> None:
    def config(g2: str) -> Config:
        return Config.parse({"tiers": {"g2": {"capacity": g2}}})

    with kvtier.open(config("1MiB"), NS) as cache:
        keys, more = chain_of(NS, 100), chain_of(NS, 10, seed=2)
        cache.put(keys, payloads_of(keys, 4096))
        with cache.get(keys) as hit:
            cache.reload(config("64KiB"))
            assert eventually(lambda: cache.manager.host.in_use.used == 100), "what nobody reads is out of use"
            assert cache.put(more, payloads_of(more, 4096), wait=False) == 0, "no slot of a reader is taken"
            assert [bytes(block) for block in hit.blocks] == payloads_of(keys, 4096)
        assert eventually(lambda: cache.stats()["g2"]["blocks"] <= 16)
        assert cache.put(more, payloads_of(more, 4096)) == 10
        cache.check()


def test_a_write_budget_follows_the_capacity(tmp_path: Path, quick: None) -> None:
    g3 = {"path": str(tmp_path / "g3"), "capacity": "2MiB", "write_budget": "3DWPD"}
    with kvtier.open(Config.parse({"tiers": {"g2": {"capacity": "1MiB"}, "g3": g3}}), NS) as cache:
        assert cache.stats()["g3"]["write_budget_bytes"] == 6 << 20
        cache.reload(Config.parse({"tiers": {"g2": {"capacity": "1MiB"}, "g3": {**g3, "capacity": "4MiB"}}}))
        assert eventually(lambda: cache.stats()["g3"]["write_budget_bytes"] == 12 << 20)


def test_g3_grows_when_no_other_process_uses_it(tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture) -> None:
    def config(capacity: str) -> Config:
        g3 = {"path": str(tmp_path / "g3"), "capacity": capacity}
        return Config.parse({"tiers": {"g2": {"capacity": "1MiB"}, "g3": g3}})

    with kvtier.open(config("2MiB"), NS) as cache, kvtier.open(config("2MiB"), NS, computes=True) as other:
        assert cache.reload(config("4MiB")) == ["tiers.g3.capacity"]
        assert eventually(lambda: "when no other process uses the directory" in caplog.text)
        keys = chain_of(NS, 8)
        assert cache.put(keys, payloads_of(keys, 4096)) == 8
        assert cache.stats()["g3"]["capacity_bytes"] == 2 << 20
        other.close()
        assert eventually(lambda: cache.stats()["g3"]["capacity_bytes"] == 4 << 20)


@pytest.mark.parametrize(("g2", "g3"), [("2MiB", "2MiB"), ("1KiB", "2MiB"), ("1MiB", "1MiB")])
def test_capacities_that_need_a_restart_are_refused(tmp_path: Path, g2: str, g3: str) -> None:
    def config(g2: str, g3: str) -> Config:
        return Config.parse({"tiers": {"g2": {"capacity": g2}, "g3": {"path": str(tmp_path / "g3"), "capacity": g3}}})

    with kvtier.open(config("1MiB", "2MiB"), NS) as cache:
        with pytest.raises(ConfigError, match=r"^tiers\.g"):
            cache.reload(config(g2, g3))
        assert cache.config == config("1MiB", "2MiB") and cache.manager.host.capacity == 256


def memory_of(arena: Arena) -> int:
    """Bytes that the system has given it."""
    return sum(512 * os.fstat(fd).st_blocks for fd in arena.fds(page_locked=False))


@pytest.mark.long
def test_bytes_stay_right_while_capacities_change(tmp_path: Path, quick: None) -> None:
    def config(g2: str, g3: int) -> Config:
        tiers = {"g2": {"capacity": g2}, "g3": {"path": str(tmp_path / "g3"), "capacity": f"{g3}MiB"}}
        return Config.parse({"tiers": tiers})

    wrong: list[str] = []
    hits = [0, 0]
    done = threading.Event()

    def use(number: int) -> None:
        turn = 0
        while not done.is_set():
            turn += 1
            keys = chain_of(NS, 24, seed=100 * number + turn % 20)
            cache.put(keys, payloads_of(keys, 4096), wait=False)
            with cache.get(keys, timeout=1.0) as hit:
                hits[number] += len(hit.blocks)
                if [bytes(block) for block in hit.blocks] != payloads_of(keys[: len(hit.blocks)], 4096):
                    wrong.append(f"{number}: turn {turn}")

    with kvtier.open(config("1MiB", 2), NS) as cache:
        threads = [threading.Thread(target=use, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for step in range(12):
            cache.reload(config(("200KiB", "1MiB", "500KiB")[step % 3], 2 + step))
            time.sleep(0.08)
        done.set()
        for thread in threads:
            thread.join(30)
        cache.reload(config("1MiB", 16))
        assert eventually(lambda: cache.manager.host.in_use.surplus == 0 and not cache.manager.host.in_use.unused)
        cache.flush()
        cache.check()
        assert not wrong and all(hits) and cache.stats()["tasks"]["restarts"].get("housekeeping", 0) == 0
    with kvtier.open(config("1MiB", 16), NS) as cache:
        cache.check()
