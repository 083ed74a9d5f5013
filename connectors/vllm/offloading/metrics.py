"""The tier's counters and the tiers' figures in the statistics of vLLM's offloading, which has them on /metrics:

vllm:kvtier_tokens_read{tier}, vllm:kvtier_events{event}    counted by the tier; in vLLM's log line, too
vllm:kvtier_…                                               the figures of the tiers, of kvtier.metrics
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingHistogramMetadata

from kvtier.connectors.counters import EVENTS, TOKENS_READ
from kvtier.connectors.tier_figures import Report, families
from kvtier.metrics import BOUNDS_S, Family, labels_of

COUNTED = {f"vllm:{family.name}": family for family in (TOKENS_READ, EVENTS)}
_FIGURES = {f"vllm:{family.name}": family for family in families()}


def definitions() -> dict[str, Any]:
    """All of the module's table, as vLLM's offloading wants it told."""
    return {name: _definition(family) for name, family in (COUNTED | _FIGURES).items()}


def _definition(family: Family) -> Any:
    labels = labels_of(family)
    if family.kind is Counter:
        return OffloadingCounterMetadata(family.help, labels)
    if family.kind is Gauge:
        return OffloadingGaugeMetadata(family.help, labels)
    return OffloadingHistogramMetadata(family.help, labels, BOUNDS_S)


def add_figures(report: Report, stats: OffloadingConnectorStats) -> None:
    """Add what the tiers report to the statistics of a step."""
    for name, values, change in report:
        full, labels = f"vllm:{name}", tuple(values)
        kind = _FIGURES[full].kind
        if kind is Counter:
            stats.increase_counter(full, change, labels)
        elif kind is Gauge:
            stats.set_gauge(full, change, labels)
        else:
            for count, seconds in change:
                for _ in range(count):
                    stats.observe_histogram(full, seconds / count, labels)  # their mean lies in their bucket


class LoggedStats(OffloadingConnectorStats):
    """Statistics whose log line leaves the tiers' figures to /metrics: there are dozens."""

    def reduce(self) -> dict[str, int | float]:
        return {name: value for name, value in super().reduce().items() if not name.startswith(tuple(_FIGURES))}
