"""What the linker tells through SGLang's own /metrics, where `--enable-metrics` is set:

    sglang:kvtier_tokens_read_total{tier}    prompt tokens that were truly read, by the tier they came from
    sglang:kvtier_events_total{event}        blocks_stored, lookups_late, … as docs/sglang.md lists them

Both also carry the labels model_name and tp_rank. SGLang gathers the counters of its processes through files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_FAMILIES = {
    "tokens_read": ("sglang:kvtier_tokens_read", "Prompt tokens read by kvtier, by tier.", "tier"),
    "events": ("sglang:kvtier_events", "What happened to kvtier's blocks and look-ups.", "event"),
}


class EngineMetrics:
    """Counters that follow totals."""

    def __init__(self, labels: Mapping[str, str], registry: Any = None) -> None:
        """Registers them, in the process's own registry unless one is given."""
        # Here and not above: the library chooses between memory and files when it is imported, and SGLang says which.
        import prometheus_client

        where = registry if registry is not None else prometheus_client.REGISTRY
        self._labels = tuple(labels.values())
        self._counters = {
            section: prometheus_client.Counter(name, text, [*labels, label], registry=where)
            for section, (name, text, label) in _FAMILIES.items()
        }
        self._told: dict[str, Counter[str]] = {section: Counter() for section in _FAMILIES}

    @classmethod
    def of(cls, server_args: Any, rank: int) -> EngineMetrics | None:
        """None unless the engine shows metrics."""
        if not getattr(server_args, "enable_metrics", False):
            return None
        return cls({"model_name": str(server_args.served_model_name), "tp_rank": str(rank)})

    def update(self, totals: Mapping[str, Mapping[str, int]]) -> None:
        """Add what came to `totals[section][name]` since the last time."""
        for section, told in self._told.items():
            for name, total in totals[section].items():
                if total > told[name]:
                    self._counters[section].labels(*self._labels, name).inc(total - told[name])
                    told[name] = total
