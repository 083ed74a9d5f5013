"""The table of `make gpu-check` as one HTML page without scripts or other files, ready to publish. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gpu.table import table

_STYLE = (
    "body{font:15px system-ui;margin:2em;max-width:75em}td{padding:.2em 1em .2em 0;vertical-align:top}"
    ".bad{color:#b00}th{text-align:left}"
)


def page(results: Mapping[str, Any], failed: Sequence[str]) -> str:
    """`results` as written to the JSON; `failed` as `gpu.table.failures` has them."""
    about = results["environment"]
    title = f"gpu-check: {about.get('gpu', 'no GPU')}"
    state = "complete" if results["complete"] else "interrupted"
    body = [f"<h1>{escape(title)}</h1>", f"<p>{state}, {results.get('seconds', 0)} s; {len(failed)} failed</p>"]
    body += [f'<p class="bad">failed: {escape(name)}</p>' for name in failed]
    body += [
        "<table>",
        *(_row(line) for line in table(results["parts"])),
        "</table>",
        "<h2>Environment</h2>",
        "<table>",
    ]
    body += [*(_row((name, str(value))) for name, value in about.items()), "</table>"]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return "\n".join([f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>', *body, "</body></html>"]) + "\n"


def _row(cells: Sequence[str]) -> str:
    bad = any(cell.startswith(("FAILED", "MISSED", "not run")) for cell in cells)
    inner = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr class="bad">{inner}</tr>' if bad else f"<tr>{inner}</tr>"
