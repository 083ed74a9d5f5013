"""`kvtier top`: live figures of a running cache, from its metrics endpoint."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import defaultdict
from typing import Annotated

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.live import Live
from rich.table import Table

from kvtier.cli.output import Json, console, write_json
from kvtier.errors import InvalidRequest
from kvtier.units import shorten

TEXT_BYTES_MAX = 4 << 20
WAIT_S_MAX = 5.0

Url = Annotated[str, typer.Argument(help="The metrics endpoint.", metavar="[URL]")]
Interval = Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between two readings.")]
Once = Annotated[bool, typer.Option("--once", help="Read once and exit.")]

Figures = dict[str, dict[str, float]]
"""Per tier ("" for requests): metric name without prefix, with its further label in brackets → figure."""


def top(
    url: Url = "http://127.0.0.1:9400/metrics", interval: Interval = 2.0, once: Once = False, json: Json = False
) -> None:
    """Show tiers, hits, misses and rates of a cache whose process called `kvtier.metrics.serve`."""
    if json:
        write_json(read_figures(url))
        return
    figures = read_figures(url)
    if once:
        console().print(_table(figures, {}, interval))
        return
    with Live(_table(figures, {}, interval), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            before, figures = figures, read_figures(url)
            live.update(_table(figures, before, interval), refresh=True)


def read_figures(url: str) -> Figures:
    """The endpoint's present figures. Waits at most WAIT_S_MAX. Raises InvalidRequest naming the URL."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{shorten(url)} is not an http URL, such as http://127.0.0.1:9400/metrics")
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S_MAX) as answer:
            text = answer.read(TEXT_BYTES_MAX).decode()
        return _figures(text)
    except (urllib.error.URLError, OSError, ValueError) as wrong:
        raise InvalidRequest(f"{shorten(url)} gives no metrics: {wrong}") from wrong


def _figures(text: str) -> Figures:
    figures: Figures = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("kvtier_"):
                continue
            labels = dict(sample.labels)
            tier = labels.pop("tier", "")
            name = sample.name.removeprefix("kvtier_").removeprefix("tier_").removesuffix("_total")
            figures[tier]["".join([name, *(f"[{value}]" for value in labels.values())])] = sample.value
    return dict(figures)


def _table(now: Figures, before: Figures, interval: float) -> Table:
    table = Table(
        "tier",
        "blocks",
        "bytes",
        "full",
        "hits",
        "read/s",
        "written/s",
        "pending",
        title=_title(now),
        title_justify="left",
    )
    for tier in sorted(now):
        if tier:
            table.add_row(tier, *_cells(now[tier], before.get(tier, {}), interval))
    return table


def _cells(now: dict[str, float], before: dict[str, float], interval: float) -> list[str]:
    def rate(name: str) -> str:
        if name not in now or name not in before:
            return ""
        return f"{max(0.0, now[name] - before[name]) / interval / 2**20:,.1f} MiB"

    capacity, held = now.get("capacity_bytes", 0), now.get("bytes", 0)
    return [
        f"{now.get('blocks', 0):,.0f}",
        f"{held / 2**30:,.2f} GiB",
        f"{held / capacity:.0%}" if capacity else "",
        f"{now.get('hit_blocks', 0):,.0f}",
        rate("read_bytes"),
        rate("written_bytes"),
        f"{now.get('pending_blocks', 0):,.0f}",
    ]


def _title(now: Figures) -> str:
    requests = now.get("", {})
    wanted, served = requests.get("lookup_blocks", 0), requests.get("hit_blocks", 0)
    share = f"{served / wanted:.1%}" if wanted else "none"
    reasons = {name: figure for name, figure in requests.items() if name.startswith("miss_blocks[") and figure}
    worst = sorted(reasons.items(), key=lambda item: -item[1])[:3]
    why = ", ".join(f"{name.removeprefix('miss_blocks[').rstrip(']')} {figure:,.0f}" for name, figure in worst)
    return f"{wanted:,.0f} blocks requested, {share} served" + (f"; misses: {why}" if why else "")
