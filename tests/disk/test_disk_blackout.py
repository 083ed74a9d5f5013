"""Power loss from a store's first call on, names and lengths included, on a file system that forgets."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.disk.apart import need, program, run


def black_out(tmp_path: Path, points: int, seed: int, *more: str) -> subprocess.CompletedProcess[str]:
    fuse = os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)
    need(fuse and importlib.util.find_spec("pyfuse3") is not None, "pyfuse3 (the extra `fuse`), /dev/fuse and root")
    return run(program("blackout", tmp_path, points, seed, *more))


def test_20_places(tmp_path: Path) -> None:
    done = black_out(tmp_path, 20, 1)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["images"] == 84
    assert result["durable_checked"] > 100, "hardly a block was durable when the power went"
    assert result["places"] > 200


@pytest.mark.parametrize("left_out", ["blocks", "names"])
def test_without_a_sync_the_loss_would_be_noticed(tmp_path: Path, left_out: str) -> None:
    done = black_out(tmp_path, 20, 1, left_out)
    assert done.returncode == 1
    assert "corrupt" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_every_place(tmp_path: Path, seed: int) -> None:
    done = black_out(tmp_path, 0, 20 + seed)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images"] > 1000
