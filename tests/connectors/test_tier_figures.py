"""The tiers' figures in an engine's metrics are those that `stats()` returns, sent in reports."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier.connectors.tier_figures import TierGrowth, TierMetrics
from kvtier.metrics import StatsCollector
from kvtier.testing import VirtualClock


def tier(calls: list[tuple[int, float]], **more: Any) -> dict[str, Any]:
    return {"seconds": {"read": [*calls, *[(0, 0.0)] * (12 - len(calls))]}, **more}


FIRST = {
    "requests": {"lookups": 10, "misses": {"absent": 2}, "dropped": 0},
    "tasks": {"restarts": {}, "out": {}},
    "g2": {"blocks": 3, "hits": 6, "health": "well"},
    "g3": tier([(2, 0.00008), (1, 0.0002)], blocks=5, hits=1, health="well"),
}
SECOND = {
    "requests": {"lookups": 30, "misses": {"absent": 2, "late": 1}, "dropped": 0},
    "tasks": {"restarts": {"housekeeping": 1}, "out": {"g3": "broken"}},
    "g2": {"blocks": 1, "hits": 6, "health": "well"},
    "g3": tier([(2, 0.00008), (1, 0.0002), (4, 0.0035)], blocks=5, hits=4, health="out"),
}
OF_A_NEW_CACHE = {
    "requests": {"lookups": 4, "misses": {}, "dropped": 0},
    "g2": {"blocks": 2, "hits": 1, "health": "well"},
    "g3": tier([(1, 0.00002)], blocks=6, hits=0, health="well"),
}


class Shown:
    """An engine's metrics, fed with reports that have been through JSON."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {}
        self.clock = VirtualClock()
        self.growth = TierGrowth(lambda: self.now, self.clock)
        self.registry = CollectorRegistry()
        self.metrics = TierMetrics("engine:", ["rank"], registry=self.registry)

    def report(self, stats: dict[str, Any]) -> int:
        self.now = stats
        report = json.loads(json.dumps(self.growth.report()))
        self.metrics.follow(report, ["7"])
        self.clock.advance(TierGrowth.EVERY_S)
        return len(report)

    def values(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Without zeros: a series that was never reported is not there."""
        return {
            (sample.name.removeprefix("engine:"), frozenset(sample.labels.items()) - {("rank", "7")}): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.value and not sample.name.endswith("_created")
        }


def scraped(stats: dict[str, Any]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What kvtier's own endpoint would say."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in StatsCollector(lambda: stats).collect()
        for sample in family.samples
        if sample.value
    }


def test_an_engine_shows_what_kvtiers_own_endpoint_shows() -> None:
    shown = Shown()
    for stats in (FIRST, SECOND):
        assert shown.report(stats)
        assert shown.values() == pytest.approx(scraped(stats))
    assert shown.report(SECOND) == 0, "what did not change is not sent"


def test_the_counters_of_the_next_cache_are_added_to_those_of_the_last() -> None:
    shown = Shown()
    for stats in (SECOND, {}, OF_A_NEW_CACHE):
        shown.report(stats)
    value = shown.registry.get_sample_value
    assert value("engine:kvtier_lookup_blocks_total", {"rank": "7"}) == 34
    assert value("engine:kvtier_tier_blocks", {"rank": "7", "tier": "g2"}) == 2
    read = {"rank": "7", "tier": "g3", "verb": "read"}
    assert value("engine:kvtier_tier_call_seconds_count", read) == 8
    assert value("engine:kvtier_tier_call_seconds_sum", read) == pytest.approx(0.0038)


def test_stats_are_asked_once_a_second() -> None:
    shown = Shown()
    assert shown.report(FIRST)
    shown.clock.advance(-0.1)
    shown.now = SECOND
    assert shown.growth.report() == []
    shown.clock.advance(0.1)
    assert shown.growth.report()
