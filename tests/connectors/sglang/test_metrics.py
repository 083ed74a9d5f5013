"""The linker's counters on SGLang's /metrics."""

from __future__ import annotations


def test_metrics_follow_what_was_counted() -> None:
    from prometheus_client import CollectorRegistry

    from kvtier.connectors.sglang.metrics import EngineMetrics
    from kvtier.connectors.tier_figures import TierGrowth
    from kvtier.testing import VirtualClock

    registry = CollectorRegistry()
    stats = {"g2": {"blocks": 3, "hits": 2}, "g3": {"seconds": {"read": [(1, 0.00005), *[(0, 0.0)] * 11]}}}
    metrics = EngineMetrics({"model_name": "m", "tp_rank": "0"}, TierGrowth(lambda: stats, VirtualClock()), registry)
    metrics.update({"tokens_read": {"g2": 16}, "events": {}})
    metrics.update({"tokens_read": {"g2": 48, "g3": 16}, "events": {"lookups_late": 1}})
    labels = {"model_name": "m", "tp_rank": "0"}
    read = "sglang:kvtier_tokens_read_total"
    assert registry.get_sample_value(read, {**labels, "tier": "g2"}) == 48
    assert registry.get_sample_value(read, {**labels, "tier": "g3"}) == 16
    assert registry.get_sample_value("sglang:kvtier_events_total", {**labels, "event": "lookups_late"}) == 1
    assert registry.get_sample_value("sglang:kvtier_tier_blocks", {**labels, "tier": "g2"}) == 3
    calls = "sglang:kvtier_tier_call_seconds_count"
    assert registry.get_sample_value(calls, {**labels, "tier": "g3", "verb": "read"}) == 1
