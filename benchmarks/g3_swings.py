"""Two block sizes in one G3 store while the demand swings between them, against the best static split in hindsight;
writes benchmarks/results/g3_swings.json.

python benchmarks/g3_swings.py [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import lmdb

from kvtier.bench.record import record, save
from kvtier.bench.tiers.swings import DEMANDS, swing

LARGE = 32  # 2 MiB and 64 KiB
SWINGS = 6
TARGET = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="sizes of 8 : 1 and four swings; nothing is saved")
    quick = parser.parse_args().quick
    large, swings = (8, 4) if quick else (LARGE, SWINGS)
    environment = lmdb.open  # no machine stops here: a commit need not wait for the device
    lmdb.open = lambda *args, **kwargs: environment(*args, **kwargs | {"sync": False})
    rows: dict[str, Any] = {}
    for demand in itertools.product(DEMANDS, repeat=2):
        for minor, in_the_way in ((0.0, False), (0.1, False), (0.3, False), (0.1, True)):
            if demand == ("once", "once"):
                continue
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                found = swing(
                    Path(folder) / "index", demand, large=large, minor=minor, swings=swings, in_the_way=in_the_way
                )
            label = f"{demand[0]} / {demand[1]}, {minor:.0%} beside{', obstacles' if in_the_way else ''}"
            rows[label] = {
                "of_best_split": round(found.ratio, 4),
                "refused": sorted(outcome for outcome in found.outcomes if not outcome.durable),
                "blocks_evicted_by_one_transaction": found.evictions_max,
                "cpu_ms_of_longest_transaction": round(found.cpu_ms_max, 2),
            }
            print(label, rows[label], flush=True)
    ratios = {label: row["of_best_split"] for label, row in rows.items()}
    results = {
        "sizes": f"{large} : 1", "swings": swings, "target": TARGET, "rows": rows,
        "least": min(ratios.values()), "below": sorted(label for label, one in ratios.items() if one < TARGET),
        "refused": sum(bool(row["refused"]) for row in rows.values()),
        "cpu_ms_of_longest_transaction": max(row["cpu_ms_of_longest_transaction"] for row in rows.values()),
    }  # fmt: skip
    print({name: value for name, value in results.items() if name != "rows"})
    if not quick:
        save(record("g3_swings", ["python", "benchmarks/g3_swings.py"], results), Path(__file__).parent / "results")


if __name__ == "__main__":
    main()
