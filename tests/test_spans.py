"""Spans of what a request waits for, in its trace; nothing in spans, logs and metrics tells of prompts and tenants."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import kvtier
import kvtier.spans
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.identity.keys import SCOPE_BYTES
from kvtier.metrics import StatsCollector
from kvtier.spans import in_trace, set_spans, span
from kvtier.testing import payloads_of, sample_namespace

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install opentelemetry-sdk")
NS = sample_namespace(4096)
SALT, TOKEN = "tenant-canary-93", 0x5EC2E7


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Finished spans, in memory; a provider of this test's own."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    set_spans(False)


def config(folder: Path, on: bool = True) -> Config:
    g3 = {"path": str(folder / "g3"), "capacity": "4MiB"}
    return Config.parse({"tiers": {"g2": {"capacity": "1MiB"}, "g3": g3}, "trace": {"spans": on}})


def test_a_request_s_lookup_plan_and_transfer_are_in_its_trace(spans: Any, tmp_path: Path) -> None:
    from opentelemetry import trace

    with kvtier.open(config(tmp_path), NS) as cache:
        keys = cache.chain_hashes([*range(128)])
        cache.put(keys, payloads_of(keys, 4096))
        cache.flush()
        cache.evict("g2")
        spans.clear()
        with trace.get_tracer("application").start_as_current_span("request") as request, cache.get(keys) as hit:
            assert len(hit) == 8
        assert cache.reload(config(tmp_path, on=False)) == ["trace.spans"]
        spans_before = len(spans.get_finished_spans())
        with cache.get(cache.chain_hashes([5] * 64)):
            pass
        assert len(spans.get_finished_spans()) == spans_before
    found = {one.name: one for one in spans.get_finished_spans()}
    assert set(found) == {"request", "kv.lookup", "kv.plan", "kv.transfer"}
    for name in ("kv.lookup", "kv.plan", "kv.transfer"):
        assert found[name].parent.span_id == request.get_span_context().span_id
    assert found["kv.lookup"].attributes == {"kvtier.blocks.g3": 8}
    assert found["kv.plan"].attributes["kvtier.load.g3"] == 8
    read = found["kv.transfer"].attributes
    assert (read["kvtier.tier"], read["kvtier.verified"], read["kvtier.bytes"]) == ("g3", 8, 8 * 4096)


def test_headers_of_a_request_name_its_trace(spans: Any) -> None:
    set_spans(True)

    def work() -> None:
        with span("kv.lookup"):
            pass

    in_trace({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}, work)
    in_trace(None, work)
    one, other = spans.get_finished_spans()
    assert one.context.trace_id == int("ab" * 16, 16) and other.context.trace_id != one.context.trace_id


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": 5},
        {"traceparent": b"x"},
        {"traceparent": "0" * 1000},
        {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": 7},
        {"baggage": 7},
        {"baggage": f"canary={'x' * 9000}"},
    ],
)
def test_no_header_is_an_error_or_told_on(spans: Any, headers: Any, caplog: pytest.LogCaptureFixture) -> None:
    """They are a client's: an engine passes them on as they came."""
    set_spans(True)
    assert in_trace(headers, lambda: 5) == 5
    assert "canary" not in caplog.text


def test_an_error_is_told_by_its_class_alone(spans: Any) -> None:
    set_spans(True)
    with pytest.raises(OSError, match="canary"), span("kv.transfer"):
        raise OSError("canary")
    (one,) = spans.get_finished_spans()
    assert one.attributes == {"kvtier.error": "OSError"} and not one.events and "canary" not in one.to_json()


def test_nothing_tells_of_prompts_and_tenants(spans: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    raw = config(tmp_path).model_dump(mode="json") | {"security": {"scope_secret": "secret-canary-0123456789"}}
    raw["tiers"]["g4"] = {"url": f"file://{tmp_path}/g4"}
    with kvtier.open(Config.parse(raw), NS) as cache:
        keys = cache.chain_hashes([TOKEN + number for number in range(128)], SALT)
        cache.put(keys, payloads_of(keys, 4096), request_id="r")
        cache.flush()
        cache.evict("g2")
        for slab in (tmp_path / "g3" / "slab").iterdir():  # damage, so that errors are told, too
            slab.write_bytes(b"\xff" * slab.stat().st_size)
        with cache.get(keys, request_id="r"):
            pass
        for tier in ("g2", "g3"):
            cache.evict(tier)
        for unit in (path for path in (tmp_path / "g4").rglob("*") if path.is_file() and path.stat().st_size > 4096):
            unit.write_bytes(unit.read_bytes()[:-4096] + bytes(4096))
        with cache.get(keys, request_id="r"):
            pass
        cache.purge(SALT)
        registry = CollectorRegistry()
        registry.register(StatsCollector(cache.stats))
        told = generate_latest(registry).decode() + repr(cache.stats())
    told += caplog.text + "".join(one.to_json() for one in spans.get_finished_spans())
    assert "kv.transfer" in told and "corrupt" in told and "failed its check twice" in told
    for secret in (
        SALT,
        str(TOKEN),
        "secret-canary",
        *(key.hex()[:16] for key in keys),
        *(key[start:].hex()[:12] for key in keys for start in (SCOPE_BYTES, SCOPE_BYTES + 20)),
        *(key.hex()[-12:] for key in keys),
    ):
        assert secret not in told
    for key in keys:
        assert repr(key)[2:-1] not in told and repr(key[16:])[2:-1] not in told


def test_off_imports_nothing_and_a_missing_library_is_a_mistake_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert span("kv.lookup") is span("kv.plan", hit=5)
    real = builtins.__import__

    def lacking(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", lacking)
    monkeypatch.delitem(sys.modules, "opentelemetry", raising=False)
    with pytest.raises(ConfigError, match=r"kvtier\[otel\]"):
        set_spans(True)
