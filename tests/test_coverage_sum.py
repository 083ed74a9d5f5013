"""The coverage of the package is summed up by folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.coverage_sum import main, summary


def of(*counts: int) -> dict[str, dict[str, int]]:
    names = ("num_statements", "covered_lines", "num_branches", "covered_branches")
    return {"summary": dict(zip(names, counts, strict=True))}


REPORT = {
    "files": {
        "kvtier/times.py": of(4, 4, 0, 0),
        "kvtier/tiers/guard.py": of(100, 90, 40, 30),
        "kvtier/tiers/steps.py": of(10, 10, 2, 2),
        "kvtier/tiers/disk/__init__.py": of(0, 0, 0, 0),
    }
}


def test_each_folder_has_a_row_and_all_have_one() -> None:
    rows = {row.pop("folder"): list(row.values()) for row in summary(REPORT)}
    assert rows == {"": [114, 104, 42, 32], "kvtier": [4, 4, 0, 0], "kvtier/tiers": [110, 100, 42, 32]}


def test_it_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report").write_text(json.dumps(REPORT))
    main(tmp_path / "report", tmp_path)
    saved = json.loads((tmp_path / "coverage.json").read_text())
    assert (saved["command"], saved["results"]["total"]["branches"]) == ("make coverage-package", 42)
    assert capsys.readouterr().out == "104 of 114 statements, 32 of 42 branches\n"
