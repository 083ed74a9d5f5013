"""Charts as SVG text, coloured by the page's CSS variables so that one file is right in light and in dark."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from math import ceil, floor, log10

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 16, 44
ROW = 52
LABELS_MAX = 12
"""More labels below an axis would touch."""


def _frame(body: str, label: str, height: int = HEIGHT) -> str:
    return (
        f'<div class="chart"><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(label)}">'
        f"<title>{html.escape(label)}</title>{body}</svg></div>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{html.escape(text)}</text>'


def _grid(top: float, unit: str, height: int = HEIGHT) -> str:
    """Four horizontal lines up to `top`, which is at the upper edge."""
    out = []
    for step in range(5):
        y = height - BOTTOM - (height - TOP - BOTTOM) * step / 4
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        out.append(_text(LEFT - 8, y + 4, f"{top * step / 4:g}{unit}", "end"))
    return "".join(out)


def duration(seconds: float) -> str:
    """For readers: 600 → 10 min, 86400 → 24 h. Pure."""
    return f"{seconds / 60:g} min" if seconds < 3600 else f"{seconds / 3600:g} h"


def nice(value: float) -> float:
    """The next round number at or above `value`. Pure."""
    if value <= 0:
        return 1.0
    power = 10.0 ** int(log10(value) if value >= 1 else log10(value) - 1)
    steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10)  # a quarter of each is a round label
    return next(round(step * power, 9) for step in steps if step * power >= value - 1e-9)


def line(points: Sequence[tuple[float, float]], ticks: Mapping[float, str], label: str, unit: str = " %") -> str:
    """y over x on a logarithmic axis; every point is marked and lettered."""
    low, high = log10(points[0][0]), log10(points[-1][0])
    top = nice(max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - low) / (high - low or 1)
        return LEFT + 20 + across * (WIDTH - LEFT - RIGHT - 44), HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    body = [_grid(top, unit)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    body.append(f'<polyline points="{path}" class="line"/>')
    for x, y in points:
        cx, cy = place(x, y)
        body.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" class="dot"/>')
        body.append(_text(cx, cy - 10, f"{y:.3g}", kind="value"))
        if x in ticks:
            body.append(_text(cx, HEIGHT - BOTTOM + 20, ticks[x]))
    return _frame("".join(body), label)


def stacked(columns: Sequence[tuple[str, Mapping[str, float]]], label: str) -> str:
    """One column per entry, parts in percent stacked from below; at most LABELS_MAX are labelled."""
    step = (WIDTH - LEFT - RIGHT) / max(1, len(columns))
    every = -(-len(columns) // LABELS_MAX)
    body = [_grid(100, " %")]
    for number, (name, parts) in enumerate(columns):
        x, y = LEFT + number * step, float(HEIGHT - BOTTOM)
        for kind, share in parts.items():
            tall = share / 100 * (HEIGHT - TOP - BOTTOM)
            y -= tall
            hint = f"<title>{html.escape(f'{name}: {kind} {share:.1f} %')}</title>"
            body.append(
                f'<rect x="{x + step * 0.08:.1f}" y="{y:.2f}" width="{step * 0.84:.1f}" height="{tall:.2f}" '
                f'class="{html.escape(kind)}">{hint}</rect>'
            )
        if number % every == 0:
            body.append(_text(x + step / 2, HEIGHT - BOTTOM + 20, name))
    return _frame("".join(body), label)


Spread = tuple[float, float, float]
"""The 10th, 50th and 90th percentile."""


def ranges(rows: Sequence[tuple[str, Spread, Spread]], label: str, unit: str = " s") -> str:
    """Per row two bars from the 10th to the 90th percentile on a logarithmic axis, medians marked: ours above, filled,
    and without below it, hollow."""
    height = TOP + BOTTOM + ROW * len(rows)
    values = [max(v, 1e-3) for _, ours, without in rows for v in (*ours, *without)]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    start = 110

    def place(value: float) -> float:
        across = (log10(max(value, 1e-3)) - low) / (high - low or 1)
        return start + across * (WIDTH - start - RIGHT - 40)

    body = []
    for power in range(low, high + 1):
        x = place(10.0**power)
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}" class="grid"/>')
        body.append(_text(x, height - BOTTOM + 20, f"{10.0**power:g}{unit}"))
    for number, (name, ours, without) in enumerate(rows):
        y = TOP + ROW * (number + 0.5)
        body.append(_text(start - 14, y + 4, name, "end", "name"))
        for (few, middle, many), kind, down in ((ours, "dot", -9), (without, "hollow", 9)):
            a, b, m = place(few), place(many), place(middle)
            hint = f"{name}: {few:.3g} … {middle:.3g} … {many:.3g}{unit}"
            body.append(
                f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{y + down}" y2="{y + down}" class="range {kind}-range">'
                f"<title>{html.escape(hint)}</title></line>"
                f'<circle cx="{m:.1f}" cy="{y + down}" r="5" class="{kind}"/>'
            )
            body.append(_text(b + 9, y + down + 4, f"{middle:.2g}", "start", "value"))
    return _frame("".join(body), label, height)
