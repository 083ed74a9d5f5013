"""Power loss at sync points of a script of 200 operations: nothing wrong, nothing durable lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lose_power(tmp_path: Path, points: int, seed: int, *more: str) -> subprocess.CompletedProcess[str]:
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-qq", "-o", os.devnull, "true"], capture_output=True).returncode:
        if os.environ.get("CI"):
            raise AssertionError("CI must have strace and the right to trace")
        pytest.skip("recording system calls needs strace and the right to trace")
    words = [sys.executable, "-m", "tests.disk.powerloss", str(tmp_path), str(points), str(seed), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_25_sync_points(tmp_path: Path) -> None:
    done = lose_power(tmp_path, 25, 1)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["images"] == 100
    assert result["durable_checked"] > 300, "hardly a block was durable when the power went"
    assert result["syncs"] > 100


def test_without_syncs_of_the_slab_damage_would_be_noticed(tmp_path: Path) -> None:
    done = lose_power(tmp_path, 10, 1, "sabotage")
    assert done.returncode == 1
    assert "corrupt" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_every_sync_point(tmp_path: Path, seed: int) -> None:
    done = lose_power(tmp_path, 0, 10 + seed)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images"] > 1000
