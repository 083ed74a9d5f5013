"""The retention report: one HTML file that needs nothing else, and the same pictures as PNG."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvtier.bench.retention.charts import duration, line, ranges, stacked
from kvtier.bench.retention.worth import PRICES, Worth

TIER_NAMES = {"g1": "G1 VRAM", "g2": "G2 RAM", "g3": "G3 SSD", "g4": "G4 objects"}

_STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfa; --ink: #1d2125; --soft: #68707a; --rule: #e3e4e0; --card: #ffffff;
  --main: #1f6feb; --g1: #0b3d91; --g2: #1f6feb; --g3: #5aa9e6; --g4: #9fd0c4; --left: #f0b86b; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e6e8ea; --soft: #98a1ab; --rule: #2b3036;
  --card: #1a1e22; --main: #6aa9ff; --g1: #3c6fd1; --g2: #6aa9ff; --g3: #8cc8f2; --g4: #7fb8aa; --left: #c98f3f; } }
* { box-sizing: border-box } body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 820px; margin: 0 auto; padding: 48px 20px 80px }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.01em; margin: 0 0 8px; text-wrap: balance }
h2 { font-size: 20px; margin: 52px 0 6px } p { margin: 6px 0 14px; max-width: 68ch } .soft { color: var(--soft) }
.doubt { border-left: 4px solid var(--left); padding: 2px 12px }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 28px 0 }
.figure { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px }
.figure b { display: block; font-size: clamp(19px, 5vw, 24px); white-space: nowrap;
  line-height: 1.15; font-variant-numeric: tabular-nums }
.figure span { color: var(--soft); font-size: 13px }
.chart { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  margin: 12px 0 }
svg { width: 100%; min-width: 640px; height: auto; display: block }
.grid { stroke: var(--rule) } .line { fill: none; stroke: var(--main); stroke-width: 2.5 }
.dot { fill: var(--main) } .hollow { fill: var(--card); stroke: var(--soft); stroke-width: 2 }
.range { stroke-width: 7; stroke-linecap: round; opacity: .35 } .dot-range { stroke: var(--main) }
.hollow-range { stroke: var(--soft) }
text { fill: var(--soft); font-size: 12px; font-family: inherit } text.value { fill: var(--ink); font-size: 12px }
text.name { fill: var(--ink); font-size: 13px }
.g1 { fill: var(--g1) } .g2 { fill: var(--g2) } .g3 { fill: var(--g3) } .g4 { fill: var(--g4) }
.left { fill: var(--left) }
.keys { display: flex; flex-wrap: wrap; gap: 6px 18px; font-size: 14px; color: var(--soft); margin: 4px 0 0;
  padding: 0 }
.keys li { list-style: none } .keys i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 7px; background: currentColor }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: 14px; margin: 10px 0;
  font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--rule) }
th { color: var(--soft); font-weight: 500 } th:first-child, td:first-child { text-align: left; padding-left: 0 }
code { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere }
footer { margin-top: 56px; border-top: 1px solid var(--rule); padding-top: 16px; font-size: 14px; color: var(--soft) }
"""


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(_shown(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _figure(value: str, meaning: str) -> str:
    return f'<div class="figure"><b>{html.escape(value)}</b><span>{html.escape(meaning)}</span></div>'


def _keys(names: Sequence[str]) -> str:
    labels = TIER_NAMES | {"left": "left to prefill"}
    items = "".join(f'<li><i style="color: var(--{n})"></i>{html.escape(labels[n])}</li>' for n in names)
    return f'<ul class="keys">{items}</ul>'


def render(worth: Worth, origin: Mapping[str, Any], replayed: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The page. `origin`: command, commit and machine, as `kvtier.bench.record` gives them; `replayed`: as
    `kvtier.bench.retention.replay.summary` gives it. Pure."""
    trace, given = worth.trace, worth.assumptions
    points = dict(worth.ttl_points)
    longest, ten = max(points), 600.0
    claim = (
        f"Keeping KV for {duration(longest)} leaves {points[longest]:.1f} % of the prompt to prefill; "
        f"ten minutes leave {points[ten]:.1f} %"
    )
    parts = [
        f"<h1>{html.escape('What keeping KV saves' if worth.doubts else claim)}</h1>",
        f'<p class="soft">{html.escape(str(trace["name"]))}: {trace["requests"]:,} requests over {trace["hours"]:g} h, '
        f"{trace['references']:,} references to {trace['unique_blocks']:,} blocks of {trace['block_tokens']} tokens. "
        f"As {html.escape(given.shape.name)} ({given.shape.bytes_per_token:,} bytes per token) that is "
        f"{trace['footprint_gb']:,} GB of KV.</p>",
        *(f'<p class="doubt">Too small a trace: {html.escape(doubt)}.</p>' for doubt in worth.doubts),
        *([] if worth.doubts else [_headline(worth, points, longest)]),
        "<h2>Prefill left, by retention of idle KV</h2>",
        "<p>Sliding: every use renews. Unbounded capacity. Exact for this trace.</p>",
        line(
            worth.ttl_points,
            {t: duration(t) for t in points},
            "Share of block references left to prefill by retention",
        ),
        *_tiers(worth),
        *_waiting(worth),
        *([] if worth.doubts else _money(worth)),
        *_replayed(replayed),
        _footer(worth, origin),
    ]
    title = f"kvtier retention: {trace['name']}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
        f"</head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _headline(worth: Worth, points: Mapping[float, float], longest: float) -> str:
    resumed = [gap for gap in ("10-60 min", "1-4 h") if gap in worth.gaps]
    figures = [
        _figure(f"{points[longest] / points[600.0]:.2f}×", f"prefill at {duration(longest)} against 10 min"),
        _figure(f"{100 - worth.prefill_left_percent:.1f} %", "served by this stack"),
    ]
    if resumed:
        g = worth.gaps[resumed[0]]
        figures.append(
            _figure(
                f"{g['without_p50_s']:.2g} → {g['ttft_p50_s']:.2g} s", f"median first token after {resumed[0]} idle"
            )
        )
    if worth.ssd:
        figures.append(_figure(f"{worth.ssd['drive_writes_per_day']:,.2f}", "drive writes per day on the SSD"))
    return f'<div class="figures">{"".join(figures)}</div>'


def _tick(hours: float) -> str:
    return f"{hours:.1f}".removesuffix(".0")


def _tiers(worth: Worth) -> list[str]:
    names = [store.name for store in worth.stores]
    columns = [
        (_tick(hour["hour"]), {**{n: hour[n] for n in names}, "left": 100 - sum(hour[n] for n in names)})
        for hour in worth.hours
    ]
    rows = [
        (TIER_NAMES[s.name], s.size_bytes / 1e9, worth.percent[s.name], s.read_gb_s, worth.break_even[s.name]["factor"])
        for s in worth.stores
    ]
    needed = worth.break_even[names[0]]["needed_gb_s"]
    return [
        "<h2>Where the prompt came from, over time</h2>",
        f"<p>Hours since the start. Leaf-first LRU in every tier, written through on creation, retention "
        f"{html.escape('unbounded' if worth.ttl == float('inf') else duration(worth.ttl))}.</p>",
        _keys([*names, "left"]),
        stacked(columns, "Share of block references served by each tier over time"),
        _table(["Tier", "GB", "served %", "read GB/s", "× break-even"], rows),
        f'<p class="soft">A tier pays only if it delivers faster than the engine computes: {needed:.2f} GB/s at '
        f"{worth.assumptions.shape.prefill_tokens_s:,.0f} prefill tokens/s.</p>",
    ]


def _waiting(worth: Worth) -> list[str]:
    rows = [
        (gap, (g["ttft_p10_s"], g["ttft_p50_s"], g["ttft_p90_s"]),
         (g["without_p10_s"], g["without_p50_s"], g["without_p90_s"]))
        for gap, g in worth.gaps.items()
    ]  # fmt: skip
    table = [
        (gap, *(g[name] for name in ("requests", "reused_tokens_mean", "ttft_p50_s", "ttft_p90_s", "without_p50_s",
                                     "without_p90_s")))
        for gap, g in worth.gaps.items()
    ]  # fmt: skip
    if not rows:
        return []
    return [
        "<h2>Time to first token, by how long a session paused</h2>",
        "<p>Bars reach from the 10th to the 90th percentile of each class, the dot and the figure are its median. "
        "Modelled from prefill rate and bandwidths, without queueing; on the logarithmic axis equal factors are equal "
        "distances.</p>",
        '<ul class="keys"><li><i style="color: var(--main)"></i>all tiers</li>'
        '<li><i style="color: var(--soft)"></i>VRAM alone</li></ul>',
        ranges(rows, "Modelled time to first token by idle gap, with and without lower tiers"),
        _table(["Pause", "requests", "tokens reused", "p50 s", "p90 s", "p50 s, VRAM only", "p90 s, VRAM only"], table),
    ]


def _money(worth: Worth) -> list[str]:
    out = ["<h2>SSD wear and cost</h2>"]
    if worth.ssd:
        out.append(
            f"<p>The SSD takes {worth.ssd['written_gb_per_day']:,.0f} GB a day, "
            f"{worth.ssd['drive_writes_per_day']:,.2f} drive writes; rated for "
            f"{worth.assumptions.drive_writes_per_day:g} over {worth.assumptions.drive_years:g} years it lasts "
            f"{worth.ssd['endurance_days']:,.0f} days.</p>"
        )
    cost = worth.cost
    out.append(
        _table(
            ["$ per month", "VRAM only", "this stack"],
            [
                ("GPU time of prefill", cost["gpu_without"], cost["gpu_with"]),
                ("RAM, SSD, objects", 0.0, cost["storage"]),
                ("together", cost["gpu_without"], cost["gpu_with"] + cost["storage"]),
            ],
        )
    )
    prices = ", ".join(f"{TIER_NAMES[n]} {p:g}" for n, p in PRICES.items() if p)
    out.append(
        f'<p class="soft">Assumed: a GPU-hour {worth.assumptions.gpu_hour:g} $; $ per GB and month: '
        f"{html.escape(prices)}. Scaled as if every day were like the trace.</p>"
    )
    return out


def _replayed(results: Mapping[str, Any]) -> list[str]:
    runs = {kept: run for kept, run in results.items() if isinstance(run, Mapping)}
    if not runs:
        return []
    rows = [
        (kept, run["prefill_left_percent"],
         ", ".join(f"{name} {share:.3g} %" for name, share in run["tiers_percent"].items()),
         run["gb_checked"], run["load_p50_ms"] or 0.0, run["load_p99_ms"] or 0.0, run["seconds"])
        for kept, run in runs.items()
    ]  # fmt: skip
    killed = any(run["killed_before_request"] >= 0 for run in runs.values())
    return [
        "<h2>Replayed with real bytes</h2>",
        f"<p>{results['references_replayed']:,} references through kvtier itself, KV scaled to "
        f"{results['bytes_per_token']} bytes per token, every byte compared"
        f"{'; the process was killed halfway and another went on' if killed else ''}.</p>",
        _table(["Kept", "left to prefill %", "served", "GB checked", "load p50 ms", "load p99 ms", "seconds"], rows),
    ]


def _footer(worth: Worth, origin: Mapping[str, Any]) -> str:
    machine = ", ".join(f"{k} {v}" for k, v in origin.get("machine", {}).items())
    return (
        f"<footer><p>Made by <code>{html.escape(str(origin.get('command', '')))}</code> at commit "
        f"<code>{html.escape(str(origin.get('commit', '')))}</code>, {html.escape(str(origin.get('date', '')))}, on "
        f"{html.escape(machine)}.</p><p>Hits are exact for the trace; times and money are modelled from the rates "
        "above; replace these assumptions by your own.</p></footer>"
    )


def write_report(
    path: Path, worth: Worth, origin: Mapping[str, Any], replayed: Mapping[str, Any] = MappingProxyType({})
) -> list[Path]:
    """Write the page to `path` and PNG files beside it; returns what was written. Blocks. The rest as for `render`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(worth, origin, replayed))
    from kvtier.bench.retention.plots import draw_worth

    return [path, *draw_worth(worth, path.parent, path.stem)]
