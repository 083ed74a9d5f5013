"""The page that compares says what the results say, losses first."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's module, over a copy of the results."""
    spec = importlib.util.spec_from_file_location("comparison_page", DOCS / "comparison.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "comparison_page", module)
    spec.loader.exec_module(module)
    shutil.copytree(module.RESULTS, tmp_path / "results")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return module


def _change(comparison: ModuleType, file: str, *place: str, to: Any) -> None:
    path = comparison.RESULTS / f"{file}.json"
    entry = json.loads(path.read_text())
    at = entry["results"]
    for part in place[:-1]:
        at = at[part]
    at[place[-1]] = to
    path.write_text(json.dumps(entry))


def test_a_damage_that_kvtier_serves_stands_first(comparison: ModuleType) -> None:
    _change(comparison, "peers_faults", "stores", "kvtier G3", "flip", "outcome", to="wrong")
    page = comparison.page()
    first = page.split("## Damages")[0]
    assert "**kvtier G3, flip: wrong.**" in first
    assert "| flip | **wrong** |" in page


def test_a_figure_that_turns_moves_to_the_other_table(comparison: ModuleType) -> None:
    text = "Puts, GB/s"
    for value, title in ((0.1, "## Better elsewhere"), (99.0, "## Better with kvtier")):
        _change(comparison, "g3_peers", "gb_per_s", "kvtier_put", "median", to=value)
        part = comparison.page().split(title)[1].split("\n## ")[0]
        assert text in part and part.count("LMCache fs_native") >= 1


def test_every_store_and_damage_has_a_cell_and_every_file_its_source(comparison: ModuleType) -> None:
    faults = comparison._results("peers_faults")
    lines = comparison.page().splitlines()
    for damage in faults["damages"]:
        row = next(line for line in lines if line.startswith(f"| {damage} | "))
        assert row.count("|") == 2 + len(faults["stores"])
        assert "not run" not in row or any(rows[damage]["outcome"] == "not run" for rows in faults["stores"].values())
    for file in ("peers_vllm", "peers_sglang", "g3_peers", "peers_faults", "peers_storage"):
        entry = json.loads((comparison.RESULTS / f"{file}.json").read_text())
        (row,) = (line for line in lines if line.startswith(f"| `{file}.json` |"))
        assert entry["commit"] in row and entry["command"] in row and entry["date"] in row


def test_undamaged_every_store_that_ran_gives_the_right_bytes(comparison: ModuleType) -> None:
    controls = {
        name: rows["control"]["outcome"] for name, rows in comparison._results("peers_faults")["stores"].items()
    }
    assert set(controls.values()) <= {"right", "not run"} and controls["kvtier G3"] == "right"


def test_figures_of_several_rounds_have_their_extremes(comparison: ModuleType) -> None:
    text = "CPU per MiB got"
    _change(comparison, "peers_storage", "stores", "kvtier G3", "get_cpu_ms_per_mib", to=20.0)
    _change(comparison, "peers_storage", "stores", "kvtier G3", "spread", to={"get_cpu_ms_per_mib": [18.5, 31]})
    (row,) = (line for line in comparison.page().splitlines() if text in line)
    assert "| 20 (18.5 to 31) |" in row
