"""The screen of `kvtier top`: figures of a cache, read from Prometheus text, as tables and lines. Pure."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvtier.cli.ask import shown
from kvtier.cli.top_latest import NOTHING

Figures = dict[str, dict[str, float]]
"""Per tier ("" for requests): metric name without prefix, with its further labels in brackets → figure."""

OURS = frozenset({"tier", "reason", "outcome", "kind", "state", "verb", "class", "task", "event", "le", "version"})
"""Labels of kvtier's own; figures that differ in an engine's labels alone, such as its rank, are added up."""

_BOUND = re.compile(r"\+Inf|\d+(\.\d+)?(e-?\d+)?", re.ASCII)

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 60
DAY_S = 86_400.0


def parse_figures(text: str) -> Figures:
    """kvtier's figures in a page of metrics, its own or an engine's. Raises ValueError."""
    figures: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            prefix, found, name = sample.name.partition("kvtier_")
            if not found or prefix not in ("", "vllm:", "sglang:"):
                continue
            if name.endswith("_created") or not math.isfinite(sample.value):
                continue  # a client library's time of a counter's birth, or of a broken exporter: nothing to show
            labels = {label: shown(value) for label, value in sorted(sample.labels.items()) if label in OURS}
            tier = labels.pop("tier", "")
            short = name.removeprefix("tier_").removesuffix("_total")
            figures[tier]["".join([short, *(f"[{value}]" for value in labels.values())])] += sample.value
    return {tier: {name: sum_ for name, sum_ in each.items() if math.isfinite(sum_)} for tier, each in figures.items()}


@dataclass(slots=True)
class Screen:
    """Two successive readings and what was seen before. `seconds`: between them. `fault`: why there is no later one."""

    now: Figures
    before: Figures = field(default_factory=dict)
    seconds: float = 0.0
    hit_rates: list[float] = field(default_factory=list)
    fault: str = ""
    latest: dict[str, Any] = field(default_factory=lambda: dict(NOTHING))
    """Of the engine's requests, for the page."""

    def read(self, figures: Figures, seconds: float) -> None:
        """Take a reading in, `seconds` after the last good one."""
        self.before, self.now, self.seconds, self.fault = self.now, figures, seconds, ""
        wanted = self._grown("", "lookup_blocks")
        if wanted:
            self.hit_rates = [*self.hit_rates, self._grown("", "hit_blocks") / wanted][-HISTORY:]

    def render(self) -> RenderableType:
        """Everything, for a terminal."""
        lines = [Text(line) for line in self._lines()]
        if self.fault:
            lines.insert(0, Text(self.fault, style="bold red"))
        return Group(*lines[:-1], self._table(), lines[-1])

    def report(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        requests = self.now.get("", {})
        promises = dict(_labelled(requests, "promises"))
        return {
            "version": self._version(),
            "fault": self.fault,
            "hit_rates": self.hit_rates,
            "requests": {
                "requested": requests.get("lookup_blocks", 0),
                "served": requests.get("hit_blocks", 0),
                "misses": _labelled(requests, "miss_blocks"),
                "dropped": requests.get("dropped_blocks", 0),
                **{kind: promises.get(kind, 0) for kind in ("pins", "pinned", "guaranteed")},
                "sessions": dict(_labelled(requests, "sessions")),
                "hints": dict(_labelled(requests, "hints")),
            },
            "tiers": [self._tier_report(tier) for tier in sorted(self.now) if tier],
            "latest": self.latest,
        }

    def _tier_report(self, tier: str) -> dict[str, Any]:
        now = self.now[tier]
        plain = {name: now.get(name, 0) for name in ("blocks", "bytes", "capacity_bytes")}
        counted = {"hits": "hit_blocks", "leased": "pinned_blocks", "pending": "pending_blocks"}
        return {
            "name": tier,
            "health": self._health(tier),
            **plain,
            **{short: now.get(name, 0) for short, name in counted.items()},
            "read_bytes_s": self._bytes_s(tier, "read_bytes"),
            "written_bytes_s": self._bytes_s(tier, "written_bytes"),
            "p99_ms": self._p99s(tier),
            "wear": self._wear(tier),
        }

    def _version(self) -> str:
        return next((name[11:-1] for name in self.now.get("", {}) if name.startswith("build_info[")), "")

    def _health(self, tier: str) -> str:
        return next((state for state, one in _labelled(self.now[tier], "health") if one), "")

    def _p99s(self, tier: str) -> str:
        p99 = [self._p99_ms(tier, verb) for verb in ("read", "write")]
        return "/".join(one or "–" for one in p99) if any(p99) else ""

    def _lines(self) -> Iterator[str]:
        requests = self.now.get("", {})
        wanted, served = requests.get("lookup_blocks", 0), requests.get("hit_blocks", 0)
        share = f"{served / wanted:.1%}" if wanted else "none"
        yield f"kvtier {self._version()}  {wanted:,.0f} blocks requested, {share} served".replace("kvtier   ", "")
        if self.hit_rates:
            yield f"hit rate {sparkline(self.hit_rates)} {self.hit_rates[-1]:.1%} now"
        why = ", ".join(f"{reason} {figure:,.0f}" for reason, figure in _labelled(requests, "miss_blocks")[:4])
        yield f"misses: {why or 'none'}"
        promises = dict(_labelled(requests, "promises"))
        yield (
            f"pins {promises.get('pins', 0):,.0f}, pinned blocks {promises.get('pinned', 0):,.0f}, guaranteed "
            f"{promises.get('guaranteed', 0):,.0f}; dropped {requests.get('dropped_blocks', 0):,.0f}"
        )
        sessions, hints = dict(_labelled(requests, "sessions")), _labelled(requests, "hints")
        if sessions or hints:
            said = ", ".join(f"{outcome} {count:,.0f}" for outcome, count in hints)
            yield (
                f"sessions {sessions.get('sessions', 0):,.0f}, their blocks {sessions.get('blocks', 0):,.0f}; hints: "
                f"{said or 'none'}"
            )

    def _table(self) -> TierTable:
        names = (
            "health",
            "blocks",
            "bytes",
            "full",
            "hits",
            "leased",
            "read",
            "written",
            "p99 r/w ms",
            "pending",
            "wear",
        )
        return TierTable(names, {tier: self._cells(tier) for tier in sorted(self.now) if tier})

    def _cells(self, tier: str) -> Sequence[str | Text]:
        now = self.now[tier]
        capacity, held = now.get("capacity_bytes", 0), now.get("bytes", 0)
        health = self._health(tier)
        return [
            Text(health, style="" if health == "well" else "bold red"),
            f"{now.get('blocks', 0):,.0f}",
            f"{held / 2**30:,.1f} GiB" if held >= 1 << 30 else f"{held / 2**20:,.1f} MiB",
            f"{held / capacity:.0%}" if capacity else "",
            f"{now.get('hit_blocks', 0):,.0f}",
            f"{now.get('pinned_blocks', 0):,.0f}",
            self._rate(tier, "read_bytes"),
            self._rate(tier, "written_bytes"),
            self._p99s(tier),
            f"{now.get('pending_blocks', 0):,.0f}",
            self._wear(tier),
        ]

    def _bytes_s(self, tier: str, name: str) -> float | None:
        known = self.seconds > 0 and name in self.now[tier] and name in self.before.get(tier, {})
        return self._grown(tier, name) / self.seconds if known else None

    def _rate(self, tier: str, name: str) -> str:
        bytes_s = self._bytes_s(tier, name)
        return "" if bytes_s is None else f"{bytes_s / 2**20:,.1f} MiB/s"

    def _wear(self, tier: str) -> str:
        """Bytes written to the device per day at the present rate, as a share of the budget where there is one, and
        whether that is spent, so that blocks are refused."""
        name = "device_written_bytes"
        if self.seconds <= 0 or not self.now[tier].get(name) or name not in self.before.get(tier, {}):
            return ""
        per_day = self._grown(tier, name) / self.seconds * DAY_S
        budget = self.now[tier].get("write_budget_bytes", 0)
        if not budget:
            return f"{per_day / 2**40:,.2f} TiB/day"
        spent = ", spent" if self._grown(tier, "stored_blocks[budget]") else ""
        return f"{per_day / budget:.0%} of budget{spent}"

    def _p99_ms(self, tier: str, verb: str) -> str:
        """Of the calls since the last reading, or of all where there were none; upper bound of its bucket."""
        since = {bound: self._grown(tier, name) for bound, name in _buckets(self.now[tier], verb)}
        ever = {bound: self.now[tier][name] for bound, name in _buckets(self.now[tier], verb)}
        counts = since if since and max(since.values()) > 0 else ever
        total = max(counts.values(), default=0)
        if total <= 0:
            return ""
        bound = min(bound for bound, count in counts.items() if count >= 0.99 * total)
        if math.isfinite(bound):
            return f"≤{bound * 1000:g}"
        least = max(filter(math.isfinite, counts), default=None)
        return "" if least is None else f">{least * 1000:g}"

    def _grown(self, tier: str, name: str) -> float:
        """Since the last reading; a counter that fell began anew."""
        now, before = self.now.get(tier, {}).get(name, 0.0), self.before.get(tier, {}).get(name, 0.0)
        return now - before if now >= before else now


@dataclass(frozen=True, slots=True)
class TierTable:
    """Cells of every tier, with a row per tier; with a column per tier where the terminal is too narrow for that."""

    names: Sequence[str]
    cells: Mapping[str, Sequence[str | Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = _plain_table("tier", *self.names)
        for tier, cells in self.cells.items():
            wide.add_row(tier, *cells)
        if Measurement.get(console, options.update(width=10_000), wide).maximum <= options.max_width:
            yield wide
            return
        tall = _plain_table("", *self.cells)
        for row, name in enumerate(self.names):
            tall.add_row(name, *(cells[row] for cells in self.cells.values()))
        yield tall


def _plain_table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bold")


def sparkline(shares: Sequence[float]) -> str:
    """Shares of 0 … 1 as bars of eight heights. Pure."""
    return "".join(BARS[min(7, int(8 * min(1.0, max(0.0, share))))] for share in shares)


def _labelled(figures: Mapping[str, float], name: str) -> list[tuple[str, float]]:
    """Label and figure of one metric, largest first, without zeros."""
    found = [(key[len(name) + 1 : -1], value) for key, value in figures.items() if key.startswith(f"{name}[") and value]
    return sorted(found, key=lambda item: -item[1])


def _buckets(figures: Mapping[str, float], verb: str) -> list[tuple[float, str]]:
    """Upper bound and key of each bucket of a verb's calls."""
    begin, end = "call_seconds_bucket[", f"][{verb}]"
    found = [key for key in figures if key.startswith(begin) and key.endswith(end)]
    return [(float(bound), key) for key in found if _BOUND.fullmatch(bound := key[len(begin) : -len(end)])]
