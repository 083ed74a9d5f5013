"""Policies at several sizes on a trace; adds to benchmarks/results/retention_policies.json and draws docs' picture.

    python benchmarks/retention_policies.py TRACE[@HOURS] [FRACTION …]

TRACE@2 is the trace with its sessions' starts squeezed into two hours. An entry replaces an earlier one of its trace
and size, but for the fixed policies, which are run once per size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvtier.bench.record import record, save
from kvtier.bench.retention.compare import FRACTIONS, compare
from kvtier.bench.retention.plots import draw_policies
from kvtier.bench.retention.traces import load_trace

SEED = 7


def main(argument: str, fractions: list[float]) -> None:
    folder = Path(__file__).parent / "results"
    path, _, hours = argument.partition("@")
    trace = load_trace(path)
    if hours:
        trace = trace.squeezed(float(hours) * 3600, SEED)
    rows = _earlier(folder / "retention_policies.json").get(trace.name, {}).get("percent_of_footprint", {})
    known = {float(size) / 100: row for size, row in rows.items()}
    for fraction, row in compare(trace, fractions or FRACTIONS, known):
        print(trace.name, f"{100 * fraction:g} %", row, flush=True)
        results = _earlier(folder / "retention_policies.json")
        entry = results.setdefault(trace.name, {"references": trace.references, "unique_blocks": trace.unique})
        rows = entry.setdefault("percent_of_footprint", {})
        rows[f"{100 * fraction:g}"] = row
        entry["percent_of_footprint"] = dict(sorted(rows.items(), key=lambda item: float(item[0])))
        command = ["python", "benchmarks/retention_policies.py", "TRACE[@HOURS]"]
        save(record("retention_policies", command, results), folder)
    draw_policies(_earlier(folder / "retention_policies.json"), Path(__file__).parents[1] / "docs" / "policies.png")


def _earlier(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())["results"]) if path.exists() else {}


if __name__ == "__main__":
    main(sys.argv[1], [float(text) for text in sys.argv[2:]])
