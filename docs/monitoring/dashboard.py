"""Writes grafana.json, the dashboard, from the panels below: `make reference`. tests/monitoring checks that it is
current, and asks a real Prometheus every query where one is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

WHERE = 'job=~"$job",instance=~"$instance"'


class Panel(NamedTuple):
    """A graph of `queries` (legend → PromQL), half as wide as the page."""

    title: str
    unit: str
    queries: dict[str, str]
    meaning: str = ""


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel(
            "Hit rate",
            "percentunit",
            {
                "{{instance}}": f"sum by (instance) (rate(kvtier_hit_blocks_total{{{WHERE}}}[$__rate_interval])) / "
                f"sum by (instance) (rate(kvtier_lookup_blocks_total{{{WHERE}}}[$__rate_interval]))"
            },
            "Blocks served per block asked for.",
        ),
        Panel(
            "Hits by tier",
            "ops",
            {"{{tier}}": f"sum by (tier) (rate(kvtier_tier_hit_blocks_total{{{WHERE}}}[$__rate_interval]))"},
            "Blocks per second, by the tier that had them.",
        ),
        Panel(
            "Misses by reason",
            "ops",
            {"{{reason}}": f"sum by (reason) (rate(kvtier_miss_blocks_total{{{WHERE}}}[$__rate_interval])) > 0"},
            "docs/operations.md has each reason and its remedy.",
        ),
        Panel(
            "Tokens",
            "ops",
            {
                "read from {{tier}}": f"sum by (tier) (rate(kvtier_read_tokens_total{{{WHERE}}}[$__rate_interval]))",
                "missed": f"sum(rate(kvtier_missed_tokens_total{{{WHERE}}}[$__rate_interval]))",
                "stored": f"sum(rate(kvtier_written_tokens_total{{{WHERE}}}[$__rate_interval]))",
            },
            "Tokens per second that need no prefill, that need it, and that were stored.",
        ),
    ],
    "Tiers": [
        Panel(
            "Health",
            "short",
            {"{{instance}} {{tier}}": f'kvtier_tier_health{{{WHERE},state="well"}}'},
            "0: out of use.",
        ),
        Panel(
            "Full",
            "percentunit",
            {"{{instance}} {{tier}}": f"kvtier_tier_bytes{{{WHERE}}} / (kvtier_tier_capacity_bytes{{{WHERE}}} > 0)"},
        ),
        Panel("Blocks held", "short", {"{{instance}} {{tier}}": f"kvtier_tier_blocks{{{WHERE}}}"}),
        Panel(
            "Evicted blocks",
            "ops",
            {"{{tier}}": f"sum by (tier) (rate(kvtier_tier_evicted_blocks_total{{{WHERE}}}[$__rate_interval]))"},
        ),
        Panel(
            "Reads, p50 and p99",
            "s",
            {
                f"{{{{tier}}}} p{name}": f"histogram_quantile({share}, sum by (tier, le) (rate("
                f'kvtier_tier_call_seconds_bucket{{{WHERE},verb="read"}}[$__rate_interval])))'
                for name, share in (("50", 0.5), ("99", 0.99))
            },
        ),
        Panel(
            "Writes, p99",
            "s",
            {
                "{{tier}}": "histogram_quantile(0.99, sum by (tier, le) (rate("
                f'kvtier_tier_call_seconds_bucket{{{WHERE},verb="write"}}[$__rate_interval])))'
            },
        ),
        Panel(
            "Traffic",
            "Bps",
            {
                f"{{{{tier}}}} {way}": "sum by (tier) (rate("
                f"kvtier_tier_{way}_bytes_total{{{WHERE}}}[$__rate_interval]))"
                for way in ("read", "written")
            },
        ),
        Panel(
            "Waiting to be written",
            "short",
            {
                "{{instance}} {{tier}}": f"kvtier_tier_pending_blocks{{{WHERE}}}",
                "{{instance}} dropped/s": f"rate(kvtier_dropped_blocks_total{{{WHERE}}}[$__rate_interval])",
            },
        ),
    ],
    "The disk": [
        Panel(
            "Written per day, and the budget",
            "bytes",
            {
                "{{instance}} written": "86400 * "
                f"rate(kvtier_tier_device_written_bytes_total{{{WHERE}}}[$__rate_interval])",
                "{{instance}} budget": f"kvtier_tier_write_budget_bytes{{{WHERE}}}",
            },
            "What the device takes at the present rate; tiers.g3.write_budget.",
        ),
        Panel(
            "Write amplification",
            "short",
            {"{{instance}}": f"kvtier_tier_write_amplification{{{WHERE}}}"},
            "Bytes on the device per byte of stored blocks.",
        ),
    ],
    "Trouble": [
        Panel(
            "Failed checks and foreign objects",
            "ops",
            {
                "{{tier}} {{reason}}": "sum by (tier, reason) (rate(kvtier_tier_miss_blocks_total{"
                f'{WHERE},reason=~"corrupt|mismatch|forged|foreign|unknown_key|no_key|wrong_key|unproven"}}'
                "[$__rate_interval]))"
            },
        ),
        Panel(
            "Late, quarantined, unanswered",
            "short",
            {
                "{{tier}} quarantined": f"sum by (tier) (kvtier_tier_quarantined_blocks{{{WHERE}}})",
                "{{tier}} late/s": f"sum by (tier) (rate(kvtier_tier_late_blocks_total{{{WHERE}}}[$__rate_interval]))",
                "abandoned tasks": f"sum(kvtier_abandoned_tasks_total{{{WHERE}}})",
            },
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it; the data source is asked for."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in ROWS.items():
        panels.append({"type": "row", "title": row, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "panels": []})
        y += 1
        for index, panel in enumerate(members):
            place = {"h": 8, "w": 12, "x": 12 * (index % 2), "y": y + 8 * (index // 2)}
            panels.append(_panel(panel, place))
        y += 8 * -(-len(members) // 2)
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "title": "kvtier", "uid": "kvtier", "schemaVersion": 38, "editable": True, "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"}, "tags": ["kvtier"], "panels": panels,
        "__inputs": [{"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}],
        "templating": {"list": [_variable("job"), _variable("instance")]},
    }  # fmt: skip


SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend, "datasource": SOURCE}
        for number, (legend, query) in enumerate(panel.queries.items())
    ]
    defaults = {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8, "lineWidth": 2, "showPoints": "never"}}
    return {
        "type": "timeseries", "title": panel.title, "description": panel.meaning, "gridPos": place,
        "datasource": SOURCE, "targets": targets, "fieldConfig": {"defaults": defaults, "overrides": []},
    }  # fmt: skip


def _variable(label: str) -> dict[str, Any]:
    return {
        "name": label, "type": "query", "datasource": SOURCE, "multi": True, "includeAll": True, "refresh": 2,
        "query": f"label_values(kvtier_build_info, {label})", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("grafana.json").write_text(text())
