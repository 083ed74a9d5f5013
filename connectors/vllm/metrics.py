"""The connector's counters in vLLM's own statistics: its log line and its Prometheus endpoint.

    vllm:kvtier_tokens_read{tier}    prompt tokens that were truly read, by the tier they came from
    vllm:kvtier_events{event}        blocks_stored, spill_lost, load_failures, … as docs/vllm.md lists them

vLLM's external-cache counters also count tokens whose copy failed and that were computed again; these do not.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.connectors.counters import EVENTS, TOKENS_READ

_READ = "tokens_read_"


class KVTierStats(KVConnectorStats):
    """Growth since the last report: `data` is name → count, plain numbers."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KVTierPromMetrics(KVConnectorPromMetrics):
    """Registers the counters of the module's table."""

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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            metric, value = (self._read, name[len(_READ) :]) if name.startswith(_READ) else (self._events, name)
            metric.labels(*self._labels[engine_idx], value).inc(count)
