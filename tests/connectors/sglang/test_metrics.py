"""The linker's counters on SGLang's /metrics."""

from __future__ import annotations


def test_metrics_follow_what_was_counted() -> None:
    from prometheus_client import CollectorRegistry

    from kvtier.connectors.sglang.metrics import EngineMetrics

    registry = CollectorRegistry()
    metrics = EngineMetrics({"model_name": "m", "tp_rank": "0"}, registry)
    metrics.update({"tokens_read": {"g2": 16}, "events": {}})
    metrics.update({"tokens_read": {"g2": 48, "g3": 16}, "events": {"lookups_late": 1}})
    labels = {"model_name": "m", "tp_rank": "0"}
    read = "sglang:kvtier_tokens_read_total"
    assert registry.get_sample_value(read, {**labels, "tier": "g2"}) == 48
    assert registry.get_sample_value(read, {**labels, "tier": "g3"}) == 16
    assert registry.get_sample_value("sglang:kvtier_events_total", {**labels, "event": "lookups_late"}) == 1
