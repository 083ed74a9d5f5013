"""The long run. Each test's outcome is kept as it ends, so a run that was broken off goes on where it was.

    pytest -p tests.support.long_run -m "long and not gpu"      runs the tests that have not passed yet
    python -m tests.support.long_run FOLDER                     keeps their outcomes in FOLDER/long_run.jsonl, and sums
                                                                them up in FOLDER/long_run.json

`make test-long` does both, after the quick tests. A record is a line of JSON: test, outcome, seconds, commit, date. The
outcome is "left" from when a test is first selected until it has run. With what FOLDER keeps, another machine goes on.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.record import commit, record, save

RECORDS = Path("build") / "long_run.jsonl"
ENDED = ("passed", "skipped")
"""Outcomes after which a test is not run again."""


def outcomes(path: Path = RECORDS) -> dict[str, Mapping[str, Any]]:
    """The latest record of each test. A line that a kill cut off is passed over."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        found[one["test"]] = one
    return found


class Recorder:
    """Keeps the worst outcome of a test's set-up, call and end, and the seconds of all three."""

    def __init__(self, path: Path = RECORDS) -> None:
        path.parent.mkdir(exist_ok=True)
        self._path = path
        self._commit = commit()
        self._seconds = 0.0
        self._outcome = "passed"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests that have passed, or been skipped, in this run. Once options have deselected theirs."""
        known = outcomes(self._path)
        ended = [item for item in items if known.get(item.nodeid, {}).get("outcome") in ENDED]
        config.hook.pytest_deselected(items=ended)
        items[:] = [item for item in items if item not in set(ended)]
        self._keep("left", 0.0, *(item.nodeid for item in items if item.nodeid not in known))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome = report.outcome
        if report.when == "teardown":
            self._keep(self._outcome, self._seconds, report.nodeid)
            self._seconds, self._outcome = 0.0, "passed"

    def _keep(self, outcome: str, seconds: float, *tests: str) -> None:
        day = time.strftime("%Y-%m-%d", time.gmtime())
        told = {"outcome": outcome, "seconds": round(seconds, 2), "commit": self._commit, "date": day}
        with self._path.open("a") as file:
            file.writelines(json.dumps({"test": test, **told}) + "\n" for test in tests)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder())


def summary(records: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each file of tests: how many passed, were skipped and are left, which failed, how long, when, and the
    commits."""
    by_file: dict[str, list[Mapping[str, Any]]] = {}
    for one in records:
        by_file.setdefault(one["test"].partition("::")[0], []).append(one)
    for file, rows in sorted(by_file.items()):
        count = Counter(row["outcome"] for row in rows)
        yield {
            "file": file,
            "passed": count["passed"],
            "skipped": count["skipped"],
            "left": count["left"],
            "failed": sorted(row["test"] for row in rows if row["outcome"] == "failed"),
            "seconds": round(sum(row["seconds"] for row in rows)),
            "commits": sorted({row["commit"] for row in rows}),
            "days": sorted({row["date"] for row in rows}),
        }


def main(folder: Path) -> int:
    """Prints how many failed, and saves the records and the rows. The exit status is 1 where a test failed or is
    left."""
    records = [one for _, one in sorted(outcomes().items())]
    rows = list(summary(records))
    (folder / RECORDS.name).write_text("".join(json.dumps(one) + "\n" for one in records))
    failed = [test for row in rows for test in row["failed"]]
    total = {name: sum(row[name] for row in rows) for name in ("passed", "skipped", "left", "seconds")}
    save(record("long_run", ["make", "test-long"], total | {"failed": len(failed), "files": rows}), folder)
    print(
        f"{total['passed']} passed, {len(failed)} failed, {total['skipped']} skipped, {total['left']} left",
        *failed,
        sep="\n",
    )
    return bool(failed or total["left"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
