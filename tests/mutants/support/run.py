"""Plants every mutant in a copy of the package, and runs the tests of its area until one fails.

    python -m tests.mutants.support.run [--area AREA …] [--name NAME …] [--every N] [--simulated] [--save FOLDER]

With `--simulated` the tests are the simulator's histories, whatever the area: what they find alone.

Prints a row per mutant, and how many were caught; exits with status 1 if one survived, with 2 if a test that caught one
fails without it, too. A run that does not end counts as caught: the mutant hangs it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.mutants.support.mutant import ROOT, Mutant, mutants

TIMEOUT_S = 600
TEST_TIMEOUT_S = 60
FOLDERS = {"connectors": "connectors", "kernels": "kernels", "configs": "presets"}
"""Folders of the tree beside `kvtier`, and what they are called in the package."""
SIMULATED = (
    "tests/sim/test_sim.py::test_no_promise_is_broken_in_any_history",
    "tests/sim/test_sim.py::test_every_fleet_works_again_once_all_is_well",
    "tests/sim/test_disk.py::test_no_promise_is_broken_with_real_disks",
    "tests/sim/test_disk.py::test_every_fleet_with_real_disks_works_again_once_all_is_well",
    "tests/sim/test_engines.py::test_no_engine_reads_or_stores_a_wrong_byte_in_any_history",
)
PRELOADED = (
    "hypothesis.stateful",
    "lmdb",
    "msgspec",
    "numpy",
    "prometheus_client",
    "pydantic",
    "pytest_asyncio",
    "yaml",
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S*::.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """`caught_by`: the test, or why the run broke off; empty: the mutant survived."""

    area: str
    name: str
    promise: str
    caught_by: str
    seconds: float


class Laboratory:
    """A copy of the package, with at most one mutant in it. Not to be shared."""

    def __init__(self, folder: Path) -> None:
        self._path = folder
        self._package = folder / "kvtier"
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "kvtier", self._package, ignore=skipped)
        for name, installed in FOLDERS.items():
            shutil.copytree(ROOT / name, self._package / installed, ignore=skipped)

    def look(self, mutant: Mutant) -> Outcome:
        """Plant it, run its tests, take it out again."""
        began = time.monotonic()
        path = self._place(mutant.file)
        sound, mutated = path.read_text(), mutant.source()
        try:
            _write(path, mutated)
            caught = self._failure(*mutant.tests)
        finally:
            _write(path, sound)
        return Outcome(mutant.area, mutant.name, mutant.promise, caught, round(time.monotonic() - began, 1))

    def _place(self, file: str) -> Path:
        top, _, rest = file.partition("/")
        return self._package / (rest if top == "kvtier" else f"{FOLDERS[top]}/{rest}")

    def unsound(self, outcomes: Sequence[Outcome]) -> str:
        """A test that caught a mutant and fails without one, too; "" if there is none."""
        tests = sorted({outcome.caught_by for outcome in outcomes if "::" in outcome.caught_by})
        return self._failure(*tests) if tests else ""

    def _failure(self, *tests: str) -> str:
        """The first test that fails, "" if all pass."""
        report = self._path / "report"
        child = os.fork()  # pytest and what the tests import besides kvtier are loaded once
        if not child:
            os._exit(self._run(report, tests))
        try:
            status = _status(child, time.monotonic() + TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        if status is None:
            return f"{tests[0]} does not end"
        if status in (0, 5):
            return ""
        found = _FAILED.search(report.read_text())
        return found[1] if found else f"{tests[0]} breaks off with status {status}"

    def _run(self, report: Path, tests: Sequence[str]) -> int:
        """In a process of its own: pytest's exit status."""
        os.setsid()
        os.chdir(ROOT)
        out = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ |= {"PYTHONPATH": str(self._path), "PYTHONSAFEPATH": "1",
                       "HYPOTHESIS_STORAGE_DIRECTORY": str(self._path / "hypothesis")}  # fmt: skip
        sys.path[:] = [str(self._path), *(place for place in sys.path if not Path(place, "kvtier").exists())]
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
        return int(pytest.main([*options, f"--basetemp={self._path / 'tmp'}", *tests]))


def _status(child: int, deadline: float) -> int | None:
    """The exit status of a process, negative if it was killed; None if it goes on beyond the deadline."""
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _write(path: Path, text: str) -> None:
    """A file of the same length within one second would be taken for the one that was compiled before."""
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def _save(outcomes: Sequence[Outcome], folder: Path, title: str) -> None:
    """Into FOLDER/TITLE.json, beside what is there of other mutants that are still in the lists."""
    from kvtier.bench.record import record, save  # the processes of the tests are to import kvtier from the copy

    path = folder / f"{title}.json"
    earlier = json.loads(path.read_text())["results"]["caught_by"] if path.exists() else {}
    found = earlier | {outcome.name: outcome.caught_by for outcome in outcomes}
    known = {mutant.name: found[mutant.name] for mutant in mutants() if mutant.name in found}
    survived = sum(not caught for caught in known.values())
    results = {"planted": len(known), "caught": len(known) - survived, "caught_by": known}
    save(record(title, ["make", "mutants"], results), folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--area", action="append")
    parser.add_argument("--name", action="append")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    chosen = [
        one for one in mutants()
        if (not given.area or one.area in given.area) and (not given.name or one.name in given.name)
    ][:: given.every]  # fmt: skip
    if given.simulated:
        chosen = [replace(one, tests=SIMULATED) for one in chosen]
    for module in PRELOADED:
        importlib.import_module(module)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="kvtier-mutants-") as folder:
        laboratory = Laboratory(Path(folder))
        for mutant in chosen:
            outcomes.append(outcome := laboratory.look(mutant))
            verdict = outcome.caught_by or "SURVIVED"
            print(f"{outcome.seconds:6.1f} s  {outcome.area:10} {outcome.name:36} {verdict}", flush=True)
        if unsound := laboratory.unsound(outcomes):
            print(f"{unsound} fails without a mutant, too")
            return 2
    survivors = [outcome.name for outcome in outcomes if not outcome.caught_by]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} caught; survivors: {', '.join(survivors) or 'none'}")
    if given.save is not None:
        _save(outcomes, given.save, "mutants_simulated" if given.simulated else "mutants")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
