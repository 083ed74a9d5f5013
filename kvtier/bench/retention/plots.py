"""The report's pictures as PNG, and that of the policies. Needs matplotlib (`kvtier[bench]`)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvtier.bench.retention.charts import duration
from kvtier.bench.retention.worth import Worth
from kvtier.errors import ConfigError

COLORS = {"g1": "#0b3d91", "g2": "#1f6feb", "g3": "#5aa9e6", "g4": "#9fd0c4", "left": "#f0b86b"}


def _figure(width: float = 8.0, height: float = 3.6) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'kvtier[bench]'") from None
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e4e0")
    axes.set_axisbelow(True)
    return figure, axes


def draw_worth(worth: Worth, folder: Path, stem: str) -> list[Path]:
    """Prefill left by ttl, hits by tier over time, first token by idle gap. Blocks on the disk."""
    paths = [folder / f"{stem}-{name}.png" for name in ("ttl", "tiers", "ttft")]
    figure, axes = _figure()
    axes.plot(*zip(*worth.ttl_points, strict=True), marker="o", color=COLORS["g2"])
    axes.set_xscale("log")
    axes.set_xticks([t for t, _ in worth.ttl_points], [duration(t) for t, _ in worth.ttl_points], minor=False)
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.set_xlabel("idle KV is kept for")
    axes.set_ylabel("left to prefill, %")
    figure.savefig(paths[0])

    figure, axes = _figure()
    names = [store.name for store in worth.stores]
    hours = [hour["hour"] for hour in worth.hours]
    width = 0.85 * (min(b - a for a, b in pairwise(hours)) if len(hours) > 1 else 1.0)
    below = [0.0] * len(hours)
    for name in names:
        shares = [hour[name] for hour in worth.hours]
        axes.bar(hours, shares, width, below, color=COLORS[name], label=name.upper())
        below = [a + b for a, b in zip(below, shares, strict=True)]
    axes.bar(hours, [100 - b for b in below], width, below, color=COLORS["left"], label="prefill")
    axes.set_xlabel("hours since the start")
    axes.set_ylabel("block references, %")
    axes.legend(frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(paths[1])

    figure, axes = _figure()
    places = range(len(worth.gaps))
    for kind, down, color, label in (
        ("ttft", -0.17, COLORS["g2"], "all tiers"),
        ("without", 0.17, "#8a9199", "VRAM only"),
    ):
        low, middle, high = ([g[f"{kind}_p{n}_s"] for g in worth.gaps.values()] for n in (10, 50, 90))
        rows = [place + down for place in places]
        axes.hlines(rows, low, high, color=color, alpha=0.35, linewidth=6, capstyle="round")
        axes.plot(middle, rows, "o", color=color, label=label)
    axes.set_yticks(list(places), list(worth.gaps))
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e3e4e0")
    axes.set_xlabel("time to first token, s: median, 10th to 90th percentile (modelled)")
    axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(paths[2])
    return paths


def draw_policies(results: Mapping[str, Any], path: Path) -> None:
    """Hits above leaf-first LRU by capacity, one panel per trace with enough sizes, with the ceiling. Blocks."""
    results = {name: found for name, found in results.items() if len(found["percent_of_footprint"]) >= 4}
    rows_of_panels = -(-len(results) // 2)
    figure, _ = _figure(9.6, 4.0 * rows_of_panels)
    figure.clear()
    figure.set_facecolor("#ffffff")  # legible on a dark page, too
    panels = list(figure.subplots(rows_of_panels, 2, squeeze=False).flat)
    for unused in panels[len(results) :]:
        unused.set_visible(False)
    styles = {
        "gapduel": ("#1f6feb", 2.6), "arc": ("#8a6fd1", 1.3), "s3fifo": ("#3f9e7a", 1.3),
        "lru + 60 s·log2 f": ("#d98c3f", 1.3), "lru + 300 s·log2 f": ("#c0504d", 1.3), "ceiling": ("#9aa1a9", 1.3),
    }  # fmt: skip
    for panel, (name, found) in zip(panels, results.items(), strict=False):
        rows = found["percent_of_footprint"]
        sizes = [float(size) for size in rows]
        for policy, (color, width) in styles.items():
            dashed = "--" if policy == "ceiling" else "-"
            gains = [row[policy] - row["lru"] for row in rows.values()]
            panel.plot(sizes, gains, dashed, color=color, linewidth=width, label=policy)
        panel.axhline(0, color="#1d2125", linewidth=1)
        panel.set_xscale("log")
        panel.set_title(name, fontsize=12)
        panel.set_xlabel("capacity, % of distinct blocks")
        panel.set_ylabel("points of hits above leaf-first LRU")
        panel.set_ylim(-12, 30)
        panel.spines[["top", "right"]].set_visible(False)
    panels[min(1, len(results) - 1)].legend(frameon=False, fontsize=10, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
