"""What `stats()` says reaches Prometheus and `kvtier top`, and nothing about tenants does."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry

import kvtier
from kvtier import metrics
from kvtier.cli import main
from kvtier.cli.top import Unanswered, read_figures
from kvtier.errors import InvalidRequest
from kvtier.metrics import PORT, REQUESTS, TASKS, TIERS, StatsCollector, serve
from kvtier.testing import chain_of, payloads_of, sample_namespace
from kvtier.tiers.breaker import Health
from kvtier.tiers.disk import store as disk_store
from kvtier.tiers.protocol import Miss

STATS = {
    "requests": {"lookups": 10, "hits": 7, "misses": {"absent": 2, "late": 1}, "accepted": 5, "dropped": 0},
    "g2": {
        "blocks": 3,
        "bytes": 3 << 20,
        "capacity_bytes": 4 << 20,
        "hits": 6,
        "misses": {},
        "evictions": 2,
        "latency": {},
    },
    "g3": {
        "blocks": 5,
        "bytes": 5 << 20,
        "capacity_bytes": 0,
        "hits": 1,
        "misses": {"corrupt": 1},
        "evictions": 0,
        "latency": {"read_p50_ms": 1.5, "read_p99_ms": None},
        "seconds": {"read": [(0, 0.0), (2, 0.0004), *[(0, 0.0)] * 9, (1, 12.0)], "write": [(0, 0.0)] * 12},
        "health": "well",
    },
}


@pytest.fixture
def url() -> Iterator[str]:
    with serve(lambda: STATS, 0) as endpoint:
        yield endpoint.url


def test_every_figure_is_exported() -> None:
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: STATS))
    value = registry.get_sample_value
    assert value("kvtier_lookup_blocks_total") == 10
    assert value("kvtier_miss_blocks_total", {"reason": "late"}) == 1
    assert value("kvtier_tier_bytes", {"tier": "g2"}) == 3 << 20
    assert value("kvtier_tier_miss_blocks_total", {"tier": "g3", "reason": "corrupt"}) == 1
    read = {"tier": "g3", "verb": "read"}
    buckets = [
        value("kvtier_tier_call_seconds_bucket", {**read, "le": le}) for le in ("0.0001", "0.0003", "10.0", "+Inf")
    ]
    assert buckets == [0, 2, 2, 3]
    assert value("kvtier_tier_call_seconds_count", read) == 3
    assert value("kvtier_tier_call_seconds_sum", read) == pytest.approx(12.0004)
    states = {health.value: value("kvtier_tier_health", {"tier": "g3", "state": health.value}) for health in Health}
    assert states == {"well": 1, "full": 0, "out": 0, "probing": 0}, "a state set: alerts see the change"
    assert value("kvtier_build_info", {"version": kvtier.__version__}) == 1


def test_series_are_there_before_the_first_event() -> None:
    """A rate over a series that appears with its first event misses that event."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: STATS))
    value = registry.get_sample_value
    for miss in Miss:
        assert value("kvtier_miss_blocks_total", {"reason": str(miss)}) is not None
        assert value("kvtier_tier_miss_blocks_total", {"tier": "g3", "reason": str(miss)}) is not None
    with kvtier.open(kvtier.Config.parse({"tiers": {"g2": {"capacity": "1MiB"}}}), sample_namespace()) as cache:
        fresh = CollectorRegistry()
        fresh.register(StatsCollector(cache.stats))
        before = {(s.name, *s.labels.items()) for family in fresh.collect() for s in family.samples}
        with cache.get(chain_of(cache.namespace, 3)):
            pass
        assert {(s.name, *s.labels.items()) for family in fresh.collect() for s in family.samples} == before


def test_alerts_see_the_first_event_of_a_tier_s_own_counters(tmp_path: Path) -> None:
    g3, g4 = {"path": str(tmp_path / "g3"), "capacity": "1MiB"}, {"url": f"file://{tmp_path}/g4"}
    config = kvtier.Config.parse({"tiers": {"g2": {"capacity": "1MiB"}, "g3": g3, "g4": g4}})
    registry = CollectorRegistry()
    with kvtier.open(config, sample_namespace()) as cache:
        registry.register(StatsCollector(cache.stats))
        for tier, kind in (("g3", "set_aside_slots"), ("g3", "unreadable_blocks"), ("g4", "purge_log_faults")):
            assert registry.get_sample_value("kvtier_tier_events_total", {"tier": tier, "kind": kind}) == 0
        for reason in ("queue", "orphan", "budget"):
            assert registry.get_sample_value("kvtier_tier_refused_blocks_total", {"tier": "g3", "reason": reason}) == 0


def test_the_default_port_is_no_exporters() -> None:
    """9400 is that of NVIDIA's DCGM exporter, which runs on the same hosts."""
    assert PORT == 19400


def test_no_label_names_a_tenant() -> None:
    labels = {family.label for family in (*REQUESTS.values(), *TASKS.values(), *TIERS.values())} - {None}
    assert labels == {"reason", "outcome", "state", "kind", "tier", "class", "task", "verb"}


def test_top_reads_the_endpoint(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_figures(url)["g2"]["bytes"] == 3 << 20
    with pytest.raises(SystemExit):
        main(["top", url, "--json"])
    assert json.loads(capsys.readouterr().out)["g3"]["miss_blocks[corrupt]"] == 1
    with pytest.raises(SystemExit):
        main(["top", url, "--once"])
    shown = capsys.readouterr().out
    assert "70.0% served" in shown and "absent 2" in shown and "75%" in shown


@pytest.mark.parametrize("wrong", ["file:///etc/passwd", "ftp://127.0.0.1/", "127.0.0.1:9400"])
def test_top_names_an_endpoint_that_is_none(wrong: str) -> None:
    with pytest.raises(InvalidRequest, match=wrong):
        read_figures(wrong)


def test_top_names_an_endpoint_that_does_not_answer() -> None:
    with pytest.raises(Unanswered, match=r"http://127\.0\.0\.1:1/' gives no metrics: .*refused"):
        read_figures("http://127.0.0.1:1/")


def test_who_connects_and_says_nothing_takes_few_threads_and_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The endpoint is in the engine's process, whose descriptors they took for ever."""
    monkeypatch.setattr(metrics._Handler, "timeout", 0.5)
    before = threading.active_count()
    with serve(lambda: STATS, 0) as endpoint, contextlib.ExitStack() as silent:
        port = urlsplit(endpoint.url).port
        held = [
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(metrics.CONNECTIONS_MAX + 8)
        ]
        time.sleep(0.1)
        assert threading.active_count() - before <= metrics.CONNECTIONS_MAX + 1
        for one in held:
            one.settimeout(20.0)
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        assert read_figures(endpoint.url)["g2"]["bytes"] == 3 << 20
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_an_endpoint_of_ipv6_has_an_address_that_works() -> None:
    with serve(lambda: STATS, 0, "::1") as endpoint:
        assert read_figures(endpoint.url)["g2"]["bytes"] == 3 << 20


def test_a_store_that_is_out_of_use_leaves_the_figures_whole(tmp_path: Path) -> None:
    """They were an error until it was opened again: for a minute, and on every scrape."""
    namespace = sample_namespace()
    tiers = {"g2": {"capacity": "1MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "16MiB"}}
    with kvtier.open(kvtier.Config.parse({"tiers": tiers}), namespace) as cache:
        keys = chain_of(namespace, 2)
        cache.put(keys, payloads_of(keys, namespace.block_bytes))
        cache.flush()
        before = cache.stats()["g3"]
        assert before["blocks"] == 2
        (store,) = disk_store.open_stores._stores.values()
        store.quarantine("a test", rest_s=60.0)
        assert cache.stats()["g3"]["blocks"] == 2
        assert cache.stats()["g3"]["capacity_bytes"] == before["capacity_bytes"]
        registry = CollectorRegistry()
        registry.register(StatsCollector(cache.stats))
        assert registry.get_sample_value("kvtier_tier_blocks", {"tier": "g3"}) == 2


@pytest.mark.parametrize("computes", [False, True])
def test_figures_are_whole_while_a_cache_is_closed_and_last_behind_that(tmp_path: Path, computes: bool) -> None:
    namespace, failures, done = sample_namespace(), list[BaseException](), threading.Event()
    tiers = {"g2": {"capacity": "1MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "16MiB"}}
    cache = kvtier.open(kvtier.Config.parse({"tiers": tiers}), namespace, computes=computes)

    def scrape() -> None:
        while not done.is_set():
            try:
                assert set(cache.stats()) >= {"g2", "g3"}
            except BaseException as wrong:
                failures.append(wrong)
                return

    thread = threading.Thread(target=scrape)
    thread.start()
    keys = chain_of(namespace, 2)
    cache.put(keys, payloads_of(keys, namespace.block_bytes))
    cache.close()
    done.set()
    thread.join()
    assert failures == []
    last = cache.stats()
    assert (last["g2"]["blocks"], last["g3"]["blocks"]) == (0, 2), "its memory is given back, what is on disk stays"
    assert last["g3"]["stored"]["stored"] == 2 and last["g3"]["device_written_bytes"] > 0


def test_every_entry_of_a_real_cache_is_exported(tmp_path: Path) -> None:
    namespace = sample_namespace()
    tiers = {"g2": {"capacity": "1MiB"}, "g3": {"path": str(tmp_path / "g3"), "capacity": "16MiB"}}
    with kvtier.open(kvtier.Config.parse({"tiers": tiers}), namespace) as cache:
        keys = chain_of(namespace, 2)
        cache.put(keys, payloads_of(keys, namespace.block_bytes))
        with cache.get(keys) as hit:
            assert len(hit) == 2
        stats = cache.stats()
        assert {"requests", "tasks", "g2", "g3"} == set(stats)
        assert set(stats["requests"]) <= set(REQUESTS)
        assert set(stats["g2"]) | set(stats["g3"]) <= set(TIERS) | {"latency"}
        with serve(cache.stats, 0) as endpoint:
            assert read_figures(endpoint.url)["g2"]["hit_blocks"] == 2
