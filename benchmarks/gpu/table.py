"""The rows of `make gpu-check` as a table: what held, and figures beside their targets. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
Parts = Mapping[str, Sequence[Mapping[str, Any]]]
Line = tuple[str, str, str]
"""Subject, observation and verdict."""


def failures(parts: Parts, proof: Sequence[str] = ()) -> list[str]:
    """Names of the rows with an error: a wrong byte, or a check that broke. Of the parts in `proof`, also of those that
    did not run. A part of which no row ran proves nothing, and is named itself."""
    failed = errors(parts)
    failed += [
        f"{part}: {row['name']}"
        for part in proof
        for row in parts.get(part, ())
        if "error" not in row and "passed" not in row
    ]
    for part, rows in parts.items():
        if not any(_kind(row) in ("passed", "error") for row in rows):
            failed.append(f"{part}: not run ({_reason(rows) if rows else 'no rows'})")
    return failed


def errors(parts: Parts) -> list[str]:
    """Names of the rows with an error."""
    return [f"{part}: {row['name']}" for part, rows in parts.items() for row in rows if "error" in row]


def table(parts: Parts) -> list[Line]:
    lines = [*held(parts.get("tests", ())), *held(parts.get("sanitizer", ()), "compute-sanitizer: ")]
    lines += [*speed(parts.get("transfer", ())), *busy(parts.get("busy", ()))]
    lines += [*busy(parts.get("vllm", ())), *first_token(parts.get("ttft", ()))]
    lines += busy(parts.get("hybrid", ()))
    return lines or [("nothing", "no row was finished", "")]


def held(rows: Sequence[Mapping[str, Any]], prefix: str = "") -> list[Line]:
    """A line per check; the parameters of one test are counted, and those that did not pass are named."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["name"].partition("[")[0], []).append(row)
    lines: list[Line] = []
    for name, group in groups.items():
        what = prefix + name.removeprefix("test_").replace("_", " ")
        kinds = Counter(_kind(row) for row in group)
        if kinds["error"]:
            lines += [(prefix + row["name"], row["error"], "FAILED") for row in group if "error" in row]
        reasons = {row["skipped"] for row in group if "skipped" in row}
        seen = f"{kinds['passed']} of {len(group)}" + (f"; {', '.join(sorted(reasons))}" if reasons else "")
        if not kinds["error"]:
            lines.append((what, seen, "ok" if kinds["passed"] == len(group) else "not run"))
    return lines


def _kind(row: Mapping[str, Any]) -> str:
    return next((kind for kind in ("error", "skipped", "begun") if kind in row), "passed")


def speed(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    lines: list[Line] = [(row["name"], row["error"], "FAILED") for row in rows if "error" in row]
    figures = {row["name"]: row for row in rows if _kind(row) == "passed"}
    ceiling = figures.get("ceiling")
    cells = [row for row in figures.values() if row.get("method") == "auto"]
    if ceiling is not None:
        seen = ", ".join(f"{way} {ceiling[way]:.1f}" for way in ("store", "load", "both"))
        lines.append(("one big pinned copy (GB/s)", seen, ""))
    if start_up := figures.get("start-up"):
        seen = ", ".join(f"{name} {value:.2f}" for name, value in start_up.items() if isinstance(value, float))
        lines.append(("opening", seen, str(start_up.get("no_kernels", ""))[:60]))
    for low, high, ways, share, gb_s in (
        (256 * KIB, 4 * MIB, ("store", "load"), 0.9, 50.0),
        (256 * KIB, 4 * MIB, ("both",), 0.0, 80.0),
        (8 * KIB, 32 * KIB, ("store", "load"), 0.8, 0.0),
    ):
        lines += [line for way in ways if (line := worst(cells, ceiling, way, low, high, share, gb_s))]
    submits = [row["submit_us"] for row in figures.values() if row.get("method") == "dma" and row["count"] >= 4096]
    if submits:
        worst_us = max(submits)
        lines.append(("CPU per descriptor, worst", f"{worst_us:.2f} µs", verdict(worst_us <= 0.6, "≤ 0.6 µs, dma")))
    for name, row in figures.items():
        if "slowdown" in row:
            seen = f"{row['slowdown']:+.1%} while {row['copied_gb_s']:.1f} GB/s were copied"
            lines.append((name, seen, verdict(row["slowdown"] <= 0.02, "≤ 2 %")))
        if name.startswith("loop"):
            seen = ", ".join(f"{key} {value:.1f}" for key, value in row.items() if key.endswith("fragment"))
            lines.append((f"{name} (GB/s)", seen, ""))
    if late := [row["name"] for row in rows if "skipped" in row]:
        lines.append(("not measured", f"{len(late)} rows, from {late[0]!r} on: {_reason(rows)}", ""))
    return lines


def _reason(rows: Sequence[Mapping[str, Any]]) -> str:
    return str(next((row["skipped"] for row in rows if "skipped" in row), "interrupted"))


def worst(
    cells: Sequence[Mapping[str, Any]],
    ceiling: Mapping[str, Any] | None,
    way: str,
    low: int,
    high: int,
    share: float,
    gb_s: float,
) -> Line | None:
    """The slowest cell of the range that moves at least 64 MiB, against its target."""
    there = [row for row in cells if low <= row["fragment"] <= high and row["fragment"] * row["count"] >= 64 * MIB]
    if not there or ceiling is None:
        return None
    cell = min(there, key=lambda row: row[way])
    fraction = cell[way] / ceiling[way]
    what = f"{low // KIB} … {high // KIB} KiB, {way}, worst"
    seen = f"{cell[way]:.1f} GB/s, {fraction:.0%}, {cell['fragment'] // KIB} KiB × {cell['count']}"
    goal = " and ".join([*([f"≥ {share:.0%}"] if share else []), *([f"≥ {gb_s:.0f} GB/s"] if gb_s else [])])
    return (what, seen, verdict(fraction >= share and cell[way] >= gb_s, goal))


def busy(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Copies beside other work, and engines: targets where there are some, else the figures as they are."""
    lines: list[Line] = []
    for row in rows:
        kind = _kind(row)
        if kind != "passed":
            lines.append((row["name"], str(row.get(kind, "")), "FAILED" if kind == "error" else "not run"))
            continue
        named = {key: value for key, value in row.items() if key not in ("name", "seconds")}
        seen = ", ".join(f"{key} {v:.3g}" if isinstance(v, float) else f"{key} {v}" for key, v in named.items())
        goal = verdict(row["submit_ms"] <= 5.0, "≤ 5 ms") if str(row.get("way")).startswith("pump") else ""
        lines.append((row["name"], seen, goal))
    return lines


def first_token(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    lines: list[Line] = []
    for row in rows:
        label = f"first token, {row['name']}"
        if (kind := _kind(row)) != "passed":
            lines.append((label, str(row.get(kind, "")), "FAILED" if kind == "error" else ""))
            continue
        seen = f"computed {row['recompute_s']:.3f} s"
        if "own_s" in row:
            seen += f", own cache {row['own_s']:.3f} s"
        for tier in ("g2", "g3"):
            if f"{tier}_s" in row:
                seen += f", {tier.upper()} {row[f'{tier}_s']:.3f} s ({row[f'{tier}_speedup']:.1f}×)"
        if "g3_skipped" in row:
            seen += f", G3: {row['g3_skipped']}"
        lines.append((label, seen, verdict(row["g2_speedup"] >= 10, "≥ 10× from G2") if row["tokens"] == 32768 else ""))
    return lines


def verdict(met: bool, goal: str) -> str:
    return f"{'met' if met else 'MISSED'} ({goal})"


def print_table(lines: Sequence[Line]) -> None:
    widths = [min(100, max(len(line[column]) for line in lines)) for column in range(2)]
    print()
    for what, seen, goal in lines:
        print(f"{what:<{widths[0]}}  {seen:<{widths[1]}}  {goal}".rstrip())
