"""Two block sizes in one G3 store while the demand swings between them, against the best static split in hindsight;
writes benchmarks/results/g3_swings.json after each row, and goes on where it was broken off at this commit.

"obstacles": 2 % of the capacity are retained blocks, and four slots of each size are held by writes that do not end. In
the split they are held, too, since no store could use them; the row has the figure without that beside it.

python benchmarks/g3_swings.py [--quick] [--processes N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from kvtier.bench.record import commit, record, save
from kvtier.bench.tiers.swings import DEMANDS, swing

LARGE = 32  # 2 MiB and 64 KiB
SWINGS = 6
TARGET = 0.95
RESULTS = Path(__file__).parent / "results"


class Case(NamedTuple):
    """The arguments of `swing`."""

    demand: tuple[str, str]
    large: int
    minor: float
    swings: int
    in_the_way: bool


def label_of(case: Case) -> str:
    """Of its row."""
    return f"{' / '.join(case.demand)}, {case.minor:.0%} beside{', obstacles' if case.in_the_way else ''}"


def measured(case: Case) -> dict[str, Any]:
    """A row of the table. In a process of its own: no machine stops there, so a commit need not wait for the device."""
    environment = lmdb.open
    lmdb.open = lambda *args, **kwargs: environment(*args, **kwargs | {"sync": False})
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            found = swing(
                Path(folder) / "index", case.demand, large=case.large, minor=case.minor, swings=case.swings,
                in_the_way=case.in_the_way,
            )  # fmt: skip
    finally:
        lmdb.open = environment
    return {
        "of_best_split": round(found.ratio, 4),
        "of_best_split_without_writes": round(found.ratio_free, 4),
        "refused": sorted(outcome for outcome in found.outcomes if not outcome.durable),
        "blocks_evicted_by_one_transaction": found.evictions_max,
        "cpu_ms_of_longest_transaction": round(found.cpu_ms_max, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="sizes of 8 : 1 and four swings; nothing is saved")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="rows that are measured at once")
    arguments = parser.parse_args()
    large, swings = (8, 4) if arguments.quick else (LARGE, SWINGS)
    cases = [
        Case(demand, large, minor, swings, in_the_way)
        for minor, in_the_way in ((0.1, True), (0.0, False), (0.1, False), (0.3, False))
        for demand in itertools.product(DEMANDS, repeat=2)
        if demand != ("once", "once")
    ]
    rows: dict[str, Any] = {} if arguments.quick else measured_before()
    left = [case for case in cases if label_of(case) not in rows]
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for case, row in zip(left, pool.map(measured, left), strict=True):
            rows[label_of(case)] = row
            print(label_of(case), row, flush=True)
            if not arguments.quick:
                results = {"sizes": f"{large} : 1", "swings": swings, "rows_in_all": len(cases), **summary_of(rows)}
                save(record("g3_swings", ["python", "benchmarks/g3_swings.py"], results), RESULTS)
    print({name: value for name, value in summary_of(rows).items() if name != "rows"})


def measured_before() -> dict[str, Any]:
    """The rows that were saved at this commit."""
    path = RESULTS / "g3_swings.json"
    saved = json.loads(path.read_text()) if path.exists() else {}
    return dict(saved["results"]["rows"]) if saved.get("commit", "").rstrip("+") == commit().rstrip("+") else {}


def summary_of(rows: dict[str, Any]) -> dict[str, Any]:
    """The table, and what it comes to. Pure."""
    ratios = {label: row["of_best_split"] for label, row in rows.items()}
    return {
        "rows_measured": len(rows), "target": TARGET, "least": min(ratios.values()),
        "below": sorted(label for label, one in ratios.items() if one < TARGET),
        "refused": sum(bool(row["refused"]) for row in rows.values()),
        "cpu_ms_of_longest_transaction": max(row["cpu_ms_of_longest_transaction"] for row in rows.values()),
        "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    main()
