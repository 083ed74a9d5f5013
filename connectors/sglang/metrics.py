"""The linker's counters on SGLang's own /metrics, where `--enable-metrics` is set:

    sglang:kvtier_tokens_read_total{tier}    prompt tokens that were truly read, by the tier they came from
    sglang:kvtier_events_total{event}        blocks_stored, lookups_late, … as docs/sglang.md lists them
    sglang:kvtier_…                          the figures of the tiers, of kvtier.metrics

All also carry the labels model_name, dp_rank and tp_rank. SGLang gathers the counters of its processes through files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import prometheus_client

from kvtier.clock import SystemClock
from kvtier.connectors.counters import EVENTS, TOKENS_READ, Growth
from kvtier.connectors.sglang.identity import replica_and_rank
from kvtier.connectors.tier_figures import TierGrowth, TierMetrics
from kvtier.metrics import Stats


class EngineMetrics:
    """Prometheus metrics that follow totals and the tiers' figures."""

    def __init__(self, labels: Mapping[str, str], tiers: TierGrowth, registry: Any = None) -> None:
        """Registers them, in the process's own registry unless one is given."""
        where = registry if registry is not None else prometheus_client.REGISTRY
        self._labels = tuple(labels.values())
        self._families = [
            (
                section,
                prometheus_client.Counter(f"sglang:{f.name}", f.help, [*labels, str(f.label)], registry=where),
                Growth[str](),
            )
            for section, f in (("tokens_read", TOKENS_READ), ("events", EVENTS))
        ]
        self._tiers = tiers
        self._tier_metrics = TierMetrics("sglang:", list(labels), registry=where)

    @classmethod
    def of(cls, server_args: Any, stats: Callable[[], Stats]) -> EngineMetrics | None:
        """None unless the engine shows metrics."""
        if not getattr(server_args, "enable_metrics", False):
            return None
        replica, rank = replica_and_rank()
        labels = {"model_name": str(server_args.served_model_name), "dp_rank": str(replica), "tp_rank": str(rank)}
        return cls(labels, TierGrowth(stats, SystemClock()))

    def update(self, totals: Mapping[str, Mapping[str, int]]) -> None:
        """Add the growth of `totals[section][name]` since the last call, and now and then what the tiers report."""
        self._tier_metrics.follow(self._tiers.report(), self._labels)
        for section, counter, growth in self._families:
            for name, count in growth.since_last(totals[section]).items():
                counter.labels(*self._labels, name).inc(count)
