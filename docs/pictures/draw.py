"""Draws the pictures of the documents from text.

    python docs/pictures/draw.py docs/pictures/*.toml         writes an SVG beside each source

A source has a `title`, a `desc`, a `size` and, in units of the drawing:

    box     name, at = [x, y, width, height], class, lines; align (start, middle, end); code, right of its first line
    arrow   from, to (names of boxes), x or y of the line where their sides face each other; label, both, class

A line begins with its kind: "# " a heading, "` " names of code, "~ " said in passing, "! " a way out; or plain.
The output has no sizes of its own, takes the fonts of whoever looks, and changes its colours where dark ones are
preferred. It depends on the source alone. A text that may not fit its box is an error.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

MARGIN = 14
HEAD = 9
KINDS = {
    "#": ("head", 22, 8.5),
    "`": ("code", 18, 7.3),
    "~": ("faint", 18, 6.6),
    "!": ("out", 19, 6.8),
    "": ("text", 19, 6.8),
}
"""Of a line: its class, its height, and the width that a character is given; most fonts need less."""

LIGHT = {
    "paper": "#ffffff", "ink": "#1f2328", "faint": "#59636e", "code": "#3d4650",
    "down": "#bc4c00", "up": "#0757ba", "out": "#b3261e",
    "plain": "#f6f8fa #818b98", "g1": "#f6f0ff #8250df", "g2": "#e9f3ff #0969da", "g3": "#e8f7ec #1a7f37",
    "g4": "#fff6dc #9a6700", "miss": "#ffeeed #cf222e",
}  # fmt: skip
DARK = {
    "paper": "#0d1117", "ink": "#f0f6fc", "faint": "#a5aeb8", "code": "#c4ccd4",
    "down": "#f0883e", "up": "#6cb0ff", "out": "#ff8f87",
    "plain": "#161b22 #7d8590", "g1": "#22173a #a371f7", "g2": "#0e2240 #4493f8", "g3": "#0f2a18 #3fb950",
    "g4": "#2d220b #d29922", "miss": "#35171a #f85149",
}  # fmt: skip
FONTS = """\
  text { font: 13.5px "Segoe UI", "Liberation Sans", Arial, Helvetica, sans-serif; }
  .head { font-size: 16px; font-weight: 600; }
  .faint { font-size: 13px; }
  .code { font: 12px Menlo, Consolas, "Liberation Mono", "DejaVu Sans Mono", monospace; }
  .label { font-size: 13px; }
  rect { stroke-width: 1.5; }
  path { fill: none; stroke-width: 2; }
  .dashed { stroke-dasharray: 5 4; }
  .bare, .stroke-bare { fill: none; stroke: none; }
"""


def draw(source: str) -> str:
    """The SVG of a TOML source. Raises ValueError for text that may not fit."""
    picture = tomllib.loads(source)
    width, height = picture["size"]
    boxes = {box["name"]: box for box in picture["box"]}
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(picture["title"])}</title>',
        f'<desc id="d">{escape(picture["desc"])}</desc>',
        "<style>",
        FONTS + _colours(LIGHT, "  ") + "  @media (prefers-color-scheme: dark) {\n" + _colours(DARK, "    ") + "  }",
        "</style>",
        f'<rect class="paper" x="0" y="0" width="{width}" height="{height}" rx="10"/>',
    ]
    for box in boxes.values():
        out += _box(box)
    for arrow in picture.get("arrow", ()):
        out += _arrow(arrow, boxes[arrow["from"]]["at"], boxes[arrow["to"]]["at"])
    return "\n".join([*out, "</svg>", ""])


def _colours(palette: Mapping[str, str], indent: str) -> str:
    rules = []
    for name, value in palette.items():
        fill, _, stroke = value.partition(" ")
        if stroke:
            rules.append(f".{name} {{ fill: {fill}; stroke: {stroke}; }}")
        elif name == "ink":
            rules.append(f"text {{ fill: {fill}; }} path {{ stroke: {fill}; }} polygon {{ fill: {fill}; }}")
        elif name in ("up", "down", "out"):
            rules.append(f"path.{name} {{ stroke: {fill}; }} polygon.{name}, text.{name} {{ fill: {fill}; }}")
        else:
            rules.append(f".{name} {{ fill: {fill}; }}")
    return "".join(f"{indent}{rule}\n" for rule in rules)


def _box(box: Mapping[str, Any]) -> Iterator[str]:
    x, y, width, height = box["at"]
    kind = box.get("class", "plain")
    if kind != "bare":
        yield f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'
    lines = [_line(text) for text in box.get("lines", ())]
    align = box.get("align", "start")
    at = {"start": x + MARGIN, "middle": x + width / 2, "end": x + width - MARGIN}[align]
    code = box.get("code", "")
    base = y + (height - sum(KINDS[mark][1] for mark, _ in lines)) / 2
    for number, (mark, text) in enumerate(lines):
        style, line_height, char = KINDS[mark]
        base += line_height
        beside = code if number == 0 else ""
        needed = len(text) * char + len(beside) * KINDS["`"][2]
        if needed > width - (4 if align == "middle" else MARGIN):
            raise ValueError(f"{text!r} may not fit {box['name']}: {needed:.0f} of {width} units")
        yield _text(at, base - 0.32 * line_height, text, style, align)
        if beside:
            yield _text(x + width - MARGIN, base - 0.32 * line_height, beside, "code", "end")


def _line(text: str) -> tuple[str, str]:
    mark, _, rest = text.partition(" ")
    return (mark, rest) if mark in KINDS else ("", text)


def _arrow(arrow: Mapping[str, Any], start: list[float], end: list[float]) -> Iterator[str]:
    """A straight line between the sides of two boxes that face each other, at `x` or `y`."""
    upright = "x" in arrow
    axis = 1 if upright else 0
    forward = start[axis] < end[axis]
    first = start[axis] + start[axis + 2] if forward else start[axis]
    last = end[axis] if forward else end[axis] + end[axis + 2]
    step = HEAD if forward else -HEAD
    across = arrow["x"] if upright else arrow["y"]
    ends = [(last, step)] + ([(first, -step)] if arrow.get("both") else [])
    line = (first + (step if arrow.get("both") else 0), last - step)
    shape = "{} {}" if upright else "{1} {0}"
    kind = arrow.get("class", "")
    path = " L".join(shape.format(*(f"{number:g}" for number in (across, point))) for point in line)
    yield f'<path class="{kind}" d="M{path}"/>'
    for tip, back in ends:
        points = ((across, tip), (across - 5, tip - back), (across + 5, tip - back))
        yield (
            f'<polygon class="{kind}" points="'
            + " ".join(shape.format(f"{a:g}", f"{b:g}").replace(" ", ",") for a, b in points)
            + '"/>'
        )
    if label := arrow.get("label"):
        middle = (first + last) / 2
        if upright:
            side = -1 if arrow.get("side") == "left" else 1
            yield _text(across + 10 * side, middle + 4.5, label, f"label {kind}", "end" if side < 0 else "start")
        else:
            yield _text(middle, across - 8, label, f"label {kind}", "middle")


def _text(x: float, y: float, text: str, style: str, anchor: str) -> str:
    return f'<text class="{style.strip()}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> None:
    for name in sys.argv[1:]:
        source = Path(name)
        source.with_suffix(".svg").write_text(draw(source.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
