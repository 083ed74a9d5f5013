"""Power loss at sync points of a script of 200 operations: nothing wrong, nothing durable lost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.disk.apart import need_strace, program, run


def lose_power(tmp_path: Path, points: int, seed: int, *more: str) -> subprocess.CompletedProcess[str]:
    need_strace()
    return run(program("powerloss", tmp_path, points, seed, *more))


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
