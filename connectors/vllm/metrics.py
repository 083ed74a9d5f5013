"""The connector's counters in vLLM's own statistics: its log line and its Prometheus endpoint.

    vllm:kvtier_tokens_read{tier}    prompt tokens that were truly read, by the tier they came from
    vllm:kvtier_events{event}        blocks_stored, spill_lost, load_failures, … as docs/vllm.md lists them
    vllm:kvtier_…                    the figures of the tiers, of kvtier.metrics; not in the log line

vLLM's external-cache counters also count tokens whose copy failed and that were computed again; these do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.connectors.counters import EVENTS, TOKENS_READ
from kvtier.connectors.tier_figures import Report, TierMetrics

_READ = "tokens_read_"


class KVTierStats(KVConnectorStats):
    """Since the last report: `data` is {"counts": name → growth, "tiers": the figures' report}, of plain values."""

    data: dict[str, Any]

    @classmethod
    def of(cls, counts: dict[str, int], tiers: Report) -> KVTierStats:
        return cls(data={"counts": counts, "tiers": tiers})

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        ours, theirs = self.data, other.data
        counts = Counter(ours.get("counts", {})) + Counter(theirs.get("counts", {}))
        self.data = {"counts": dict(counts), "tiers": [*ours.get("tiers", ()), *theirs.get("tiers", ())]}
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data.get("counts", {}))

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVTierPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics of the module's table."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._labels = per_engine_labelvalues
        self._read, self._events = (
            counter(name=f"vllm:{family.name}", documentation=family.help, labelnames=[*labelnames, family.label])
            for family in (TOKENS_READ, EVENTS)
        )
        self._tiers = TierMetrics("vllm:", labelnames, metric_types)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._tiers.follow(transfer_stats_data.get("tiers", ()), self._labels[engine_idx])
        for name, count in transfer_stats_data.get("counts", {}).items():
            metric, value = (self._read, name[len(_READ) :]) if name.startswith(_READ) else (self._events, name)
            metric.labels(*self._labels[engine_idx], value).inc(count)


def hit_sources(tiers: Mapping[str, int]) -> dict[Any, int]:
    """Tokens by tier under vLLM's own labels; {} where this release has none."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return {}
    labels = {"g2": CacheHitSource.HOST, "g3": CacheHitSource.DISK}
    out: dict[Any, int] = {}
    for tier, count in tiers.items():
        label = labels.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
        out[label] = out.get(label, 0) + count
    return out
