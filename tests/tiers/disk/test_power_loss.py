"""Power loss at sync points of a script of 200 operations: nothing wrong, nothing durable lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.disk.support.subprocesses import must_notice, need_strace, program, result


def powerloss(tmp_path: Path, points: int, seed: int, *more: str) -> list[str]:
    """The words that run tests/tiers/disk/support/power_loss.py."""
    need_strace()
    return program("power_loss", tmp_path, points, seed, *more)


def test_25_sync_points(tmp_path: Path) -> None:
    said = result(powerloss(tmp_path, 25, 1))
    assert said["images"] == 100
    assert said["durable_checked"] > 300, "hardly a block was durable when the power went"
    assert said["syncs"] > 100


def test_without_syncs_of_the_slab_damage_would_be_noticed(tmp_path: Path) -> None:
    must_notice(powerloss(tmp_path, 10, 1, "sabotage"))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_every_sync_point(tmp_path: Path, seed: int) -> None:
    assert result(powerloss(tmp_path, 0, 10 + seed))["images"] > 1000
