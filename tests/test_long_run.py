"""The long run keeps each outcome, and goes on where it was broken off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.long_run import main, outcomes, summary

ROOT = Path(__file__).parents[1]
TESTS = """
import os, pathlib, pytest

def test_right(): pathlib.Path("ran").open("a").write("right ")
def test_mended(): assert pathlib.Path("mended").exists()
def test_not_here(): pytest.skip("no device")
def test_that_ends_the_process():
    if not pathlib.Path("mended").exists(): os._exit(9)
def test_after_it(): pathlib.Path("ran").open("a").write("after ")
"""


def run(folder: Path) -> int:
    """Pytest's exit status, of a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.long_run", "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60, check=False).returncode


def test_a_run_that_was_broken_off_goes_on(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    records = tmp_path / "build" / "long_run.jsonl"
    assert run(tmp_path) == 9
    first = {test.partition("::")[2]: one["outcome"] for test, one in outcomes(records).items()}
    assert first == {
        "test_right": "passed", "test_mended": "failed", "test_not_here": "skipped",
        "test_that_ends_the_process": "left", "test_after_it": "left",
    }  # fmt: skip
    (row,) = summary(outcomes(records).values())
    assert (row["passed"], row["skipped"], row["left"], len(row["failed"])) == (1, 1, 2, 1)

    records.open("a").write('{"test": "test_it.py::test_right", "outc')  # as a kill leaves it
    records.open("a").write("\n")
    (tmp_path / "mended").touch()
    assert run(tmp_path) == 0
    assert (tmp_path / "ran").read_text() == "right after ", "what has passed is not run again"
    (row,) = summary(outcomes(records).values())
    assert (row["passed"], row["skipped"], row["left"], row["failed"]) == (4, 1, 0, [])
    assert row["file"] == "test_it.py"


def test_the_records_are_kept_beside_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that another machine goes on with them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    assert run(tmp_path) == 9
    assert main(tmp_path) == 1
    (tmp_path / "build" / "long_run.jsonl").write_bytes((tmp_path / "long_run.jsonl").read_bytes())
    (tmp_path / "mended").touch()
    assert run(tmp_path) == 0
    assert (tmp_path / "ran").read_text() == "right after ", "what has passed is not run again"
    assert main(tmp_path) == 0


def test_a_failure_at_the_end_of_a_test_counts(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.fixture\ndef it():\n    yield\n    raise ValueError\n\ndef test_one(it): pass\n"
    )
    assert run(tmp_path) == 1
    (one,) = outcomes(tmp_path / "build" / "long_run.jsonl").values()
    assert one["outcome"] == "failed"
