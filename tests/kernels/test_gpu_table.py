"""The table of `make gpu-check` judges figures that are given to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("gpu_benchmarks")


def parts(fraction: float) -> dict[str, list[dict[str, Any]]]:
    """A run in which everything reaches `fraction` of what is asked."""
    speeds = {"store": 55.0, "load": 55.0, "both": 100.0}
    cells = [
        {"name": f"{fragment} {method}", "fragment": fragment, "count": count, "method": method}
        | {"submit_us": 0.4 / fraction}
        | {way: value * fraction for way, value in speeds.items()}
        for fragment, count, method in ((8192, 65536, "auto"), (1 << 20, 256, "auto"), (8192, 4096, "dma"))
    ]
    return {
        "tests": [{"name": "test_bytes[one]", "passed": True}, {"name": "test_bytes[two]", "passed": True}],
        "sanitizer": [{"name": "halves, direct", "passed": True}],
        "busy": [{"name": "loads behind a long kernel", "way": "pump", "submit_ms": 4.0 / fraction}],
        "transfer": [
            {"name": "ceiling", **speeds},
            {"name": "start-up", "calibration_s": 1.5},
            *cells,
            {"name": "GEMM beside x", "slowdown": 0.015 / fraction, "copied_gb_s": 90.0},
            {"name": "loop, 16 KiB × 4096", "torch_per_fragment": 2.0},
            {"name": "later", "skipped": "no time left"},
        ],
        "ttft": [
            {"name": "prefix of 32768 tokens", "tokens": 32768, "recompute_s": 2.0, "g2_s": 0.15 / fraction}
            | {"g2_speedup": 13.0 * fraction, "g3_s": 1.0, "g3_speedup": 2.0},
            {"name": "prefix of 131072 tokens", "skipped": "no time left"},
        ],
    }


@pytest.mark.parametrize(("fraction", "met"), [(1.0, True), (0.5, False)])
def test_the_table_compares_with_the_targets(fraction: float, met: bool, capsys: pytest.CaptureFixture[str]) -> None:
    from gpu import table as gpu_table

    lines = gpu_table.table(parts(fraction))
    judged = [goal for _, _, goal in lines if "met" in goal or "MISSED" in goal]
    assert len(judged) == 9 and all(goal.startswith("met") is met for goal in judged)
    assert ("bytes", "2 of 2", "ok") in lines
    gpu_table.print_table(lines)
    assert capsys.readouterr().out.count("no time left") == 2
    assert gpu_table.failures(parts(fraction)) == [], "a target that was missed is no failure"


def test_what_broke_fails_and_what_must_be_proved_may_not_be_left_out() -> None:
    from gpu import table as gpu_table

    results = parts(1.0)
    results["tests"][1] = {"name": "test_bytes[two]", "error": "E   assert 1 == 2"}
    results["transfer"][2] = {"name": "8 KiB", "error": "RuntimeError: out of memory"}
    lines = gpu_table.table(results)
    assert ("test_bytes[two]", "E   assert 1 == 2", "FAILED") in lines
    assert ("8 KiB", "RuntimeError: out of memory", "FAILED") in lines
    assert gpu_table.failures(results) == ["tests: test_bytes[two]", "transfer: 8 KiB"]
    skipped = {"tests": [{"name": "test_bytes", "skipped": "no CUDA device"}]}
    assert gpu_table.failures(skipped) == ["tests: not run (no CUDA device)"]
    assert gpu_table.failures(skipped, ["tests"])[0] == "tests: test_bytes"
    half = {"ttft": [{"name": "8k", "tokens": 8192}, {"name": "128k", "skipped": "no space"}], "busy": []}
    assert gpu_table.failures(half) == ["busy: not run (no rows)"], "one row that ran is enough"
    assert gpu_table.table({"tests": []}) == [("nothing", "no row was finished", "")]


def results_of(fraction: float) -> dict[str, Any]:
    about = {"gpu": f"<Card {fraction}>", "torch": "2"}
    return {"environment": about, "complete": True, "seconds": 3.0, "parts": parts(fraction)}


def test_the_page_has_the_table_and_no_markup_of_others() -> None:
    from gpu import page as gpu_page

    text = gpu_page.page(results_of(0.5), ["ttft: not run (no <torch>)"])
    assert "&lt;Card 0.5&gt;" in text and "no &lt;torch&gt;" in text and "<Card" not in text
    assert text.count("MISSED") == 9 and "<script" not in text and "http" not in text
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")


def test_two_results_are_compared_by_figure(tmp_path: Path) -> None:
    from gpu import compare as gpu_compare

    old, new = results_of(1.0), results_of(0.5)
    new["parts"]["transfer"][1] = {"name": "start-up", "error": "RuntimeError: no"}
    lines = gpu_compare.compare(old, new)
    assert ("gpu", "<Card 1.0> → <Card 0.5>", "") in lines and ("torch", "2", "") in lines
    assert ("transfer, 8192 auto: load", "55 → 27.5", "-50.0%") in lines
    assert ("transfer, start-up", "ran → error", "") in lines
    assert next(change for *_, change in lines if change) == "+100.0%", "the largest first"
    path = tmp_path / "gpu-check.json"
    path.write_text(json.dumps({"results": old}))
    assert gpu_compare.compare(gpu_compare.load(path), old)[0] == ("gpu", "<Card 1.0>", "")
    path.write_text("{}")
    with pytest.raises(ValueError, match="no results of gpu-check"):
        gpu_compare.load(path)


def test_a_file_that_cannot_be_compared_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpu import check as gpu_check

    good, other, text = tmp_path / "good.json", tmp_path / "other.json", tmp_path / "gpu-check.html"
    good.write_text(json.dumps({"results": results_of(1.0)}))
    other.write_text("{}")
    text.write_text("<html>")
    assert gpu_check.compared(good, good) == 0
    shapes = [
        "[" * 9999,
        "[]",
        *(json.dumps({"results": one}) for one in (None, 5, "parts", {"parts": []}, {"parts": {}})),
    ]
    shapes.append(json.dumps({"results": {"environment": {}, "parts": {"transfer": [{}]}}}))
    others = [tmp_path / f"shape-{number}.json" for number in range(len(shapes))]
    for place, shape in zip(others, shapes, strict=True):
        place.write_text(shape)
    for bad in (other, text, tmp_path / "absent.json", *others):
        capsys.readouterr()
        assert gpu_check.compared(good, bad) == 2
        assert bad.name in capsys.readouterr().out
