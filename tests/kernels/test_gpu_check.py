"""`make gpu-check` cannot run here; its parts run in tiny sizes, and its table judges figures that are given to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_transfer_part_runs() -> None:
    import gpu_transfer

    figures = gpu_transfer.measure("cpu", 20.0, tiny=True)
    assert figures["complete"] and len(figures["cells"]) == 4
    assert all(cell[way] > 0 for cell in figures["cells"] for way in ("store", "load", "both"))


@pytest.mark.long
def test_the_first_token_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_ttft

    monkeypatch.chdir(tmp_path)
    figures = gpu_ttft.measure("cpu", 60.0, tiny=True)
    assert [each["tokens"] for each in figures["lengths"]] == [64, 128]
    assert all(each["g2_s"] > 0 and each["disk_s"] > 0 for each in figures["lengths"])


def figures(fraction: float) -> dict[str, Any]:
    """A run in which everything reaches `fraction` of what is asked."""
    speed = {"store": 55.0, "load": 55.0, "both": 100.0}
    cells = [
        {"fragment": fragment, "count": count, "method": "auto", "submit_us": 0.1}
        | {way: value * fraction for way, value in speed.items()}
        for fragment, count in ((8192, 65536), (1 << 20, 256))
    ]
    cells.append(cells[0] | {"method": "dma", "count": 4096, "submit_us": 0.4 / fraction})
    return {
        "tests": {"ok": True, "summary": "30 passed"},
        "sanitizer": {"ok": True, "skipped": "compute-sanitizer is not installed"},
        "transfer": {
            "ok": True, "complete": True, "ceiling_gb_s": speed, "cells": cells,
            "gemm_slowdown": {"x": 0.015 / fraction},
            "naive": [{"fragment": 16384, "count": 4096, "torch_per_fragment": 2.0}],
        },
        "ttft": {
            "ok": True,
            "lengths": [
                {"tokens": 32768, "recompute_s": 2.0, "g2_s": 0.15 / fraction, "g2_speedup": 13.0 * fraction},
                {"tokens": 131072, "skipped": "no time left"},
            ],
        },
    }  # fmt: skip


@pytest.mark.parametrize(("fraction", "met"), [(1.0, True), (0.5, False)])
def test_the_table_compares_with_the_targets(fraction: float, met: bool, capsys: pytest.CaptureFixture[str]) -> None:
    import gpu_check

    results = figures(fraction)
    rows = [*gpu_check.correctness(results), *gpu_check.speed(results), *gpu_check.first_token(results)]
    judged = [goal for _, _, goal in rows if "met" in goal or "MISSED" in goal]
    assert len(judged) == 8 and all(goal.startswith("met") is met for goal in judged)
    gpu_check.print_table(rows)
    assert "no time left" in capsys.readouterr().out


def test_a_part_that_broke_is_shown_as_failed() -> None:
    import gpu_check

    results = figures(1.0)
    results["transfer"] = {"ok": False, "error": "Traceback …\nRuntimeError: out of memory\n"}
    results["tests"] = {"ok": False, "summary": "1 failed, 29 passed"}
    rows = [*gpu_check.correctness(results), *gpu_check.speed(results)]
    assert [goal for _, _, goal in rows] == ["FAILED", "ok", "FAILED"]
    assert rows[-1][1] == "RuntimeError: out of memory"


def test_without_a_device_nothing_is_claimed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gpu_check
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert gpu_check.run_all(tmp_path, smoke=False) == 2
    assert "Nothing was run" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_run_of_the_gpu_tests_that_all_skip_is_not_a_pass() -> None:
    import gpu_check
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert not gpu_check.pytest_run([sys.executable], ["-m", "gpu"], 60.0)["ok"]
