"""Which lines and branches of the package the quick tests reach, by folder.

    python -m tests.support.coverage_sum REPORT FOLDER      sums up a report of `coverage json` in FOLDER/coverage.json

`make coverage-package` does it last.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from kvtier.bench.record import record, save

COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def summary(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each folder with code, and for all as "": statements and branches, and how many of each were reached.
    Branches are counted as coverage.py does: each way out of a line that has several."""
    count: dict[str, Counter[str]] = {"": Counter()}
    for file, one in report["files"].items():
        for folder in ("", PurePath(file).parent.as_posix()):
            count.setdefault(folder, Counter()).update({name: one["summary"][name] for name in COUNTS})
    for folder, found in sorted(count.items()):
        if found["num_statements"]:
            yield {
                "folder": folder,
                "statements": found["num_statements"],
                "statements_reached": found["covered_lines"],
                "branches": found["num_branches"],
                "branches_reached": found["covered_branches"],
            }


def main(report: Path, folder: Path) -> None:
    """Saves the rows, and prints the first."""
    total, *rows = summary(json.loads(report.read_text()))
    save(record("coverage", ["make", "coverage-package"], {"total": total, "folders": rows}), folder)
    print(
        f"{total['statements_reached']:,} of {total['statements']:,} statements, "
        f"{total['branches_reached']:,} of {total['branches']:,} branches"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
