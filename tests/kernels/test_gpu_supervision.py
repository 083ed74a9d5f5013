"""The supervision of `make gpu-check` survives what a device may do to a process."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from gpu_benchmarks import BENCHMARKS, rows_of

pytestmark = pytest.mark.usefixtures("gpu_benchmarks")


CHILD = """
import argparse, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from gpu.rows import Rows, Skip
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=Path)
parser.add_argument("--budget", type=float)
options = parser.parse_args()
rows = Rows(options.rows, options.budget)
def wrong():
    os.system("echo an engine tells why")
    raise RuntimeError("a byte was wrong")
def absent(): raise Skip("not here")
rows.run("first", lambda: {"figure": 1})
rows.run("wrong", wrong)
rows.run("absent", absent)
rows.run("crash", lambda: os._exit(7))
rows.run("hang", lambda: time.sleep(60))
rows.run("last", lambda: {"figure": 2})
"""


def child(folder: Path, source: str) -> list[str]:
    path = folder / "child.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\n{source}")
    return [sys.executable, str(path)]


def test_an_error_a_crash_and_a_hang_cost_their_own_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import rows as gpu_rows

    monkeypatch.setattr(gpu_rows, "ROW_LIMIT_S", 2.0)
    changes: list[int] = []
    gpu_rows.supervise(child(tmp_path, CHILD), tmp_path / "rows", 60.0, lambda: changes.append(1))
    rows = rows_of(tmp_path / "rows")
    assert list(rows) == ["first", "wrong", "absent", "crash", "hang", "last"]
    assert rows["first"]["figure"] == 1 and rows["last"]["figure"] == 2 and rows["absent"]["skipped"] == "not here"
    assert rows["wrong"]["error"] == "RuntimeError: a byte was wrong" and "Traceback" in rows["wrong"]["detail"]
    assert rows["wrong"]["detail"].endswith("an engine tells why\n")
    assert "code 7" in rows["crash"]["error"] and "within 2 s" in rows["hang"]["error"]
    assert changes


def test_a_part_ends_with_its_time_and_says_what_was_under_way(tmp_path: Path) -> None:
    from gpu import rows as gpu_rows

    started = time.monotonic()
    source = CHILD.replace("os._exit(7)", "time.sleep(60)")
    gpu_rows.supervise(child(tmp_path, source), tmp_path / "rows", 7.0)
    assert time.monotonic() - started < 20
    rows = rows_of(tmp_path / "rows")
    assert "time of this part" in rows["crash"]["error"] and "last" not in rows


@pytest.mark.parametrize("source", ["raise SystemExit('no such module')", "import os; os._exit(3)"])
def test_a_part_that_cannot_start_is_tried_once(tmp_path: Path, source: str) -> None:
    from gpu import rows as gpu_rows

    gpu_rows.supervise(child(tmp_path, source), tmp_path / "rows", 60.0)
    rows = rows_of(tmp_path / "rows")
    assert list(rows) == ["the process"] and "ended with code" in rows["the process"]["error"]


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text('{"name": "one", "figure": 1}\n{"name": "two", "fig')
    assert list(rows_of(tmp_path / "rows")) == ["one"]
    assert rows_of(tmp_path / "nothing") == {}


def test_without_a_device_nothing_is_claimed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from gpu import check as gpu_check

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert gpu_check.run_all(tmp_path, False, list(gpu_check.BUDGETS)) == 2
    said = capsys.readouterr().out
    assert "no CUDA device here" in said and "Nothing was run" in said and not list(tmp_path.iterdir())


def test_an_interpreter_without_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's python3, which `make gpu-check` takes unless it is told of another, mostly has none."""
    from gpu import check as gpu_check

    (tmp_path / "torch.py").write_text("raise ImportError('nothing here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    why = gpu_check.environment(smoke=False)["why"]
    assert sys.executable in why and "no torch (nothing here)" in why and "GPU_PYTHON" in why


def test_its_parts_fit_into_nine_minutes() -> None:
    from gpu import check as gpu_check

    assert sum(gpu_check.BUDGETS.values()) <= gpu_check.TOTAL_S <= 535
