"""The linker's counters on SGLang's own /metrics, where `--enable-metrics` is set:

    sglang:kvtier_tokens_read_total{tier}    prompt tokens that were truly read, by the tier they came from
    sglang:kvtier_events_total{event}        blocks_stored, lookups_late, … as docs/sglang.md lists them

Both also carry the labels model_name and tp_rank. SGLang gathers the counters of its processes through files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import prometheus_client

from kvtier.connectors.counters import EVENTS, TOKENS_READ, Growth


class EngineMetrics:
    """Prometheus counters that follow totals."""

    def __init__(self, labels: Mapping[str, str], registry: Any = None) -> None:
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

    @classmethod
    def of(cls, server_args: Any, rank: int) -> EngineMetrics | None:
        """None unless the engine shows metrics."""
        if not getattr(server_args, "enable_metrics", False):
            return None
        return cls({"model_name": str(server_args.served_model_name), "tp_rank": str(rank)})

    def update(self, totals: Mapping[str, Mapping[str, int]]) -> None:
        """Add the growth of `totals[section][name]` since the last call."""
        for section, counter, growth in self._families:
            for name, count in growth.since_last(totals[section]).items():
                counter.labels(*self._labels, name).inc(count)
