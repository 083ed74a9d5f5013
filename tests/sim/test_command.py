"""`kvtier sim`: its figures, a failing history kept and played again, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from kvtier.cli import main
from kvtier.cli import sim as command
from kvtier.tiers.host.refusals import Refusals

BUGGY = 0
"""A seed that shows the bug planted below."""


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *words])
    return int(ended.value.code or 0)


def test_the_same_seeds_have_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for _ in range(2):
        assert run("--seeds", "3-4", "--steps", "12", "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["histories"] == 2 and found[0]["failures"] == []
    assert found[0]["digest"] == found[1]["digest"]


def test_a_failing_history_is_kept_and_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(Refusals, "has_purged", lambda *_: False):
        assert run("--seeds", str(BUGGY), "--folder", str(tmp_path), "--no-shrink", "--json") == 1
        (failure,) = json.loads(capsys.readouterr().out)["failures"]
        file = tmp_path / f"sim-safety-{BUGGY}.json"
        assert failure["command"] == f"kvtier sim --replay {file}"
        assert run("--replay", str(file)) == 1
        assert "purged later" in " ".join(capsys.readouterr().out.split())
    assert run("--replay", str(file)) == 0, "without the bug every promise holds"


@pytest.mark.parametrize("seeds", ["", "x", "5-4", "-1", "1-2-3"])
def test_seeds_that_are_none_are_refused(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--seeds", seeds) == 2
    assert "--seeds" in capsys.readouterr().err


def test_figures_and_failures_are_shown_to_a_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run("--seeds", "3", "--steps", "12") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "blocks served" in out and "3-3" in out and "seed 3," not in out
    with mock.patch.object(Refusals, "has_purged", lambda *_: False), mock.patch.object(command, "FAILURES_MAX", 1):
        assert run("--seeds", f"{BUGGY}-{BUGGY + 3}", "--folder", str(tmp_path), "--no-shrink") == 1
        told = " ".join(capsys.readouterr().out.split())
        assert f"seed {BUGGY}, " in told and "purged later" in told
        assert f"{BUGGY}-{BUGGY} │" in told, "it ends with the first of so many failures"
        file = tmp_path / f"sim-safety-{BUGGY}.json"
        assert run("--replay", str(file), "--json") == 1
    played = json.loads(capsys.readouterr().out)
    assert "purged later" in played["failure"] and played["history"] and played["digest"]
